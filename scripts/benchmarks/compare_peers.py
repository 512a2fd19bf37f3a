"""The same work on jaxllm and on its peers, alternating in one run, and the ratios between them.

One decision: a machine's speed drifts, so figures of different runs are not compared. Each round
times every test on every contender, in a rotating order, and measures the memory bandwidth before
each test; a ratio is a ratio of medians over the rounds. The first round compiles and does not
count. Other programs slow PyTorch down far more than jaxllm (its threads wait for each other), so
each round first measures the background load and warns about it.

jaxllm, transformers and OpenVINO have a process for each format, which loads once and reads tests
from stdin. llama.cpp's `llama-bench` runs once per measurement. Known differences: llama.cpp caches
keys and values in float16, OpenVINO in 8 bits, and jaxllm's quantized formats in bfloat16. With
quantized weights both peers round the inputs to 8 bits too, jaxllm only as int8+int8_inputs.
"""

import contextlib
import datetime
import itertools
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli import run_command
from jaxllm.cli.console import log, write
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.evaluate import bench
from jaxllm.evaluate.bench import BenchResult, Test
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.types.arrays import DTYPES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.benchmarks.peer_engines import Contender, LlamaBench, Measure, Worker, precision_of

EXAMPLE = (
    "Example: python scripts/benchmarks/compare_peers.py ~/models/TinyLlama-1.1B"
    " --formats bfloat16,int8 --llama-bench build/bin/llama-bench --gguf bfloat16=BF16.gguf"
    " --gguf int8=Q8_0.gguf"
)
PEERS = ("transformers", "llama.cpp", "openvino")
BUSY = 0.2  # cores of background load above which ratios mean little
DISTRUST = "the ratios are not reliable"


def measure_background_load(seconds: float = 0.5) -> float | None:
    """Return the cores that other programs use while no contender runs; None without /proc/stat."""
    stat, samples = Path("/proc/stat"), []
    if not stat.exists():
        return None
    for wait in (seconds, 0):
        # user, nice, system, idle, iowait, irq, softirq, steal: ticks of all cores (man 5 proc).
        ticks = [int(x) for x in stat.read_text(encoding="utf-8").split("\n")[0].split()[1:9]]
        samples.append((sum(ticks), ticks[3] + ticks[4]))
        time.sleep(wait)
    (all_before, idle_before), (all_after, idle_after) = samples
    elapsed, idle = all_after - all_before, idle_after - idle_before
    return (elapsed - idle) / max(1, elapsed) * (os.cpu_count() or 1)


class Comparison:
    """Measurements so far.

    `seconds` has the runs by test and contender; the first one compiles. `loads` has the background
    load in cores before each round, `bandwidth` the GB/s before each test.
    """

    def __init__(self, contenders: Sequence[Contender], tests: Sequence[Test]) -> None:
        self.contenders, self.tests = contenders, tests
        self.loads: list[float] = []
        self.bandwidth: dict[Test, list[float]] = {test: [] for test in tests}
        self.seconds: dict[tuple[Test, Contender], list[float]] = {
            (test, c): [] for test in tests for c in contenders
        }

    def run(
        self, rounds: int, read_bandwidth: Measure, advance: Callable[[], None]
    ) -> Iterator[None]:
        """Time everything once and then `rounds` times; yield after each round.

        If a contender fails a test, a message names both, and later rounds skip the pair.
        """
        broken = set()
        for number in range(rounds + 1):
            turn = number % len(self.contenders)
            if (load := measure_background_load()) is not None:
                self.loads.append(load)
                if load > BUSY:
                    log(f"round {number}: other programs use {load:.1f} cores: {DISTRUST}")
            for test in self.tests:
                self.bandwidth[test].append(read_bandwidth(test))
                for contender in (*self.contenders[turn:], *self.contenders[:turn]):
                    advance()
                    if (test, contender) in broken:
                        continue
                    try:
                        self.seconds[test, contender].append(contender.measure(test))
                    except JaxllmError as error:
                        broken.add((test, contender))
                        log(f"{contender.name}, {test.name}: skipped: {error}")
            yield

    def row(self, test: Test, contender: Contender) -> BenchResult | None:
        """Return the result as `jaxllm bench` does; None if no timed run has finished."""
        first, *seconds = self.seconds[test, contender] or [0.0]
        if not seconds:
            return None
        median = statistics.median(seconds)
        weights = contender.weights if test.decode else None
        weights_gb_s = None if weights is None else weights * test.decode / median / 1e9
        compile_s = max(0.0, first - median)
        bus = max(self.bandwidth[test])
        return BenchResult(test.name, test.tokens, tuple(seconds), compile_s, weights_gb_s, bus)

    def results(self) -> list[dict[str, Any]]:
        """Return a dict per test and contender, with the ratios to peers of the same precision."""
        results = []
        for test in self.tests:
            rows = [(c, row) for c in self.contenders if (row := self.row(test, c))]
            for c, row in rows:
                peers = [(p, r) for p, r in rows if p.precision == c.precision and p.peer in PEERS]
                ratios = {
                    p.peer: round(row.tokens_per_second / r.tokens_per_second, 3)
                    for p, r in peers
                    if c.peer == "jaxllm"
                }
                fields = {"engine": c.name, "precision": c.precision, **row.to_dict()}
                results.append({**fields, "seconds": row.seconds, "ratios": ratios})
        return results


