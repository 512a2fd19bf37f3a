"""The modules that architectures share. Flax names parameters here and does nothing else.

A module takes leaves as they are (array, quantized tensor, adapter): what a leaf is, `weights`
knows. It finds its number format by its own path in `Precision`. Another kind of attention plugs in
beside `attend`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jaxllm import ops
from jaxllm.cache.kv import Segment
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.ops.masked import attend_masked, attention_weights, within_documents
from jaxllm.weights.linear import embed, linear, linears
from jaxllm.weights.precision import Precision

Angles = tuple[jax.Array, jax.Array]  # cosines and sines of each token, [B, T, H/2]
Mass = bool | Literal["heads"]  # none, summed over queries and heads, or each one's weights


class Scope(NamedTuple):
    """What new tokens may attend to: the same for every layer.

    position_BT: int32, of the new tokens, -1 for padding. segments: of the cache, oldest first.
    mask_BTS: what each query sees of all slots and then the new tokens, as `attend_masked` takes
    it, in place of what positions and windows say. document_BT: int32, which document each new
    token is of: it sees new tokens of its own alone, and all of the cache. mass: what to say of the
    weights; nothing under a mask or with documents. angles: what queries and keys are turned by;
    None where they are not.
    """

    position_BT: jax.Array
    segments: tuple[Segment, ...] = ()
    mask_BTS: jax.Array | None = None
    mass: Mass = False
    angles: Angles | None = None
    document_BT: jax.Array | None = None


class Attended(NamedTuple):
    """What attention computes, in order.

    q: `[B, T, N, H]`, after rotation. k, v: `[B, T, K, H]`, as the cache keeps them. heads: the
    weighted sums of values, `[B, T, N, H]`. x: the same after the output projection, `[B, T, D]`.
    mass: what every slot and new token received, float32 `[B, S + T]`, or what each head of each
    query gave them, `[B, N, T, S + T]`; None unless asked for.
    """

    q: jax.Array
    k: ops.Entries
    v: ops.Entries
    heads: jax.Array
    x: jax.Array
    mass: jax.Array | None


class Layer(NamedTuple):
    """What a block computes, in order, each `[B, T, D]`; x: its output, with both parts added.

    mlp_hidden: the input of the MLP's last linear, `[B, T, F]`: with `attention_norm`, `mlp_norm`
    and `attention.heads` the inputs of all linears are here, as calibration needs them.
    memory: what the layer keeps of the text so far, `[B, ...]` (`ModelConfig.memory`).
    """

    attention_norm: jax.Array
    attention: Attended
    mlp_norm: jax.Array
    mlp_hidden: jax.Array
    mlp: jax.Array
    x: jax.Array
    memory: Any = None


class Trace(struct.PyTreeNode):
    """All that a model computes for some tokens; a jitted caller pays only for what it keeps.

    embeddings, norm (the final one): `[B, T, D]`. logits: float32 `[B, T, V]`, or `[B, 1, V]` where
    one column was picked.
    """

    embeddings: jax.Array
    layers: tuple[Layer, ...]
    norm: jax.Array
    logits: jax.Array

    @property
    def hidden_states(self) -> tuple[jax.Array, ...]:
        """Embeddings, each block's output, the last after the final norm, as transformers has."""
        return (self.embeddings, *(layer.x for layer in self.layers[:-1]), self.norm)

    @property
    def k(self) -> tuple[ops.Entries, ...]:
        """The keys, one `[B, T, K, H]` a layer, as the cache keeps them."""
        return tuple(layer.attention.k for layer in self.layers)

    @property
    def v(self) -> tuple[ops.Entries, ...]:
        """The values, likewise."""
        return tuple(layer.attention.v for layer in self.layers)

    @property
    def memory(self) -> tuple[Any, ...]:
        """What the layers keep beside keys and values; empty where none of them does."""
        kept = tuple(layer.memory for layer in self.layers)
        return kept if any(x is not None for x in kept) else ()

    @property
    def attention_mass(self) -> tuple[jax.Array, ...] | None:
        """What every slot and new token received in each layer; None unless asked for."""
        mass = [layer.attention.mass for layer in self.layers]
        return tuple(m for m in mass if m is not None) or None


