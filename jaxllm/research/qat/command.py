"""`jaxllm train qat`: training with fake quantization."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import spinner
from jaxllm.cli.options import Out
from jaxllm.cli.train_run import (
    ModelToTrain,
    TrainOptions,
    check_run,
    load_training_model,
    run_training,
)
from jaxllm.errors import ConfigError

DISTRIBUTED = True  # all processes train together
EXAMPLE = "Example: jaxllm train qat demo:llama small --data story.txt --format int3-g64"


def qat(
    model: ModelToTrain,
    target: Out,
    name: Annotated[str, typer.Option("--format")] = "int4-g64",
    rules: Path | None = None,
    learned_scales: bool = False,
    int8_inputs: bool = False,
    float_steps: Annotated[int, typer.Option(min=0)] = 0,
    *,
    options: TrainOptions,
) -> None:
    """Train with fake quantization: each step rounds as quantize does. The result is quantized.

    Its logits are those of the last step, bit for bit. The state is saved in OUT.parts during the
    run.

    Args:
        name: Integer format, as for quantize: int4-g64, int3-g64-zp, ...
        rules: JSON file to use instead: a list of [regex over parameter paths, format or null].
        learned_scales: Train the scales with the weights (LSQ).
        int8_inputs: Quantize the inputs of integer weights to int8, too.
        float_steps: Number of first steps without rounding.
    """
    with spinner("starting"):
        from jaxllm.cli.quantize import read_rules
        from jaxllm.research.qat.job import check_formats, qat as job_of

        if options.fsdp:
            raise ConfigError(
                "--fsdp cannot be combined with train qat, which rounds unsharded weights: use"
                " --mesh tensor=N to shard them"
            )
        wanted = name if rules is None else read_rules(rules)
        check_formats(wanted)
        checked = check_run(model, target, options, 1e-4)
    lm = load_training_model(model, options, "float32")
    inputs: Any = {"learn_scales": learned_scales, "dynamic_inputs": int8_inputs}
    job = job_of(lm, wanted, dtype=options.dtype, start_step=float_steps, **inputs)
    run_training(lm, job, target, options, checked, f"quantization-aware training of {model}")
