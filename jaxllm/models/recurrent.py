"""Decoders that mix layers with attention and recurrent layers, whose state does not grow.

The state is of a fixed size (`ops.recurrent`), a value in `KVCache.state` as keys and values are.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.config.model import HeadCount, Rope
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.models.decoder import Decoder
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.family import Family, LinearGroup
from jaxllm.models.layers import AttentionContext, AttentionOutput
from jaxllm.models.modules import Linear, get_param, project
from jaxllm.models.sites import SiteRecorder
from jaxllm.ops import recurrent
from jaxllm.ops.recurrent import Recurrence, RecurrentState, Tokens
from jaxllm.ops.recurrent_tree import run_tree
from jaxllm.weights.formats import as_weight
from jaxllm.weights.precision import Precision

MixerType = Literal["full_attention", "linear_attention", "conv"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(DecoderConfig):
    """A decoder some of whose layers are recurrent. layer_types: one per layer."""

    per_layer_fields: ClassVar[tuple[str, ...]] = ("layer_types",)

    layer_types: tuple[MixerType, ...]

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer is recurrent, in place of attention."""
        return self.layer_types[layer] != "full_attention"

    def kv_heads(self, layer: int) -> int:
        return 0 if self.is_recurrent(layer) else self.num_key_value_heads

    def layer_rope(self, layer: int) -> Rope | None:
        return None if self.is_recurrent(layer) else self.rope

    def layer_template(self, layer: int) -> int:
        return self.layer_types.index(self.layer_types[layer])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(RecurrentConfig):
    """A decoder with gated DeltaNet layers (Yang et al. 2024, arXiv 2412.06464).

    Attributes:
        linear_num_key_heads, linear_num_value_heads: Each key head serves equally many value heads.
        linear_conv_kernel_dim: Width of the convolution, in tokens.
        value_heads_tiled: Whether the key head of value head i is i modulo their number (GGUF),
            instead of i divided by the number of value heads of each.
    """

    linear_num_key_heads: HeadCount
    linear_num_value_heads: HeadCount
    linear_key_head_dim: HeadCount
    linear_value_head_dim: HeadCount
    linear_conv_kernel_dim: HeadCount
    value_heads_tiled: bool = False

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if not complaints and self.linear_num_value_heads % self.linear_num_key_heads:
            complaints.append(
                f"linear_num_value_heads ({self.linear_num_value_heads}) is not a multiple of"
                f" linear_num_key_heads ({self.linear_num_key_heads})"
            )
        return complaints

    @property
    def linear_sizes(self) -> tuple[int, int]:
        """Numbers of all heads' channels, of keys (and queries) and of values."""
        return (
            self.linear_num_key_heads * self.linear_key_head_dim,
            self.linear_num_value_heads * self.linear_value_head_dim,
        )

    def state_shape(self, layer: int) -> RecurrentState | None:
        if not self.is_recurrent(layer):
            return None
        H, (keys, values) = self.linear_num_key_heads, self.linear_sizes
        heads = (
            H,
            self.linear_num_value_heads // H,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )
        return recurrent.state_shapes(2 * keys + values, self.linear_conv_kernel_dim, heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvConfig(RecurrentConfig):
    """A decoder with short convolutions. conv_L_cache: their width, in tokens."""

    conv_L_cache: HeadCount
    conv_bias: bool = False

    def state_shape(self, layer: int) -> RecurrentState | None:
        if not self.is_recurrent(layer):
            return None
        return recurrent.state_shapes(self.hidden_size, self.conv_L_cache, None)


class Convolution(nn.Module):
    """A causal convolution by channel. bias: whether it has one."""

    width: int
    bias: bool

    @nn.compact
    def __call__(self, channels: int) -> tuple[jax.Array, Any]:
        """Return the weights `[X, L]`, and the bias `[X]` or None."""
        weight = as_weight(get_param(self, "weight", channels, 1, self.width)).to_dense()
        return weight[:, 0], get_param(self, "bias", channels) if self.bias else None


class GatedDeltaNet(nn.Module):
    """A gated DeltaNet layer: convolution, delta rule, normalized and gated output."""

    config: DeltaNetConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> AttentionOutput:
        c, p = self.config, self.precision
        H, K, V = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
        N, (keys, values) = c.linear_num_value_heads, c.linear_sizes
        sizes = {"qkv": 2 * keys + values, "z": values, "b": N, "a": N}
        linears = [Linear(size, False, p, name=f"in_proj_{x}") for x, size in sizes.items()]
        qkv, z, b, a = project(x, *linears)
        log_11N, bias_11N = (
            get_param(self, name, N).astype(jnp.float32)[None, None]
            for name in ("A_log", "dt_bias")
        )
        decay = -jnp.exp(log_11N) * jax.nn.softplus(a.astype(jnp.float32) + bias_11N)
        update = jax.nn.sigmoid(b.astype(jnp.float32))

        def group(y: jax.Array, *size: int) -> jax.Array:
            """Return a value for each value head as `[B, T, H, R, ...]`."""
            if not c.value_heads_tiled:
                return y.reshape(*y.shape[:2], H, N // H, *size)
            return y.reshape(*y.shape[:2], N // H, H, *size).swapaxes(2, 3)

        others = tuple(group(y) for y in (decay, update))

        def split(conv_BTX: jax.Array, others: Any) -> Tokens:
            channels = ops.ACTIVATIONS[c.hidden_act](conv_BTX)
            parts = jnp.split(channels, (keys, 2 * keys), axis=-1)
            q, k = (y.reshape(*y.shape[:2], H, K) for y in parts[:2])
            q, k = (y * jax.lax.rsqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
            return Tokens(q * K**-0.5, k, group(parts[2], V), *others)

        weight_XL, _ = Convolution(c.linear_conv_kernel_dim, False, name="conv1d")(qkv.shape[-1])
        recurrence = Recurrence(weight_XL, None, split)
        y, state = run_recurrence(self, recurrence, qkv, others, context, site)
        y = y.swapaxes(2, 3) if c.value_heads_tiled else y
        y = GatedNorm(c.norm_eps, name="norm")(y.reshape(*y.shape[:2], N, V), z)
        y = Linear(x.shape[-1], False, p, name="out_proj")(y.astype(x.dtype))
        return recurrent_output(self, site("attn.output", y), state, context)


class GatedNorm(nn.Module):
    """RMS norm of each head, then a gate, in float32."""

    eps: float

    @nn.compact
    def __call__(self, y_BTNV: jax.Array, gate_BTX: jax.Array) -> jax.Array:
        """Return the gated heads, float32 `[B, T, N * V]`."""
        weight_V = get_param(self, "weight", y_BTNV.shape[-1])
        norm = partial(ops.rms_norm, eps=self.eps)
        y = as_weight(weight_V).apply_norm(y_BTNV.astype(jnp.float32), norm)
        gated: jax.Array = y.reshape(gate_BTX.shape) * jax.nn.silu(gate_BTX.astype(jnp.float32))
        return gated


class ShortConv(nn.Module):
    """A convolution of gated inputs, and a gate after it."""

    config: ShortConvConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> AttentionOutput:
        c, p, D = self.config, self.precision, x.shape[-1]
        before, after, inner = jnp.split(
            Linear(3 * D, c.conv_bias, p, name="in_proj")(x), 3, axis=-1
        )
        recurrence = Recurrence(*Convolution(c.conv_L_cache, c.conv_bias, name="conv")(D))
        y, state = run_recurrence(self, recurrence, before * inner, (), context, site)
        y = Linear(D, c.conv_bias, p, name="out_proj")(after * y.astype(x.dtype))
        return recurrent_output(self, site("attn.output", y), state, context)


def run_recurrence(
    module: Any,
    recurrence: Recurrence,
    x_BTX: jax.Array,
    others: Any,
    context: AttentionContext,
    site: SiteRecorder,
) -> tuple[jax.Array, Any]:
    """Run a layer's recurrence from its state; see `recurrent.run`.

    Raises ConfigError for masks, documents that share a row, and tokens sharded over
    devices.
    """
    requested = {
        "an attention mask": context.mask_BTS is not None,
        "several documents in one row (train with --no-pack)": context.document_BT is not None,
        "a text that is sharded over devices": context.hooks.attend is not None,
    }
    for what, is_asked in requested.items():
        if is_asked:
            raise ConfigError(f"recurrent layers do not support {what}")
    state = context.state[module.layer] if context.state else None
    shapes, tree = module.config.state_shape(module.layer), context.branches
    if tree is None:
        return recurrent.run(state, shapes, recurrence, x_BTX, others, context.position_BT)
    # Each node is a row of one token.
    B, M, _ = tree.place_BMP.shape
    x_BMX, others, position_BM = jax.tree.map(
        lambda x: x.reshape(B, M, *x.shape[2:]), (x_BTX, others, context.position_BT)
    )
    if state is None:
        state = recurrent.empty_state(shapes, B)
    nodes = None if tree.nodes is None else tree.nodes.state[module.layer].rows
    y, pending = run_tree(state, recurrence, x_BMX, others, position_BM, tree.place_BMP, nodes)
    return y.reshape(B * M, 1, *y.shape[2:]), pending


def recurrent_output(
    module: Any, x_BTD: jax.Array, state: Any, context: AttentionContext
) -> AttentionOutput:
    """Return a recurrent layer's output, with keys and values of no heads."""
    B, T, _ = x_BTD.shape
    parts, empty = context.segments, jnp.zeros((B, T, 0, module.config.head_dim))
    kept = parts[0].k[module.layer].dtype if parts else jnp.dtype(module.precision.cache)
    slots = sum(segment.position_BS.shape[1] for segment in parts) + T
    mass = jnp.zeros((B, slots)) if context.mass else None
    none = ops.cast(empty, kept)
    return AttentionOutput(none, none, x_BTD, mass, state)


class RecurrentBlock(decoder.Block):
    """A layer with attention, or with a recurrent mixer in its place.

    Attributes:
        mixer: The mixer's class, and its name.
    """

    config: RecurrentConfig

    mixer: ClassVar[tuple[type[nn.Module], str]] = (GatedDeltaNet, "linear_attn")

    def _mixer(self) -> Any:
        if not self.config.is_recurrent(self.layer):
            return super()._mixer()
        module, name = self.mixer
        made: Any = module
        return made(self.config, self.precision, self.layer, name=name)


class RecurrentDecoder(Decoder):
    """A decoder with gated DeltaNet layers."""

    block = RecurrentBlock


class ShortConvBlock(RecurrentBlock):
    """A layer with attention or a short convolution."""

    mixer = (ShortConv, "conv")


class ShortConvDecoder(Decoder):
    """A decoder with short convolutions."""

    block = ShortConvBlock


def recurrent_family(row: Family, inputs: tuple[str, ...]) -> Family:
    """Return the row of a family, from that of the same one without recurrent layers.

    inputs: the linears that read a recurrent layer's input.
    """
    group = LinearGroup("attn_norm", inputs, "attn.output", row.attention_norm)
    return dataclasses.replace(row, linear_groups=(group, *row.linear_groups))
