"""Decoder layers for steps of few rows on a GPU: a kernel runs more than its product.

A layer is four launches and attention: queries, keys and values of normed rows; the output
projection, added to the stream; the gated channels of normed rows; and their projection, added too.
Weights of several formats that multiply the same rows have a launch for each format. The final norm
and the logits are one launch. Sums are rounded where the separate operations round them, but for
the norm: its weight multiplies before its root does.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.models.decoder_block import MLP, Attention, Block
from jaxllm.models.layers import NO_PARALLEL, AttentionContext, AttentionOutput, Layer
from jaxllm.models.modules import Linear, scale_logits
from jaxllm.models.sites import SiteRecorder
from jaxllm.ops import cuda
from jaxllm.weights.formats import as_weight
from jaxllm.weights.precision import Precision


class Normed(NamedTuple):
    """Rows that are normed where they are multiplied."""

    x: jax.Array
    norm: cuda.Norm


def can_fuse(
    config: Any, precision: Precision, params: Mapping[str, Any], x: jax.Array,
    context: AttentionContext,
) -> bool:  # fmt: skip
    """Return whether a layer with these parameters can be a `FusedBlock`."""
    if cuda.find_problem() is not None or not _is_plain(config):
        return False
    before, _, before_mlp, _ = config.norms
    attention, mlp = params["self_attn"], params["mlp"]
    norms = [params[name]["weight"] for name in (before, before_mlp)]
    linears = [attention[f"{name}_proj"] for name in "qkvo"]
    linears += [mlp[f"{name}_proj"] for name in ("gate", "up", "down")]
    weights = [linear["weight"] for linear in linears]
    return _can_launch(precision, norms, weights, x, context)


def launch_head(
    config: Any, precision: Precision, params: Mapping[str, Any], table: Any, x: jax.Array,
    context: AttentionContext,
) -> jax.Array | None:  # fmt: skip
    """Return the logits of rows that the final norm has not seen; None if no launch does both."""
    if config.score is not None or cuda.find_problem() is not None:
        return None
    norm = params["norm"]["weight"]
    head = table if config.tie_word_embeddings else params["lm_head"]["weight"]
    if not _can_launch(precision, [norm], [head], x, context):
        return None
    norm = cuda.Norm(norm, config.norm_eps, config.norm_weight_offset)
    return scale_logits(config, _launch(x, [head], dtype=jnp.float32, norm=norm))


def _can_launch(
    precision: Precision, norms: Sequence[Any], weights: Sequence[Any], x: jax.Array,
    context: AttentionContext,
) -> bool:  # fmt: skip
    """Whether kernels take these weights, for as many rows as x has, and these norms; and nothing
    is read or changed between them.
    """
    rows, some = math.prod(x.shape[:-1]), [as_weight(weight) for weight in weights]
    return (
        not (precision.overrides or precision.int8_inputs or precision.invariant)
        and precision.activations == "bfloat16"
        and not (context.read or context.edits.edits)
        and context.hooks == NO_PARALLEL
        and bool(context.segments)  # not in training: a launch has no derivative
        and all(isinstance(x, jax.Array) and x.dtype == jnp.bfloat16 for x in norms)
        and all(cuda.fits((rows, w.shape[1]), [w.cuda_matrix()]) for w in some)
    )


def _is_plain(config: Any) -> bool:
    """Whether nothing is added between the products of a layer."""
    before, after, before_mlp, after_mlp = config.norms
    return (
        None not in (before, before_mlp)
        and (after, after_mlp) == (None, None)
        and config.hidden_act in cuda.ACTIVATIONS
        and config.residual_scale == 1
        and not (config.biases[1] or config.biases[2] or config.gates_attention)
    )


def project_normed(x: Normed, *modules: Linear) -> list[jax.Array]:
    """Apply several `Linear`s to normed rows, as `project` does."""
    terms = [module.weight_and_bias(x.x.shape[-1]) for module in modules]
    products = _multiply(x, [weight for weight, _ in terms])
    return [
        y if bias is None else y + bias.astype(y.dtype)
        for y, (_, bias) in zip(products, terms, strict=True)
    ]


class FusedAttention(Attention):
    """`Attention` of normed rows, which adds to the stream."""

    _project_in: ClassVar[Any] = staticmethod(project_normed)

    def _project_out(self, x: Any, linear: Linear, heads: jax.Array) -> jax.Array:
        weight, _ = linear.weight_and_bias(heads.shape[-1])
        return _launch(heads, [weight], residual_RO=_rows(x.x))


class FusedMLP(MLP):
    """`MLP` of normed rows, which adds to the stream."""

    @nn.compact
    def __call__(self, x: Any, site: SiteRecorder) -> jax.Array:
        c, p, D = self.config, self.precision, x.x.shape[-1]
        gates = [Linear(self.width, False, p, name=f"{name}_proj") for name in ("gate", "up")]
        weights = [linear.weight_and_bias(D)[0] for linear in gates]
        if cuda.fits(_rows(x.x).shape, _matrices(weights)):
            hidden = _launch(x.x, weights, norm=x.norm, activation=c.hidden_act)
        else:
            gate, up = _multiply(x, weights)
            hidden = ops.ACTIVATIONS[c.hidden_act](gate) * up
        down, _ = Linear(D, False, p, name="down_proj").weight_and_bias(self.width)
        return _launch(hidden, [down], residual_RO=_rows(x.x))


class FusedBlock(Block):
    """`Block` for what `can_fuse` approves of; its parameters have the same names."""

    @nn.compact
    def __call__(self, x: jax.Array, context: AttentionContext) -> Layer:
        c, p = self.config, self.precision
        before, _, before_mlp, _ = c.norms
        site = context.site_recorder(self.layer)
        attention = FusedAttention(c, p, self.layer, name="self_attn")
        attended: AttentionOutput = attention(self._normed(before, x), context, site)
        middle = attended.x
        mlp = FusedMLP(c, p, c.mlp_size(self.layer), name="mlp")
        y = mlp(self._normed(before_mlp, middle), site)
        return Layer(attended._replace(x=middle - x), y, site.recorded)

    def _normed(self, name: str | None, x: jax.Array) -> Any:
        c, params = self.config, self.variables["params"]
        norm = cuda.Norm(params[str(name)]["weight"], c.norm_eps, c.norm_weight_offset)
        return Normed(x, norm)


def _multiply(x: Normed, weights: Sequence[Any]) -> list[jax.Array]:
    """Return the products of normed rows `[..., I]` with each weight, `[..., O]`."""
    products = cuda.multiply(
        _rows(x.x), _matrices(weights), jnp.bfloat16, x.norm, cuda.can_start_early()
    )
    return [y.reshape(*x.x.shape[:-1], -1) for y in products]


def _launch(x: jax.Array, weights: Sequence[Any], **options: Any) -> jax.Array:
    """Return the one result of a launch with rows `[..., I]`, `[..., O]`."""
    options["is_early"] = cuda.can_start_early()
    (y,) = cuda.launch(_rows(x), _matrices(weights), **options)
    return y.reshape(*x.shape[:-1], -1)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _matrices(weights: Sequence[Any]) -> list[cuda.Matrix]:
    return [matrix for w in weights if (matrix := as_weight(w).cuda_matrix()) is not None]
