"""The same work on jaxllm and on its peers, in turns within one run, and the ratios between them.

One decision: a machine's speed drifts, so figures of different runs are not compared. Each round
times every test on every contender, in an order that rotates, with a reading of the memory bus
beside; a ratio is one of medians over the rounds. The first round compiles and does not count.
Other programs slow PyTorch down far more than jaxllm (its threads wait for each other), so what
they take of the processor is read before each round and said.

jaxllm, transformers and OpenVINO have a process for each format, which loads once and waits for its
turn: a line of JSON in, one out. llama.cpp is a call of its `llama-bench` a measurement. What
differs: it keeps keys and values in float16 (OpenVINO in 8 bits), quantized formats of ours in
bfloat16; and where weights are quantized both round the inputs to 8 bits too, which ours do as
int8+int8_inputs alone.
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
BUSY = 0.2  # cores of other programs, above which ratios mean little
DISTRUST = "the ratios are not to be trusted"


def cores_taken(seconds: float = 0.5) -> float | None:
    """Cores that others keep busy while no contender runs; None where /proc/stat is not there."""
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
    """What was measured so far: seconds by test and contender, the first a run that compiled.

    taken: cores that others kept busy before each round.
    """

    def __init__(self, contenders: Sequence[Contender], tests: Sequence[Test]) -> None:
        self.contenders, self.tests = contenders, tests
        self.taken: list[float] = []
        self.bus: dict[Test, list[float]] = {test: [] for test in tests}
        self.seconds: dict[tuple[Test, Contender], list[float]] = {
            (test, c): [] for test in tests for c in contenders
        }

    def run(self, rounds: int, read_bus: Measure, done: Callable[[], None]) -> Iterator[None]:
        """Time everything once and then `rounds` times; yields after each of them.

        A test that a contender fails is left out of it from then on, by name on stderr.
        """
        broken = set()
        for number in range(rounds + 1):
            turn = number % len(self.contenders)
            if (taken := cores_taken()) is not None:
                self.taken.append(taken)
                if taken > BUSY:
                    log(f"round {number}: other programs use {taken:.1f} cores: {DISTRUST}")
            for test in self.tests:
                self.bus[test].append(read_bus(test))
                for contender in (*self.contenders[turn:], *self.contenders[:turn]):
                    done()
                    if (test, contender) in broken:
                        continue
                    try:
                        self.seconds[test, contender].append(contender.measure(test))
                    except JaxllmError as error:
                        broken.add((test, contender))
                        log(f"{contender.name}, {test.name}: left out: {error}")
            yield

    def row(self, test: Test, contender: Contender) -> BenchResult | None:
        """As `jaxllm bench` has it; None before a run that counts."""
        first, *seconds = self.seconds[test, contender] or [0.0]
        if not seconds:
            return None
        middle = statistics.median(seconds)
        weights = contender.weights if test.decode else None
        streamed = None if weights is None else weights * test.decode / middle / 1e9
        compiling = max(0.0, first - middle)
        bus = max(self.bus[test])
        return BenchResult(test.name, test.tokens, tuple(seconds), compiling, streamed, bus)

    def results(self) -> list[dict[str, Any]]:
        """A dict a test and contender; ratios: of ours to the peers of the same precision."""
        found = []
        for test in self.tests:
            rows = [(c, row) for c in self.contenders if (row := self.row(test, c))]
            for c, row in rows:
                same = [(p, r) for p, r in rows if p.precision == c.precision and p.peer in PEERS]
                ours = c.peer == "jaxllm"
                ratios = {
                    p.peer: round(row.tokens_per_second / r.tokens_per_second, 3)
                    for p, r in same
                    if ours
                }
                fields = {"engine": c.name, "precision": c.precision, **row.to_dict()}
                found.append({**fields, "seconds": row.seconds, "ratios": ratios})
        return found


def as_markdown(machine: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """The machine in a line, then a table a test."""
    lines, test = [", ".join(f"{name} {value}" for name, value in machine.items())], None
    peers = [peer for peer in PEERS if any(r["engine"].split()[0] == peer for r in results)]
    if (machine.get("cores others used") or 0) > BUSY:
        lines += ["", f"**Other programs were running: {DISTRUST}.**"]
    for r in results:
        if r["test"] != test:
            test = r["test"]
            heads = ("engine", "tokens/s", "±", *(f"to {peer}" for peer in peers), "of the bus")
            rule = "|---" + "|---:" * (len(heads) - 1) + "|"
            lines += ["", f"### {test}", "", f"| {' | '.join(heads)} |", rule]
        ratios = [f"{r['ratios'][p]:.2f}x" if p in r["ratios"] else "" for p in peers]
        share, bus = r["share_of_bus"], r["bus_gb_s"]
        speed = (f"{r['tokens_per_second']:.2f}", f"{r['spread']:.2f}")
        cells = (r["engine"], *speed, *ratios, "" if share is None else f"{share:.0%} of {bus:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def about_machine(comparison: Comparison, threads: int) -> dict[str, Any]:
    """Processor, cores, those that others used at most, threads, date and versions."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)
    about = {
        "cpu": (names or [platform.processor()])[0],
        "cores": os.cpu_count(),
        "cores others used": round(max(comparison.taken), 2) if comparison.taken else None,
        "threads": threads,
        "date": datetime.date.today().isoformat(),
    }
    for package in ("jax", "torch", "transformers", "openvino"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package)
    builds = {c.build for c in comparison.contenders if isinstance(c, LlamaBench)} - {
        LlamaBench.build
    }
    return about | ({"llama.cpp": " ".join(sorted(builds))} if builds else {})


