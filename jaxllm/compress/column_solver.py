"""Optimal brain surgeon in blocks of columns: GPTQ, also of weights that are zeroed on the way.

Columns of a weight are rounded or zeroed one after the other, and the columns that are not yet
processed compensate the change of the layer's output (Frantar et al. 2022, arXiv 2210.17323; 2023,
arXiv 2301.00774). With `H = 2/n sum x x^T` and `inv(H) = U^T U`, column i's error is
`e = (w_i - q_i) / U_ii`, and `e U_i` is subtracted from the columns after it. Then
`sum |e|^2 = trace((W - Q) H (W - Q)^T)`, which the tests check.

Unlike the reference implementation, a group's scale is computed from weights that all earlier
columns have updated, including those of the same block.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import lapack

from jaxllm.compress.input_stats import InputStats
from jaxllm.errors import NonFiniteError
from jaxllm.weights.types.base import round_up
from jaxllm.weights.types.int_weight import IntFormat, IntWeight

# Returns which weights of a block are zeroed from column i on, bool `[C, O]`. Its arguments: i, the
# weights `[C, O]`, those zeroed so far, the block of U `[C, C]`, and which columns are no padding
# `[C]`. Hashable: it is a part of the program.
ChooseZeros = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
COLUMN_BLOCK = 128  # columns
MAX_DAMPING = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class HessianFactor:
    """The factor U of the inverse Hessian of a linear's inputs.

    u_II: float32, upper triangular, `inv(H) = U^T U` of the damped H in the order of `order_I`.
    order_I: the order in which columns are processed. dead_I: channels that are always zero, in the
    original order. damping: what was added to H's diagonal, as a fraction of its mean.
    """

    u_II: np.ndarray
    order_I: np.ndarray
    dead_I: np.ndarray
    damping: float


def factor_hessian(
    gram_II: Any, count: float, *, damping: float = 0.01, act_order: bool = False
) -> HessianFactor:
    """Factor the inverse Hessian, given the inputs' Gram matrix `sum x x^T` of `count` tokens.

    act_order: process columns with larger inputs first. The damping is raised tenfold until H is
    positive definite. Raises NonFiniteError if it never is.
    """
    h_II = np.array(gram_II, np.float64)
    h_II *= 2 / max(count, 1)
    dead_I = np.diagonal(h_II) == 0
    np.fill_diagonal(h_II, np.where(dead_I, 1.0, np.diagonal(h_II)))
    order_I = np.arange(len(h_II))
    if act_order:
        order_I = np.argsort(-np.diagonal(h_II), kind="stable")
        h_II = h_II[np.ix_(order_I, order_I)]
    mean, added = float(np.diagonal(h_II).mean()), damping
    while np.isfinite(mean):
        damped_II = h_II.copy()
        np.fill_diagonal(damped_II, np.diagonal(h_II) + added * mean)
        u_II = _inverse_root(damped_II)
        if u_II is not None:
            return HessianFactor(u_II.astype(np.float32), order_I, dead_I, added)
        if added >= MAX_DAMPING:
            break
        added = min(max(added, 1e-4) * 10, MAX_DAMPING)
    raise NonFiniteError("Gram matrix of the inputs is singular even with the largest damping")


def factor_inputs(
    stats: InputStats,
    where: str,
    damping: float,
    log: Callable[[str], None],
    act_order: bool = False,
) -> HessianFactor:
    """Factor the inverse Hessian of a linear's inputs, and log if it needed more damping."""
    factor = factor_hessian(stats.gram_II, float(stats.count), damping=damping, act_order=act_order)
    if factor.damping > damping:
        log(f"{where}: H is not positive definite, damping raised to {factor.damping:.3g}")
    return factor


def _inverse_root(h_II: np.ndarray) -> np.ndarray | None:
    """Return U with `inv(h) = U^T U`, overwriting h; None if h is not positive definite."""
    root, info = lapack.dpotrf(h_II.T, lower=1, overwrite_a=1)  # LAPACK is column-major
    if info == 0:
        root, info = lapack.dpotri(root, lower=1, overwrite_c=1)
    if info == 0:
        root, info = lapack.dpotrf(root, lower=1, overwrite_a=1)
    u_II: np.ndarray = root.T
    u_II[np.tri(len(u_II), k=-1, dtype=bool)] = 0
    return u_II if info == 0 and np.isfinite(u_II).all() else None


