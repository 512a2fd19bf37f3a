"""Rounding to nearest, with a search for the clipped range of each group."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.methods.formats import convert_inner
from jaxllm.compress.recipe import QUANTIZED, ModelState, RuleOptions, StepContext, StepSpec
from jaxllm.weights.formats import Weight, as_weight, log_slow_formats, parse_format, to_dense
from jaxllm.weights.paths import map_leaves
from jaxllm.weights.quantize import KEPT_RULES, Rules, find_format
from jaxllm.weights.types.base import round_up
from jaxllm.weights.types.int_weight import IntFormat, IntWeight

SHRINK_STEPS = 20  # down to half of the range, as in AWQ
ROW_BLOCK = 128  # rows per batch


class RtnOptions(RuleOptions, frozen=True):
    """on: as in `RuleOptions`, by default all matrices. clip: clip each integer range to minimize
    the weights' squared error.
    """

    on: str = ".*"
    clip: bool = False


def rtn(context: StepContext[RtnOptions]) -> ModelState:
    """Round each weight to the nearest value of its format.

    With the default rule this is `quantize(params, argument)`, which keeps embeddings and the LM
    head at 8 bits if the rest has 4.
    """
    argument, options = context.argument, context.options
    log_slow_formats([argument], context.log)
    plain = options.on == RtnOptions().on
    rules: Rules = parse_format(argument).name if plain else [*KEPT_RULES, (options.on, argument)]

    def change(path: str, leaf: Weight) -> Weight:
        name = find_format(rules, path, leaf.shape)
        if name is None:
            return leaf
        to, is_composite = parse_format(name), as_weight(leaf).is_composite
        if options.clip and isinstance(to, IntFormat) and to.is_plain and not is_composite:
            wide = to_dense(leaf, jnp.float32)
            if wide.ndim == 2:
                return round_to_nearest(wide, to, clip=True)
            return jax.tree.map(
                lambda *x: jnp.stack(x), *(round_to_nearest(w, to, clip=True) for w in wide)
            )
        return convert_inner(leaf, name)

    params = map_leaves(change, context.state.params)
    return dataclasses.replace(context.state, params=params)


def round_to_nearest(
    weight_OI: jax.Array, target: IntFormat, stats: InputStats | None = None, *, clip: bool = False
) -> IntWeight:
    """Round a weight to the nearest codes of `target`.

    Args:
        clip: Shrink each group's range to the fraction (1, 19/20, ... 11/20) with the least error.
        stats: With them the error is that of the group's output, `sum (x . (w' - w))^2` (Lin et
            al. 2024, arXiv 2306.00978), else the squared error of the weights.

    A format with one scale per row treats all columns as one group.
    """
    if not clip:
        return target.quantize(weight_OI)
    rows, columns = weight_OI.shape
    size, width = target.group_size(columns), round_up(columns, target.group_size(columns))
    if stats is None:
        gram_Ggg = jnp.broadcast_to(jnp.eye(size), (width // size, size, size))
    else:
        gram_Ggg = _gram_blocks(stats, size, width)
    parts = []
    for begin in range(0, rows, ROW_BLOCK):
        w_OI = weight_OI[begin : begin + ROW_BLOCK].astype(jnp.float32)
        w_OGg = jnp.pad(w_OI, ((0, 0), (0, width - columns))).reshape(len(w_OI), -1, size)
        parts.append(_search_clipping(w_OGg, gram_Ggg, target))
    codes_OGg, scale_OG, zero_OG = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return target.from_codes(codes_OGg.reshape(rows, -1)[:, :columns], scale_OG, zero_OG)


@partial(jax.jit, static_argnums=2)
def _search_clipping(
    w_OGg: jax.Array, gram_Ggg: jax.Array, target: IntFormat
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return codes, scales and zero points of the range with the least error."""

    def quantize_range(shrink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scale, zero = target.choose_grid(w_OGg, shrink)
        codes = target.to_codes(w_OGg, scale[..., None], zero[..., None])
        return codes, scale, zero

    def error(shrink: jax.Array) -> jax.Array:
        codes, scale, zero = quantize_range(shrink)
        off_OGg = target.to_values(codes, scale[..., None], zero[..., None]) - w_OGg
        return jnp.einsum("ogi,gij,ogj->og", off_OGg, gram_Ggg, off_OGg, optimize=True)

    shrink_S = 1 - jnp.arange(SHRINK_STEPS // 2, dtype=jnp.float32) / SHRINK_STEPS
    error_SOG = jax.lax.map(error, shrink_S)
    return quantize_range(shrink_S[error_SOG.argmin(0)])


def _gram_blocks(stats: InputStats, group: int, width: int) -> jax.Array:
    """Return the diagonal blocks `[G, group, group]` of the Gram matrix, padded to `width`."""
    pad = width - stats.gram_II.shape[0]
    gram_II = jnp.pad(stats.gram_II, ((0, pad), (0, pad)))
    blocks = gram_II.reshape(width // group, group, width // group, group)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=0, axis2=2), -1, 0)


STEP = StepSpec(
    "quantize",
    "rtn",
    rtn,
    "round each weight to the nearest value",
    QUANTIZED,
    RtnOptions,
    needs_calibration=False,
    supports_experts=True,
)
