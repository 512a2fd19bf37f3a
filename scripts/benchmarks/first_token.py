"""Where each tenth of a second goes until `jaxllm generate` shows its first and its second token.

Each measurement is a process of its own, which runs the command as it is: an import hook times
imports and wraps the functions of STAGES. A stage's time is its own, without that of stages
within it, so that a column adds up to the whole; what other threads do meanwhile stands below.
Processes with kept programs and without take turns, so that a busy minute meets all alike. The
checkpoint is in the page cache, and Python's own files are compiled.

    python scripts/benchmarks/first_token.py -m story-model -m story-int4 --repetitions 5

The table is Markdown, on stdout: of each stage the median of wall and of processor seconds (of all
threads), and in square brackets the spread of the totals.
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

IMPORTS = {  # by the first part of a module's name; others belong to who imports them
    "jaxllm": "import jaxllm",
    "convert": "import jaxllm",
    "jax": "import jax",
    "numpy": "import numpy",
    "flax": "import flax",
    "typer": "import typer",
    "tokenizers": "import tokenizers",
}
STAGES = {  # module: function, and what it does
    "jaxllm.convert.registry": [
        ("open_checkpoint", "reading the configuration, checking names"),
        ("read_text_assets", "reading the tokenizer"),
    ],
    "jaxllm.lm": [("LM.encode", "encoding the prompt")],
    "jaxllm.checkpoints.native": [("load_params", "loading weights")],
    "jaxllm.weights.load": [("first_non_finite", "looking for NaN")],
    "jaxllm.ops.compile_cache": [
        ("enable_compile_cache", "finding the programs' folder"),
        ("CachedJit._load_or_compile", "tracing"),
        ("_load_program", "loading kept programs"),
        ("_save_program", "keeping programs"),
    ],
    "jax.stages": [("Traced.lower", "lowering"), ("Lowered.compile", "compiling")],
}
FIRST, SECOND = "running the prompt", "second token: its run"
WORDS = ("the", "man", "went", "down", "to", "a", "river", "and", "saw", "small", "boats")


class Stopwatch:
    """What the main thread spends on each stage until the second token, and what others do."""

    def __init__(self, spawned: float, file: str) -> None:
        self.file, self.written = file, 0
        self.wall: dict[str, float] = {"Python itself": time.time() - spawned}
        self.processor = {"Python itself": time.process_time()}
        self.beside: dict[str, float] = {}
        self.totals: list[tuple[float, float]] = []
        self._started = time.perf_counter() - self.wall["Python itself"]
        self._names = ["the command itself"]
        self._since = time.perf_counter(), time.process_time()

    def turn(self) -> None:
        """What has passed since the last turn is the innermost stage's."""
        now = time.perf_counter(), time.process_time()
        for total, before, after in zip((self.wall, self.processor), self._since, now, strict=True):
            total[self._names[-1]] = total.get(self._names[-1], 0.0) + after - before
        self._since = now

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, its time taken."""

        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                start = time.perf_counter()
                try:
                    return function(*args, **options)
                finally:
                    passed = time.perf_counter() - start
                    self.beside[name] = self.beside.get(name, 0.0) + passed
            self.turn()
            self._names.append(f"second token: {name}" if self.written else name)
            try:
                return function(*args, **options)
            finally:
                self.turn()
                self._names.pop()

        return wrapped

    def running(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that loads the model: what comes after it is running the prompt."""

        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            self.turn()
            self._names[0] = FIRST
            return found

        return wrapped

    def writing(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """The function that writes a token's text: told of each."""

        @functools.wraps(write)
        def wrapped(text: str) -> None:
            write(text)
            self.turn()
            self.written += 1
            self._names[0] = SECOND
            self.totals.append((time.perf_counter() - self._started, time.process_time()))
            if self.written == 2:
                report = self.wall, self.processor, self.beside, self.totals
                Path(self.file).write_text(json.dumps(report), encoding="utf-8")

        return wrapped


class Hook(importlib.abc.MetaPathFinder):
    """Times what is imported, and wraps functions of modules as soon as these are there."""

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
        execute = self._watch.timed(loader.exec_module, stage)

        def exec_module(module: Any) -> None:
            execute(module)
            for function, what in STAGES.get(name, []):
                owner, _, attribute = function.rpartition(".")
                holder = getattr(module, owner) if owner else module
                setattr(holder, attribute, self._watch.timed(getattr(holder, attribute), what))
            if name == "jaxllm.cli.generate":
                module.load_model = self._watch.running(module.load_model)
                module.write = self._watch.writing(module.write)

        loader.exec_module = exec_module


def watched(arguments: Sequence[str]) -> None:
    """This process is `jaxllm` with a stopwatch: when it was spawned, a file for the report, and
    the command's arguments."""
    spawned, file, *command = arguments
    sys.meta_path.insert(0, Hook(Stopwatch(float(spawned), file)))
    sys.argv[1:] = command
    from jaxllm.__main__ import main

    main()


def prompt_of(model: str, tokens: int) -> str:
    """A text of so many tokens, or just below; the one that begins every text counts."""
    from jaxllm.text.tokenizer import Tokenizer

    tokenizer, text = Tokenizer.from_directory(model), ""
    for number in range(4 * tokens):
        longer = f"{text} {WORDS[number % len(WORDS)]}".strip()
        if len(tokenizer.encode(longer, bos=tokenizer.adds_bos)) <= tokens:
            text = longer
    return text


def measure(model: str, prompt: str, folder: Path) -> Any:
    """One process: wall and processor seconds by stage, other threads' stages, the two totals."""
    with tempfile.TemporaryDirectory() as place:
        file = str(Path(place) / "report.json")
        ours = {n: x for n, x in os.environ.items() if not n.startswith("JAX_")}
        ours.pop("PYTHONDONTWRITEBYTECODE", None)
        environment = {**ours, "JAXLLM_COMPILE_CACHE": str(folder)}
        command = ["generate", "-m", model, "-p", prompt, "-n", "3", "-o", "eos_token_id=[]"]
        here = [sys.executable, __file__, "--watch", str(time.time()), file]
        ended = subprocess.run([*here, *command], env=environment, capture_output=True, text=True)
        if ended.returncode or not Path(file).exists():
            raise SystemExit(f"jaxllm generate -m {model}: {ended.stderr}")
        return json.loads(Path(file).read_text(encoding="utf-8"))


def table(columns: dict[str, list[Any]]) -> str:
    """Markdown: a row for each stage that took a hundredth of a second somewhere."""

    def cell(reports: list[Any], index: int, name: str) -> float:
        return statistics.median(r[index].get(name, 0.0) for r in reports)

    every = [r for reports in columns.values() for r in reports]
    lines = [f"| s (processor s) | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]

    def rows(index: int, wanted: Callable[[str], bool], prefix: str = "") -> None:
        for name in dict.fromkeys(n for r in every for n in r[index] if wanted(n)):
            cells = [(cell(r, index, name), cell(r, 1, name)) for r in columns.values()]
            if max(wall for wall, _ in cells) >= 0.01:
                texts = (f"{w:.2f}" if prefix else f"{w:.2f} ({c:.2f})" for w, c in cells)
                lines.append(f"| {prefix}{name} | {' | '.join(texts)} |")

    def total(which: int, name: str) -> None:
        texts = []
        for reports in columns.values():
            walls = [r[3][which][0] for r in reports]
            used = statistics.median(r[3][which][1] for r in reports)
            median = statistics.median(walls)
            texts.append(f"{median:.2f} ({used:.2f}) [{min(walls):.2f}-{max(walls):.2f}]")
        lines.append(f"| **{name}** | {' | '.join(texts)} |")

    rows(0, lambda name: not name.startswith("second token"))
    total(0, "first token")
    rows(0, lambda name: name.startswith("second token"))
    total(1, "second token")
    rows(2, lambda _: True, "other threads: ")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("-m", "--model", action="append", required=True, help="a directory")
    parser.add_argument("-t", "--tokens", type=int, default=32, help="of the prompt")
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="processes a column")
    asked = parser.parse_args(arguments)
    columns: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        prompts = {model: prompt_of(model, asked.tokens) for model in asked.model}
        for model, prompt in prompts.items():
            measure(model, prompt, Path(place) / "kept")
        for number in range(asked.repetitions):
            for model, prompt in prompts.items():
                for way, folder in (("kept programs", "kept"), ("none", f"none{number}{model}")):
                    found = measure(model, prompt, Path(place) / folder.replace(os.sep, "-"))
                    columns.setdefault(f"{Path(model).name}, {way}", []).append(found)
                    print(f"{model}, {way}: {found[3][0][0]:.2f} s", file=sys.stderr)
    print(table(columns))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watched(sys.argv[2:])
    else:
        main()
