"""`jaxllm compress`: a recipe of steps that make a model smaller, and what each of them costs."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.calibration import (
    SOURCES,
    Document,
    Source,
    calibrate,
    read_source,
    samples_to_measure,
    source_of,
)
from jaxllm.cli.console import note, waiting, write
from jaxllm.cli.corpus import described, make_loader
from jaxllm.cli.options import AsJson, Dtype, Model, Out, check_writable, load_model
from jaxllm.errors import ConfigError, JaxllmError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.compress.journal import Journal
    from jaxllm.compress.recipe import Recipe
    from jaxllm.evaluate.likelihood.data import Loader

EXAMPLES = """
Examples:

  jaxllm compress demo:llama smaller --step "quantize: rtn int4-g64" --text @story.txt

  jaxllm compress demo:gpt2 smaller --recipe recipe.txt --wikitext train.parquet --plot costs.png
"""


def _listed(asked: bool) -> None:
    if asked:
        with waiting("starting"):
            from jaxllm.compress.steps import STEPS
        for step in STEPS:
            wants = " (wants calibration)" if step.calibrated else ""
            write(f"{step.usage}\n    {step.help}{wants}\n")
        raise typer.Exit


def _on_one_device(mesh: str | None) -> None:
    if mesh is not None:
        raise ConfigError(
            "compress runs on one device, in the memory of a layer: its steps look at whole inputs"
            f" and whole matrices. Leave out --mesh, and run what it writes with --mesh {mesh}"
        )


def compress(
    model: Model,
    target: Out,
    recipe: Annotated[
        Path | None, typer.Option(help="A file with a step a line; # begins a comment.")
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(help='A step, as "prune: wanda 2:4"; may be given more than once.'),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|@FILE|-",
            help="Calibrate on this text, @FILE's or stdin's; see --eval for its last tenth.",
        ),
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(help='The same of JSON lines with "text" or "tokens", joined to one.'),
    ] = None,
    wikitext: Annotated[
        Path | None, typer.Option(help="The same of WikiText as published, .raw or .parquet.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Calibrate on so many rows that the model says by itself.")
    ] = None,
    calibration_rows: Annotated[int, typer.Option(help="Rows to calibrate on.")] = 128,
    length: Annotated[
        int | None, typer.Option(help="Tokens of each; by default 512, or what the context takes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of where the rows begin, or of --samples.")] = 0,
    evaluated: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            help="Measure quality on this text; by default on the last tenth of the calibration"
            " text, of which the steps then see the rest alone, or on other samples.",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of it that are run together; as for perplexity.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Only its first so many windows.")] = 40,
    no_speed: Annotated[bool, typer.Option("--no-speed", help="Do not time decoding.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Also write what --json prints to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw quality against bytes, as a PNG file.")
    ] = None,
    dtype: Dtype = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            callback=_on_one_device,
            help="Not here: a recipe sees one whole layer after the other. What runs its result"
            " takes --mesh.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Do a step that was done to this model already.")
    ] = False,
    as_json: AsJson = False,
    listed: Annotated[
        bool,
        typer.Option("--list", callback=_listed, is_eager=True, help="List all steps, and exit."),
    ] = False,
) -> None:
    """Apply a recipe of compression to a model.

    Each step's costs are printed: bytes, quality, speed, time.

    The result has its own configuration and formats, and remembers the recipe. What is finished
    stays in OUT.parts until the result is written: the same command goes on from it.
    """
    with waiting("starting"):  # JAX is imported
        from jaxllm.checkpoint import claim
        from jaxllm.compress import apply, picture
        from jaxllm.compress.report import Scale, as_table, in_words
        from jaxllm.compress.report import as_json as as_report
        from jaxllm.files import writing
        from jaxllm.weights.paths import flatten

    lines = _recipe(recipe, step)
    claim(target)  # before the work, not after it
    for option, path in (("--report", report), ("--plot", plot)):
        check_writable(option, path)
    if plot is not None:
        picture.check_plot()
    files = {"--documents": documents, "--wikitext": wikitext}
    source = source_of({"--text": text, **files}, samples, calibration_rows, length, seed)
    calibrated = source.file is not None or samples is not None
    _check_calibrated(lines, calibrated)
    seen, measured = read_source(source, evaluated)
    if plot is not None and measured is None and samples is None:
        raise ConfigError("--plot draws quality: give --eval FILE")
    lm = load_model(model, dtype)
    apply.check(lm, lines, calibrated=calibrated, again=again)
    loader, facts = _loader(lm, source, measured, window, limit)
    wanted = any(line.step.calibrated for line in lines)
    calibration = calibrate(lm, source, seen) if wanted else None
    parts = _parts(target)
    journal = apply.journal_of(lm, calibration, parts, note)
    scale, subject = Scale(lm, loader, not no_speed), apply.subject_of(lm)
    _note_room(parts, sum(int(leaf.nbytes) for _, leaf in flatten(lm.params)))
    with _keeping(journal):
        table = [scale.first(journal)]
        for stage in apply.stages(lm, lines, calibration, journal, say=note):
            subject = stage.subject or subject
            table.append(scale.row(stage))
            note(f"{len(table) - 1} of {len(lines)}: {in_words(table[-1])}")
        apply.compressed(lm, lines, subject).save(target)
        journal.forget()
    about = {
        "model": model,
        "dtype": dtype,
        "recipe": [*lm.recipe, *map(str, lines)],
        "calibration": calibration.to_dict() if calibration else None,
        "evaluation": facts,
    }
    content = as_report(table, about)
    write(content if as_json else as_table(table))
    if report is not None:
        with writing(report, "w") as file:
            file.write(content)
    if plot is not None:
        picture.plot({target.name: table}, plot, f"{model}: mean KL divergence against bytes")
    note(f"{target}: written" + (f"; quality on {described(facts)}" if facts else ""))


def _recipe(file: Path | None, steps: list[str] | None) -> "Recipe":
    """The recipe of a file, or of flags. Raises ConfigError where there is none, or both."""
    from jaxllm.compress.recipe import parse_lines, read_recipe
    from jaxllm.compress.steps import STEPS

    if (file is None) == (not steps):
        raise ConfigError('give --recipe FILE or --step "verb: method ...", one of them')
    return (
        read_recipe(file, STEPS) if file is not None else parse_lines(steps or [], STEPS, "--step")
    )


def _check_calibrated(lines: "Recipe", calibrated: bool) -> None:
    """Raise ConfigError for a step that wants calibration where there is none."""
    for line in lines:
        if line.step.calibrated and not calibrated:
            raise ConfigError(f"{str(line)!r} wants calibration: give {SOURCES}")


def _loader(
    lm: "LM", source: Source, measured: Document | None, window: int | None, limit: int
) -> "tuple[Loader | None, dict[str, Any] | None]":
    """What quality is measured on, and what to say about it: None where there is no text for it."""
    if measured is None and source.samples is not None:
        rows = samples_to_measure(lm, source, limit)
        return make_loader(lm, rows, window=window, limit=limit, bos="first")
    if measured is None:
        note("without --eval FILE nothing is said of quality")
        return None, None
    corpus: Any = [measured]
    return make_loader(lm, corpus, window=window, limit=limit)


def _parts(target: Path) -> Path:
    """Where what is finished is kept: beside the result."""
    whole = Path(os.path.realpath(target))
    return whole.with_name(f"{whole.name}.parts")


def _note_room(parts: Path, size: int) -> None:
    """Say where there may be too little room: for the result, and for what is finished before."""
    folder = next(path for path in parts.parents if path.exists())
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        note(f"{folder} has {free / 1e6:,.0f} MB left; the model is of {size / 1e6:,.0f} MB")


@contextlib.contextmanager
def _keeping(journal: "Journal") -> Iterator[None]:
    """Where the block fails, what is finished stays, and is said; measurements alone do not."""
    with journal.kept():
        try:
            yield
        except JaxllmError as error:
            if all(".row." in path.name for path in journal.parts()):
                journal.forget()
                raise
            raise type(error)(f"{error}; what is finished is in {journal.directory}") from None
