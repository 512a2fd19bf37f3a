"""Settings of training runs: their bounds and meanings, from which the commands' flags come.

This module does not import JAX.
"""

import dataclasses
from typing import Annotated, Literal

from msgspec import Meta

from jaxllm.files import compile_pattern
from jaxllm.runtime.schema import check_fields

Count = Annotated[int, Meta(ge=1, lt=1 << 31)]  # steps are counted in int32
Fraction = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0, lt=1e38)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Seed = Annotated[int, Meta(ge=0, lt=1 << 32)]  # as JAX's keys take


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The length of a run, and how often it is evaluated and saved.

    Attributes:
        steps: Number of optimizer steps.
        gradient_accumulation_steps: Batches per optimizer step.
        num_iterations: Optimizer steps on the same batches or answers.
        seed: Random seed.
        eval_steps: Steps between evaluations and lines of the log; None for one at the end.
        patience: Evaluations without improvement before early stopping; the best step is written.
        save_steps: Steps between checkpoints OUT.step-N, in OUT's format.

    Raises ConfigError for values out of bounds.
    """

    steps: Count
    gradient_accumulation_steps: Count = 1
    num_iterations: Count = 1
    seed: Seed = 0
    eval_steps: Count | None = None
    patience: Count | None = None
    save_steps: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of AdamW (Loshchilov and Hutter 2019) with warmup and decay of the learning rate.

    Attributes:
        steps: Steps of the whole run.
        lr: Peak learning rate; at 0 nothing changes.
        warmup: Share of steps with learning rate warmup, 0 to 1.
        schedule: Learning rate after warmup; cosine and linear decay it to a tenth (`floor`).
        floor: Last learning rate, as a share of the peak.
        max_grad_norm: Maximum gradient norm; None for no limit.
        weight_decay: Weight decay of matrices.
        b1: Decay of the mean gradient.
        b2: Decay of the mean squared gradient.
        eps: Term added to the denominator.
        rates: Rows `(regex, peak)` over trained paths, as in `weights.paths`, for parameters with
            another peak rate. They follow the same schedule and do not decay.

    Raises:
        ConfigError: For values out of bounds.
    """

    steps: Count
    lr: Rate = 1e-4
    warmup: Fraction = 0.05
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    floor: Fraction = 0.1
    max_grad_norm: Annotated[float, Meta(gt=0, lt=1e38)] | None = 1.0
    weight_decay: Rate = 0.01
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-8
    rates: tuple[tuple[str, Rate], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "rates", tuple(map(tuple, self.rates)))
        for regex, _ in self.rates:
            compile_pattern(regex, "rates")
