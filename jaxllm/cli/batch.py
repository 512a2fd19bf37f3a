"""`jaxllm batch`: offline inference over the rows of a file, in several processes or on Ray."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import note, read_stdin, write
from jaxllm.cli.options import Model, Stop, check_writable, read_more, read_options
from jaxllm.cli.shared import Loading, Sampling, with_options
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.fleet.rows import Row
    from jaxllm.fleet.running import Workers

EXAMPLE = """
Examples:

  jaxllm batch demo:llama prompts.jsonl --out answers.jsonl -n 40 --temperature 0.8

  jaxllm batch demo:llama texts.parquet --field text --task embed --out vectors.parquet --resume
"""


@with_options
def batch(
    sampling: Sampling,
    loading: Loading,
    model: Model,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Input rows: JSON lines or .parquet; - reads JSON lines from stdin.",
        ),
    ],
    task: Annotated[str, typer.Option(help="Task: generate, score or embed.")] = "generate",
    field: Annotated[
        str | None,
        typer.Option(help="Name of the prompt field; then all other fields but id are ignored."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New output file, .parquet or JSON lines [default: JSON lines on stdout]."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted run from its --out file.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of worker processes; 0 runs in this process [default: cores / threads].",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Cores per worker [default: 1].")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="local|ADDRESS",
            help="Run workers as Ray actors: local starts Ray here, ADDRESS joins a cluster.",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", "--batch", min=1, help="Rows per batch in a worker."),
    ] = 8,
    group: Annotated[
        int, typer.Option(min=1, help="Rows sent to a worker, and saved, at once.")
    ] = 64,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time limit in seconds for a group or a single row, compiling included. The worker"
            " is killed and its rows retried once, one by one; a row that times out again fails.",
        ),
    ] = None,
    stop: Stop = None,
) -> None:
    """Generate from, score or embed every row of a file. Answers keep the order of the file and are
    bit-identical for any number of workers; a row that fails has an error in place of its answer.
    """
    from jaxllm.fleet.job import Job
    from jaxllm.fleet.processes import Processes
    from jaxllm.fleet.running import run, stream
    from jaxllm.fleet.tasks import check_task
    from jaxllm.fleet.written import line

    start = time.perf_counter()
    if out is None and resume:
        raise ConfigError("--resume requires --out FILE: name the file to resume")
    check_writable("--out", out)
    options = _options(
        task,
        sampling.more,
        **sampling.named,
        stop_strings=stop,
        seed=_seed(sampling) if task == "generate" else None,
    )
    check_task(task, options)
    found = _rows(file, field)
    load = partial(loading.load, model, show_progress=False if workers != 0 else None)
    where, threads = _workers(load, workers, threads, ray, -(-len(found) // group))
    if timeout is not None and not isinstance(where, Processes):
        raise ConfigError(
            "--timeout requires worker processes on this machine: give --workers N with N >= 1,"
            " and leave out --ray"
        )
    job = Job(
        task=task, options=options, rows=batch_size, group=group, threads=threads,
        timeout=timeout, tries=3 if timeout is None else 1,
        about={"model": model, **loading.facts()},
    )  # fmt: skip
    if out is not None:
        ran = run(found, job, where, out, resume=resume, say=note)
        answered, failed = ran.rows, ran.failed
    else:
        answered = failed = 0
        for answer in stream(found, job, where):
            write(line(answer))
            answered, failed = answered + 1, failed + ("error" in answer)
    note(
        f"{answered} answers{f' in {out}' if out else ''}, {failed} of them errors;"
        f" {time.perf_counter() - start:.1f} s"
    )
    if failed:
        raise typer.Exit(1)


def _options(task: str, more: list[str] | None, **named: Any) -> dict[str, Any]:
    """Return the options of a task; those of score and embed can only be set by -o."""
    if task == "generate":
        return read_options(more, kind="serve", **named)
    for name, value in named.items():
        if value not in (None, []):
            flag = name.removesuffix("_strings").replace("_", "-")
            raise ConfigError(f"--task {task} does not generate text: leave out --{flag}")
    return read_more(more)


def _seed(sampling: Sampling) -> int:
    """Return the seed of a batch, 0 by default. Raises ConfigError for --seed random."""
    if (seed := sampling.given_seed(0)) == "random":
        raise ConfigError("--seed must be a number for batch, so that runs repeat: got random")
    return int(seed)


def _rows(file: str, field: str | None) -> "list[Row]":
    from jaxllm.files import split_lines
    from jaxllm.fleet.rows import read_lines, read_rows

    if file == "-":
        found = read_lines(split_lines(read_stdin()), field)
    else:
        found = read_rows(Path(file), field)
    if not found:
        raise ConfigError(f"{file} has no rows")
    if again := sum(row.copy > 0 for row in found):
        note(
            f"{again} rows repeat the id of an earlier row; tell their answers apart by line number"
        )
    return found


def _workers(
    load: Any, workers: int | None, threads: int | None, ray: str | None, groups: int
) -> "tuple[Workers, int]":
    """Return the workers, and the number of threads of each."""
    from jaxllm.fleet.processes import Here, Processes, available_cores
    from jaxllm.fleet.raydata import RayData

    cores = len(available_cores())
    if workers == 0:
        if ray is not None or threads is not None:
            raise ConfigError("--workers 0 runs in this process: leave out --ray and --threads")
        return Here(load), cores
    threads = threads or 1
    if threads > cores and ray in (None, "local"):
        raise ConfigError(f"--threads must be at most the number of cores, {cores}: got {threads}")
    count = workers or max(1, min(cores // threads, groups))
    return (Processes(load, count, note) if ray is None else RayData(load, count, ray)), threads
