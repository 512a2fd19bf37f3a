"""Peak memory of training: all weights, an adapter beside them, an adapter beside quantized ones.

    python scripts/training_memory.py CHECKPOINT [--ways full LoRA QLoRA] [--no-remat]

Each row is a process of its own that loads, quantizing on the way in, and takes two steps of one
row: the first compiles. What is counted is what Linux holds in memory for it: all that was ever
resident at once (VmHWM in /proc), the pages of the mapped checkpoint too, and the most that it
could not take back (RssAnon). "kept" is what goes from step to step: weights, masters, Adam's
moments. Linux only.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from memory_table import gb, watched

RANK, RATE = 16, 1e-4


class Way(NamedTuple):
    """quantize: of what lies below an adapter; None for what the checkpoint has."""

    adapter: bool
    dtype: str
    quantize: str | None = None


WAYS = {
    "full, float32": Way(False, "float32"),
    "full, bfloat16": Way(False, "bfloat16"),
    "LoRA, bfloat16": Way(True, "bfloat16"),
    "QLoRA, int8": Way(True, "bfloat16", "int8"),
    "QLoRA, int4-g64-zp": Way(True, "bfloat16", "int4-g64-zp"),
    "QLoRA, nf4": Way(True, "bfloat16", "nf4"),
}


def run(checkpoint: str, name: str, length: int, remat: bool) -> dict[str, float]:
    """In this process: load, two steps. Bytes of what is kept, and seconds of the second step."""
    import jax

    import jaxllm
    from jaxllm.adapters import LoraConfig
    from jaxllm.train import jobs
    from jaxllm.train.data.rows import Rows
    from jaxllm.train.optimizer import Optimizer
    from jaxllm.train.step import Setup, start, train_step
    from jaxllm.train.trained import split

    way = WAYS[name]
    lm = jaxllm.load(
        checkpoint,
        dtype=way.dtype if way.adapter else "float32",
        quantize=way.quantize,
        show_progress=False,
    )
    lora = LoraConfig(r=RANK, lora_alpha=RANK)
    job = jobs.lora(lm, lora) if way.adapter else jobs.full(lm, way.dtype)
    vocabulary = lm.config.vocab_size
    del lm
    setup = Setup(
        job.model.clone(remat=remat), job.objective, Optimizer(steps=100, lr=RATE, warmup=0.0)
    )
    trained, rest = split(job.params, job.rules, job.like)
    del job
    state = start(trained, setup)
    del trained
    ids = np.random.default_rng(0).integers(0, vocabulary, (1, 1, length + 1)).astype(np.int32)
    position = np.arange(length, dtype=np.int32).reshape(1, 1, length)
    given = Rows(ids[..., :-1], ids[..., 1:], position, np.zeros_like(position))
    kept = sum(int(x.nbytes) for x in jax.tree.leaves((state, rest)))
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        state, metrics = train_step(state, rest, None, given, jax.random.key(0), setup=setup)
        loss, seconds = float(metrics.loss), time.perf_counter() - began
    return {"kept": kept, "seconds": seconds, "loss": loss}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--length", type=int, default=128, help="tokens of the row (128)")
    parser.add_argument("--no-remat", action="store_true", help="keep every block's inside")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(run(*json.loads(asked.run))))
        return 0
    if not asked.checkpoint:
        parser.error("name a checkpoint")
    names = [name for name in WAYS if any(name.startswith(way) for way in asked.ways)]
    print(
        "| training | kept | peak | of it anonymous | seconds a step |\n|---|---:|---:|---:|---:|"
    )
    for name in names:
        told = json.dumps([asked.checkpoint, name, asked.length, not asked.no_remat])
        command = [sys.executable, str(Path(__file__).resolve()), "--run", told]
        said, peak = watched(command, {"JAXLLM_COMPILE_CACHE": "0"})
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        cells = [name, gb(found["kept"]), gb(peak.resident), gb(peak.anonymous)]
        print(f"| {' | '.join([*cells, format(found['seconds'], '.1f')])} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
