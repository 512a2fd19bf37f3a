"""A decoder's layer: rotary attention and a gated MLP, with norms around them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm import ops
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.layers import AttentionContext, AttentionOutput, Layer, Unrotated, attend
from jaxllm.models.modules import Linear, RMSNorm, get_param, project
from jaxllm.models.sites import SiteRecorder
from jaxllm.weights.precision import Precision


class Sinks(nn.Module):
    """A score of each query head."""

    heads: int

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return the scores, `[N]`."""
        score_N: jax.Array = get_param(self, "weight", self.heads)
        return score_N


class Attention(nn.Module):
    """Rotary grouped-query attention. out_name: name of the output projection."""

    config: DecoderConfig
    precision: Precision
    layer: int
    out_name: str = "o_proj"

    _project_in: ClassVar[Any] = staticmethod(project)

    @nn.compact
    def __call__(
        self, x: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> AttentionOutput:
        c, p = self.config, self.precision
        q, k, v, gate = self._split_heads(self._project_in(x, *self._linears()))
        rope = c.layer_rope(self.layer)
        q, k, v = site("attn.q", q), site("attn.k", k), site("attn.v", v)
        kind, unrotated = c.attention_kind(self.layer), None
        if kind is not None:
            held = {x: get_param(self, x, c.num_attention_heads) for x in kind.head_params}
            state = context.state[self.layer] if context.state else None
            unrotated = Unrotated(q, k, v, held, state)
        if rope is not None:
            angles = context.angles[c.ropes.index(rope)]
            q, k = ops.rotate(q, *angles), ops.rotate(k, *angles)
        if (growth := c.query_growth(self.layer)) is not None:
            beta, length = growth
            steps_BT = jnp.maximum(context.position_BT, 0) // length
            grown_BT = 1 + beta * jnp.log1p(steps_BT.astype(jnp.float32))
            q = q * grown_BT[..., None, None].astype(q.dtype)
        sink_N = Sinks(c.num_attention_heads, name="sinks")() if c.attention_sinks else None
        return attend(
            context,
            site,
            self.layer,
            q,
            k,
            v,
            partial(self._project_out, x, self._out_linear()),
            cache_dtype=p.cache,
            scale=c.attention_scale,
            window=c.window(self.layer),
            cap=c.attention_cap,
            sink_N=sink_N,
            kind=kind,
            unrotated=unrotated,
            gate=gate,
            rope=rope,
            source=c.kv_source(self.layer),
        )

    def _project_out(self, x: jax.Array, linear: Linear, heads: jax.Array) -> jax.Array:
        """Project the heads' outputs. x: The layer's input."""
        return linear(heads)

    def _out_linear(self) -> Linear:
        c = self.config
        return Linear(c.hidden_size, c.biases[1], self.precision, name=self.out_name)

    def _linears(self) -> Sequence[Linear]:
        """Return the linears that read the layer's input."""
        c, K = self.config, self.config.kv_heads(self.layer)
        heads = {
            "q_proj": c.num_attention_heads * (1 + c.gates_attention),
            "k_proj": K,
            "v_proj": K,
        }
        size = c.layer_head_dim(self.layer)
        return [
            Linear(n * size, c.biases[0], self.precision, name=name) for name, n in heads.items()
        ]

    def _split_heads(
        self, terms: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return queries, keys and values before rotation, and the gate, each `[B, T, *, H]`.

        terms: Of each linear. Norms of all heads at once come before the heads are split.
        """
        c, (q, k, v) = self.config, terms
        if c.qk_norm == "all heads":
            q, k = self._norm_qk(q, k)
        q, k, v = (y.reshape(*y.shape[:2], -1, c.head_dim) for y in (q, k, v))
        gate = None
        if c.gates_attention:
            q, gate = q[:, :, 0::2], q[:, :, 1::2]
        if c.qk_norm == "each head" and c.use_qk_norm:
            q, k = self._norm_qk(q, k)
        return q, k, v, gate

    def _norm_qk(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
        c = self.config
        return tuple(
            RMSNorm(c.norm_eps, c.norm_weight_offset, name=name)(y)
            for name, y in (("q_norm", q), ("k_norm", k))
        )


class MLP(nn.Module):
    """Gated MLP. width: the number of its hidden channels."""

    config: DecoderConfig
    precision: Precision
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, site: SiteRecorder) -> jax.Array:
        c, p = self.config, self.precision
        bias = c.biases[2]
        gate, up = project(
            x,
            Linear(self.width, bias, p, name="gate_proj"),
            Linear(self.width, bias, p, name="up_proj"),
        )
        gate = site("mlp.pre", gate)
        hidden = site("mlp.post", ops.ACTIVATIONS[c.hidden_act](gate) * up)
        return Linear(x.shape[-1], bias, p, name="down_proj")(hidden)


class Block(nn.Module):
    """One layer: attention and a gated MLP with residual connections, and norms around them."""

    config: DecoderConfig
    precision: Precision
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, context: AttentionContext) -> Layer:
        before, after, before_mlp, after_mlp = self.config.norms
        site = context.site_recorder(self.layer)
        x = site("resid_pre", x)
        normed = site("attn_norm", context.gather_tokens(self._norm(before, x)))
        attended = self._mixer()(normed, context, site)
        y = self._scale_residual(self._norm(after, attended.x))
        x = site("resid_mid", x + site("attn_out", y))
        normed = site("mlp_norm", context.gather_tokens(self._norm(before_mlp, x)))
        y = self._scale_residual(self._norm(after_mlp, self._mlp(x, normed, context, site)))
        x = site("resid_post", self._finish(x + site("mlp_out", y), context))
        return Layer(attended, x, site.recorded)

    def _finish(self, x: jax.Array, context: AttentionContext) -> jax.Array:
        """Return the output of the layer from the stream after its MLP."""
        return x

    def _mixer(self) -> Any:
        """Return the module that mixes tokens: attention."""
        return Attention(self.config, self.precision, self.layer, name="self_attn")

    def _mlp(
        self, x: jax.Array, normed: jax.Array, context: AttentionContext, site: SiteRecorder
    ) -> jax.Array:
        """Return the MLP's output. x: The stream before its norm."""
        mlp = MLP(self.config, self.precision, self.config.mlp_size(self.layer), name="mlp")
        return site("mlp.output", mlp(normed, site))

    def _norm(self, name: str | None, x: jax.Array) -> jax.Array:
        if name is None:
            return x
        normed: jax.Array = RMSNorm(
            self.config.norm_eps, self.config.norm_weight_offset, name=name
        )(x)
        return normed

    def _scale_residual(self, y: jax.Array) -> jax.Array:
        scale = self.config.residual_scale
        return y if scale == 1 else y * scale
