"""`jaxllm plan`: estimate memory and communication of a model on a device mesh."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxllm.cli.console import spinner, write, write_json
from jaxllm.cli.options import AsJson, BatchSize, Dtype, Model, Quantize, check_exclusive

if TYPE_CHECKING:
    from jaxllm.checkpoints.native import Checkpoint

WEIGHT_SUFFIXES = (".safetensors", ".msgpack", ".bin", ".gguf", ".pt", ".pth", ".h5")
DISTRIBUTED = False  # it runs no model
EXAMPLE = "Example: jaxllm plan demo:llama --devices 8 --batch 64 --context 1024 --hardware h100"


def plan(
    model: Model = "demo:llama",
    mesh: str | None = None,
    devices: Annotated[int | None, typer.Option(min=1, max=1 << 20)] = None,
    batch: BatchSize = 1,
    context: Annotated[int | None, typer.Option(min=1)] = None,
    hardware: str = "h100",
    goal: str = "latency",
    microbatches: int | None = None,
    exact: Annotated[bool, typer.Option("--exact/--no-exact")] = False,
    dtype: Dtype = None,
    quantize: Quantize = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory and communication on a mesh.

    Prints bytes, communication, idle time, and what fits. Reads no weights; MODEL may be just a
    Hugging Face config.json, or a directory with only that file.

    Args:
        mesh: Device mesh, as in data=2,tensor=4 [default: one device].
        devices: Number of devices to propose meshes for, best first.
        batch: Rows, in total over all devices.
        context: Tokens per row [default: the model's].
        hardware: Device: h100, a100, rtx4090, tpu-v5e, ... or numbers:
            flops=1t,memory=16g,bandwidth=20g,link=10g (optionally node=, across=, latency=).
        goal: Goal of --devices: latency (per token), throughput, or prompt (prefill time).
        microbatches: Pipeline microbatches [default: the number of stages].
        exact: The exact sums of one device, without partial sums.
    """
    with spinner("starting"):
        from jaxllm.research.plan.estimate import PlanQuery, plan as estimate_plan
        from jaxllm.research.plan.hardware import parse_hardware
        from jaxllm.research.plan.report import format_plan, format_ranking, plan_to_dict
        from jaxllm.research.plan.search import check_goal, propose_meshes
        from jaxllm.sharding.mesh_spec import MeshSpec, parse_mesh
        from jaxllm.sharding.partition_rules import resolve_mesh
        from jaxllm.weights.precision import freeze_rules

    check_exclusive({"--mesh": mesh, "--devices": devices})
    check_goal(goal)
    mesh_axes = None if mesh is None else parse_mesh(mesh)
    device = parse_hardware(hardware)
    opened = open_for_planning(Path(model) if model.endswith(".json") else model)
    precision = opened.precision
    if dtype is not None:
        precision = precision.with_dtype(dtype)
    if quantize is not None:
        precision = dataclasses.replace(precision, quantize=freeze_rules(quantize))
    context = context if context is not None else opened.config.default_cache_size
    axes = MeshSpec() if mesh_axes is None else resolve_mesh(mesh_axes, opened.config)
    query = PlanQuery(opened, precision, device, axes, batch, context, exact, microbatches)
    plans = [estimate_plan(query)] if devices is None else propose_meshes(query, devices, goal)
    if as_json:
        records = [plan_to_dict(plan) for plan in plans]
        return write_json(records[0] if devices is None else records)
    ranking = "" if devices is None else f"{format_ranking(plans)}\nthe first of them:\n\n"
    write(f"{ranking}{format_plan(plans[0])}")


def open_for_planning(path: str | Path) -> "Checkpoint":
    """Open the checkpoint at `path`, as in `jaxllm.load`.

    A config.json, or a directory without weight files, gives a checkpoint without tensors. Its
    weights count as bfloat16, unless its `dtype` is float32 or float16.

    Raises CheckpointError or ConfigError if there is no valid checkpoint.
    """
    from jaxllm.checkpoints.native import Checkpoint
    from jaxllm.convert.hf import read_config, unread_fields
    from jaxllm.convert.registry import open_checkpoint, warn_ignored
    from jaxllm.files import read_json
    from jaxllm.weights.precision import Precision

    if not isinstance(path, Path):
        alone = Path(path) / "config.json"
        if not alone.is_file() or any(
            file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            for file in alone.parent.iterdir()
        ):
            return open_checkpoint(path)
        path = alone
    data = read_json(path)
    config, _ = read_config(data)
    stored = data.get("dtype", data.get("torch_dtype"))
    dtype = stored if stored in ("float32", "float16", "bfloat16") else "bfloat16"
    opened = Checkpoint(path, config, {}, {}, Precision.uniform(dtype), ignored=unread_fields(data))
    warn_ignored(opened)
    return opened
