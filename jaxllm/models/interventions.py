"""Edits: changes of the array at a site, as pytrees.

An edit's numbers are traced, so another strength or position runs the same program. As written, it
broadcasts like NumPy; `Edit.fit` gives all of its arrays the site's rank and a first axis of B or
1, so that rows can be selected, stacked and sharded without looking at the kind of edit.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import ConfigError


class Edit(struct.PyTreeNode, kw_only=True):
    """A change of the array at a site, computed in float32.

    Attributes:
        heads: Which heads to change, ints `[n]` or `[B, n]`; None: all. At `attn.k`, `attn.rot_k`
            and `attn.v`, key/value heads. -1 is no head.
        positions: Which tokens to change, by position in the text, ints `[n]` or `[B, n]`; None:
            all. -1 is no token. At `attn.scores` and `attn.pattern`, the tokens that attend.
        rows: Which rows to change, ints `[n]`; None: all.
    """

    heads: Any = None
    positions: Any = None
    rows: Any = None

    _values: ClassVar[tuple[str, ...]] = ()  # fields that broadcast with the site's array
    _vectors: ClassVar[tuple[str, ...]] = ()  # likewise, but need its last axis
    _scales: ClassVar[tuple[str, ...]] = ()  # fields with one number, or one for each row

    def change(self, x: jax.Array) -> jax.Array:
        """Return the changed array."""
        raise NotImplementedError

    def apply(self, x: jax.Array, axes: str, position_BT: jax.Array) -> jax.Array:
        """Return the array of a site after the edit, which fits it.

        Args:
            position_BT: Of the site's tokens, -1 for padding.
        """
        y = self.change(x.astype(jnp.float32)).astype(x.dtype)
        masks = []
        if self.rows is not None:
            masks.append(_expand(self.rows, axes, "B"))
        if self.heads is not None:
            axis = "N" if "N" in axes else "K"
            number_N = jnp.arange(x.shape[axes.index(axis)], dtype=jnp.int32)
            is_in_BN = (number_N[None, :, None] == self.heads[:, None, :]).any(axis=-1)
            masks.append(_expand(is_in_BN, axes, f"B{axis}"))
        if self.positions is not None:
            at_BTP = position_BT[:, :, None] == self.positions[:, None, :]
            is_in_BT = at_BTP.any(axis=-1) & (position_BT >= 0)
            masks.append(_expand(is_in_BT, axes, "BT"))
        return jnp.where(reduce(jnp.logical_and, masks), y, x) if masks else y

    def fit(self, axes: str, shape: tuple[int, ...]) -> Self:
        """Return the edit of a site with these axes, its arrays in the site's rank.

        Raises:
            ConfigError: For values of other shapes.
        """
        B, fields = shape[0], dict[str, Any]()
        for name in (*self._values, *self._vectors):
            fields[name] = _fit_value(name, getattr(self, name), axes, shape)
            if name in self._vectors and fields[name].shape[-1] != shape[-1]:
                raise ConfigError(f"{name} must be a vector of width {shape[-1]}, got one number")
        for name in self._scales:
            x_B = as_floats(name, getattr(self, name))
            if x_B.shape not in ((), (1,), (B,)):
                raise ConfigError(
                    f"{name} must be one number or one for each of {B} rows, got shape {x_B.shape}"
                )
            fields[name] = x_B.reshape(-1, *[1] * (len(shape) - 1))
        if self.heads is not None:
            head_axis = next((axis for axis in axes if axis in "NK"), None)
            if head_axis is None:
                raise ConfigError("heads cannot be chosen at a site without heads")
            count = shape[axes.index(head_axis)]
            fields["heads"] = _fit_numbers("heads", self.heads, B, count)
        if self.positions is not None:
            fields["positions"] = _fit_numbers("positions", self.positions, B)
        if self.rows is not None:
            rows = _fit_numbers("rows", self.rows, 0, B)
            fields["rows"] = (np.arange(B, dtype=np.int32)[:, None] == rows).any(axis=-1)
        return self.replace(**fields)


class Add(Edit):
    """`x + scale * vector`. vector: broadcasts with x. scale: one number, or one for each row."""

    vector: Any
    scale: Any = 1.0

    _values = ("vector",)
    _scales = ("scale",)

    def change(self, x: jax.Array) -> jax.Array:
        return x + self.scale * self.vector


class Set(Edit):
    """`value` in place of x. value: broadcasts with x."""

    value: Any

    _values = ("value",)

    def change(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.value, x.shape)


class Scale(Edit):
    """`x * scale`. scale: one number, or one for each row."""

    scale: Any

    _scales = ("scale",)

    def change(self, x: jax.Array) -> jax.Array:
        return x * self.scale


class Project(Edit):
    """x without `scale` times its component along a direction, which need not have length 1.

    Attributes:
        direction: `[D]`, or broadcasts with x.
        scale: one number, or one for each row; 1 removes the component, 2 mirrors it.
    """

    direction: Any
    scale: Any = 1.0

    _vectors = ("direction",)
    _scales = ("scale",)

    def change(self, x: jax.Array) -> jax.Array:
        square = jnp.square(self.direction).sum(axis=-1, keepdims=True)
        component = (x * self.direction).sum(axis=-1, keepdims=True)
        return x - self.scale * (component / jnp.where(square == 0, 1.0, square)) * self.direction


class Clamp(Edit):
    """x with a feature of a sparse autoencoder set to `value`; the rest of x stays.

    The feature's activation is `a = encoder . x + bias` where this exceeds the threshold, else 0,
    and x becomes `x + (value - a) * decoder`.

    Attributes:
        encoder, decoder: The feature's column and row, `[D]`, or broadcast with x.
        value: The activation to set: one number, or one for each row.
        bias: The encoder's; subtract `encoder . b` if a bias b is subtracted from x first.
        threshold: 0 for ReLU; JumpReLU has its own.
    """

    encoder: Any
    decoder: Any
    value: Any
    bias: Any = 0.0
    threshold: Any = 0.0

    _vectors = ("encoder", "decoder")
    _scales = ("value", "bias", "threshold")

    def change(self, x: jax.Array) -> jax.Array:
        before = (x * self.encoder).sum(axis=-1, keepdims=True) + self.bias
        active = jnp.where(before > self.threshold, before, 0.0)
        return x + (self.value - active) * self.decoder


class Apply(Edit):
    """`function(x)`, for any JAX function that returns an array of x's shape.

    Attributes:
        function: A plain function is static: each new one compiles. `jax.tree_util.Partial(f, ...)`
            has traced arguments.
    """

    function: Any

    def change(self, x: jax.Array) -> jax.Array:
        y = jnp.asarray(self.function(x))
        if y.shape != x.shape:
            raise ConfigError(f"an edit must keep the shape {x.shape} of its site, got {y.shape}")
        return y

    def fit(self, axes: str, shape: tuple[int, ...]) -> Self:
        function = self.function
        if not isinstance(function, jax.tree_util.Partial):
            function = jax.tree_util.Partial(function)
        return super().fit(axes, shape).replace(function=function)


def as_edits(edit: Edit | Callable[..., Any] | list[Any] | tuple[Any, ...]) -> list[Edit]:
    """Return one edit, one function, or a list of them as edits. Raises ConfigError for others."""
    if isinstance(edit, list | tuple):
        return [one for item in edit for one in as_edits(item)]
    if isinstance(edit, Edit):
        return [edit]
    if callable(edit) and not isinstance(edit, type):
        return [Apply(edit)]
    raise ConfigError(
        f"an edit must be one of jaxllm.inside (Add, Set, ...) or a function, got {edit!r:.60}"
    )


def as_floats(name: str, x: Any) -> Any:
    """Return numbers as a float32 array. Raises ConfigError for anything else."""
    try:
        x = x if isinstance(x, jax.Array) else np.asarray(x)
    except ValueError:
        x = np.empty(0, object)
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise ConfigError(f"{name} must be an array of numbers, got {x.dtype} {x!r:.40}")
    return x.astype(np.float32)


def _fit_value(name: str, value: Any, axes: str, shape: tuple[int, ...]) -> Any:
    """Return a value in the rank of a site's array. Raises ConfigError if it does not broadcast."""
    x = as_floats(name, value)
    fitted = x.reshape(*[1] * (len(shape) - x.ndim), *x.shape)
    sizes = list(zip(fitted.shape, shape, strict=False))
    is_wide = x.ndim and fitted.shape[-1] != shape[-1]  # no accidental broadcast of one number
    if x.ndim > len(shape) or is_wide or any(a not in (1, b) for a, b in sizes):
        wanted = ", ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))
        raise ConfigError(f"{name} has shape {x.shape}, which does not fit the site's [{wanted}]")
    return fitted


