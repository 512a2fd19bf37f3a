"""Flags that all training commands share, and the run of their jobs."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from jaxllm.cli.console import log, spinner, write
from jaxllm.cli.fields import Flags
from jaxllm.cli.options import NewFile, Plot, load_model, parse_dtype, parts_dir
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.runtime import multihost
from jaxllm.train.settings import OptimizerSettings, TrainPlan

if TYPE_CHECKING:
    from jaxllm.checkpoints.native import Checkpoint
    from jaxllm.lm import LM
    from jaxllm.train.data.examples import Examples
    from jaxllm.train.data.rows import Data
    from jaxllm.train.jobs import TrainJob
    from jaxllm.train.loop import StepRecord, TrainResult
    from jaxllm.train.optimizer import Optimizer

ModelToTrain = Annotated[str, typer.Argument(metavar="MODEL", help="Model, as for generate.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The flags of every run, with some of its plan and optimizer.

    Attributes:
        data: Prompts: JSON lines with "prompt", or with "messages" for the chat template.
        steps: Number of optimizer steps [default: by --epochs].
        epochs: Number of epochs.
        batch_size: Prompts per batch.
        lr: Peak learning rate [default: 1e-4; lora 1e-3, prompt 3e-3].
        max_grad_norm: Maximum gradient norm; 0 for no limit.
        eval_steps: Steps between two lines of the log [default: a tenth of all].
        sample: Prompt to continue after each evaluation.
        keep_state: Keep OUT.parts at the end, so that --resume can extend the run.
        resume: Continue from OUT.parts even if OUT exists, and replace OUT.
        gradient_checkpointing: Recompute activations: less memory for a third more arithmetic.
        dtype: Compute dtype: float32, or bfloat16 (trained weights stay float32).
        report: JSON file to write: the numbers of every step, updated at each evaluation.
        plot: PNG file to draw: the losses.
    """

    data: Path
    steps: Annotated[int | None, typer.Option(min=1)] = None
    epochs: float = 1.0
    batch_size: Annotated[int, typer.Option(min=1)] = 8
    plan: Annotated[
        dict[str, Any], Flags(TrainPlan, "gradient_accumulation_steps", "seed", "save_steps")
    ]
    lr: float | None = None
    optimizer: Annotated[
        dict[str, Any], Flags(OptimizerSettings, "schedule", "warmup", "weight_decay")
    ]
    max_grad_norm: float = 1.0
    eval_steps: Annotated[int | None, typer.Option(min=1)] = None
    sample: str | None = None
    keep_state: bool = False
    resume: bool = False
    gradient_checkpointing: bool = False
    dtype: Annotated[str, typer.Option(callback=parse_dtype)] = "float32"
    report: NewFile = None
    plot: Plot = None

    @property
    def seed(self) -> int:
        """The random seed."""
        return int(self.plan["seed"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOptions(RunOptions):
    """The flags of training on rewards: no evaluation data, one document per row, one device.

    Attributes:
        lr: Peak learning rate [default: 1e-5; with --rank 1e-4].
    """

    eval_data = length = mesh = None
    eval_split, fsdp = 0.0, False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """The flags of training on texts.

    Attributes:
        data: Training data: a text file, WikiText (.raw, .parquet), or JSON lines (.jsonl) with
            "text", "prompt" and "completion", or "messages".
        eval_data: Evaluation data [default: --eval-split of the training data].
        eval_split: Share of the examples held out for evaluation, chosen by the seed (of a single
            text its end); 0 for none.
        batch_size: Rows per batch.
        length: Tokens per row [default: 512, or the context if shorter].
        no_pack: One document per row, padded, instead of packed rows.
        eval_steps: Steps between evaluations [default: a tenth of all].
        mesh: Device mesh, as in data=2,stage=2,tensor=2: data shards rows; stage layers; tensor
            heads, MLPs and vocabulary.
        fsdp: Shard weights, gradients and optimizer state over --mesh data=N; each weight is
            gathered when it is used.
    """

    plan: Annotated[
        dict[str, Any],
        Flags(TrainPlan, "gradient_accumulation_steps", "seed", "patience", "save_steps"),
    ]
    eval_data: Path | None = None
    eval_split: float = 0.05
    length: Annotated[int | None, typer.Option(min=2)] = None
    no_pack: bool = False
    mesh: Annotated[str | None, typer.Option(metavar="AXES")] = None
    fsdp: bool = False


Options = TrainOptions | RewardOptions


class RunSetup(NamedTuple):
    """Setup of a run before weights are read.

    optimizer, plan: their steps are --steps, or 1 as a placeholder if the data decide.
    """

    checkpoint: "Checkpoint"
    optimizer: "Optimizer"
    plan: TrainPlan


def check_run(
    model: str,
    target: Path,
    options: Options,
    lr: float,
    result: str | None = "config.json",
    rates: Mapping[str, float] | None = None,
    num_iterations: int = 1,
) -> RunSetup:
    """Check all that can be checked before weights are read and data are encoded.

    Args:
        lr: The default learning rate.
        result: The file in OUT that marks it complete; None if OUT is a file itself.
        rates: Learning rates of parameters by patterns, before those of the model's attention.
        num_iterations: Optimizer steps on the same answers.

    Raises:
        ConfigError, CheckpointError: The run would fail on an option.
    """
    from jaxllm.convert.registry import open_checkpoint
    from jaxllm.files import regular_size
    from jaxllm.sharding.mesh_spec import parse_mesh
    from jaxllm.train.optimizer import Optimizer, import_optax

    import_optax()
    axes = None if options.mesh is None else parse_mesh(options.mesh)
    if options.fsdp and (axes is None or axes.data == 1):
        raise ConfigError("--fsdp shards weights over data: give --mesh data=N with N >= 2")
    if not 0 < options.epochs < math.inf:
        raise ConfigError(f"--epochs must be a finite number above 0: got {options.epochs}")
    if not 0 <= options.eval_split < 1:
        raise ConfigError(f"--eval-split must be at least 0 and below 1: got {options.eval_split}")
    if options.plan.get("patience") and options.eval_data is None and not options.eval_split:
        raise ConfigError("--patience requires an evaluation loss: leave --eval-split above 0")
    for path in (options.data, options.eval_data):
        if path is not None:
            regular_size(path)
    _check_target(target, options, result)
    steps = options.steps or 1
    plan = TrainPlan(
        steps=steps, eval_steps=options.eval_steps, num_iterations=num_iterations, **options.plan
    )
    optimizer = Optimizer(
        steps=steps,
        lr=lr if options.lr is None else options.lr,
        max_grad_norm=options.max_grad_norm or None,
        **options.optimizer,
    )
    opened = open_checkpoint(model)
    context = opened.config.context_length
    if options.length is not None and options.length > context:
        raise ConfigError(
            f"--length must be at most {context}, the context of {model}: got {options.length}."
            " Give a smaller one."
        )
    kind = opened.config.attention
    all_rates = (*(rates or {}).items(), *(() if kind is None else kind.rates))
    if optimizer.lr == 0 and not all_rates:
        raise ConfigError("--lr must be above 0: at 0 nothing is trained")
    return RunSetup(opened, dataclasses.replace(optimizer, rates=all_rates), plan)


def _check_target(target: Path, options: Options, result: str | None) -> None:
    """Raise CheckpointError or ConfigError if OUT or another output cannot be written."""
    from jaxllm.files import check_vacant, path_exists

    parts, result_path = parts_dir(target), target if result is None else target / result
    facts = multihost.broadcast_from_zero(
        lambda: f"{int(path_exists(parts))}{int(path_exists(result_path))}"
    )
    has_state, has_result = (letter == "1" for letter in facts)
    if options.resume and not has_state:
        raise ConfigError(
            f"--resume requires the state of a run: {parts.name} does not exist next to"
            f" {target.name}. A run with --keep-state keeps it."
        )
    if has_result and has_state and not options.resume:
        raise CheckpointError(
            f"{target} already holds a result, and {parts.name} the state of its run: give --resume"
            " to continue the run and replace the result, or name another OUT"
        )
    if has_result and result is None and not options.resume:
        raise CheckpointError(f"{target} exists: name another file")
    if not has_result or not options.resume:
        name = target.parent if result is None else target
        check_vacant(name, result or target.name, "a result")


def run_training(
    lm: "LM",
    job: "TrainJob | Callable[[Data, Data | None], TrainJob]",
    target: Path,
    options: Options,
    setup: RunSetup,
    title: str,
    examples: "Callable[[Path], Examples] | None" = None,
    reserved_tokens: int = 0,
    data: Any = None,
) -> "TrainResult":
    """Read the data, run a job, write its result and print its loss.

    Args:
        job: the job, or a function that makes it from the training and evaluation data (or None).
        setup: the setup that `check_run` returned.
        title: the title of report and plot.
        examples: a function that reads a data file, instead of `sources.read_examples`.
        reserved_tokens: tokens of the context that rows must leave free.
        data: the training data (`Data`, with `summary` and `facts`), instead of the file's.
    """
    from jaxllm.files import atomic_file
    from jaxllm.train import jobs, plots

    held_out = None
    if isinstance(options, TrainOptions):
        data, held_out = _read_data(lm, options, examples, reserved_tokens)
    batches = options.epochs * len(data) / setup.plan.gradient_accumulation_steps
    steps = options.steps or max(1, round(batches * setup.plan.num_iterations))
    log(f"{data.summary}; {steps:,} steps")
    eval_steps = options.eval_steps or max(1, steps // 10)
    parts = parts_dir(target)
    training = job(data, held_out) if callable(job) else job

    def write_report(records: "Sequence[StepRecord]", before: float | None) -> None:
        if options.report is not None:
            content = {"title": title, "data": data.facts, "total_steps": steps, "before": before}
            content["steps"] = [r._asdict() for r in records]
            with atomic_file(options.report, "w") as file:
                json.dump(content, file, indent=1)

    def save_checkpoint(params: Any, step: int) -> None:
        name = target.with_name(f"{target.name}.step-{step}")
        _write_result(training, params, name)
        log(f"step {step}: {name}")

    run = jobs.run_job(
        training, data, dataclasses.replace(setup.optimizer, steps=steps),
        dataclasses.replace(setup.plan, steps=steps, eval_steps=eval_steps),
        eval_data=held_out, directory=parts, remat=options.gradient_checkpointing,
        report=write_report,
        checkpoint=save_checkpoint, log=log,
        sample=None if options.sample is None else jobs.make_sampler(training.lm, options.sample),
    )  # fmt: skip
    with spinner("writing"):
        _write_result(training, run.params, target)
    if not options.keep_state:
        jobs.delete_state(parts)
    if options.plot is not None:
        plots.plot(run.records, run.initial_loss, options.plot, title, training.metric)
    last = run.best or run.records[-1]
    name, loss = "loss", last.loss if last.held_out is None else last.held_out
    if training.metric is not None:
        name, loss = training.metric, last.also[training.metric]
    was = "" if run.initial_loss is None else f" (before: {run.initial_loss:.4f})"
    write(f"{target}: {name} {loss:.4f}{was} after step {last.step}\n")
    return run


def _write_result(job: "TrainJob", params: Any, target: Path) -> None:
    """Write a result, replacing an existing one."""
    aside = target.with_name(f".{target.name}.replaced")

    def move_aside() -> None:
        if target.is_dir():  # writing a file replaces it anyway
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)

    multihost.run_on_process_zero(move_aside)
    job.finish(params, target)
    multihost.run_on_process_zero(lambda: shutil.rmtree(aside, ignore_errors=True))


def load_training_model(
    model: str, options: Options, dtype: str | None = None, **kwargs: Any
) -> "LM":
    """Load a model on the mesh of the options, by default in their compute dtype."""
    return load_model(model, dtype or options.dtype, mesh=options.mesh, fsdp=options.fsdp, **kwargs)


def _read_data(
    lm: "LM",
    options: TrainOptions,
    examples: "Callable[[Path], Examples] | None",
    reserved_tokens: int,
) -> tuple[Any, Any]:
    """Return the training rows, and the evaluation rows or None."""
    from jaxllm.train.data.dataset import Dataset
    from jaxllm.train.data.examples import split_examples
    from jaxllm.train.data.sources import TextEncoder, read_examples
    from jaxllm.train.frozen_prefix import check_context

    writing = TextEncoder(lm.tokenizer, lm.chat_template)
    width = (
        min(512, lm.config.context_length - reserved_tokens)
        if options.length is None
        else options.length
    )
    check_context(lm.model, reserved_tokens, width)

    def read(path: Path) -> "Examples":
        return read_examples(path, writing) if examples is None else examples(path)

    examples_read = read(options.data)
    measured = None if options.eval_data is None else read(options.eval_data)
    if measured is None and options.eval_split:
        if len(examples_read) == 1:
            log(
                f"{options.data} is one text: its last {options.eval_split:.0%} is held out"
                " (--eval-split) and may differ from the rest; --eval-data FILE uses other data"
            )
        examples_read, measured = split_examples(examples_read, options.eval_split, options.seed)

    def make_dataset(some: "Examples") -> Dataset:
        data = Dataset(some, width, options.batch_size, options.seed, not options.no_pack)
        data.check(lm.config)
        return data

    return make_dataset(examples_read), None if measured is None else make_dataset(measured)
