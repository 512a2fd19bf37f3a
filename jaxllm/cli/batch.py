"""`jaxllm batch`: offline inference over the rows of a file, in several processes or on Ray."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import log, read_stdin, write
from jaxllm.cli.option_groups import LoadingOptions, SamplingOptions
from jaxllm.cli.options import Model, Stop, check_writable, read_extra_options, read_options
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.batch_inference.rows import Row
    from jaxllm.batch_inference.runner import Workers

EXAMPLE = """
Examples:

  jaxllm batch demo:llama prompts.jsonl --out answers.jsonl -n 40 --temperature 0.8

  jaxllm batch demo:llama texts.parquet --field text --task embed --out vectors.parquet --resume
"""


def batch(
    model: Model,
    file: Annotated[str, typer.Argument(metavar="FILE")],
    task: str = "generate",
    field: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    workers: Annotated[int | None, typer.Option(min=0)] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    ray: Annotated[str | None, typer.Option(metavar="local|ADDRESS")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "--batch", min=1)] = 8,
    group: Annotated[int, typer.Option(min=1)] = 64,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS")] = None,
    stop: Stop = None,
    *,
    sampling: SamplingOptions,
    loading: LoadingOptions,
) -> None:
    """Generate from, score, embed or classify every row of a file. Answers keep the order of the
    file and are bit-identical for any number of workers; a row that fails has an error in place of
    its answer.

    Args:
      file: Input rows: JSON lines or .parquet; - reads JSON lines from stdin.
      task: Task: generate, score, embed or classify.
      field: Name of the prompt field; then all other fields but id are ignored.
      out: New output file, .parquet or JSON lines [default: JSON lines on stdout].
      resume: Resume an interrupted run from its --out file.
      workers: Number of worker processes; 0 runs in this process [default: cores / threads].
      threads: Cores per worker [default: 1].
      ray: Run workers as Ray actors: local starts Ray here, ADDRESS joins a cluster.
      batch_size: Rows per batch in a worker.
      group: Rows sent to a worker, and saved, at once.
      timeout: Time limit in seconds for a group or a single row, compiling included. The worker is
        killed and its rows retried once, one by one; a row that times out again fails.
    """
    from jaxllm.batch_inference.job import BatchJob
    from jaxllm.batch_inference.output import format_answer
    from jaxllm.batch_inference.processes import ProcessWorkers
    from jaxllm.batch_inference.runner import run_job, stream
    from jaxllm.batch_inference.tasks import check_task

    start = time.perf_counter()
    if out is None and resume:
        raise ConfigError("--resume requires --out FILE: name the file to resume")
    check_writable("--out", out)
    seed = sampling.parse_seed(0) if task == "generate" else None
    if seed == "random":
        raise ConfigError("--seed must be a number for batch, so that runs repeat: got random")
    options = _read_task_options(
        task, sampling.more, **sampling.options, stop_strings=stop, seed=seed
    )
    check_task(task, options)
    rows = _read_rows(file, field)
    load = partial(loading.load, model, show_progress=False if workers != 0 else None)
    where, threads = _choose_workers(load, workers, threads, ray, -(-len(rows) // group))
    if timeout is not None and not isinstance(where, ProcessWorkers):
        raise ConfigError(
            "--timeout requires worker processes on this machine: give --workers N with N >= 1,"
            " and leave out --ray"
        )
    job = BatchJob(
        task=task, options=options, rows=batch_size, group=group, threads=threads,
        timeout=timeout, tries=3 if timeout is None else 1,
        metadata={"model": model, **loading.facts()},
    )  # fmt: skip
    if out is not None:
        ran = run_job(rows, job, where, out, resume=resume, log=log)
        answered, failed = ran.rows, ran.failed
    else:
        answered = failed = 0
        for answer in stream(rows, job, where):
            write(format_answer(answer))
            answered, failed = answered + 1, failed + ("error" in answer)
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


def _read_rows(file: str, field: str | None) -> "list[Row]":
    from jaxllm.batch_inference.rows import read_lines, read_rows
    from jaxllm.files import split_lines

    if file == "-":
        found = read_lines(split_lines(read_stdin()), field)
    else:
        found = read_rows(Path(file), field)
    if not found:
        raise ConfigError(f"{file} has no rows")
    if again := sum(row.duplicate > 0 for row in found):
        log(
            f"{again} rows repeat the id of an earlier row; tell their answers apart by line number"
        )
    return found


def _choose_workers(
    load: Any, workers: int | None, threads: int | None, ray: str | None, groups: int
) -> "tuple[Workers, int]":
    """Return the workers, and the number of threads of each."""
    from jaxllm.batch_inference.processes import InProcessWorkers, ProcessWorkers, available_cores
    from jaxllm.batch_inference.ray_data import RayWorkers

    cores = len(available_cores())
    if workers == 0:
        if ray is not None or threads is not None:
            raise ConfigError("--workers 0 runs in this process: leave out --ray and --threads")
        return InProcessWorkers(load), cores
    threads = threads or 1
    if threads > cores and ray in (None, "local"):
        raise ConfigError(f"--threads must be at most the number of cores, {cores}: got {threads}")
    count = workers or max(1, min(cores // threads, groups))
    return (
        ProcessWorkers(load, count, log) if ray is None else RayWorkers(load, count, ray)
    ), threads
