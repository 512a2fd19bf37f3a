"""`jaxllm compress`: a recipe of compression steps, and the cost of each.

Calibration data of a recipe and evaluation data of its result never overlap: a text is split in
two; samples from the model are drawn twice, with two seeds.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import log, spinner, write
from jaxllm.cli.eval_data import (
    adds_bos,
    bos_id,
    describe_text,
    join_documents,
    make_loader,
    read_text_option,
)
from jaxllm.cli.options import (
    AsJson,
    Dtype,
    Model,
    NewFile,
    NewModel,
    Plot,
    load_model,
    parts_dir,
)
from jaxllm.errors import ConfigError, JaxllmError, TokenError

if TYPE_CHECKING:
    from jaxllm.checkpoints.resume import TensorStore
    from jaxllm.compress.calibration import Calibration
    from jaxllm.compress.recipe import Recipe
    from jaxllm.evaluate.likelihood.data import Loader
    from jaxllm.lm import LM

EXAMPLE = """
Examples:

  jaxllm compress demo:llama smaller --step "quantize: rtn int4-g64" --text @story.txt

  jaxllm compress demo:gpt2 smaller --recipe recipe.txt --wikitext train.parquet --plot costs.png
"""
SOURCES = "--text @FILE, --documents FILE, --wikitext FILE or --samples N"
EVAL_ONE_IN = 10  # one part in 10 of a text is held out for evaluation

Document = str | list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Flags of the calibration data. Raises ConfigError for more than one source.

    Attributes:
        text: Calibration text; its last tenth is held out unless --eval is given.
        documents: Calibration text from JSON lines with "text" or "tokens", joined.
        wikitext: Calibration text from WikiText as published: .raw or .parquet.
        samples: Number of calibration rows to sample from the model itself.
        calibration_rows: Number of calibration rows.
        length: Tokens per calibration row [default: 512, or the context if shorter].
        seed: Random seed of the calibration rows.
    """

    text: Annotated[str | None, typer.Option(metavar="TEXT|@FILE|-")] = None
    documents: Path | None = None
    wikitext: Path | None = None
    samples: int | None = None
    calibration_rows: int = 128
    length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = (self.text, self.documents, self.wikitext, self.samples)
        if sum(source is not None for source in given) > 1:
            raise ConfigError(f"more than one source of calibration data: give one of {SOURCES}")

    @property
    def is_given(self) -> bool:
        """Whether there are calibration data."""
        return self.samples is not None or self._file is not None

    @property
    def _file(self) -> tuple[str, str | Path] | None:
        """The option that names a text, with its value; None if there is none."""
        for name in ("text", "documents", "wikitext"):
            if (value := getattr(self, name)) is not None:
                return f"--{name}", value
        return None

    def read(self, eval_data: Path | None) -> tuple[Document | None, Document | None]:
        """Return the calibration text and the evaluation text, each None if no file has it.

        Without `eval_data`, the last tenth of the calibration text is held out for evaluation.

        Raises:
            CheckpointError: A file cannot be read.
            TokenError: The text is too short to split.
        """
        document = None if self._file is None else _read_document(*self._file)
        if eval_data is not None:
            is_table = eval_data.suffix == ".parquet"
            option = ("--wikitext", eval_data) if is_table else ("--text", f"@{eval_data}")
            return document, _read_document(*option)
        if document is None:
            return None, None
        begin = len(document) * (EVAL_ONE_IN - 1) // EVAL_ONE_IN
        if isinstance(document, str):  # cut after a newline, else after a space
            begin = next((at + 1 for c in "\n " if (at := document.rfind(c, 0, begin)) >= 0), begin)
        if not begin:
            named = " ".join(map(str, self._file or ()))
            raise TokenError(f"{named} is too short to split")
        return document[:begin], document[begin:]

    def calibrate(self, lm: "LM", document: Document | None) -> "Calibration":
        """Return the calibration rows of a recipe, checked against the model's config.

        Args:
            document: The calibration text from `read`; None for samples.
        """
        from jaxllm.compress.calibration import chunk_rows_after, from_texts, from_tokens
        from jaxllm.data.chunking import ChunkSpec

        if self.samples is not None:
            return self._sample_rows(lm, self.samples, self.seed, adds_bos(lm))
        cut = ChunkSpec(width=self._row_length(lm), rows=self.calibration_rows, seed=self.seed)
        assert document is not None and self._file is not None
        option, value = self._file
        is_file = option != "--text" or str(value).startswith("@")
        name = Path(str(value).removeprefix("@")).name if is_file else None
        if isinstance(document, str):
            calibration = from_texts(document, lm.tokenizer, cut)
        else:
            import numpy as np

            begin = [bos_id(lm)] if adds_bos(lm) else []
            text = document[1:] if document[:1] == begin else document  # begins with it once
            calibration = from_tokens(chunk_rows_after(begin, [np.array(text, np.int32)], cut))
        about: dict[str, Any] = {"kind": option.lstrip("-"), "file": name, "seed": self.seed}
        sourced = dataclasses.replace(calibration, source={**calibration.source, **about})
        sourced.check(lm.config)
        return sourced

    def sample_eval_rows(self, lm: "LM", maximum: int) -> list[list[int]]:
        """Sample as many evaluation rows as a recipe is calibrated on, at most `maximum`.

        They begin with the begin-of-text token, and are as long as the calibration rows.
        """
        assert self.samples is not None
        rows = min(self.samples, max(1, maximum))
        seed = self.seed ^ 1  # another than calibration's
        rows_NT: list[list[int]] = self._sample_rows(lm, rows, seed, True).token_NT.tolist()
        return rows_NT

    def _row_length(self, lm: "LM") -> int:
        return min(512, lm.config.context_length) if self.length is None else self.length

    def _sample_rows(self, lm: "LM", rows: int, seed: int, bos: bool) -> "Calibration":
        from jaxllm.compress.calibration import from_samples

        how: Any = {"rows": rows, "width": self._row_length(lm), "seed": seed, "bos": bos}
        calibration = from_samples(lm.model, lm.params, bos_id=bos_id(lm), **how)
        calibration.check(lm.config)
        return calibration


