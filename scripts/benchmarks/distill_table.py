"""Held-out loss after each distillation method at equal steps: a Markdown table.

    python scripts/benchmarks/distill_table.py [--steps 150] [--only NAME ...] [--out DIR]

The teacher is demo:llama; the student is two of its four layers (0 and 3), which generate poor text
before training. One decision: all methods train on the same stories of the demo's grammar in the
same order. Only "sequence-level" trains on texts that the teacher generates from the beginnings of
half of these stories. A method has a line of Markdown on stdout, and with --out a JSON line in a
file: cross-entropy of held-out stories, and the KL divergence of the student from the teacher on
them, in nats per token.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxllm
from jaxllm.lm import LM
from jaxllm.research.distill.job import (
    Distillation,
    distill,
    eos_token_ids,
    extract_student,
)
from jaxllm.research.distill.losses import DistillLossConfig, OnlineTeacherLoss
from jaxllm.research.distill.sequence_kd import write_completions
from jaxllm.research.distill.student import StudentSize, cut_student
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import build_examples, from_ids
from jaxllm.train.data.rows import Data, Example
from jaxllm.train.loop import TrainPlan, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import draw_stories

WIDTH, ROWS, RATE = 256, 4, 1e-3
PROMPT = 16  # tokens of a story that the teacher continues
TEACHER = "demo:llama"

# None trains without a teacher; a string trains on texts that the teacher generates.
METHODS: dict[str, Distillation | str | None] = {
    "trained alone": None,
    "forward KL": Distillation(),
    "forward KL, T = 2": Distillation(temperature=2.0),
    "half cross-entropy (Hinton), T = 2": Distillation(temperature=2.0, alpha=0.5),
    "reverse KL": Distillation(beta=1.0),
    "GKD, beta 0.5, off-policy": Distillation(beta=0.5),
    "GKD, beta 0.5, half on-policy": Distillation(
        beta=0.5, on_policy=0.5, prompt_tokens=PROMPT, new_tokens=112
    ),
    "forward KL, hidden states (mse)": Distillation(hidden="mse"),
    "forward KL, hidden states (cosine)": Distillation(hidden="cosine"),
    "forward KL, recorded top 32": Distillation(top_k=32),
    "forward KL, recorded top 4": Distillation(top_k=4),
    "sequence-level": "generated",
}


class Loss(NamedTuple):
    """Nats per token on held-out stories."""

    cross_entropy: float
    divergence: float


def make_dataset(lm: LM, count: int, seed: int) -> Dataset:
    """Return stories of the grammar in packed rows."""
    assert lm.tokenizer is not None
    encode, end = lm.tokenizer.encode, eos_token_ids(lm)[0]
    ids = [[*encode(story, bos=True), end] for story in draw_stories(count, seed)]
    return Dataset(from_ids(ids), WIDTH, ROWS)


def generate_dataset(teacher: LM, count: int, seed: int, folder: Path) -> Dataset:
    """Return the teacher's continuations of the same stories; prompts have no loss."""
    assert teacher.tokenizer is not None
    read, decode = teacher.tokenizer.encode, teacher.tokenizer.decode
    prompts = [decode(read(story)[:PROMPT]) for story in draw_stories(count, seed)]
    path = folder / "generated.jsonl"
    write_completions(
        teacher, prompts, path, {"max_new_tokens": WIDTH - PROMPT, "temperature": 1.0}, rows=16
    )
    encode, end = teacher.tokenizer.encode, list(eos_token_ids(teacher))[:1]
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        first = encode(row["prompt"], bos=True)
        rest = [*encode(row["completion"]), *end]
        counts = [False] * len(first) + [True] * len(rest)
        examples.append(Example(np.array([*first, *rest]), np.array(counts)))
    return Dataset(build_examples([example] for example in examples), WIDTH, ROWS)


def mean_loss(lm: LM, teacher: LM, data: Data) -> Loss:
    """Return the mean losses over all tokens of the data."""
    sums = [_batch_loss(lm.model, teacher.model, lm.params, teacher.params, data.batch(n))
            for n in range(len(data))]  # fmt: skip
    weight, entropy, divergence = (float(sum(column)) for column in zip(*sums, strict=True))
    return Loss(entropy / weight, divergence / weight)


@partial(jax.jit, static_argnums=(0, 1))
def _batch_loss(model: Any, teacher: Any, params: Any, teacher_params: Any, rows: Any) -> Any:
    objective = OnlineTeacherLoss(teacher, teacher.config.vocab_size, DistillLossConfig())
    output = objective(model, params, teacher_params, rows, jax.random.key(0))
    return output.weight, output.extras["cross_entropy"], output.extras["divergence"]


def train_student(
    method: Distillation | str | None,
    student: LM,
    teacher: LM,
    data: Data,
    steps: int,
    folder: Path,
) -> LM:
    """Return the student after `steps` steps of a method."""
    optimizer = Optimizer(steps=steps, lr=RATE)
    run = partial(train, plan=TrainPlan(steps=steps), show_progress=None)
    if not isinstance(method, Distillation):
        return extract_student(
            student, run(student.params, data, Setup(student.model, NextToken(), optimizer)).params
        )
    job = distill(teacher, student, data, method, directory=folder)
    setup = Setup(student.model, job.objective, optimizer)
    return extract_student(
        student,
        run(
            job.params,
            job.data or data,
            setup,
            extra_inputs=job.extra_inputs,
            prepare=job.prepare,
        ).params,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--stories", type=int, default=700, help="training stories")
    parser.add_argument("--out", type=Path, help="directory for a JSON Lines file")
    options = parser.parse_args()
    teacher = jaxllm.load(TEACHER, dtype="float32")
    student = cut_student(teacher, StudentSize(layers=2))
    data, held_out = make_dataset(teacher, options.stories, 31), make_dataset(teacher, 60, 32)
    print("| method | held-out loss | KL from teacher | seconds |\n|---|---|---|---|", flush=True)
    for name, lm in (("teacher", teacher), ("student before training", student)):
        loss = mean_loss(lm, teacher, held_out)
        print(f"| {name} | {loss.cross_entropy:.4f} | {loss.divergence:.4f} | |", flush=True)
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            start, method = time.perf_counter(), METHODS[name]
            texts: Data = data
            if method == "generated":
                texts = generate_dataset(teacher, options.stories // 2, 31, Path(folder))
            trained = train_student(method, student, teacher, texts, options.steps, Path(folder))
            seconds = time.perf_counter() - start
        loss = mean_loss(trained, teacher, held_out)
        print(f"| {name} | {loss.cross_entropy:.4f} | {loss.divergence:.4f} | {seconds:.0f} |",
              flush=True)  # fmt: skip
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            row = {"method": name, "steps": options.steps, "seconds": seconds, **loss._asdict()}
            with (options.out / "distillation.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
