"""`jaxllm compress`: a recipe of compression steps, and the cost of each."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.calibration import (
    SOURCES,
    CalibrationSource,
    Document,
    calibrate,
    choose_source,
    read_source,
    sample_eval_rows,
)
from jaxllm.cli.console import log, spinner, write
from jaxllm.cli.eval_data import adds_bos, describe_text, make_loader
from jaxllm.cli.options import (
    AsJson,
    Dtype,
    Model,
    Out,
    check_plot_file,
    check_writable,
    load_model,
    parts_dir,
)
from jaxllm.errors import ConfigError, JaxllmError

if TYPE_CHECKING:
    from jaxllm.checkpoints.resume import TensorStore
    from jaxllm.compress.recipe import Recipe
    from jaxllm.evaluate.likelihood.data import Loader
    from jaxllm.lm import LM

EXAMPLE = """
Examples:

  jaxllm compress demo:llama smaller --step "quantize: rtn int4-g64" --text @story.txt

  jaxllm compress demo:gpt2 smaller --recipe recipe.txt --wikitext train.parquet --plot costs.png
"""


def _list_steps(requested: bool) -> None:
    if requested:
        with spinner("starting"):
            from jaxllm.compress.registry import STEPS
        for step in STEPS:
            wants = " (needs calibration data)" if step.needs_calibration else ""
            write(f"{step.usage}\n    {step.help}{wants}\n")
        raise typer.Exit


def _refuse_mesh(mesh: str | None) -> None:
    if mesh is not None:
        raise ConfigError(
            "compress runs on one device, one layer at a time, since its steps need unsharded"
            f" inputs and matrices. Leave out --mesh, and run the result with --mesh {mesh}"
        )


def compress(
    model: Model,
    target: Out,
    recipe: Path | None = None,
    step: list[str] | None = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT|@FILE|-")] = None,
    documents: Path | None = None,
    wikitext: Path | None = None,
    samples: int | None = None,
    calibration_rows: int = 128,
    length: int | None = None,
    seed: int = 0,
    eval_data: Annotated[Path | None, typer.Option("--eval")] = None,
    window: int | None = None,
    limit: int = 40,
    no_speed: bool = False,
    report: Path | None = None,
    plot: Path | None = None,
    dtype: Dtype = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", callback=_refuse_mesh)] = None,
    again: bool = False,
    as_json: AsJson = False,
    list_steps: Annotated[
        bool, typer.Option("--list", callback=_list_steps, is_eager=True)
    ] = False,
) -> None:
    """Apply a compression recipe to a model.

    Prints the cost of each step: bytes, quality, speed, time.

    The result has its own configuration and formats, and records the recipe. Finished work stays in
    OUT.parts until the result is written: the same command resumes from it.

    Args:
      recipe: Recipe file: one step per line; # starts a comment.
      step: Recipe step, for example "prune: wanda 2:4"; repeatable.
      text: Calibration text; its last tenth is held out unless --eval is given.
      documents: Calibration text from JSON lines with "text" or "tokens", joined.
      wikitext: Calibration text from WikiText as published: .raw or .parquet.
      samples: Number of calibration rows to sample from the model itself.
      calibration_rows: Number of calibration rows.
      length: Tokens per calibration row [default: 512, or the context if shorter].
      seed: Random seed of the calibration rows.
      eval_data: Evaluation text file [default: the last tenth of the calibration text, which the
        steps then do not see; with --samples, other samples].
      window: Tokens per evaluation window, as for perplexity.
      limit: Maximum number of evaluation windows.
      no_speed: Do not time decoding.
      report: JSON file to write: the output of --json.
      plot: PNG file to draw: quality against bytes.
      mesh: Not supported: recipes run on one device, layer by layer. Commands that run the result
        take --mesh.
      again: Repeat steps that this model's recipe already has.
      list_steps: List all steps and exit.
    """
    with spinner("starting"):  # JAX is imported
        from jaxllm.checkpoints.native import check_output_directory
        from jaxllm.compress import pipeline, plots
        from jaxllm.compress.report import StepEvaluator, as_json as as_report, as_table, summarize
        from jaxllm.files import atomic_file
        from jaxllm.weights.paths import flatten

    lines = _read_recipe(recipe, step)
    check_output_directory(target)  # before the work, not after it
    check_writable("--report", report)
    check_plot_file("--plot", plot)
    files = {"--documents": documents, "--wikitext": wikitext}
    source = choose_source({"--text": text, **files}, samples, calibration_rows, length, seed)
    calibrated = source.file is not None or samples is not None
    for line in lines:
        if line.step.needs_calibration and not calibrated:
            raise ConfigError(f"{str(line)!r} needs calibration data: give {SOURCES}")
    seen, measured = read_source(source, eval_data)
    if plot is not None and measured is None and samples is None:
        raise ConfigError("--plot requires evaluation data: give --eval FILE")
    lm = load_model(model, dtype)
    pipeline.check_applicable(lm, lines, has_calibration=calibrated, allow_repeat=again)
    loader, facts = _make_eval_loader(lm, source, measured, window, limit)
    wanted = any(line.step.needs_calibration for line in lines)
    calibration = calibrate(lm, source, seen) if wanted else None
    parts = parts_dir(target)
    store = pipeline.make_store(lm, calibration, parts, log)
    scale, subject = StepEvaluator(lm, loader, not no_speed), pipeline.initial_state(lm)
    _log_low_disk(parts, sum(int(leaf.nbytes) for _, leaf in flatten(lm.params)))
    with _keep_store(store):
        table = [scale.original_row(store)]
        for stage in pipeline.run_steps(lm, lines, calibration, store, log=log):
            subject = stage.state or subject
            table.append(scale.step_row(stage))
            log(f"{len(table) - 1} of {len(lines)}: {summarize(table[-1])}")
        pipeline.build_model(lm, lines, subject).save(target)
        store.clear()
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
        with atomic_file(report, "w") as file:
            file.write(content)
    if plot is not None:
        plots.plot({target.name: table}, plot, f"{model}: mean KL divergence against bytes")
    log(f"{target}: written" + (f"; quality on {describe_text(facts)}" if facts else ""))


def _read_recipe(file: Path | None, steps: list[str] | None) -> "Recipe":
    """Return the recipe of a file or of flags. Raises ConfigError unless exactly one is given."""
    from jaxllm.compress.recipe import parse_lines, read_recipe
    from jaxllm.compress.registry import STEPS

    if (file is None) == (not steps):
        raise ConfigError('give either --recipe FILE or --step "verb: method ..."')
    return (
        read_recipe(file, STEPS) if file is not None else parse_lines(steps or [], STEPS, "--step")
    )


def _make_eval_loader(
    lm: "LM",
    source: CalibrationSource,
    eval_document: Document | None,
    window: int | None,
    limit: int,
) -> "tuple[Loader | None, dict[str, Any] | None]":
    """Return the evaluation data and facts about it, or None and None if there is none."""
    if eval_document is None and source.samples is not None:
        rows = sample_eval_rows(lm, source, limit)
        bos = "each" if adds_bos(lm) else "first"  # samples begin with it
        return make_loader(lm, rows, window=window, limit=limit, bos=bos)
    if eval_document is None:
        log("quality is not measured: give --eval FILE")
        return None, None
    corpus: Any = [eval_document]
    return make_loader(lm, corpus, window=window, limit=limit)


def _log_low_disk(parts: Path, size: int) -> None:
    """Log if the disk may be too small for the result and the finished work."""
    folder = next(path for path in parts.parents if path.exists())
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        log(f"{folder} has {free / 1e6:,.0f} MB left; the model has {size / 1e6:,.0f} MB")


@contextlib.contextmanager
def _keep_store(store: "TensorStore") -> Iterator[None]:
    """Keep finished work if the block fails, and name it in the error; not measurements alone."""
    with store.lock():
        try:
            yield
        except JaxllmError as error:
            if all(".row." in path.name for path in store.part_paths()):
                store.clear()
                raise
            raise type(error)(f"{error}; finished work is in {store.directory}") from None
