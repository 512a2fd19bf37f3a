"""`jaxllm batch`: every row of a file through a model, over processes or Ray."""

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
            metavar="FILE", help="Rows: JSON lines, or .parquet; - reads lines from stdin."
        ),
    ],
    task: Annotated[str, typer.Option(help="generate, score or embed.")] = "generate",
    field: Annotated[
        str | None,
        typer.Option(help="The field that is the prompt; then others are no options."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A new file, .parquet or JSON lines; by default lines to stdout."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --out where a run has ended early.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes; by default as many as there are cores for. 0: in this one.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Cores of each worker; by default 1.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="local|ADDRESS",
            help="Workers are actors of Ray: one started here, or the cluster there.",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", "--batch", min=1, help="Rows that run at once in a worker."),
    ] = 8,
    group: Annotated[
        int, typer.Option(min=1, help="How many rows are given to a worker, and kept, as one.")
    ] = 64,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End a worker that has had no answer for so long to a group, or to a row by itself"
            " (compiling counts): its rows are tried once more, one by one, then they have failed.",
        ),
    ] = None,
    stop: Stop = None,
) -> None:
    """Generate from, score or embed every row of a file. Each is answered once, in the order of the
    file, with the same bits for any number of workers; a row that fails has its error in its place.
    """
    from jaxllm.fleet.job import Job
    from jaxllm.fleet.processes import Processes
    from jaxllm.fleet.running import run, stream
    from jaxllm.fleet.tasks import check_task
    from jaxllm.fleet.written import line

    start = time.perf_counter()
    if out is None and resume:
        raise ConfigError("--resume goes on with --out FILE; name it")
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
            "--timeout ends processes of this machine: --workers from 1, without --ray"
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
    """The options of a task: those of LM.generate have flags, others are named by -o alone."""
    if task == "generate":
        return read_options(more, kind="serve", **named)
    for name, value in named.items():
        if value not in (None, []):
            flag = name.removesuffix("_strings").replace("_", "-")
            raise ConfigError(f"--task {task} takes no --{flag}: nothing is generated")
    return read_more(more)


def _seed(sampling: Sampling) -> int:
    """The seed of a batch, 0 unless another is given. Raises ConfigError for a random one."""
    if (seed := sampling.given_seed(0)) == "random":
        raise ConfigError("--seed random: a batch takes a number, so that a run can be repeated")
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
        note(f"{again} rows have the id of a row before them; answers are told apart by their line")
    return found


def _workers(
    load: Any, workers: int | None, threads: int | None, ray: str | None, groups: int
) -> "tuple[Workers, int]":
    """Where groups are answered, and by how many threads each."""
    from jaxllm.fleet.processes import Here, Processes, available_cores
    from jaxllm.fleet.raydata import RayData

    cores = len(available_cores())
    if workers == 0:
        if ray is not None or threads is not None:
            raise ConfigError("--workers 0 is this process, as it is: without --ray and --threads")
        return Here(load), cores
    threads = threads or 1
    if threads > cores and ray in (None, "local"):
        raise ConfigError(f"--threads {threads}: there are {cores} cores")
    count = workers or max(1, min(cores // threads, groups))
    return (Processes(load, count, note) if ray is None else RayData(load, count, ray)), threads
