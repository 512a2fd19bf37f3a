"""A weight with matrices of low rank beside it, which change what it does and never the weight.

LoRA (Hu et al. 2021, eq. 3): `W x + s B A x`. DoRA (Liu et al. 2024, eq. 5): the rows of the sum
are scaled to lengths of their own, `m / ||W + s B A|| (W x + s B A x)`; the norms have no slope
(section 4.3). Several adapters may lie in one leaf, of which each row of a batch takes one or none.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.weights.leaves.arrays import as_leaf
from jaxllm.weights.leaves.leaf import Leaf, Linear, or_nan
from jaxllm.weights.leaves.wrapped import Wrapped
from jaxllm.weights.paths import Params

KIND = "adapted/"
NONE = -1  # of `choice`: no adapter

Site = Literal["product", "rows", "head"]
Over = tuple[str, ...]


class Adapted(Wrapped, struct.PyTreeNode):
    """`weight + b diag(scale) a`, of any weight `[O, I]`: an array or a leaf, shared, not copied.

    a: `[K, I]`, b: `[O, K]`, float32 or bfloat16; what lies between the two products keeps float32.
    scale: float32 `[K]`. magnitude: float32 `[O]` of DoRA, None of LoRA. norm: the lengths of the
    rows of the sum, where they are known; None: they are computed anew in each product, as long as
    a and b change.

    site: where the sum stands. "product": everywhere. "rows": in the rows that are taken of a table
    of tokens, while products are with the weight alone (as PEFT has a tied head keep its weight);
    magnitude and norm are then `[I]`, of its columns. "head": in products alone, of such a table.

    Of several adapters, owner: int32 `[K]`, which one each of the K is of; magnitude and norm:
    `[n, O]`. choice: int32 `[B]`, which adapter a row of the batch takes, NONE for none; rows R
    are B groups in order. None: all take none, and it is the weight.

    dropout: of x before a, while training, with key; None: not training. apart: on a mesh, the axes
    over which devices have rows of x of their own, and those over which they have columns.
    """

    kind = KIND
    nests = True
    trained = ("a", "b", "magnitude")

    weight: Any
    a: jax.Array
    b: jax.Array
    scale: jax.Array
    magnitude: jax.Array | None = None
    norm: jax.Array | None = None
    owner: jax.Array | None = None
    choice: jax.Array | None = None
    key: jax.Array | None = None
    site: Site = struct.field(pytree_node=False, default="product")
    dropout: float = struct.field(pytree_node=False, default=0.0)
    apart: tuple[Over, Over] = struct.field(pytree_node=False, default=((), ()))

    @property
    def idle(self) -> bool:
        """Whether nothing of it is chosen."""
        return self.owner is not None and self.choice is None

    def training(self, key: jax.Array, step: jax.Array) -> "Adapted":
        """As a training step multiplies by it: dropout drawn by the key, norms of what is there."""
        return self.replace(norm=None, key=key if self.dropout else None)

    def dense(self, dtype: Any = None) -> jax.Array:
        """The sum in float32. Raises ValueError for several adapters at once."""
        if self.idle:
            return self._bare().dense(dtype)
        if self.choice is not None and self.choice.shape != (1,):
            raise ValueError("the rows of a batch take different adapters: there is no one matrix")
        w_OI = self._bare().dense(jnp.float32) + self._added()
        if self.magnitude is not None:
            gain_O = self._gain(1)[0]
            w_OI = w_OI * (gain_O[None] if self.site == "rows" else gain_O[:, None])
        return w_OI.astype(dtype or self.dtype)

    def take(self, index: jax.Array) -> jax.Array:
        rows = self.stored.take(index)
        if self.site == "head" or self.idle:
            return rows
        flat, at_N = rows.reshape(-1, rows.shape[-1]).astype(jnp.float32), index.reshape(-1)
        between_NK = as_leaf(self.b).take(at_N).astype(jnp.float32)
        sum_NI = flat + self._mine(between_NK) @ self.a.astype(jnp.float32)
        if self.magnitude is not None:
            gain_N = self._gain(at_N.shape[0])
            if self.site != "rows":
                gain_N = jnp.broadcast_to(gain_N, (at_N.shape[0], gain_N.shape[1]))
                gain_N = jnp.take_along_axis(gain_N, at_N[:, None], axis=1, mode="clip")
            sum_NI = sum_NI * gain_N
        return or_nan(sum_NI, index, self.shape[0]).astype(rows.dtype)

    def product(self, x_RI: jax.Array) -> jax.Array:
        return self.through(x_RI, lambda x, weight: as_leaf(weight).product(x))

    def through(self, x_RI: jax.Array, linear: Linear) -> jax.Array:
        y_RO = linear(x_RI, self.weight)
        if self.site == "rows" or self.idle:
            return y_RO
        dropped_RI = self._dropped(x_RI)
        added_RO = linear(self._mine(linear(dropped_RI, self.a)), self.b)
        if self.magnitude is None:
            return y_RO + added_RO
        gain_RO = self._gain(x_RI.shape[0])
        if self.key is None:
            return gain_RO * (y_RO + added_RO)
        # PEFT's: what is beyond the weight's own product sees the inputs that are left.
        return y_RO + (gain_RO - 1.0) * linear(dropped_RI, self.weight) + gain_RO * added_RO

    def norms(self) -> jax.Array:
        """How long the rows of the sum are (at "rows": its columns), float32, without slope."""
        w_OI = jax.lax.stop_gradient(self._bare().dense(jnp.float32) + self._added())
        squares = jnp.square(w_OI).sum(axis=0 if self.site == "rows" else 1)
        return jnp.sqrt(jax.lax.psum(squares, self.apart[1]) if self.apart[1] else squares)

    def beside(self) -> dict[str, jax.Array]:
        names = ("a", "b", "scale", "magnitude", "norm", "owner")
        mine = {f".{name}": getattr(self, name) for name in names}
        return {name: piece for name, piece in mine.items() if piece is not None}

    def _bare(self) -> Leaf:
        """The weight, of a tied table without what else stands beside it."""
        return as_leaf(bare(self.weight))

    def _added(self) -> jax.Array:
        """`s B A` of the one adapter, float32 `[O, I]`."""
        scale_K = self.scale
        if self.owner is not None and self.choice is not None:
            scale_K = jnp.where(self.owner == self.choice, scale_K, 0.0)
        return (self.b.astype(jnp.float32) * scale_K[None]) @ self.a.astype(jnp.float32)

    def _mine(self, between_RK: jax.Array) -> jax.Array:
        """What is between a and b, scaled; of each row only what its own adapter made."""
        scaled_RK = between_RK * self.scale[None]
        if self.owner is None:
            return scaled_RK
        choice_R = self._choices(scaled_RK.shape[0])
        return jnp.where(self.owner[None] == choice_R[:, None], scaled_RK, 0.0)

    def _choices(self, rows: int) -> jax.Array:
        assert self.choice is not None
        given = self.choice.shape[0]
        if rows % given:
            raise ValueError(f"{rows} rows for a choice of adapters for {given}")
        return jnp.broadcast_to(self.choice[:, None], (given, rows // given)).reshape(rows)

    def _gain(self, rows: int) -> jax.Array:
        """What the sums are times, float32 `[1 or R, O]`."""
        assert self.magnitude is not None
        norm = self.norms() if self.norm is None else self.norm
        gain = self.magnitude.astype(jnp.float32) / jnp.where(norm == 0, 1.0, norm)
        if self.owner is None:
            return gain[None]
        choice_R = self._choices(rows)
        return jnp.where(choice_R[:, None] >= 0, jnp.take(gain, choice_R, axis=0, mode="clip"), 1.0)

    def _dropped(self, x_RI: jax.Array) -> jax.Array:
        if self.key is None:
            return x_RI
        # Drawn for all devices, so that each number is kept or not whatever mesh there is.
        shape = [
            n * jax.lax.axis_size(over) for n, over in zip(x_RI.shape, self.apart, strict=True)
        ]
        kept_RI = jax.random.bernoulli(self.key, 1.0 - self.dropout, shape)
        for axis, (mine, over) in enumerate(zip(x_RI.shape, self.apart, strict=True)):
            if over:
                begin = jax.lax.axis_index(over) * mine
                kept_RI = jax.lax.dynamic_slice_in_dim(kept_RI, begin, mine, axis)
        return jnp.where(kept_RI, x_RI / (1.0 - self.dropout), 0).astype(x_RI.dtype)


def alone(params: Params) -> Params:
    """The parameters with the one adapter that is chosen for all rows, and no others, on the host:
    the same whatever else was beside it. Where each row has its own choice they stay as they are.
    """

    def of_one(leaf: Any) -> Any:
        if not isinstance(leaf, Adapted):
            return leaf
        inner = of_one(leaf.weight)
        if leaf.owner is None or (leaf.choice is not None and leaf.choice.shape != (1,)):
            return leaf.replace(weight=inner)
        number = NONE if leaf.choice is None else int(leaf.choice[0])
        mine_K = np.asarray(leaf.owner) == number
        if not mine_K.any():
            return inner
        magnitude, norm = leaf.magnitude, leaf.norm
        if magnitude is not None and norm is not None:
            magnitude, norm = magnitude[number], norm[number]
            if (magnitude == 1).all() and (norm == 1).all():  # LoRA beside another one's DoRA
                magnitude = norm = None
        return Adapted(
            inner,
            leaf.a[mine_K],
            leaf.b[:, mine_K],
            leaf.scale[mine_K],
            magnitude,
            norm,
            site=leaf.site,
        )

    changed: Params = jax.tree.map(of_one, params, is_leaf=lambda x: isinstance(x, Adapted))
    return changed


def bare(weight: Any) -> Any:
    """A weight without its adapters."""
    return bare(weight.weight) if isinstance(weight, Adapted) else weight


def choose(params: Params, choice_B: jax.Array | None) -> Params:
    """The parameters with which rows of a batch take the adapters `choice_B`, by number; None: none
    of them. One for each row, or one for all.

    Leaves without several adapters stay as they are.
    """

    def chosen(leaf: Any) -> Any:
        if not isinstance(leaf, Adapted):
            return leaf
        inner = leaf.replace(weight=chosen(leaf.weight))
        return inner if leaf.owner is None else inner.replace(choice=choice_B)

    changed: Params = jax.tree.map(chosen, params, is_leaf=lambda x: isinstance(x, Adapted))
    return changed