def format_markdown(machine: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """Format a line about the machine, then a table for each test."""
    lines, test = [", ".join(f"{name} {value}" for name, value in machine.items())], None
    peers = [peer for peer in PEERS if any(r["engine"].split()[0] == peer for r in results)]
    if (machine.get("background load, cores") or 0) > BUSY:
        lines += ["", f"**Other programs were running: {DISTRUST}.**"]
    for r in results:
        if r["test"] != test:
            test = r["test"]
            ratio_heads = (f"to {peer}" for peer in peers)
            heads = ("engine", "tokens/s", "±", *ratio_heads, "share of bandwidth, GB/s")
            rule = "|---" + "|---:" * (len(heads) - 1) + "|"
            lines += ["", f"### {test}", "", f"| {' | '.join(heads)} |", rule]
        ratios = [f"{r['ratios'][p]:.2f}x" if p in r["ratios"] else "" for p in peers]
        share, bus = r["share_of_bus"], r["bus_gb_s"]
        speed = (f"{r['tokens_per_second']:.2f}", f"{r['spread']:.2f}")
        cells = (r["engine"], *speed, *ratios, "" if share is None else f"{share:.0%} of {bus:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def describe_machine(comparison: Comparison, threads: int) -> dict[str, Any]:
    """Return processor, cores, largest background load, threads, date and versions."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)
    facts = {
        "cpu": (names or [platform.processor()])[0],
        "cores": os.cpu_count(),
        "background load, cores": round(max(comparison.loads), 2) if comparison.loads else None,
        "threads": threads,
        "date": datetime.date.today().isoformat(),
    }
    for package in ("jax", "torch", "transformers", "openvino"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    builds = {c.build for c in comparison.contenders if isinstance(c, LlamaBench)} - {
        LlamaBench.build
    }
    return facts | ({"llama.cpp": " ".join(sorted(builds))} if builds else {})


def make_llama_contenders(
    files: Sequence[str], binary: Path | None, batched: Path | None, threads: int, untied: int
) -> Iterator[LlamaBench]:
    """Yield a contender per `FORMAT=FILE` whose files exist; log the others."""
    for fmt, _, file in (item.partition("=") for item in files):
        missing = [
            str(p or "--llama-bench") for p in (binary, Path(file)) if not (p and p.is_file())
        ]
        if missing or binary is None:
            log(f"llama.cpp {fmt}: skipped: no such file: {', '.join(missing)}")
        else:
            yield LlamaBench(fmt, Path(file), binary, batched, threads, untied)


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically; log a failure instead of ending the measurement."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        log(f"--out {path}: {error.strerror}")


def split_list(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_ints(text: str) -> list[int]:
    try:
        return [int(part) for part in split_list(text)]
    except ValueError:
        raise ConfigError(f"expected numbers separated by commas, got {text!r}") from None


Binary = Annotated[Path | None, typer.Option(help="Path of this llama.cpp program.")]


def compare_peers(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint directory, demo:llama or demo:gpt2.")
    ],
    formats: Annotated[
        str, typer.Option(help="Formats of jaxllm; int8+int8_inputs also rounds the inputs.")
    ] = "bfloat16,int8,int4-g64,bf16-packed,float32",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, tokens.")] = "512",
    decode: Annotated[int, typer.Option(help="Number of tokens to decode.")] = 16,
    depths: Annotated[str, typer.Option(help="Tokens in the cache before decoding.")] = "0,1024",
    batches: Annotated[str, typer.Option(help="Batch sizes for decoding.")] = "8,16",
    rounds: Annotated[int, typer.Option(min=1, help="Number of timed rounds.")] = 3,
    threads: Annotated[
        int, typer.Option(min=1, max=os.cpu_count(), help="Threads per engine.")
    ] = os.cpu_count() or 1,
    llama_bench: Binary = None,
    llama_batched_bench: Binary = None,
    gguf: Annotated[
        list[str] | None, typer.Option(metavar="FORMAT=FILE", help="GGUF file for llama.cpp.")
    ] = None,
    transformers: Annotated[bool, typer.Option(help="Time transformers with PyTorch.")] = True,
    torch_dtypes: Annotated[str, typer.Option(help="Dtypes of transformers.")] = "bfloat16",
    openvino: Annotated[
        str,
        typer.Option(
            help="Precisions of OpenVINO: bfloat16,int8,int4 (pip install openvino nncf)."
        ),
    ] = "",
    output_format: Annotated[
        str, typer.Option("--output", "-o", help="Output format: md or json.")
    ] = "md",
    out: Annotated[
        Path | None, typer.Option(help="File for the report, rewritten after each round.")
    ] = None,
) -> None:
    """Time prefill and decoding on jaxllm and its peers, alternating, and print the ratios."""
    if output_format not in ("md", "json"):
        raise ConfigError(f"--output must be md or json, got {output_format!r}")
    if out and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out {out}: not a file in an existing directory")
    if unknown := [dtype for dtype in split_list(torch_dtypes) if dtype not in DTYPES]:
        expected = ", ".join(DTYPES)
        raise ConfigError(f"--torch-dtypes must be among {expected}, got {', '.join(unknown)}")
    engines = [("jaxllm", fmt) for fmt in split_list(formats)]
    engines += [("transformers", dtype) for dtype in split_list(torch_dtypes) if transformers]
    precisions = ("float32", "bfloat16", "int8", "int4")
    if unknown := [fmt for fmt in split_list(openvino) if fmt not in precisions]:
        expected = ", ".join(precisions)
        raise ConfigError(f"--openvino must be among {expected}, got {', '.join(unknown)}")
    for _, fmt in engines:
        precision_of(fmt)
    files = [precision_of(item.partition("=")[0]) for item in gguf or ()]
    if len(set(files)) < len(files):
        raise ConfigError(f"--gguf: expected one file per precision, got {', '.join(files)}")
    candidates = bench.make_tests(
        parse_ints(prompts), decode, parse_ints(depths), parse_ints(batches)
    )
    opened = open_checkpoint(checkpoint)
    config = opened.config
    tests = [t for t in candidates if (t.prompt or t.depth + t.decode) < config.context_length]
    for test in (t for t in candidates if t not in tests):
        log(f"{test.name}: skipped: the model's context is {config.context_length}")

    with contextlib.ExitStack() as stack:

        def start_worker(peer: str, fmt: str) -> Worker:
            worker = Worker(peer, fmt, opened.directory, threads)
            stack.callback(worker.close)
            return worker

        bus = start_worker("memory bus", "float32")
        workers = [start_worker(*engine) for engine in engines]
        contenders: list[Contender] = []
        # OpenVINO converts in float32: one at a time, or memory would not suffice.
        for worker in itertools.chain(
            workers, (start_worker("openvino", fmt) for fmt in split_list(openvino))
        ):
            try:
                worker.wait_until_ready()
                contenders.append(worker)
            except ConfigError as error:
                log(f"{worker.name}: skipped: {error}")
        untied = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        paths = (llama_bench, llama_batched_bench)
        contenders += make_llama_contenders(gguf or [], *paths, threads, untied)
        if not contenders or not tests:
            raise ConfigError("nothing to time: see the skipped contenders and tests above")
        bus.wait_until_ready()
        comparison = Comparison(contenders, tests)

        def make_report() -> str:
            machine, results = describe_machine(comparison, threads), comparison.results()
            if output_format == "md":
                return format_markdown(machine, results)
            facts = {"checkpoint": opened.directory.name, "machine": machine}
            return json.dumps({**facts, "results": results}, indent=2) + "\n"

        interrupted, total = False, (rounds + 1) * len(tests) * len(contenders)
        with steps_bar(f"timing {opened.directory.name}", total) as advance:
            try:
                for _ in comparison.run(rounds, bus.measure, advance):
                    if out and comparison.results():
                        write_atomic(out, make_report())
            except KeyboardInterrupt:
                interrupted = True
                log("interrupted: the report has the measurements so far")
        if not comparison.results():
            raise ConfigError("nothing could be timed: see the skipped tests above")
        write(make_report())
    if interrupted:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(compare_peers, "python scripts/benchmarks/compare_peers.py", EXAMPLE)
