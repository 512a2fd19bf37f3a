"""The same work on jaxllm and on its peers, in turns within one run, and the ratios between them.

One decision: a machine's speed drifts, so figures of different runs are not compared. Each round
times every test on every contender, in an order that rotates, with a reading of the memory bus
beside; a ratio is one of medians over the rounds. The first round compiles and does not count.
Other programs slow PyTorch down far more than jaxllm (its threads wait for each other), so what
they take of the processor is read before each round and said.

jaxllm and transformers have a process for each format, which loads once and waits for its turn: a
line of JSON in, one out. llama.cpp is a call of its `llama-bench` a measurement. What differs: it
keeps keys and values in float16, quantized formats of ours in bfloat16; and where weights are
quantized it rounds the inputs to 8 bits too, which ours do as int8+int8_inputs alone.
"""

import contextlib
import copy
import dataclasses
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jaxllm import bench
from jaxllm.api import open_checkpoint
from jaxllm.bench import Row, Test
from jaxllm.cli import run_command
from jaxllm.cli.console import note, write
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.progress import steps_bar
from jaxllm.weights.formats import DTYPES, PACKED, Integer, parse

EXAMPLE = (
    "Example: python scripts/compare_peers.py ~/models/TinyLlama-1.1B --formats bfloat16,int8"
    " --llama-bench build/bin/llama-bench --gguf bfloat16=BF16.gguf --gguf int8=Q8_0.gguf"
)
PEERS = ("transformers", "llama.cpp")
BUSY = 0.2  # cores of other programs, above which ratios mean little
DISTRUST = "the ratios are not to be trusted"
Measure = Callable[[Test], float]


def precision_of(fmt: str) -> str:
    """What a format is compared within: float32, bfloat16, float16, int8 or int4.

    Raises ConfigError for no format, or +int8_inputs on one that is not of integers.
    """
    name, plus, extra = fmt.partition("+")
    parsed = parse(name)
    if plus and (extra != "int8_inputs" or not isinstance(parsed, Integer)):
        raise ConfigError(f"+int8_inputs may follow a format of integers, got {fmt!r}")
    if isinstance(parsed, Integer):
        return f"int{parsed.bits}"
    return "bfloat16" if parsed == PACKED else parsed


class Contender:
    """What can be timed. weights: bytes that a decoded token reads of them; None: not known yet."""

    def __init__(self, peer: str, fmt: str) -> None:
        self.name, self.peer, self.precision = f"{peer} {fmt}", peer, precision_of(fmt)
        self.weights: float | None = None

    def measure(self, test: Test) -> float:
        """Seconds that one run takes. Raises ConfigError, with the reason, where there is none."""
        raise NotImplementedError


