"""Peak memory of loading, prompt and decoding, for each format: a table in markdown.

    python scripts/memory_table.py CHECKPOINT ... [--weights stored,int8] [--caches bfloat16,int8]
    python scripts/memory_table.py CHECKPOINT ... --commands

What is counted is all that Linux holds in memory for a process (VmHWM in /proc), the pages of a
mapped file too, though Linux could take those back. "anonymous" is the most that it could not take
back (RssAnon, looked at every few milliseconds from outside). Each row is a process of its own that
loads, quantizing on the way in, reads a prompt and decodes: the first compiles its programs, the
second finds them kept, as `jaxllm generate` does.

The goal is weights + cache + 10% + 0.2 GB for the libraries. What those take is measured with the
small demo model and stands above the table: without JAX's compiler and with it.

With --commands: of `jaxllm quantize` to each format and `jaxllm convert`, of which only the weights
that they hold count. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "stored,float32,bfloat16,float16,int8,int8-g64,int4-g64-f16,bf16-packed"
LIBRARIES = 0.2e9  # bytes that the goal grants
SLACK = 1.1
DEMO = "demo:llama"
SECONDS = 0.003  # between two looks


class Peak(NamedTuple):
    """Bytes: of all that was resident, of what was anonymous."""

    resident: int
    anonymous: int


class Figures(NamedTuple):
    """Bytes that a process took. imported, loaded: the most resident until then."""

    imported: int
    loaded: int
    weights: int
    cache: int
    peak: Peak

    @property
    def goal(self) -> float:
        return SLACK * (self.weights + self.cache) + LIBRARIES


def resident(process: str = "self") -> dict[str, int]:
    """What /proc says of a process's memory, bytes by name; empty where there is none."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    rows = (line.split() for line in lines if line.startswith(("VmHWM", "RssAnon")))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in rows}


def watched(command: Sequence[str], environment: dict[str, str]) -> tuple[str, Peak]:
    """What a command says on stdout, and its peak. Raises CalledProcessError where it fails."""
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would be in the place of ours
    seen = Peak(0, 0)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=said, cwd=ROOT, env=environment) as process,
    ):
        while process.poll() is None:
            now = resident(str(process.pid))
            seen = Peak(
                max(seen.resident, now.get("VmHWM", 0)), max(seen.anonymous, now.get("RssAnon", 0))
            )
            time.sleep(SECONDS)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        said.seek(0)
        return said.read(), seen


def measured(
    checkpoint: str, weights: str, cache: str, *, prompt: int, new: int, programs: str
) -> Figures:
    """The figures of one process. programs: the folder of compiled ones; "0" for none."""
    asked = json.dumps([checkpoint, weights, cache, prompt, new])
    command = [sys.executable, str(Path(__file__).resolve()), "--run", asked]
    said, peak = watched(command, {"JAXLLM_COMPILE_CACHE": programs})
    return Figures(**json.loads(said.splitlines()[-1]), peak=peak)


def run(checkpoint: str, weights: str, cache: str, prompt: int, new: int) -> dict[str, int]:
    """In this process: load, read a random prompt, decode. The fields of `Figures` but the peak."""
    import jax
    import numpy as np

    import jaxllm
    from jaxllm.programs import keep_programs

    keep_programs()
    jax.numpy.zeros(1).block_until_ready()
    imported = resident()["VmHWM"]
    quantize, precision = how(checkpoint, weights, cache)
    lm = jaxllm.load(checkpoint, dtype=precision, quantize=quantize, show_progress=False)
    jax.block_until_ready(lm.params)
    loaded = resident()["VmHWM"]
    new = min(new, lm.config.context_length - 1)
    length = min(prompt, lm.config.context_length - new)
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, length).tolist()
    made = lm.generate(ids, max_new_tokens=new, eos_token_id=[])
    return {
        "imported": imported,
        "loaded": loaded,
        "weights": sum(x.nbytes for x in jax.tree.leaves(lm.params)),
        "cache": made.cache.nbytes,
    }


