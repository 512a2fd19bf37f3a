"""`jaxllm batch`: offline inference over the rows of a file, in this process or on Ray."""

import io
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import log, read_stdin, write
from jaxllm.cli.option_groups import LoadingOptions, SamplingOptions
from jaxllm.cli.options import BatchSize, Model, NewFile, Stop, read_extra_options, read_options
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.batch_inference.rows import BatchRow

EXAMPLE = """
Examples:

  jaxllm batch demo:llama prompts.jsonl --out answers.jsonl -n 40 --temperature 0.8

  jaxllm batch demo:llama texts.parquet --field text --task embed --out vectors.jsonl
"""


def batch(
    model: Model,
    file: Annotated[str, typer.Argument(metavar="FILE")],
    task: str = "generate",
    field: str | None = None,
    out: NewFile = None,
    batch_size: BatchSize = 8,
    ray: Annotated[str | None, typer.Option(metavar="local|ADDRESS")] = None,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    stop: Stop = None,
    *,
    sampling: SamplingOptions,
    loading: LoadingOptions,
) -> None:
    """Generate from, score, embed or classify every row of a file. Answers are written with their
    ids as they finish, and the same command resumes an interrupted job. A row that fails has an
    error in place of its answer.

    Args:
        file: Input rows: JSON lines or .parquet; - reads JSON lines from stdin.
        task: Task: generate, score, embed or classify.
        field: Name of the prompt field; then all other fields but id are ignored.
        out: Output file of JSON lines, new or of the same job [default: stdout].
        batch_size: Rows that run at once.
        ray: Run actors of Ray Data: local starts Ray here, ADDRESS joins a cluster.
        workers: Number of Ray actors, which share all cores [default: 1].
    """
    from jaxllm.batch_inference.rows import check_rows
    from jaxllm.batch_inference.run import format_answer, run_job
    from jaxllm.batch_inference.tasks import BatchJob, answer_rows

    start = time.perf_counter()
    if out is not None and out.suffix == ".parquet":
        raise ConfigError(f"--out {out}: answers are appended as JSON lines: name a .jsonl file")
    if workers is not None and ray is None:
        raise ConfigError("--workers requires --ray: without it the job runs in this process")
    seed = sampling.parse_seed(0) if task == "generate" else None
    if seed == "random":
        raise ConfigError("--seed must be a number for batch, so that runs repeat: got random")
    options = _read_task_options(
        task, sampling.more, **sampling.options, stop_strings=stop, seed=seed
    )
    job = BatchJob(task=task, options=options, batch_size=batch_size)
    content = read_stdin().encode() if file == "-" else None

    def read() -> "Iterator[BatchRow]":
        from jaxllm.batch_inference.rows import parse_lines, read_rows

        if content is None:
            return read_rows(Path(file), field)
        return parse_lines(io.BytesIO(content), field)

    def answer(rows: "Iterable[BatchRow]") -> "Iterator[tuple[BatchRow, dict[str, Any]]]":
        if ray is None:
            return answer_rows(loading.load(model), job, rows)
        from jaxllm.batch_inference.ray import answer_on_ray

        load = partial(loading.load, model, show_progress=False)
        return answer_on_ray(load, job, rows, address=ray, workers=workers or 1)

    if out is not None:
        facts = {"model": model, **loading.facts()}
        answered, failed = run_job(job, read, answer, out, facts=facts, log=log)
    else:
        answered, failed = check_rows(read())[0], 0
        for row, reply in answer(read()):
            write(format_answer(row.id, reply))
            failed += "error" in reply
    log(
        f"{answered} answers{f' in {out}' if out else ''}, {failed} of them errors;"
        f" {time.perf_counter() - start:.1f} s"
    )
    if failed:
        raise typer.Exit(1)


def _read_task_options(task: str, extra: list[str] | None, **flags: Any) -> dict[str, Any]:
    """Return the options of a task; those of score and embed can only be set by -o."""
    if task == "generate":
        return read_options(extra, kind="serve", **flags)
    for name, value in flags.items():
        if value not in (None, []):
            flag = name.removesuffix("_strings").replace("_", "-")
            raise ConfigError(f"--task {task} does not generate text: leave out --{flag}")
    return read_extra_options(extra)
