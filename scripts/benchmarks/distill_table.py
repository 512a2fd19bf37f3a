"""What each way of distilling brings at equal steps: a table of held-out losses.

    python scripts/benchmarks/distill_table.py [--steps 150] [--only NAME ...] [--out DIR]

The teacher is demo:llama, the student two of its four layers (0 and 3), which by themselves say
little. Data are stories of the demo's grammar, the same rows in the same order for all but
"sequence-level", whose texts the teacher wrote from the beginnings of half of these stories. Each
way has a line of Markdown on stdout, and with --out a line of numbers in a file: cross-entropy of
held-out stories, and the KL from the teacher's distribution to the student's on them, in nats a
token.
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
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_examples, from_ids
from jaxllm.train.data.rows import Data, Example
from jaxllm.train.distill import student_init as students
from jaxllm.train.distill.job import (
    Distillation,
    distill,
    eos_token_ids,
    extract_student,
)
from jaxllm.train.distill.losses import DistillLossConfig, OnlineTeacherLoss
from jaxllm.train.distill.sequence_kd import cut_prompts, write_completions
from jaxllm.train.distill.student_init import StudentSize
from jaxllm.train.loop import TrainPlan, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import stories

WIDTH, ROWS, RATE = 256, 4, 1e-3
PROMPT = 16  # tokens, of what is continued
TEACHER = "demo:llama"

# None: without a teacher. A text: the teacher's own texts, without its distributions.
WAYS: dict[str, Distillation | str | None] = {
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
    "sequence-level": "written",
}


class Loss(NamedTuple):
    """Nats a token on held-out stories."""

    cross_entropy: float
    divergence: float


def stories_of(lm: LM, count: int, seed: int) -> Dataset:
    """Stories of the grammar in packed rows."""
    assert lm.tokenizer is not None
    encode, end = lm.tokenizer.encode, eos_token_ids(lm)[0]
    ids = [[*encode(story, bos=True), end] for story in stories(count, seed)]
    return Dataset(from_ids(ids), WIDTH, ROWS)


def written_by(teacher: LM, count: int, seed: int, folder: Path) -> Dataset:
    """What the teacher makes of the beginnings of the same stories; only that is learned."""
    assert teacher.tokenizer is not None
    prompts = cut_prompts(teacher, list(stories(count, seed)), PROMPT)
    path = folder / "written.jsonl"
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
    return Dataset(from_examples(examples), WIDTH, ROWS)


def loss_of(lm: LM, teacher: LM, data: Data) -> Loss:
    """Sums over all tokens of the data, a batch at a time."""
    found = [_measured(lm.model, teacher.model, lm.params, teacher.params, data.batch(n))
             for n in range(len(data))]  # fmt: skip
    weight, entropy, divergence = (float(sum(column)) for column in zip(*found, strict=True))
    return Loss(entropy / weight, divergence / weight)


@partial(jax.jit, static_argnums=(0, 1))
def _measured(model: Any, teacher: Any, params: Any, given: Any, rows: Any) -> Any:
    against = OnlineTeacherLoss(teacher, teacher.config.vocab_size, DistillLossConfig())
    found = against(model, params, given, rows, jax.random.key(0))
    return found.weight, found.extras["cross_entropy"], found.extras["divergence"]


def distilled(
    way: Distillation | str | None, student: LM, teacher: LM, data: Data, steps: int, folder: Path
) -> LM:
    """The student after so many steps of one way."""
    optimizer = Optimizer(steps=steps, lr=RATE)
    run = partial(train, plan=TrainPlan(steps=steps), show_progress=None)
    if not isinstance(way, Distillation):
        return extract_student(
            student, run(student.params, data, Setup(student.model, NextToken(), optimizer)).params
        )
    job = distill(teacher, student, data, way, directory=folder)
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
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--stories", type=int, default=700, help="to train on")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    teacher = jaxllm.load(TEACHER, dtype="float32")
    student = students.cut_student(teacher, StudentSize(layers=2))
    data, held_out = (stories_of(teacher, n, seed) for n, seed in ((asked.stories, 31), (60, 32)))
    print("| way | held-out loss | KL from the teacher | seconds |\n|---|---|---|---|", flush=True)
    for name, lm in (("the teacher", teacher), ("the student before", student)):
        loss = loss_of(lm, teacher, held_out)
        print(f"| {name} | {loss.cross_entropy:.4f} | {loss.divergence:.4f} | |", flush=True)
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            start, way = time.perf_counter(), WAYS[name]
            texts: Data = data
            if way == "written":
                texts = written_by(teacher, asked.stories // 2, 31, Path(folder))
            made = distilled(way, student, teacher, texts, asked.steps, Path(folder))
            seconds = time.perf_counter() - start
        loss = loss_of(made, teacher, held_out)
        print(f"| {name} | {loss.cross_entropy:.4f} | {loss.divergence:.4f} | {seconds:.0f} |",
              flush=True)  # fmt: skip
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            row = {"way": name, "steps": asked.steps, "seconds": seconds, **loss._asdict()}
            with (asked.out / "distilled.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
