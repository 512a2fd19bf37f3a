"""Training run for test_training.py, in one process or as a program of two."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jaxllm
from jaxllm.adapters import LoraConfig
from jaxllm.lm import LM
from jaxllm.research.distill.job import Distillation, distill
from jaxllm.research.distill.student import StudentSize, make_student, select_full_rows
from jaxllm.research.qat.job import qat
from jaxllm.runtime import multihost
from jaxllm.runtime.multihost import Group, join_group
from jaxllm.train import frozen_prefix, jobs, loop
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.jobs import TrainJob
from jaxllm.train.loop import TrainPlan
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
    """Raised to interrupt a run after a given step."""


def adapter(lm: LM, dora: bool = False) -> TrainJob:
    config = LoraConfig(r=2, target_modules=("q_proj", "down_proj"), use_dora=dora)
    return jobs.lora(lm, config, seed=1)


def student(lm: LM, directory: Path, **asked: Any) -> TrainJob:
    part = make_student(lm, StudentSize(layers=1, channels=64), select_full_rows(Texts().batch(0)))
    asked_for = Distillation(**asked)
    return distill(lm, part, Texts(), asked_for, eval_data=Texts(), directory=directory, seed=2)


KINDS: dict[str, Callable[[LM, Path], TrainJob]] = {
    "full": lambda lm, _: jobs.full_finetune(lm),
    "lora": lambda lm, _: adapter(lm),
    "dora": lambda lm, _: adapter(lm, dora=True),
    "after": lambda lm, _: frozen_prefix.with_prefix(adapter(lm), [9, 8, 7]),
    "prompt": lambda lm, _: frozen_prefix.prompt_tuning(lm, [5, 6, 7]),
    "entries": lambda lm, _: frozen_prefix.prompt_tuning(lm, [5, 6, 7], kind="entries"),
    "qat": lambda lm, _: qat(lm, "int8-g32", start_step=1),
    "distill": lambda lm, directory: student(
        lm, directory, on_policy=0.5, new_tokens=4, hidden="mse"
    ),
    "recorded": lambda lm, directory: student(lm, directory, top_k=4, alpha=0.8),
}


def run(
    model: str, out: Path, *, stop: int | None = None, kind: str = "full", **how: Any
) -> dict[str, Any] | None:
    """Train and return the records; None if interrupted after `stop` steps, state saved."""
    loop.SAVE_SECONDS = loop.SAVE_FACTOR = 0  # type: ignore[assignment]
    lm, lines = jaxllm.load(model, dtype="float32", **how), list[str]()
    job = KINDS[kind](lm, out.with_name(f"{out.name}.taught"))
    optimizer = Optimizer(steps=STEPS, lr=0.01, max_grad_norm=0.5, weight_decay=0.1, eps=1e-3)

    def log(line: str) -> None:
        lines.append(line)
        if stop is not None and line.startswith(f"step {stop + 1}:"):
            raise Stopped

    parts = out.with_name(f"{out.name}.parts")
    plan = TrainPlan(steps=STEPS, eval_steps=1)
    try:
        found = jobs.run_job(
            job, Texts(), optimizer, plan, eval_data=Texts(), directory=parts, log=log,
            show_progress=False,
        )  # fmt: skip
    except Stopped:
        return None
    job.finish(found.params, out)
    jobs.delete_state(parts)
    records = [[r.step, r.loss, r.norm, r.held_out] for r in found.records]
    return {"records": records, "first_line": lines[0]}


if __name__ == "__main__":
    address, number, model, out, each = sys.argv[1:]
    join_group(Group(address, 2, int(number)))
    answers = [run(model, Path(out), **how) for how in json.loads(each)]
    print(json.dumps(answers), file=sys.__stdout__, flush=True)
    multihost.leave_group(0)