class Worker(Contender):
    """A contender in a process of its own, which loads from the start; `ready` waits for that."""

    def __init__(self, peer: str, fmt: str, directory: Path, threads: int) -> None:
        super().__init__(peer, fmt)
        # XLA takes its threads from NPROC, PyTorch's libraries from OMP_NUM_THREADS.
        more = {"NPROC": str(threads), "OMP_NUM_THREADS": str(threads)}
        more |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", peer, str(directory), fmt],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | more,
            start_new_session=True,  # an interrupt is for the parent
        )

    def ready(self) -> None:
        """Wait until it has loaded. Raises ConfigError with the reason where it cannot."""
        self.weights = self._reply(b"")

    def measure(self, test: Test) -> float:
        return self._reply(json.dumps(dataclasses.asdict(test)).encode() + b"\n")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _reply(self, request: bytes) -> float:
        stdin, stdout = self._process.stdin, self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it ended, which the answer says
            if stdin and request:
                stdin.write(request)
                stdin.flush()
        if not (line := stdout.readline() if stdout else b""):
            raise ConfigError(f"its process ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return float(answer["value"])


class LlamaBench(Contender):
    """llama.cpp on a GGUF file. untied: numbers in an embedding of which a token reads one row.

    Its bytes a token take the embedding to be quantized as the rest is, on the average.
    """

    build = "not run"

    def __init__(
        self, fmt: str, gguf: Path, binary: Path, batched: Path | None, threads: int, untied: int
    ) -> None:
        super().__init__("llama.cpp", fmt)
        self._binary, self._batched, self._untied = binary, batched, untied
        self._common = ["-m", str(gguf), "-t", str(threads)]

    def measure(self, test: Test) -> float:
        try:
            if test.batch > 1:
                return self._rows(test)
            counts = ("-p", test.prompt, "-n", test.decode, "-d", test.depth, "-r", 1)
            row = json.loads(self._run(self._binary, *counts, "-o", "json"))[0]
            self.build = f"{row['build_number']} ({row['build_commit']})"
            self.weights = row["model_size"] * (1 - self._untied / row["model_n_params"])
            return float(row["samples_ns"][0]) / 1e9
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, JaxllmError):
                raise
            raise ConfigError(f"it printed something else than expected: {error!r}") from None

    def _rows(self, test: Test) -> float:
        """Rows at once; each reads a token before, as without one a rate is printed as nan."""
        if self._batched is None:
            raise ConfigError("for several rows --llama-batched-bench is needed")
        slots = -(-(test.decode + 1) // 256) * 256 * test.batch  # a row's come in blocks of 256
        counts = ("-npp", 1, "-ntg", test.decode, "-npl", test.batch, "-c", slots)
        text = self._run(self._batched, *counts, "--output-format", "jsonl")
        line = next((x for x in text.splitlines() if x.startswith("{")), text)
        return float(json.loads(line)["t_tg"])

    def _run(self, binary: Path, *options: object) -> str:
        command = [str(binary.resolve()), *self._common, *map(str, options)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except OSError as error:
            raise ConfigError(f"{binary}: {error.strerror}") from None
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(f"{binary} ended with code {done.returncode}: {last}")
        return done.stdout


def tokens_of(test: Test, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids_BT to read, token_SB to decode), as `bench.prepared` draws them."""
    generator = np.random.default_rng(0)
    ids_BT = generator.integers(0, vocabulary, (test.batch, test.prompt or max(1, test.depth)))
    return ids_BT, generator.integers(0, vocabulary, (test.decode, test.batch))


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def load_ours(directory: str, fmt: str) -> tuple[Measure, float]:
    """How to time jaxllm in a format, and the bytes of weights that a decoded token reads."""
    from jaxllm.cli.options import load_model

    name, _, extra = fmt.partition("+")
    dtype, quantize = (name, None) if name in DTYPES else ("bfloat16", name)
    lm = load_model(directory, dtype, quantize=quantize, int8_inputs=bool(extra))
    runs = cache(lambda test: bench.prepared(lm, test, 512))
    return lambda test: timed(runs(test)), bench.weight_bytes(lm)


def load_transformers(directory: str, dtype: str) -> tuple[Measure, float]:
    """The same of transformers, in eager PyTorch with the cache that it makes by default."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    options = {"dtype": getattr(torch, dtype), "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    config = model.config

    @cache
    def before(test: Test) -> DynamicCache:
        kv = DynamicCache(config=config)
        if test.depth:
            ids_BT = torch.from_numpy(tokens_of(test, config.vocab_size)[0])
            model(ids_BT, past_key_values=kv, logits_to_keep=1)
        return kv

    def measure(test: Test) -> float:
        ids_BT, token_SB = map(torch.from_numpy, tokens_of(test, config.vocab_size))
        kv = copy.deepcopy(before(test))
        blocks_BT = [ids_BT] if test.prompt else [token_B[:, None] for token_B in token_SB]
        return timed(lambda: [model(x, past_key_values=kv, logits_to_keep=1) for x in blocks_BT])

    tables = ("wpe",) if config.tie_word_embeddings else ("wpe", "wte", "embed_tokens")
    named = [(name.split(".")[-2], p.nbytes) for name, p in model.named_parameters()]
    return measure, sum(n for name, n in named if name not in tables)


def load_bus(directory: str, fmt: str) -> tuple[Measure, float]:
    """What reads the gigabytes a second that memory gives just now, whatever the test."""
    import jax.numpy as jnp

    probe = jnp.arange(bench.PROBE_BYTES // 4, dtype=jnp.uint32).block_until_ready()
    return lambda test: bench.bandwidth(probe), 0


LOADERS = {"jaxllm": load_ours, "transformers": load_transformers, "memory bus": load_bus}


def serve(peer: str, directory: str, fmt: str) -> None:
    """The worker's side: load, say so, then answer a test a line until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no reply

    def answer(make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            made = make(*arguments)
            value = made[1] if isinstance(made, tuple) else made
            reply = {"value": value}
        except Exception as error:  # whatever a peer raises is the reason to leave it out
            made, text = None, " ".join(str(error).split())[:300]
            reply = {"error": f"{type(error).__name__}: {text}"}
        print(json.dumps(reply), file=replies, flush=True)
        return made

    if loaded := answer(LOADERS[peer], directory, fmt):
        for line in sys.stdin:
            answer(loaded[0], Test(**json.loads(line)))


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
                    note(f"round {number}: other programs use {taken:.1f} cores: {DISTRUST}")
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
                        note(f"{contender.name}, {test.name}: left out: {error}")
            yield

    def row(self, test: Test, contender: Contender) -> Row | None:
        """As `jaxllm bench` has it; None before a run that counts."""
        first, *seconds = self.seconds[test, contender] or [0.0]
        if not seconds:
            return None
        middle = statistics.median(seconds)
        weights = contender.weights if test.decode else None
        streamed = None if weights is None else weights * test.decode / middle / 1e9
        compiling = max(0.0, first - middle)
        bus = max(self.bus[test])
        return Row(test.name, test.tokens, tuple(seconds), compiling, streamed, bus)

    def results(self) -> list[dict[str, Any]]:
        """A dict a test and contender; ratios: of ours to the peers of the same precision."""
        found = []
        for test in self.tests:
            rows = [(c, row) for c in self.contenders if (row := self.row(test, c))]
            for c, row in rows:
                same = [(p, r) for p, r in rows if p.precision == c.precision and p.peer in PEERS]
                ours = c.peer == "jaxllm"
                ratios = {p.peer: round(row.median / r.median, 3) for p, r in same if ours}
                fields = {"engine": c.name, "precision": c.precision, **row.to_dict()}
                found.append({**fields, "seconds": row.seconds, "ratios": ratios})
        return found


def as_markdown(machine: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """The machine in a line, then a table a test."""
    lines, test = [", ".join(f"{name} {value}" for name, value in machine.items())], None
    if (machine.get("cores others used") or 0) > BUSY:
        lines += ["", f"**Other programs were running: {DISTRUST}.**"]
    for r in results:
        if r["test"] != test:
            test = r["test"]
            heads = ("engine", "tokens/s", "±", *(f"to {peer}" for peer in PEERS), "of the bus")
            lines += ["", f"### {test}", "", f"| {' | '.join(heads)} |", "|---" + "|---:" * 5 + "|"]
        ratios = [f"{r['ratios'][p]:.2f}x" if p in r["ratios"] else "" for p in PEERS]
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
    for package in ("jax", "torch", "transformers"):
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
            note(f"llama.cpp {fmt}: left out, there is no {' and no '.join(gone)}")
        else:
            yield LlamaBench(fmt, Path(file), binary, batched, threads, untied)


def write_whole(path: Path, text: str) -> None:
    """Write a file all or not at all; where that fails say so, and go on to measure."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        note(f"--out {path}: {error.strerror}")


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
    for _, fmt in named:
        precision_of(fmt)
    files = [precision_of(item.partition("=")[0]) for item in gguf or ()]
    if len(set(files)) < len(files):
        raise ConfigError(f"--gguf: one file a precision, got {', '.join(files)}")
    asked = bench.tests_of(numbers(prompts), decode, numbers(depths), numbers(batches))
    opened = open_checkpoint(checkpoint)
    config = opened.config
    tests = [t for t in asked if (t.prompt or t.depth + t.decode) < config.context_length]
    for test in (t for t in asked if t not in tests):
        note(f"{test.name}: left out, the model's context is {config.context_length}")

    with contextlib.ExitStack() as stack:

        def started(peer: str, fmt: str) -> Worker:
            worker = Worker(peer, fmt, opened.directory, threads)
            stack.callback(worker.close)
            return worker

        bus, workers = started("memory bus", "float32"), [started(*pair) for pair in named]
        contenders: list[Contender] = []
        for worker in workers:
            try:
                worker.ready()
                contenders.append(worker)
            except ConfigError as error:
                note(f"{worker.name}: left out: {error}")
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
                note("interrupted: here is what was measured until then")
        if not comparison.results():
            raise ConfigError("nothing could be timed: see what was left out")
        write(report())
    if stopped:
        raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(*sys.argv[2:])
    else:
        run_command(compare_peers, "python scripts/compare_peers.py", EXAMPLE)
