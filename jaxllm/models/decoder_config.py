"""The configuration of most families' decoders.

A family is a configuration: its properties set norms, biases, windows, scales and caps, and a field
of the same name replaces a property.
"""

import dataclasses
from typing import Any, ClassVar, Self

from jaxllm.config.model import ModelConfig, Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder. A family whose arithmetic differs overrides properties.

    Attributes:
        norms: Names of the norms before and after attention, before and after the MLP; None: no
            norm.
        qk_norm: "each head" or "all heads": how queries and keys are normalized before rotation;
            None: not at all.
    """

    norms: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    qk_norm: ClassVar[str | None] = None

    rope: Rope

    def _complaints(self) -> list[str]:
        complaints = super()._complaints()
        if complaints:
            return complaints
        context = self.max_position_embeddings
        complaints = [
            f"Self-Extend's neighbor_window {rope.neighbor_window} must be less than the context of"
            f" {context} tokens, which it extends"
            for rope in self._ropes()
            if (rope.neighbor_window or 0) >= context
        ]
        return complaints + [c for rope in self._ropes() for c in rope.complaints(self.head_dim)]

    def _ropes(self) -> tuple[Rope, ...]:
        """Return all rotary settings, whether or not a layer uses them."""
        return (self.rope,)

    def layer_rope(self, layer: int) -> Rope | None:
        return self.rope

    @property
    def sliding_window(self) -> int | None:
        """Sliding window of all layers in tokens."""
        return None

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    def state_shape(self, layer: int) -> Any:
        kind = self.attention_kind(layer)
        return kind and kind.state_shape(self.num_key_value_heads, self.head_dim)

    @property
    def context_length(self) -> int:
        """The trained context, extended by `dynamic_inputs` NTK scaling (its factor) or
        Self-Extend.
        """
        stretch = self.rope.factor if self.rope.rope_type == "dynamic" else 1.0
        return self.rope.extended_length(int(self.max_position_embeddings * (stretch or 1.0)))

    def with_self_extend(self, group_size: int, neighbor_window: int) -> Self:
        rope = dataclasses.replace(
            self.rope, group_size=group_size, neighbor_window=neighbor_window
        )
        return dataclasses.replace(self, rope=rope)

    @property
    def attention_bias(self) -> bool:
        """Whether queries, keys, values and attention's output have biases."""
        return False

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP's linears have biases."""
        return False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether there are biases on q/k/v, on the attention output, and in the MLP."""
        return (self.attention_bias, self.attention_bias, self.mlp_bias)

    @property
    def gates_attention(self) -> bool:
        """Whether attention's heads are multiplied by the sigmoid of a gate. Each head's gate
        follows its query in the rows of `q_proj`.
        """
        return False

    @property
    def use_qk_norm(self) -> bool:
        """Whether this model has the norms of `qk_norm`; some models of a family may lack them."""
        return True

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return float(self.head_dim**-0.5)

    @property
    def attention_cap(self) -> float | None:
        """Soft cap on attention scores."""
        return None

    @property
    def attention_sinks(self) -> bool:
        """Whether each query head has a sink (`sink_N` of `ops.attend`)."""
        return False

    def query_growth(self, layer: int) -> tuple[float, int] | None:
        """Return beta and L if the layer's queries grow with their position p, else None.

        They are multiplied by 1 + beta ln(1 + floor(p / L)) (Llama 4's temperature of attention).
        """
        return None

    @property
    def residual_scale(self) -> float:
        """Factor on each sublayer's output before it is added to the stream."""
        return 1.0
