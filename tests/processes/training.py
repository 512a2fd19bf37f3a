"""A run of training that two processes do together, or one alone: where it stops, what it says."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import jaxllm
from jaxllm import distributed
from jaxllm.adapters import LoraConfig
from jaxllm.distributed import Group, join
from jaxllm.train import jobs, loop
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.loop import Plan
from jaxllm.train.optimizer import Optimizer

STEPS = 4


class Texts:
    """Random texts of unequal lengths."""

    digest, tokens = "texts", 100

    def __len__(self) -> int:
        return 2

    def batch(self, number: int) -> Rows:
        ids = np.random.default_rng(number % 2).integers(0, 131, (4, 9)).astype(np.int32)
        label = np.full((4, 9), IGNORED, np.int32)
        for row in range(4):
            label[row, : 8 - row] = ids[row, 1 : 9 - row]
        position = np.broadcast_to(np.arange(9, dtype=np.int32), (4, 9))
        return Rows(ids, label, position, np.zeros((4, 9), np.int32))


class Stopped(Exception):
    pass


def run(
    model: str, out: Path, *, stop: int | None = None, kind: str = "full", **how: Any
) -> dict[str, Any] | None:
    """What came of it; None where it stopped after so many steps, whose state is kept."""
    loop.KEEP_SECONDS = loop.KEEP_SHARE = 0  # type: ignore[assignment]
    lm, said = jaxllm.load(model, dtype="float32", **how), list[str]()
    lora = LoraConfig(r=2, target_modules=("q_proj", "down_proj"), use_dora=kind == "dora")
    job = jobs.full(lm) if kind == "full" else jobs.lora(lm, lora, seed=1)
    optimizer = Optimizer(steps=STEPS, rate=0.01, clip=0.5, decay=0.1, eps=1e-3)

    def say(line: str) -> None:
        said.append(line)
        if stop is not None and line.startswith(f"step {stop + 1}:"):
            raise Stopped

    parts = out.with_name(f"{out.name}.parts")
    plan = Plan(steps=STEPS, evaluate_every=1)
    try:
        found = jobs.run(
            job, Texts(), optimizer, plan, held_out=Texts(), directory=parts, say=say,
            show_progress=False,
        )  # fmt: skip
    except Stopped:
        return None
    job.finish(found.params, out)
    jobs.forget(parts)
    records = [[r.step, r.loss, r.norm, r.held_out] for r in found.records]
    return {"records": records, "said": said[0]}


if __name__ == "__main__":
    address, number, model, out, each = sys.argv[1:]
    join(Group(address, 2, int(number)))
    answers = [run(model, Path(out), **how) for how in json.loads(each)]
    print(json.dumps(answers), file=sys.__stdout__, flush=True)
    distributed.leave(0)