class OBSResult(NamedTuple):
    """A processed weight.

    value_OI: float32. codes_OI, scale_OG, zero_OG: its integer form, if quantized. group_I: each
    column's group, of G. error: `sum |e|^2`.
    """

    value_OI: jax.Array
    codes_OI: jax.Array | None
    scale_OG: jax.Array | None
    zero_OG: jax.Array | None
    group_I: np.ndarray
    error: float

    def to_weight(self, target: IntFormat, order_I: jax.Array | None = None) -> IntWeight:
        """Return the integer weight, with its columns in another order if there is one."""
        assert self.codes_OI is not None and self.scale_OG is not None
        codes_OI = self.codes_OI if order_I is None else self.codes_OI[:, order_I]
        return target.from_codes(codes_OI, self.scale_OG, self.zero_OG)


def solve_columns(
    weight_OI: jax.Array,
    hessian: HessianFactor,
    *,
    target: IntFormat | None = None,
    choose_zeros: ChooseZeros | None = None,
    static_groups: bool = True,
) -> OBSResult:
    """Quantize a weight to `target` integers, zero a part of it, or both.

    Later columns compensate each column's error. Weights that are zero stay zero.

    Args:
        choose_zeros: Which further weights are zeroed.
        static_groups: Matters only with `act_order`. If true, groups are adjacent columns in the
            original order, with scales computed before the first column is changed; else groups are
            adjacent in the processing order.
    """
    rows, columns = weight_OI.shape
    w_OI = np.array(weight_OI, np.float32)
    w_OI[:, hessian.dead_I] = 0
    size = target.group_size(columns) if target else columns
    width = round_up(columns, COLUMN_BLOCK)
    ordered = bool((hessian.order_I != np.arange(columns)).any())
    static = target is not None and (target.group is None or (ordered and static_groups))
    group_I = hessian.order_I // size if static else np.arange(columns) // size
    count = -(-columns // size)
    scale_GO, zero_GO = jnp.zeros((count, rows)), jnp.zeros((count, rows), jnp.uint8)
    number_I = np.full(width, count, np.int32)  # padding belongs to an extra group
    number_I[:columns] = group_I
    if target is not None:
        scale_GO = scale_GO.astype(target.scale_dtype)
        if static:
            groups = jnp.pad(jnp.asarray(w_OI), ((0, 0), (0, count * size - columns)))
            scale_OG, zero_OG = target.choose_grid(groups.reshape(rows, count, size))
            scale_GO, zero_GO = scale_OG.T, zero_OG.T
    u_II = hessian.u_II
    if width > columns:
        u_II = np.eye(width, dtype=np.float32)
        u_II[:columns, :columns] = hessian.u_II
    w_IO = jnp.pad(jnp.asarray(w_OI[:, hessian.order_I].T), ((0, width - columns), (0, 0)))
    state = _solve_blocks(
        w_IO,
        jax.device_put(u_II, may_alias=True),
        jnp.asarray(number_I),
        jnp.pad(scale_GO, ((0, 1), (0, 0))),
        jnp.pad(zero_GO, ((0, 1), (0, 0))),
        target=target,
        choose_zeros=choose_zeros,
        static=static,
        columns=columns,
    )
    back_I = np.argsort(hessian.order_I)
    integers: tuple[Any, Any, Any] = None, None, None
    if target is not None:
        codes_OI = state.codes_IO[:columns][back_I].T
        integers = codes_OI, state.scale_GO[:count].T, state.zero_GO[:count].T
    value_OI = state.w_IO[:columns][back_I].T
    return OBSResult(value_OI, *integers, group_I[back_I], float(state.error))


class _State(NamedTuple):
    w_IO: jax.Array
    codes_IO: jax.Array
    scale_GO: jax.Array
    zero_GO: jax.Array
    error: jax.Array


@partial(jax.jit, static_argnames=("target", "choose_zeros", "static", "columns"), donate_argnums=0)
def _solve_blocks(
    w_IO: jax.Array,
    u_II: jax.Array,
    group_I: jax.Array,
    scale_GO: jax.Array,
    zero_GO: jax.Array,
    *,
    target: IntFormat | None,
    choose_zeros: ChooseZeros | None,
    static: bool,
    columns: int,
) -> _State:
    width, rows = w_IO.shape
    zero_IO = w_IO == 0

    def block(number: jax.Array, state: _State) -> _State:
        begin = number * COLUMN_BLOCK
        w_CO = jax.lax.dynamic_slice_in_dim(state.w_IO, begin, COLUMN_BLOCK)
        u_CI = jax.lax.dynamic_slice_in_dim(u_II, begin, COLUMN_BLOCK)
        u_CC = jax.lax.dynamic_slice_in_dim(u_CI, begin, COLUMN_BLOCK, 1)
        group_C = jax.lax.dynamic_slice_in_dim(group_I, begin, COLUMN_BLOCK)
        gone_CO = jax.lax.dynamic_slice_in_dim(zero_IO, begin, COLUMN_BLOCK)
        is_real_C = begin + jnp.arange(COLUMN_BLOCK) < columns

        def column(i: jax.Array, inner: Any) -> Any:
            w_CO, gone_CO, error_CO, codes_CO, scale_GO, zero_GO = inner
            if choose_zeros is not None:
                gone_CO = choose_zeros(i, w_CO, gone_CO, u_CC, is_real_C)
            if target is not None and not static:
                scale_GO, zero_GO = _update_scales(i, w_CO, group_C, scale_GO, zero_GO, target)
            w_O, u_C = w_CO[i], u_CC[i]
            q_O = jnp.where(gone_CO[i], 0.0, w_O)
            if target is not None:
                scale_O, zero_O = scale_GO[group_C[i]], zero_GO[group_C[i]]
                codes_O = target.to_codes(q_O, scale_O, zero_O)
                q_O = target.to_values(codes_O, scale_O, zero_O)
                codes_CO = codes_CO.at[i].set(codes_O)
            e_O = (w_O - q_O) / u_C[i]
            w_CO = (w_CO - u_C[:, None] * e_O[None]).at[i].set(q_O)
            return w_CO, gone_CO, error_CO.at[i].set(e_O), codes_CO, scale_GO, zero_GO

        codes_CO = jax.lax.dynamic_slice_in_dim(state.codes_IO, begin, COLUMN_BLOCK)
        inner = (w_CO, gone_CO, jnp.zeros_like(w_CO), codes_CO, state.scale_GO, state.zero_GO)
        inner = jax.lax.fori_loop(0, COLUMN_BLOCK, column, inner)
        w_CO, _, error_CO, codes_CO, scale_GO, zero_GO = inner
        later_CI = jnp.where(jnp.arange(width)[None] >= begin + COLUMN_BLOCK, u_CI, 0.0)
        w_IO = state.w_IO - later_CI.T @ error_CO
        return _State(
            jax.lax.dynamic_update_slice_in_dim(w_IO, w_CO, begin, 0),
            jax.lax.dynamic_update_slice_in_dim(state.codes_IO, codes_CO, begin, 0),
            scale_GO,
            zero_GO,
            state.error + (error_CO**2).sum(),
        )

    codes_IO = jnp.zeros((width, rows), target.code_dtype if target else jnp.uint8)
    begun = _State(w_IO, codes_IO, scale_GO, zero_GO, jnp.float32(0))
    return jax.lax.fori_loop(0, width // COLUMN_BLOCK, block, begun)


def _update_scales(
    i: jax.Array,
    w_CO: jax.Array,
    group_C: jax.Array,
    scale_GO: jax.Array,
    zero_GO: jax.Array,
    target: IntFormat,
) -> tuple[jax.Array, jax.Array]:
    """Set the scales of the group that begins at column i, if one does."""
    size = target.group
    assert size is not None

    def find_scales() -> tuple[jax.Array, jax.Array]:
        w_Og = jax.lax.dynamic_slice_in_dim(w_CO, i, size).T
        scale_O, zero_O = target.choose_grid(w_Og)
        at = group_C[i]
        return scale_GO.at[at].set(scale_O), zero_GO.at[at].set(zero_O)

    return jax.lax.cond(i % size == 0, find_scales, lambda: (scale_GO, zero_GO))
