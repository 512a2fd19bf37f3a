"""Startup profile: the time of each stage until `jaxllm generate` shows its first two tokens.

One decision: each measurement runs the unchanged command in a separate process; an import hook
times imports and wraps the functions of STAGES. A stage's time excludes the stages within it, so
that a column adds up to the total; concurrent work of other threads is listed below. Processes with
and without cached programs alternate, so that background load affects both. The checkpoint is in
the page cache, and Python's bytecode is compiled.

    python scripts/benchmarks/first_token.py -m story-model -m story-int4 --repetitions 5

The Markdown table on stdout has each stage's median wall seconds and processor seconds (of all
threads), and the range of the totals in square brackets.
"""

import argparse
import functools
import importlib.abc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

IMPORTS = {  # by top-level package; other packages count as part of their importer
    "jaxllm": "import jaxllm",
    "convert": "import jaxllm",
    "jax": "import jax",
    "numpy": "import numpy",
    "flax": "import flax",
    "typer": "import typer",
    "tokenizers": "import tokenizers",
}
STAGES = {  # module: functions and their stages
    "jaxllm.convert.registry": [
        ("open_checkpoint", "reading the configuration, checking names"),
        ("read_text_assets", "reading the tokenizer"),
    ],
    "jaxllm.lm": [("LM.encode", "encoding the prompt")],
    "jaxllm.checkpoints.native": [
        ("load_params", "loading weights"),
        ("first_non_finite", "looking for NaN"),
    ],
    "jaxllm.weights.load": [("first_non_finite", "looking for NaN")],
    "jaxllm.ops.compile_cache": [
        ("enable_compile_cache", "finding the compile cache"),
        ("CachedJit._lower", "tracing"),
        ("_load_program", "loading cached programs"),
        ("_save_program", "caching programs"),
    ],
    "jax.stages": [("Traced.lower", "lowering"), ("Lowered.compile", "compiling")],
}
FIRST, SECOND = "running the prompt", "second token: running the step"
WORDS = ("the", "man", "went", "down", "to", "a", "river", "and", "saw", "small", "boats")


