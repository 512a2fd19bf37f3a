"""LoRA weights: low-rank matrices beside a weight, which itself never changes.

LoRA (Hu et al. 2021, eq. 3): `W x + s B A x`. DoRA (Liu et al. 2024, eq. 5): the rows of the sum
are scaled to learned lengths, `m / ||W + s B A|| (W x + s B A x)`; the norms have no gradient
(section 4.3). One weight can hold several adapters; each row of a batch uses one of them or none.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.errors import ConfigError, suggest_name
from jaxllm.weights.paths import Params
from jaxllm.weights.types.arrays import as_weight, matmul
from jaxllm.weights.types.base import LinearFn, WeightBase, nan_out_of_range
from jaxllm.weights.types.wrapper import WeightWrapper

PREFIX = "adapted/"
NO_ADAPTER = -1  # in `choice`: no adapter
BASE = "base"  # the name of the model without an adapter

LoraSite = Literal["product", "rows", "head"]
AxisNames = tuple[str, ...]


class LoraWeight(WeightWrapper, struct.PyTreeNode):
    """`weight + b diag(scale) a`, for any weight `[O, I]`, which is shared and not copied.

    The activations between a and b are float32. Several adapters are concatenated along K.
    """

    format_prefix = PREFIX
    allows_composite = True
    trainable_fields = ("a", "b", "magnitude")

    weight: Any
    a: jax.Array  # [K, I], float32 or bfloat16
    b: jax.Array  # [O, K], float32 or bfloat16
    scale: jax.Array  # float32 [K]
    # float32 [O] for DoRA, None for LoRA. [I] at site "rows", [n, O] for several adapters.
    magnitude: jax.Array | None = None
    # Row norms of the sum, of the shape of magnitude; None: computed in each product, as a and b
    # change in training.
    norm: jax.Array | None = None
    owner: jax.Array | None = None  # int32 [K], the adapter of each rank, if there are several
    # int32 [B] or [1], each row's adapter or NONE; rows of x are B groups in order. None: no row
    # uses an adapter.
    choice: jax.Array | None = None
    key: jax.Array | None = None  # for dropout; None: not training
    # Where the sum is used. "product": everywhere. "rows": in rows taken from a token table, but
    # not in products (PEFT leaves a tied head unchanged). "head": only in products of such a table.
    site: LoraSite = struct.field(pytree_node=False, default="product")
    dropout: float = struct.field(pytree_node=False, default=0.0)  # of x before a
    # The mesh axes that split the rows of x, and those that split its columns.
    sharded_axes: tuple[AxisNames, AxisNames] = struct.field(pytree_node=False, default=((), ()))

    @property
    def idle(self) -> bool:
        """Whether no adapter is selected."""
        return self.owner is not None and self.choice is None

    def for_training_step(self, key: jax.Array, step: jax.Array) -> "LoraWeight":
        """Return it for one training step: with a dropout key, and norms to be computed."""
        return self.replace(norm=None, key=key if self.dropout else None)

    def to_dense(self, dtype: Any = None) -> jax.Array:
        """Return the sum in float32. Raises ValueError if rows use different adapters."""
        if self.idle:
            return self._base_weight().to_dense(dtype)
        if self.choice is not None and self.choice.shape != (1,):
            raise ValueError("rows of the batch use different adapters: no single matrix exists")
        w_OI = self._base_weight().to_dense(jnp.float32) + self._lora_delta()
        if self.magnitude is not None:
            gain_O = self._gain(1)[0]
            w_OI = w_OI * (gain_O[None] if self.site == "rows" else gain_O[:, None])
        return w_OI.astype(dtype or self.dtype)

    def take(self, index: jax.Array) -> jax.Array:
        rows = self.inner.take(index)
        if self.site == "head" or self.idle:
            return rows
        flat, at_N = rows.reshape(-1, rows.shape[-1]).astype(jnp.float32), index.reshape(-1)
        between_NK = as_weight(self.b).take(at_N).astype(jnp.float32)
        sum_NI = flat + matmul(self._scale_by_adapter(between_NK), self.a.astype(jnp.float32).T)
        if self.magnitude is not None:
            gain_N = self._gain(at_N.shape[0])
            if self.site != "rows":
                gain_N = jnp.broadcast_to(gain_N, (at_N.shape[0], gain_N.shape[1]))
                gain_N = jnp.take_along_axis(gain_N, at_N[:, None], axis=1, mode="clip")
            sum_NI = sum_NI * gain_N
        return nan_out_of_range(sum_NI, index, self.shape[0]).astype(rows.dtype)

    def apply_with(self, x_RI: jax.Array, linear: LinearFn) -> jax.Array:
        y_RO = linear(x_RI, self.weight)
        if self.site == "rows" or self.idle:
            return y_RO
        dropped_RI = self._apply_dropout(x_RI)
        added_RO = linear(self._scale_by_adapter(linear(dropped_RI, self.a)), self.b)
        if self.magnitude is None:
            return y_RO + added_RO
        gain_RO = self._gain(x_RI.shape[0])
        if self.key is None:
            return gain_RO * (y_RO + added_RO)
        # As in PEFT: all terms but the plain product of the weight use the inputs after dropout.
        return y_RO + (gain_RO - 1.0) * linear(dropped_RI, self.weight) + gain_RO * added_RO

    def norms(self) -> jax.Array:
        """Return the row norms of the sum (column norms at "rows"), float32, without gradient."""
        w_OI = jax.lax.stop_gradient(self._base_weight().to_dense(jnp.float32) + self._lora_delta())
        squares = jnp.square(w_OI).sum(axis=0 if self.site == "rows" else 1)
        return jnp.sqrt(
            jax.lax.psum(squares, self.sharded_axes[1]) if self.sharded_axes[1] else squares
        )

    def _base_weight(self) -> WeightBase:
        """Return the weight without adapters, also of a tied table."""
        return as_weight(strip_adapters(self.weight))

    def _lora_delta(self) -> jax.Array:
        """Return `s B A` of the selected adapter, float32 `[O, I]`."""
        scale_K = self.scale
        if self.owner is not None and self.choice is not None:
            scale_K = jnp.where(self.owner == self.choice, scale_K, 0.0)
        return matmul(self.b.astype(jnp.float32) * scale_K[None], self.a.astype(jnp.float32).T)

    def _scale_by_adapter(self, between_RK: jax.Array) -> jax.Array:
        """Scale the activations between a and b, and keep only those of each row's adapter."""
        scaled_RK = between_RK * self.scale[None]
        if self.owner is None:
            return scaled_RK
        choice_R = self._row_choices(scaled_RK.shape[0])
        return jnp.where(self.owner[None] == choice_R[:, None], scaled_RK, 0.0)

    def _row_choices(self, rows: int) -> jax.Array:
        assert self.choice is not None
        choices = self.choice.shape[0]
        if rows % choices:
            raise ValueError(
                f"rows of x must be a multiple of {choices}, one per choice: got {rows}"
            )
        return jnp.broadcast_to(self.choice[:, None], (choices, rows // choices)).reshape(rows)

    def _gain(self, rows: int) -> jax.Array:
        """Return the factor of the sums, float32 `[1 or R, O]`."""
        assert self.magnitude is not None
        norm = self.norms() if self.norm is None else self.norm
        gain = self.magnitude.astype(jnp.float32) / jnp.where(norm == 0, 1.0, norm)
        if self.owner is None:
            return gain[None]
        choice_R = self._row_choices(rows)
        return jnp.where(choice_R[:, None] >= 0, jnp.take(gain, choice_R, axis=0, mode="clip"), 1.0)

    def _apply_dropout(self, x_RI: jax.Array) -> jax.Array:
        if self.key is None:
            return x_RI
        # Drawn for all devices, so that the mask does not depend on the mesh.
        shape = [
            n * jax.lax.axis_size(over)
            for n, over in zip(x_RI.shape, self.sharded_axes, strict=True)
        ]
        is_kept_RI = jax.random.bernoulli(self.key, 1.0 - self.dropout, shape)
        for axis, (size, over) in enumerate(zip(x_RI.shape, self.sharded_axes, strict=True)):
            if over:
                begin = jax.lax.axis_index(over) * size
                is_kept_RI = jax.lax.dynamic_slice_in_dim(is_kept_RI, begin, size, axis)
        return jnp.where(is_kept_RI, x_RI / (1.0 - self.dropout), 0).astype(x_RI.dtype)


def keep_chosen_adapter(params: Params) -> Params:
    """Keep only the adapter that is selected for all rows, with its arrays on the host.

    The result does not depend on the other adapters. Weights whose rows select different adapters
    stay.
    """

    def reduce_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, LoraWeight):
            return leaf
        inner = reduce_leaf(leaf.weight)
        if leaf.owner is None or (leaf.choice is not None and leaf.choice.shape != (1,)):
            return leaf.replace(weight=inner)
        number = NO_ADAPTER if leaf.choice is None else int(leaf.choice[0])
        chosen_K = np.asarray(leaf.owner) == number
        if not chosen_K.any():
            return inner
        magnitude, norm = leaf.magnitude, leaf.norm
        if magnitude is not None and norm is not None:
            magnitude, norm = magnitude[number], norm[number]
            if (magnitude == 1).all() and (norm == 1).all():  # LoRA beside another one's DoRA
                magnitude = norm = None
        return LoraWeight(
            inner,
            leaf.a[chosen_K],
            leaf.b[:, chosen_K],
            leaf.scale[chosen_K],
            magnitude,
            norm,
            site=leaf.site,
        )

    changed: Params = jax.tree.map(reduce_leaf, params, is_leaf=lambda x: isinstance(x, LoraWeight))
    return changed


def strip_adapters(weight: Any) -> Any:
    """Return a weight without its adapters."""
    return strip_adapters(weight.weight) if isinstance(weight, LoraWeight) else weight


def adapter_index(name: str | None, names: Sequence[str]) -> int:
    """Return an adapter's index by name; `NO_ADAPTER` for "base" or None.

    Raises ConfigError for an unknown name.
    """
    if name is None or name == BASE:
        return NO_ADAPTER
    if name not in names:
        known_names = ", ".join([*names, BASE])
        raise ConfigError(
            f"no adapter {name!r:.60}{suggest_name(str(name), names)}; loaded are {known_names}"
        )
    return list(names).index(name)


def choose_adapters(params: Params, choice_B: jax.Array | None) -> Params:
    """Select adapters by number: `choice_B` has one for each row, or one for all rows.

    None selects none. Weights without several adapters stay.
    """

    def choose_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, LoraWeight):
            return leaf
        inner = leaf.replace(weight=choose_leaf(leaf.weight))
        return inner if leaf.owner is None else inner.replace(choice=choice_B)

    changed: Params = jax.tree.map(choose_leaf, params, is_leaf=lambda x: isinstance(x, LoraWeight))
    return changed