def llama_contenders(
    files: Sequence[str], binary: Path | None, batched: Path | None, threads: int, untied: int
) -> Iterator[LlamaBench]:
    """Of `FORMAT=FILE`s, those whose files are there; the others are named on stderr."""
    for fmt, _, file in (item.partition("=") for item in files):
        gone = [str(p or "--llama-bench") for p in (binary, Path(file)) if not (p and p.is_file())]
        if gone or binary is None:
            log(f"llama.cpp {fmt}: left out, there is no {' and no '.join(gone)}")
        else:
            yield LlamaBench(fmt, Path(file), binary, batched, threads, untied)


def write_whole(path: Path, text: str) -> None:
    """Write a file all or not at all; where that fails say so, and go on to measure."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        log(f"--out {path}: {error.strerror}")


def split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in split(text)]
    except ValueError:
        raise ConfigError(f"numbers separated by commas, got {text!r}") from None


Binary = Annotated[Path | None, typer.Option(help="Where this program of llama.cpp is.")]


def compare_peers(
    checkpoint: Annotated[str, typer.Argument(help="A directory, demo:llama or demo:gpt2.")],
    formats: Annotated[
        str, typer.Option(help="Ours; int8+int8_inputs rounds inputs too.")
    ] = "bfloat16,int8,int4,bf16-packed,float32",
    prompts: Annotated[str, typer.Option(help="Lengths of prompts to read.")] = "512",
    decode: Annotated[int, typer.Option(help="How many tokens to decode.")] = 16,
    depths: Annotated[str, typer.Option(help="Tokens in the cache before decoding.")] = "0,1024",
    batches: Annotated[str, typer.Option(help="Rows decoded at once.")] = "8,16",
    rounds: Annotated[int, typer.Option(min=1, help="How many times each is timed.")] = 3,
    threads: Annotated[int, typer.Option(min=1, max=os.cpu_count(), help="Of each engine.")] = (
        os.cpu_count() or 1
    ),
    llama_bench: Binary = None,
    llama_batched_bench: Binary = None,
    gguf: Annotated[
        list[str] | None, typer.Option(metavar="FORMAT=FILE", help="For llama.cpp.")
    ] = None,
    transformers: Annotated[bool, typer.Option(help="Time transformers with PyTorch.")] = True,
    torch_dtypes: Annotated[str, typer.Option(help="Those of transformers.")] = "bfloat16",
    openvino: Annotated[
        str, typer.Option(help="Its precisions, as bfloat16,int8,int4 (pip install openvino nncf).")
    ] = "",
    form: Annotated[str, typer.Option("--output", "-o", help="md or json.")] = "md",
    out: Annotated[Path | None, typer.Option(help="Write there too, after each round.")] = None,
) -> None:
    """Time reading prompts and decoding on jaxllm and its peers, in turns, and print the ratios."""
    if form not in ("md", "json"):
        raise ConfigError(f"--output is md or json, got {form!r}")
    if out and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out {out}: not a file in a directory that is there")
    if strange := [dtype for dtype in split(torch_dtypes) if dtype not in DTYPES]:
        raise ConfigError(f"--torch-dtypes are of {', '.join(DTYPES)}, got {', '.join(strange)}")
    named = [("jaxllm", fmt) for fmt in split(formats)]
    named += [("transformers", dtype) for dtype in split(torch_dtypes) if transformers]
    exact = ("float32", "bfloat16", "int8", "int4")
    if strange := [fmt for fmt in split(openvino) if fmt not in exact]:
        raise ConfigError(f"--openvino is of {', '.join(exact)}, got {', '.join(strange)}")
    for _, fmt in named:
        precision_of(fmt)
    files = [precision_of(item.partition("=")[0]) for item in gguf or ()]
    if len(set(files)) < len(files):
        raise ConfigError(f"--gguf: one file a precision, got {', '.join(files)}")
    asked = bench.make_tests(numbers(prompts), decode, numbers(depths), numbers(batches))
    opened = open_checkpoint(checkpoint)
    config = opened.config
    tests = [t for t in asked if (t.prompt or t.depth + t.decode) < config.context_length]
    for test in (t for t in asked if t not in tests):
        log(f"{test.name}: left out, the model's context is {config.context_length}")

    with contextlib.ExitStack() as stack:

        def started(peer: str, fmt: str) -> Worker:
            worker = Worker(peer, fmt, opened.directory, threads)
            stack.callback(worker.close)
            return worker

        bus, workers = started("memory bus", "float32"), [started(*pair) for pair in named]
        contenders: list[Contender] = []
        # OpenVINO converts in float32: one at a time, or memory would not do.
        for worker in itertools.chain(
            workers, (started("openvino", fmt) for fmt in split(openvino))
        ):
            try:
                worker.ready()
                contenders.append(worker)
            except ConfigError as error:
                log(f"{worker.name}: left out: {error}")
        untied = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        paths = (llama_bench, llama_batched_bench)
        contenders += llama_contenders(gguf or [], *paths, threads, untied)
        if not contenders or not tests:
            raise ConfigError("there is nothing to time: see what was left out")
        bus.ready()
        comparison = Comparison(contenders, tests)

        def report() -> str:
            machine, results = about_machine(comparison, threads), comparison.results()
            if form == "md":
                return as_markdown(machine, results)
            about = {"checkpoint": opened.directory.name, "machine": machine}
            return json.dumps({**about, "results": results}, indent=2) + "\n"

        stopped, total = False, (rounds + 1) * len(tests) * len(contenders)
        with steps_bar(f"timing {opened.directory.name}", total) as done:
            try:
                for _ in comparison.run(rounds, bus.measure, done):
                    if out and comparison.results():
                        write_whole(out, report())
            except KeyboardInterrupt:
                stopped = True
                log("interrupted: here is what was measured until then")
        if not comparison.results():
            raise ConfigError("nothing could be timed: see what was left out")
        write(report())
    if stopped:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(compare_peers, "python scripts/benchmarks/compare_peers.py", EXAMPLE)