class Stopwatch:
    """Times of the main thread's stages until the second token, and of other threads' stages."""

    def __init__(self, spawn_time: float, file: str) -> None:
        self.file, self.tokens = file, 0
        self.wall: dict[str, float] = {"Python itself": time.time() - spawn_time}
        self.processor = {"Python itself": time.process_time()}
        self.other_threads: dict[str, float] = {}
        self.totals: list[tuple[float, float]] = []
        self._start = time.perf_counter() - self.wall["Python itself"]
        self._names = ["the command itself"]
        self._since = time.perf_counter(), time.process_time()

    def charge(self) -> None:
        """Add the time since the last call to the innermost stage."""
        now = time.perf_counter(), time.process_time()
        for total, before, after in zip((self.wall, self.processor), self._since, now, strict=True):
            total[self._names[-1]] = total.get(self._names[-1], 0.0) + after - before
        self._since = now

    def wrap_stage(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a function so that its time counts as a stage."""

        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                start = time.perf_counter()
                try:
                    return function(*args, **options)
                finally:
                    seconds = time.perf_counter() - start
                    self.other_threads[name] = self.other_threads.get(name, 0.0) + seconds
            self.charge()
            self._names.append(f"second token: {name}" if self.tokens else name)
            try:
                return function(*args, **options)
            finally:
                self.charge()
                self._names.pop()

        return wrapper

    def wrap_load(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that loads the model; the prompt's stage starts after it."""

        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self.charge()
            self._names[0] = FIRST
            return result

        return wrapper

    def wrap_write(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """Wrap the function that writes a token's text, to count tokens and write the report."""

        @functools.wraps(write)
        def wrapper(text: str) -> None:
            write(text)
            self.charge()
            self.tokens += 1
            self._names[0] = SECOND
            self.totals.append((time.perf_counter() - self._start, time.process_time()))
            if self.tokens == 2:
                report = self.wall, self.processor, self.other_threads, self.totals
                Path(self.file).write_text(json.dumps(report), encoding="utf-8")

        return wrapper


class ImportTimer(importlib.abc.MetaPathFinder):
    """An import hook that times imports, and wraps functions of each module once it is loaded."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                self._wrap(name, spec.loader)
                return spec
        return None

    def _wrap(self, name: str, loader: Any) -> None:
        stage = IMPORTS.get(name.partition(".")[0])
        if stage is None or not hasattr(loader, "exec_module"):
            return
        execute = self._watch.wrap_stage(loader.exec_module, stage)

        def exec_module(module: Any) -> None:
            execute(module)
            for function, label in STAGES.get(name, []):
                owner, _, attribute = function.rpartition(".")
                holder = getattr(module, owner) if owner else module
                wrapper = self._watch.wrap_stage(getattr(holder, attribute), label)
                setattr(holder, attribute, wrapper)
            if name == "jaxllm.cli.option_groups":
                module.load_model = self._watch.wrap_load(module.load_model)
            if name == "jaxllm.cli.generate":
                module.write = self._watch.wrap_write(module.write)

        loader.exec_module = exec_module


def run_watched(arguments: Sequence[str]) -> None:
    """Run `jaxllm` with a stopwatch.

    Args:
        arguments: spawn time, report file, then the command's arguments.
    """
    spawn_time, file, *command = arguments
    sys.meta_path.insert(0, ImportTimer(Stopwatch(float(spawn_time), file)))
    sys.argv[1:] = command
    from jaxllm.__main__ import main

    main()


def make_prompt(model: str, tokens: int) -> str:
    """Return a text of at most `tokens` tokens, including a begin-of-text token.

    Without a tokenizer, return that many ids.
    """
    from jaxllm.text.tokenizer import Tokenizer, has_tokenizer

    if not has_tokenizer(model):
        return json.dumps([*range(5, 5 + tokens)])
    tokenizer, text = Tokenizer.from_directory(model), ""
    for number in range(4 * tokens):
        longer = f"{text} {WORDS[number % len(WORDS)]}".strip()
        if len(tokenizer.encode(longer, bos=tokenizer.adds_bos)) <= tokens:
            text = longer
    return text


def measure(model: str, prompt: str, folder: Path) -> Any:
    """Run one process; return its seconds by stage (wall, processor, other threads) and totals."""
    with tempfile.TemporaryDirectory() as scratch:
        file = str(Path(scratch) / "report.json")
        environment = {n: x for n, x in os.environ.items() if not n.startswith("JAX_")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["JAXLLM_COMPILE_CACHE"] = str(folder)
        command = ["generate", model, "-p", prompt, "-n", "3", "-o", "eos_token_id=[]"]
        watch = [sys.executable, __file__, "--watch", str(time.time()), file]
        done = subprocess.run([*watch, *command], env=environment, capture_output=True, text=True)
        if done.returncode or not Path(file).exists():
            raise SystemExit(f"jaxllm generate {model}: {done.stderr}")
        return json.loads(Path(file).read_text(encoding="utf-8"))


def format_table(columns: dict[str, list[Any]]) -> str:
    """Format Markdown: a row per stage that took at least a hundredth of a second in a column."""

    def stage_median(reports: list[Any], index: int, name: str) -> float:
        return statistics.median(r[index].get(name, 0.0) for r in reports)

    all_reports = [r for reports in columns.values() for r in reports]
    lines = [f"| s (processor s) | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]

    def add_rows(index: int, wanted: Callable[[str], bool], prefix: str = "") -> None:
        for name in dict.fromkeys(n for r in all_reports for n in r[index] if wanted(n)):
            cells = [
                (stage_median(r, index, name), stage_median(r, 1, name)) for r in columns.values()
            ]
            if max(wall for wall, _ in cells) >= 0.01:
                texts = (f"{w:.2f}" if prefix else f"{w:.2f} ({c:.2f})" for w, c in cells)
                lines.append(f"| {prefix}{name} | {' | '.join(texts)} |")

    def add_total(token: int, name: str) -> None:
        texts = []
        for reports in columns.values():
            walls = [r[3][token][0] for r in reports]
            processor = statistics.median(r[3][token][1] for r in reports)
            median = statistics.median(walls)
            texts.append(f"{median:.2f} ({processor:.2f}) [{min(walls):.2f}-{max(walls):.2f}]")
        lines.append(f"| **{name}** | {' | '.join(texts)} |")

    add_rows(0, lambda name: not name.startswith("second token"))
    add_total(0, "first token")
    add_rows(0, lambda name: name.startswith("second token"))
    add_total(1, "second token")
    add_rows(2, lambda _: True, "other threads: ")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", action="append", required=True, help="model directory")
    parser.add_argument("-t", "--tokens", type=int, default=32, help="prompt length, tokens")
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="processes per column")
    options = parser.parse_args(arguments)
    columns: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        prompts = {model: make_prompt(model, options.tokens) for model in options.model}
        for model, prompt in prompts.items():
            measure(model, prompt, Path(scratch) / "cached")
        for number in range(options.repetitions):
            for model, prompt in prompts.items():
                for name, folder in (
                    ("cached programs", "cached"),
                    ("no cached programs", f"empty{number}{model}"),
                ):
                    report = measure(model, prompt, Path(scratch) / folder.replace(os.sep, "-"))
                    columns.setdefault(f"{Path(model).name}, {name}", []).append(report)
                    print(f"{model}, {name}: {report[3][0][0]:.2f} s", file=sys.stderr)
    print(format_table(columns))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        run_watched(sys.argv[2:])
    else:
        main()
