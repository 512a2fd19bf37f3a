"""Options of reinforcement learning, from which the flags come. This module does not import JAX."""

import dataclasses
from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxllm.errors import SamplingError
from jaxllm.runtime.schema import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforcement:
    """Options of reinforcement learning.

    Attributes:
        loss: Form of the loss.
        group_size: Answers per prompt, which are compared with each other; a file of scored answers
            has its own number.
        max_new_tokens: Maximum number of tokens of an answer.
        sampling: Options of `generate` that determine the distribution to sample from, by name
            [default: the model's own, whatever the checkpoint's generation_config.json has].
        clip_low: Limit of the probability ratio: 1 - X.
        clip_high: Limit of the probability ratio: 1 + X [default: 0.2; dapo 0.28].
        beta: Weight of the divergence from the model before training.

    Raises ConfigError for values out of bounds, SamplingError for other options in `sampling`.
    """

    loss: Literal["grpo", "dr-grpo", "dapo"] = "grpo"
    group_size: Annotated[int, Meta(ge=2)] = 8
    max_new_tokens: Annotated[int, Meta(ge=1)] = 64
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    clip_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Meta(gt=0, lt=1e9)] | None = None
    beta: Annotated[float, Meta(ge=0, lt=1e9)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.sampling:
            return
        from jaxllm.research.rl.job import SAMPLING  # with JAX

        if unknown := sorted(self.sampling.keys() - SAMPLING):
            raise SamplingError(
                f"answers to train on cannot have {unknown[0]}: give processors and grammars"
            )
        if self.sampling.get("temperature", 1.0) == 0:
            raise SamplingError("the temperature must be above 0: equal answers teach nothing")