def _fit_numbers(name: str, numbers: Any, rows: int, limit: int | None = None) -> Any:
    """Return numbers of heads, positions or rows, int32 `[B or 1, n]`; below `limit`."""
    try:
        x = numbers if isinstance(numbers, jax.Array) else np.asarray(numbers)
    except ValueError:
        x = np.empty(0, object)
    if not x.size and not isinstance(x, jax.Array):  # an empty list has no dtype
        x = x.astype(np.int32)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    if not is_integer or x.ndim > 2 or (x.ndim == 2 and x.shape[0] not in (1, rows)):
        raise ConfigError(f"{name} must be integers [n] or [B, n], got {x.dtype} {x.shape}")
    is_known = x.size and not isinstance(x, jax.core.Tracer)
    if limit is not None and is_known and (x.min() < -1 or x.max() >= limit):
        raise ConfigError(
            f"{name} {np.asarray(x).tolist()} out of range: expected 0 to {limit - 1}"
        )
    return x.astype(np.int32).reshape(*[1] * (2 - x.ndim), *x.shape)


def _expand(mask: jax.Array, axes: str, names: str) -> jax.Array:
    """Return a mask over some axes of a site, with axes of size 1 for the others."""
    sizes = dict(zip(names, mask.shape, strict=True))
    return jnp.asarray(mask).reshape([sizes.get(axis, 1) for axis in axes])
