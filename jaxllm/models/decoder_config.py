"""The configuration of most families' decoders.

A family is a configuration: its properties set norms, biases, windows, scales and caps, and a field
of the same name replaces a property.
"""

import dataclasses
from typing import Any, ClassVar, Self

from jaxllm.config.attention_kind import AttentionKind
from jaxllm.config.model import ModelConfig, Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder. A family whose arithmetic differs overrides properties.

    Attributes:
        norms: Names of the norms before and after attention, before and after the MLP; None: no
            norm.
        qk_norm: "each head" or "all heads": how queries and keys are normalized before rotation;
            None: not at all.
        attention: A kind of attention of another package, for the layers with the rotary settings
            `rope`; no published checkpoint has one.
    """

    norms: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    qk_norm: ClassVar[str | None] = None

    rope: Rope
    attention: AttentionKind | None = None

    def _complaints(self) -> list[str]:
        if complaints := super()._complaints():
            return complaints
        complaints = [c for rope in self._ropes() for c in rope.complaints(self.head_dim)]
        return complaints + (self.attention.complaints(self) if self.attention else [])

    def _ropes(self) -> tuple[Rope, ...]:
        """Return all rotary settings, whether or not a layer uses them."""
        return (self.rope,)

    def layer_rope(self, layer: int) -> Rope | None:
        return self.rope

    def with_attention(self, kind: AttentionKind) -> Self:
        return dataclasses.replace(self, attention=kind)

    def attention_kind(self, layer: int) -> AttentionKind | None:
        if self.attention is None or self.layer_rope(layer) != self.rope:
            return None
        return self.attention.with_layers([layer])

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
        """The trained context, extended by dynamic NTK scaling (its factor) or a kind of
        attention.
        """
        stretch = self.rope.factor if self.rope.rope_type == "dynamic" else 1.0
        length = int(self.max_position_embeddings * (stretch or 1.0))
        if self.attention is None:
            return length
        return min(self.attention.context_length(length), self.position_limit)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if self.attention is None:  # keep the files of models without it unchanged
            return {name: value for name, value in fields.items() if name != "attention"}
        return {**fields, "attention": self.attention.to_dict()}

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
