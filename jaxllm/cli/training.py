"""What all kinds of training have in common: their options, once, and how a job is run."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm import distributed
from jaxllm.cli.console import note, waiting, write
from jaxllm.cli.options import Out, check_writable, dtype_named, load_model
from jaxllm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.train.data.examples import Examples
    from jaxllm.train.data.rows import Data
    from jaxllm.train.jobs import Job
    from jaxllm.train.loop import Run

TrainedModel = Annotated[str, typer.Argument(metavar="MODEL", help="As MODEL of generate.")]
Target = Out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every kind of training: a field's annotation is its flag."""

    data: Annotated[
        Path,
        typer.Option(
            help="What to learn: a text, WikiText (.raw, .parquet), or JSON lines (.jsonl) of"
            ' "text", of "prompt" and "completion", or of "messages".'
        ),
    ]
    evaluated: Annotated[
        Path | None,
        typer.Option("--eval", help="Measure on this; by default on a share of the data."),
    ] = None
    held_out: Annotated[float, typer.Option(help="That share, drawn by the seed; 0 for none.")] = (
        0.05
    )
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the optimiser; by default as --epochs say.")
    ] = None
    epochs: Annotated[float, typer.Option(help="How often the data is seen.")] = 1.0
    batch: Annotated[int, typer.Option(min=1, help="Rows that run together.")] = 8
    accumulate: Annotated[
        int, typer.Option(min=1, help="Batches a step: their gradients are added up.")
    ] = 1
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a row; by default 512, or what the context takes."),
    ] = None
    no_pack: Annotated[
        bool, typer.Option("--no-pack", help="One document a row, padded; else they share rows.")
    ] = False
    rate: Annotated[float | None, typer.Option(help="The peak of the learning rate.")] = None
    gate_rate: Annotated[
        float | None, typer.Option(help="That of the gates of Infini-attention; by default 0.01.")
    ] = None
    schedule: Annotated[
        str, typer.Option(help="Of the rate after it has warmed up: cosine, linear, constant.")
    ] = "cosine"
    warmup: Annotated[float, typer.Option(help="The share of the steps in which it rises.")] = 0.05
    decay: Annotated[float, typer.Option(help="Weight decay, of matrices alone.")] = 0.01
    clip: Annotated[float, typer.Option(help="The largest norm of a gradient; 0 for any.")] = 1.0
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between measurements; by default 10 in all.")
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(min=1, help="End after so many without a better one; the best is the result."),
    ] = None
    sample: Annotated[
        str | None, typer.Option(help="Continue this text after each measurement.")
    ] = None
    remat: Annotated[
        bool, typer.Option("--remat", help="Less memory, a third more arithmetic.")
    ] = False
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Train on many devices, as data=2,stage=2,tensor=2: rows, layers, and heads, MLPs"
            " and vocabulary.",
        ),
    ] = None
    fsdp: Annotated[
        bool,
        typer.Option(
            "--fsdp",
            help="With --mesh data=N: weights, gradients and the optimiser's state are divided by"
            " N, and each weight is gathered for its products.",
        ),
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0
    dtype: Annotated[
        str,
        typer.Option(
            callback=dtype_named,
            help="What the model runs in: float32, or bfloat16 (what is trained stays float32).",
        ),
    ] = "float32"
    report: Annotated[
        Path | None, typer.Option(help="Write every step's numbers to this file, as JSON.")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Draw the losses, as a PNG file.")] = None


def check(target: Path, options: Options, result: str | None = "config.json") -> None:
    """What can be refused before anything is loaded. result: the file that makes OUT complete;
    None: it is a file itself.
    """
    from jaxllm.files import check_vacant, is_there
    from jaxllm.mesh.axes import parse
    from jaxllm.train.optimizer import check_optax

    check_optax()
    if options.fsdp and (options.mesh is None or parse(options.mesh).data == 1):
        raise ConfigError("--fsdp divides weights over data: give --mesh data=N, N from 2 up")
    if distributed.told(lambda: "there" if result is None and is_there(target) else ""):
        raise CheckpointError(f"{target} exists: name another file")
    check_vacant(target.parent if result is None else target, result or target.name, "a result")
    for option, path in (("--report", options.report), ("--plot", options.plot)):
        check_writable(option, path)
    if options.plot is not None:
        from jaxllm.compress.picture import check_plot

        check_plot()


def trained(
    lm: "LM",
    made: "Callable[[Data, Data | None], Job]",
    target: Path,
    options: Options,
    rate: float,
    title: str,
    examples: "Callable[[Path], Examples] | None" = None,
    room: int = 0,
) -> "Run":
    """Read the data for a model, run the job made of it, write what came of it, and say so.

    made: told the data and what is held out, or None. rate: where no other is asked for. title: of
    report and picture. examples: how a file is read, where it is not as `sources.read_examples`
    does. room: tokens of the context that rows must leave.
    """
    from jaxllm.train import jobs, picture
    from jaxllm.train.infini import gate_rates
    from jaxllm.train.loop import Plan
    from jaxllm.train.optimizer import Optimizer

    data, held_out = _data(lm, options, examples, room)
    steps = options.steps or max(1, round(options.epochs * len(data) / options.accumulate))
    facts = data.facts
    note(
        f"{facts['examples']:,} examples in {facts['rows']:,} rows of {data.width}"
        f" ({facts['filled']:.0%} filled), {data.tokens:,} tokens to learn; {steps:,} steps"
    )
    plan = Plan(
        steps=steps,
        accumulate=options.accumulate,
        seed=options.seed,
        evaluate_every=options.evaluate_every or max(1, steps // 10),
        patience=options.patience,
    )
    optimizer = Optimizer(
        steps=steps,
        rate=options.rate or rate,
        warmup=options.warmup,
        schedule=options.schedule,
        clip=options.clip or None,
        decay=options.decay,
        rates=gate_rates(lm.config, options.gate_rate),
    )
    parts, job = parts_of(target), made(data, held_out)
    run = jobs.run(
        job, data, optimizer, plan, held_out=held_out, directory=parts, remat=options.remat,
        sample=None if options.sample is None else jobs.told(job.lm, options.sample), say=note,
    )  # fmt: skip
    with waiting("writing"):
        job.finish(run.params, target)
    jobs.forget(parts)
    if options.report is not None:
        from jaxllm.files import writing

        content = {"title": title, "data": facts, "before": run.before}
        content["steps"] = [{**r._asdict()} for r in run.records]
        with writing(options.report, "w") as file:
            json.dump(content, file, indent=1)
    if options.plot is not None:
        picture.plot(run.records, run.before, options.plot, title)
    last = run.best or run.records[-1]
    loss = last.loss if last.held_out is None else last.held_out
    was = "" if run.before is None else f" (before: {run.before:.4f})"
    write(f"{target}: loss {loss:.4f}{was} after step {last.step}\n")
    return run


def loaded(model: str, options: Options, dtype: str | None = None, **more: Any) -> "LM":
    """A model on the mesh that the options name, by default in the format that it is to run in."""
    return load_model(model, dtype or options.dtype, mesh=options.mesh, fsdp=options.fsdp, **more)


def parts_of(target: Path) -> Path:
    """Where a run keeps what is finished: beside its result."""
    whole = Path(os.path.realpath(target))
    return whole.with_name(f"{whole.name}.parts")


def _data(
    lm: "LM", options: Options, examples: "Callable[[Path], Examples] | None", room: int
) -> tuple[Any, Any]:
    """The rows to learn, and those to measure on, or None."""
    from jaxllm.train.data.dataset import Dataset
    from jaxllm.train.data.parting import part
    from jaxllm.train.data.sources import Writing, read_examples
    from jaxllm.train.prefix import check_room

    writing = Writing(lm.tokenizer, lm.chat_template)

    def read(path: Path) -> "Examples":
        return read_examples(path, writing) if examples is None else examples(path)

    found = read(options.data)
    measured = None if options.evaluated is None else read(options.evaluated)
    if measured is None and options.held_out:
        found, measured = part(found, options.held_out, options.seed)
    width = min(512, lm.config.context_length - room) if options.length is None else options.length

    def rows(some: "Examples") -> Dataset:
        data = Dataset(some, width, options.batch, options.seed, not options.no_pack)
        data.check(lm.config)
        check_room(lm.model, room, width)
        return data

    if options.patience is not None and measured is None:
        raise ConfigError("--patience waits for the held-out loss: leave --held-out above 0")
    return rows(found), None if measured is None else rows(measured)