def _read_document(option: str, value: str | Path) -> Document:
    """Return the value of an option as one document."""
    from jaxllm.compress.calibration import SEPARATOR
    from jaxllm.data.wikitext import MAX_BYTES, read_wikitext
    from jaxllm.evaluate.likelihood.data import read_documents

    if option == "--wikitext":
        return SEPARATOR.join(read_wikitext(Path(value)))
    if option == "--text":
        return read_text_option(str(value), MAX_BYTES)
    document: Document = join_documents(read_documents(Path(value)))
    return document


def _list_steps(requested: bool) -> None:
    if requested:
        with spinner("starting"):
            from jaxllm.compress.registry import find_steps
        for step in find_steps():
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
    target: NewModel,
    recipe: Path | None = None,
    step: list[str] | None = None,
    eval_data: Annotated[Path | None, typer.Option("--eval")] = None,
    window: int | None = None,
    limit: int = 40,
    no_speed: bool = False,
    report: NewFile = None,
    plot: Plot = None,
    dtype: Dtype = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", callback=_refuse_mesh)] = None,
    again: bool = False,
    as_json: AsJson = False,
    list_steps: Annotated[
        bool, typer.Option("--list", callback=_list_steps, is_eager=True)
    ] = False,
    *,
    source: CalibrationOptions,
) -> None:
    """Apply a compression recipe to a model.

    Prints the cost of each step: bytes, quality, speed, time.

    The result has its own configuration and formats, and records the recipe. Finished work stays in
    OUT.parts until the result is written: the same command resumes from it.

    Args:
        recipe: Recipe file: one step per line; # starts a comment.
        step: Recipe step, for example "prune: wanda 2:4"; repeatable.
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
        from jaxllm.compress import pipeline, plots
        from jaxllm.compress.report import StepEvaluator, as_json as as_report, as_table, summarize
        from jaxllm.files import atomic_file
        from jaxllm.weights.paths import flatten

    lines = _read_recipe(recipe, step)
    for line in lines:
        if line.step.needs_calibration and not source.is_given:
            raise ConfigError(f"{str(line)!r} needs calibration data: give {SOURCES}")
    seen, measured = source.read(eval_data)
    if plot is not None and measured is None and source.samples is None:
        raise ConfigError("--plot requires evaluation data: give --eval FILE")
    lm = load_model(model, dtype)
    pipeline.check_applicable(lm, lines, has_calibration=source.is_given, allow_repeat=again)
    loader, facts = _make_eval_loader(lm, source, measured, window, limit)
    wanted = any(line.step.needs_calibration for line in lines)
    calibration = source.calibrate(lm, seen) if wanted else None
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
    from jaxllm.compress.registry import find_steps

    if (file is None) == (not steps):
        raise ConfigError('give either --recipe FILE or --step "verb: method ..."')
    table = find_steps()
    return parse_lines(steps or [], table, "--step") if file is None else read_recipe(file, table)


def _make_eval_loader(
    lm: "LM",
    source: CalibrationOptions,
    eval_document: Document | None,
    window: int | None,
    limit: int,
) -> "tuple[Loader | None, dict[str, Any] | None]":
    """Return the evaluation data and facts about it, or None and None if there is none."""
    if eval_document is None and source.samples is not None:
        rows = source.sample_eval_rows(lm, limit)
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
