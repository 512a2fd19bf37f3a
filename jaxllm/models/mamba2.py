"""Mamba-2 layers (Dao & Gu 2024, arXiv 2405.21060) between layers with attention.

In the terms of `ops.recurrent`, a group of heads is a key head: C reads, B is the key, and the
values are the inputs, scaled by a step size of each head.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.config.model import HeadCount
from jaxllm.models.decoder import Decoder
from jaxllm.models.layers import AttentionContext, AttentionOutput
from jaxllm.models.modules import Linear, get_param
from jaxllm.models.recurrent import (
    Convolution,
    RecurrentBlock,
    RecurrentConfig,
    recurrent_output,
    run_recurrence,
)
from jaxllm.models.sites import SiteRecorder
from jaxllm.ops import recurrent
from jaxllm.ops.recurrent import Recurrence, RecurrentState, Tokens
from jaxllm.weights.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """A decoder with Mamba-2 layers.

    Attributes:
        mamba_n_heads, mamba_d_head: Number of heads, and channels of each.
        mamba_n_groups, mamba_d_state: Number of groups of heads that share B and C, and their size.
        mamba_d_conv: Width of the convolution, in tokens.
        mamba_conv_bias, mamba_proj_bias: Whether it, and the linears, have biases.
    """

    mamba_n_heads: HeadCount
    mamba_d_head: HeadCount
    mamba_n_groups: HeadCount
    mamba_d_state: HeadCount
    mamba_d_conv: HeadCount
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if not complaints and self.mamba_n_heads % self.mamba_n_groups:
            complaints.append(
                f"mamba_n_heads ({self.mamba_n_heads}) is not a multiple of mamba_n_groups"
                f" ({self.mamba_n_groups})"
            )
        return complaints

    @property
    def mamba_sizes(self) -> tuple[int, int]:
        """Numbers of channels of all heads, and of B (and C) of all groups."""
        return self.mamba_n_heads * self.mamba_d_head, self.mamba_n_groups * self.mamba_d_state

    def state_shape(self, layer: int) -> RecurrentState | None:
        if not self.is_recurrent(layer):
            return None
        G, (inner, keys) = self.mamba_n_groups, self.mamba_sizes
        heads = (G, self.mamba_n_heads // G, self.mamba_d_state, self.mamba_d_head)
        return recurrent.state_shapes(inner + 2 * keys, self.mamba_d_conv, heads)


class Mamba2(nn.Module):
    """A Mamba-2 layer: convolution, state, gated and normalized output."""

    config: Mamba2Config
    precision: Precision
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> AttentionOutput:
        c, p, G = self.config, self.precision, self.config.mamba_n_groups
        N, V, (inner, keys) = c.mamba_n_heads, c.mamba_d_head, c.mamba_sizes
        sizes = (inner, inner + 2 * keys, N)
        gate, mixed, step = jnp.split(
            Linear(sum(sizes), c.mamba_proj_bias, p, name="in_proj")(x),
            (inner, sizes[0] + sizes[1]),
            axis=-1,
        )
        log_N, bias_N, skip_N = (
            get_param(self, name, N).astype(jnp.float32) for name in ("A_log", "dt_bias", "D")
        )
        step = jax.nn.softplus(step.astype(jnp.float32) + bias_N[None, None])
        step_BTGR = step.reshape(*step.shape[:2], G, -1)
        rate_11GR, skip_GR = -jnp.exp(log_N).reshape(1, 1, G, -1), skip_N.reshape(G, -1)

        def split(conv_BTX: jax.Array, step_BTGR: jax.Array) -> Tokens:
            channels = ops.ACTIVATIONS[c.hidden_act](conv_BTX)
            v, k, q = jnp.split(channels, (inner, inner + keys), axis=-1)
            q, k = (y.reshape(*y.shape[:2], G, -1) for y in (q, k))
            v = v.reshape(*v.shape[:2], G, -1, V)
            skip = v * skip_GR[None, None, ..., None]
            return Tokens(q, k, v * step_BTGR[..., None], step_BTGR * rate_11GR, None, skip)

        convolution = Convolution(c.mamba_d_conv, c.mamba_conv_bias, name="conv1d")(sizes[1])
        recurrence = Recurrence(*convolution, split)
        y, state = run_recurrence(self, recurrence, mixed, step_BTGR, context, site)
        y = y.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
        y = GroupNorm(c.norm_eps, G, name="norm")(y)
        y = Linear(x.shape[-1], c.mamba_proj_bias, p, name="out_proj")(y.astype(x.dtype))
        return recurrent_output(self, site("attn.output", y), state, context)


class GroupNorm(nn.Module):
    """RMS norm of groups of channels."""

    eps: float
    groups: int

    @nn.compact
    def __call__(self, y_BTX: jax.Array) -> jax.Array:
        y_BTGX = y_BTX.reshape(*y_BTX.shape[:2], self.groups, -1)
        weight_X = get_param(self, "weight", y_BTX.shape[-1]).astype(jnp.float32)
        one_X = jnp.ones(y_BTGX.shape[-1], jnp.float32)
        normalized = ops.rms_norm(y_BTGX, one_X, eps=self.eps)
        scaled: jax.Array = normalized.reshape(y_BTX.shape) * weight_X[None, None]
        return scaled


class Mamba2Block(RecurrentBlock):
    """A layer with attention or Mamba-2."""

    mixer = (Mamba2, "mamba")


class Mamba2Decoder(Decoder):
    """A decoder with Mamba-2 layers."""

    block = Mamba2Block
