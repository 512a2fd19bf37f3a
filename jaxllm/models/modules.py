"""Flax modules that architectures share; they only name parameters.

A parameter may be an array, a quantized tensor or an adapter: `weights` handles the difference. A
module looks up its dtypes in `Precision` by its own path.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.models.sites import SiteRecorder
from jaxllm.weights.formats import as_weight
from jaxllm.weights.linear import embed, linear, linears
from jaxllm.weights.precision import Precision


def get_param(module: nn.Module, name: str, *shape: int) -> Any:
    """Return the parameter `name` of `module`; declares its shape for `param_shapes`."""
    if module.is_initializing():
        return module.param(name, nn.initializers.zeros, shape, jnp.float32)
    value: Any = module.get_variable("params", name)
    if value is None:
        raise CheckpointError(f"params lack {'.'.join((*module.path, name))}")
    return value


class Linear(nn.Module):
    """`x @ weight.T + bias` in the module's dtypes, returned in x's dtype, or in `out_dtype`."""

    features: int
    bias: bool
    precision: Precision
    out_dtype: str | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return project(x, self)[0]

    @nn.compact
    def weight_and_bias(self, features: int) -> tuple[Any, jax.Array | None]:
        """Return the weight `[O, I]` and the bias, for this number of input features."""
        weight = get_param(self, "weight", self.features, features)
        return weight, get_param(self, "bias", self.features) if self.bias else None


def project(x: jax.Array, *modules: Linear) -> list[jax.Array]:
    """Apply several `Linear`s to x, in one kernel call if their dtypes agree."""
    precision, names = modules[0].precision, [".".join(module.path) for module in modules]
    dtypes = [precision.activation_dtype(name) for name in names]
    if len(set(dtypes)) > 1:
        return [y for module in modules for y in project(x, module)]
    terms = [module.weight_and_bias(x.shape[-1]) for module in modules]
    products = linears(x.astype(dtypes[0]), terms, int8_inputs=precision.int8_inputs)
    results = []
    for name, module, y in zip(names, modules, products, strict=True):
        y = y.astype(precision.output_dtype(name) or module.out_dtype or dtypes[0])
        results.append(y.astype(module.out_dtype or x.dtype))
    return results


class UngatedMLP(nn.Module):
    """Two linears with biases."""

    config: ModelConfig
    precision: Precision
    names: tuple[str, str]  # of the linears

    @nn.compact
    def __call__(self, x: jax.Array, site: SiteRecorder) -> jax.Array:
        c, p, (first, second) = self.config, self.precision, self.names
        before = site("mlp.pre", Linear(c.intermediate_size, True, p, name=first)(x))
        hidden = site("mlp.post", ops.ACTIVATIONS[c.hidden_act](before))
        return site("mlp.output", Linear(x.shape[-1], True, p, name=second)(hidden))


class Embedding(nn.Module):
    """An embedding table, which a tied model also uses as its output matrix."""

    rows: int
    features: int

    @nn.compact
    def __call__(self, index_BT: jax.Array) -> tuple[jax.Array, Any]:
        """Return the rows `[B, T, D]` and the table itself."""
        weight = get_param(self, "weight", self.rows, self.features)
        return embed(weight, index_BT), weight


class RMSNorm(nn.Module):
    """RMS norm.

    Attributes:
        eps: Added to the mean square.
        weight_offset: Added to the weights (1 for Gemma).
    """

    eps: float
    weight_offset: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight_D = get_param(self, "weight", x.shape[-1])
        norm = partial(ops.rms_norm, eps=self.eps, weight_offset=self.weight_offset)
        return as_weight(weight_D).apply_norm(x, norm)


class LayerNorm(nn.Module):
    eps: float
    has_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight_D = get_param(self, "weight", x.shape[-1])
        bias_D = get_param(self, "bias", x.shape[-1]) if self.has_bias else None
        return ops.layer_norm(x, weight_D, bias_D, eps=self.eps)


def select_columns(x_BTX: jax.Array, column_B: jax.Array | None) -> jax.Array:
    """Select one column of each row of `[B, T, ...]`: `[B, 1, ...]`; all if `column_B` is None."""
    if column_B is None:
        return x_BTX
    index_B1X = column_B.reshape(-1, *(1,) * (x_BTX.ndim - 1))
    return jnp.take_along_axis(x_BTX, index_B1X, axis=1)


class Head(nn.Module):
    """The logits, soft-capped and scaled, from the final norm's output."""

    config: ModelConfig
    precision: Precision

    @nn.compact
    def __call__(self, x: jax.Array, table: Any) -> jax.Array:
        return unembed(self.config, self.precision, table, x)


def unembed(config: ModelConfig, precision: Precision, table: Any, x: jax.Array) -> jax.Array:
    """Return float32 logits, from the embedding table if tied, else from `lm_head`.

    A score head's outputs are neither scaled nor capped.
    """
    if config.score is not None:
        if (count := len(config.score.labels)) == 0:
            return x[..., :0].astype(jnp.float32)
        score = Linear(count, False, precision, out_dtype="float32", name="score")
        return score(x)
    if config.tie_word_embeddings:
        logits = linear(x, table)
    else:
        head = Linear(config.vocab_size, False, precision, out_dtype="float32", name="lm_head")
        logits = head(x)
    return scale_logits(config, logits)


def scale_logits(config: ModelConfig, logits: jax.Array) -> jax.Array:
    """Scale and cap the output matrix's products."""
    if config.logits_scale != 1:
        logits = logits * config.logits_scale
    if config.logits_cap is None:
        return logits
    # The minimum changes no value. Without it, XLA contracts the cap's product with a sum after it
    # in some programs and not in others, so log-probabilities would have several bits.
    return jnp.minimum(ops.soft_cap(logits, config.logits_cap), config.logits_cap)