def attend(
    scope: Scope,
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    project_out: Callable[[jax.Array], jax.Array],
    *,
    cache_dtype: str,
    scale: float,
    window: int | None,
) -> Attended:
    """Softmax attention of one layer over what the cache holds of it, and the new tokens.

    q: `[B, T, N, H]`, k and v: `[B, T, K, H]`, all rotated where they are. project_out: of the
    heads, `[B, T, N * H]` to `[B, T, D]`. cache_dtype: the cache's format where there is no cache.
    window: how many of the last positions a query sees, itself included; None for all.
    """
    parts = [ops.Part(s.k[layer], s.v[layer], s.position_BS) for s in scope.segments]
    # New keys and values are rounded as the cache will round them, so that a token attends to the
    # same numbers whether they come from the cache or from the same chunk.
    kept = parts[0].k_BSKH.dtype if parts else jnp.dtype(cache_dtype)
    new = ops.Part(ops.cast(k, kept), ops.cast(v, kept), scope.position_BT)
    parts.append(new)
    mask_BTS = scope.mask_BTS
    if scope.document_BT is not None:
        mask_BTS = within_documents(scope.position_BT, parts, scope.document_BT, window=window)
    if mask_BTS is not None:
        out, mass = attend_masked(q, parts, mask_BTS, scale=scale), None
    else:
        at, summed = scope.position_BT, scope.mass is True
        out, mass = ops.attend(q, at, parts, scale=scale, window=window, mass=summed)
        if scope.mass == "heads":
            mass = attention_weights(q, at, parts, scale=scale, window=window)
    x = project_out(out.reshape(*out.shape[:2], -1))
    return Attended(q, new.k_BSKH, new.v_BSKH, out, x, mass)


def run_block(block: nn.Module, x: jax.Array, scope: Scope, remat: bool) -> Layer:
    """One layer of a text. remat: what it computes is computed again where its gradient needs it,
    and not kept until then.
    """
    if not remat:
        layer: Layer = block(x, scope)
        return layer
    again = nn.remat(lambda module, x: module(x, scope), prevent_cse=True)
    layer = again(block, x)
    return layer


def angles_of(config: ModelConfig, position_BT: jax.Array, length_B: jax.Array) -> Angles | None:
    """What tokens at these positions, of texts of these lengths, are turned by."""
    if config.rotary is None:
        return None
    return ops.rope_angles(
        config.rotary,
        position_BT,
        length_B,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
    )


def leaf(module: nn.Module, name: str, *shape: int) -> Any:
    """The parameter `name` of `module`; its shape is declared for `param_shapes`."""
    if module.is_initializing():
        return module.param(name, nn.initializers.zeros, shape, jnp.float32)
    value: Any = module.get_variable("params", name)
    if value is None:
        raise CheckpointError(f"params lack {'.'.join((*module.path, name))}")
    return value


class Linear(nn.Module):
    """`x @ weight.T + bias` in the module's own number format, returned in x's (or `out`)."""

    features: int
    bias: bool
    precision: Precision
    out: str | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return project(x, self)[0]

    @nn.compact
    def term(self, features: int) -> tuple[Any, jax.Array | None]:
        """The weight `[O, I]` and the bias, for so many features of x."""
        weight = leaf(self, "weight", self.features, features)
        return weight, leaf(self, "bias", self.features) if self.bias else None


def project(x: jax.Array, *modules: Linear) -> list[jax.Array]:
    """Each of several `Linear`s of x, in one call of the kernels where their formats agree."""
    precision, names = modules[0].precision, [".".join(module.path) for module in modules]
    dtypes = [precision.activations_at(name) for name in names]
    if len(set(dtypes)) > 1:
        return [y for module in modules for y in project(x, module)]
    terms = [module.term(x.shape[-1]) for module in modules]
    products = linears(x.astype(dtypes[0]), terms, int8_inputs=precision.int8_inputs)
    results = []
    for name, module, y in zip(names, modules, products, strict=True):
        y = y.astype(precision.output_at(name) or module.out or dtypes[0])
        results.append(y.astype(module.out or x.dtype))
    return results


class Embedding(nn.Module):
    """A table of vectors, which a tied model also uses as its output matrix."""

    rows: int
    features: int

    @nn.compact
    def __call__(self, index_BT: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the rows `[B, T, D]` and the table itself."""
        weight = leaf(self, "weight", self.rows, self.features)
        return embed(weight, index_BT), weight


class RMSNorm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return ops.rms_norm(x, leaf(self, "weight", x.shape[-1]), eps=self.eps)


class LayerNorm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight, bias = leaf(self, "weight", x.shape[-1]), leaf(self, "bias", x.shape[-1])
        return ops.layer_norm(x, weight, bias, eps=self.eps)


def pick(x_BTD: jax.Array, column_B: jax.Array | None) -> jax.Array:
    """One column of each row, `[B, 1, D]`; all of them where `column_B` is None."""
    if column_B is None:
        return x_BTD
    return jnp.take_along_axis(x_BTD, column_B[:, None, None], axis=1)


def unembed(config: ModelConfig, precision: Precision, table: Any, x: jax.Array) -> jax.Array:
    """Float32 logits, from the embedding's own table where the two are tied, else by `lm_head`."""
    if config.tie_word_embeddings:
        return linear(x, table)
    return Linear(config.vocab_size, False, precision, out="float32", name="lm_head")(x)
