"""`jaxllm plan`: estimate memory and communication of a model on a device mesh."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from jaxllm.cli.console import waiting, write
from jaxllm.cli.options import AsJson, Dtype, Model, Quantize
from jaxllm.errors import ConfigError

EXAMPLE = "Example: jaxllm plan demo:llama --devices 8 --batch 64 --context 1024 --hardware h100"


def plan(
    model: Model = "demo:llama",
    mesh: Annotated[
        str | None, typer.Option(help="Device mesh, as in data=2,tensor=4 [default: one device].")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of devices to propose meshes for, best first.")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch-size", "--batch", help="Rows, in total over all devices.")
    ] = 1,
    context: Annotated[
        int | None, typer.Option(help="Tokens per row [default: the model's].")
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(
            help="Device: h100, a100, rtx4090, tpu-v5e, ... or numbers: flops=1t,memory=16g,"
            "bandwidth=20g,link=10g (optionally node=, across=, latency=)."
        ),
    ] = "h100",
    goal: Annotated[
        str,
        typer.Option(
            help="Goal of --devices: latency (per token), throughput, or prompt (prefill time)."
        ),
    ] = "latency",
    microbatches: Annotated[
        int | None, typer.Option(help="Pipeline microbatches [default: the number of stages].")
    ] = None,
    exact: Annotated[
        bool, typer.Option(help="The exact sums of one device, without partial sums.")
    ] = False,
    dtype: Dtype = None,
    quantize: Quantize = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory and communication on a mesh.

    Prints bytes, communication, idle time, and what fits. Reads no weights; MODEL may be just a
    Hugging Face config.json, or a directory with only that file.
    """
    with waiting("starting"):
        from jaxllm.mesh.axes import Axes, parse
        from jaxllm.mesh.rules import fitted
        from jaxllm.plan.estimate import Asked
        from jaxllm.plan.estimate import plan as planned
        from jaxllm.plan.hardware import hardware as named
        from jaxllm.plan.opening import opened_for
        from jaxllm.plan.propose import check_goal, proposals
        from jaxllm.plan.report import ranking, text, values
        from jaxllm.weights.precision import freeze
        from jaxllm.whole import whole

    if mesh is not None and devices is not None:
        raise ConfigError("--mesh and --devices cannot be combined: leave one out")
    whole("--batch", batch, 1, error=ConfigError)
    wanted = None if devices is None else whole("--devices", devices, 1, 1 << 20, ConfigError)
    if context is not None:
        whole("--context", context, 1, error=ConfigError)
    check_goal(goal)
    spread = None if mesh is None else parse(mesh)
    kind = named(hardware)
    opened = opened_for(Path(model) if model.endswith(".json") else model)
    precision = opened.precision
    if dtype is not None:
        precision = precision.in_dtype(dtype)
    if quantize is not None:
        precision = dataclasses.replace(precision, quantize=freeze(quantize))
    context = context if context is not None else opened.config.usual_capacity
    axes = Axes() if spread is None else fitted(spread, opened.config)
    asked = Asked(opened, precision, kind, axes, batch, context, exact, microbatches)
    if wanted is None:
        found = planned(asked)
        write(json.dumps(values(found)) + "\n" if as_json else text(found))
        return
    plans = proposals(asked, wanted, goal)
    if as_json:
        write(json.dumps([values(plan) for plan in plans]) + "\n")
        return
    write(f"{ranking(plans)}\nthe first of them:\n\n{text(plans[0])}")
