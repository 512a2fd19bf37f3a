"""Options of distillation, from which the flags come. This module does not import JAX."""

import dataclasses
from typing import Annotated, Literal

from msgspec import Meta

from jaxllm.errors import ConfigError
from jaxllm.runtime.schema import field_errors
from jaxllm.train.settings import Fraction

Positive = Annotated[float, Meta(gt=0, lt=1e9)]
Weight = Annotated[float, Meta(ge=0, lt=1e9)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """Options of distillation.

    Attributes:
        beta: Divergence: 0 forward KL, 1 reverse KL, between Jensen-Shannon.
        temperature: Temperature of teacher and student in the divergence.
        alpha: Weight of the divergence from the teacher; 1 - alpha is cross-entropy.
        top_k: Number of top teacher logits to record once; 0 runs the teacher at each step.
        on_policy: Share of steps on texts sampled from the student (GKD).
        prompt_tokens: Length of an on-policy prompt from a text without one.
        new_tokens: Maximum number of new tokens of an on-policy text.
        sample_temperature: Sampling temperature of on-policy texts.
        hidden: Additional loss on hidden states.
        hidden_weight: Weight of the loss on hidden states.
        pairs: Layers of student and teacher to compare [default: evenly spaced].

    Raises ConfigError for values out of bounds, or that exclude each other.
    """

    beta: Fraction = 0.0
    temperature: Positive = 1.0
    alpha: Fraction = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    on_policy: Fraction = 0.0
    prompt_tokens: Annotated[int, Meta(ge=1)] = 16
    new_tokens: Annotated[int, Meta(ge=1)] = 128
    sample_temperature: Positive = 1.0
    hidden: Literal["mse", "cosine"] | None = None
    hidden_weight: Weight = 1.0
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        complaints = field_errors(self)
        if self.top_k and self.on_policy:
            complaints.append(
                "recorded teacher outputs (top_k) do not cover rows that the student generates"
                " (on_policy): drop one of them"
            )
        if self.top_k and self.hidden:
            complaints.append("hidden states need a running teacher: drop top_k or hidden")
        if self.alpha == 0 and (self.top_k or self.on_policy):
            complaints.append(
                "with alpha 0 the teacher's outputs are not used: drop top_k and on_policy, or set"
                " alpha above 0"
            )
        if self.pairs and not self.hidden:
            complaints.append("pairs of layers need hidden: set it to mse or cosine")
        if complaints:
            raise ConfigError("; ".join(complaints))