def how(checkpoint: str, weights: str, cache: str) -> tuple[str | None, Any]:
    """What `jaxllm.load` is to be told: quantize and dtype. "stored": as the checkpoint has it."""
    import dataclasses

    from jaxllm.forms import open_checkpoint
    from jaxllm.weights.leaves.arrays import DTYPES

    precision = open_checkpoint(checkpoint).precision
    precision = precision.in_dtype(weights) if weights in DTYPES else precision
    if cache != "stored":
        precision = dataclasses.replace(precision, cache=cache)
    return None if weights in (*DTYPES, "stored") else weights, precision


def rows(asked: argparse.Namespace) -> Iterator[str]:
    """The table of loading and decoding."""
    known: dict[str, Any] = {"prompt": asked.prompt, "new": asked.new}
    demo = measured(DEMO, "stored", "stored", **known, programs="0")
    yield (
        f"Libraries: {gb(demo.imported)} imported, {gb(demo.loaded - demo.weights)} with a model"
        f" loaded, {gb(demo.peak.resident - demo.weights - demo.cache)} after compiling and"
        f" decoding ({DEMO}). A prompt of {asked.prompt} tokens, {asked.new} new ones; GB.\n"
    )
    yield (
        "| checkpoint | weights | cache | bytes of weights + cache | goal | peak, loading |"
        " peak, compiling | of the goal | anonymous |"
        " peak, programs kept | of the goal | anonymous |"
    )
    yield f"|---|---|---{'|---:' * 9}|"
    for checkpoint in asked.checkpoints:
        for weights in asked.weights.split(","):
            for cache in asked.caches.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    cold, warm = (
                        measured(checkpoint, weights, cache, **known, programs=folder)
                        for _ in range(2)
                    )
                loading = max(cold.loaded, warm.loaded)
                cells = [Path(checkpoint).name, weights, cache]
                cells += [f"{gb(cold.weights)} + {gb(cold.cache)}", gb(cold.goal), gb(loading)]
                for each in (cold, warm):
                    share = f"{each.peak.resident / each.goal:.2f}x"
                    cells += [gb(each.peak.resident), share, gb(each.peak.anonymous)]
                yield f"| {' | '.join(cells)} |"


def commands(asked: argparse.Namespace) -> Iterator[str]:
    """The table of `jaxllm quantize` and `jaxllm convert`."""
    yield "| checkpoint | command | written | peak | anonymous |"
    yield "|---|---|---:|---:|---:|"
    for checkpoint in asked.checkpoints:
        tried = [["convert"], ["convert", "--to-hf"], ["convert", "--dtype", "float32"]]
        formats = asked.weights.split(",")
        tried += [["quantize", "--format", w] for w in formats if w.startswith(("int", "bf16-"))]
        for command in tried:
            with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
                target = Path(folder) / "made"
                line = [sys.executable, "-m", "jaxllm", command[0], checkpoint, str(target)]
                _, peak = watched([*line, *command[1:]], {"JAXLLM_COMPILE_CACHE": "0"})
                written = (target / "model.safetensors").stat().st_size
            cells = [Path(checkpoint).name, f"`{' '.join(command)}`", gb(written)]
            yield f"| {' | '.join([*cells, gb(peak.resident), gb(peak.anonymous)])} |"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="*", help=f"directories, or {DEMO}")
    parser.add_argument("--weights", default=WEIGHTS, help=f"formats, by default {WEIGHTS}")
    parser.add_argument("--caches", default="bfloat16,int8", help="formats of keys and values")
    parser.add_argument("--prompt", type=int, default=300, help="tokens (300)")
    parser.add_argument("--new", type=int, default=16, help="tokens decoded (16)")
    parser.add_argument("--commands", action="store_true", help="of quantize and convert instead")
    parser.add_argument("--scratch", help="with --commands: where there is room to write")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(run(*json.loads(asked.run))))
        return 0
    if not asked.checkpoints:
        parser.error("name a checkpoint")
    if "VmHWM" not in resident():
        parser.error("this system has no /proc that says what a process holds")
    for line in (commands if asked.commands else rows)(asked):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
