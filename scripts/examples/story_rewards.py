"""Reinforcement learning of a task that a program can check: stories with colors.

The demo model continues the start of a story by one sentence, which a grammar ends. The reward is
half for each of up to two different colors in it. All three losses train from the same seed, and a
plot shows the mean reward of each step. `beta` keeps the model near its language: with 0 it learns
to write colors alone.

    python scripts/examples/story_rewards.py --steps 100 --plot rl.png

`jaxllm train rl ... --reward scripts.examples.story_rewards:reward` trains on it, too.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.cli import run_command
from jaxllm.files.plots import save_figure
from jaxllm.research.rl.job import Reinforcement, reinforce
from jaxllm.research.rl.losses import FORMS
from jaxllm.research.rl.prompts import Prompt, Prompts
from jaxllm.runtime import signals
from jaxllm.train import jobs
from jaxllm.train.loop import StepRecord, TrainPlan
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.plots import moving_mean

EXAMPLE = "Example: python scripts/examples/story_rewards.py --steps 100 --plot rl.png"
COLORS = {"red", "blue", "green", "yellow", "purple", "orange", "silver", "golden", "white", "pink"}
SENTENCE = r"[a-zA-Z ,']+\."
BEGINNINGS = [
    f"Once upon a time there was a {animal}"
    for animal in ("fox", "rabbit", "bear", "mouse", "hedgehog", "squirrel", "otter", "badger")
]


def reward(prompt: str, answer: str, line: Mapping[str, Any]) -> float:
    """Return half of the number of colors, at most 1; 0 for an unfinished sentence."""
    found = COLORS & set(re.findall("[a-z]+", answer))
    return min(len(found), 2) / 2 if answer.endswith(".") else 0.0


def story_rewards(
    model: str = "demo:llama",
    steps: int = 100,
    rate: float = 2e-4,
    beta: float = 0.15,
    group: int = 8,
    tokens: int = 32,
    plot: Path = Path("rl.png"),
) -> None:
    """Train on rewards with each loss, and draw the rewards of their steps."""
    lm = jaxllm.load(model, dtype="float32")
    prompts = Prompts([Prompt(text, lm.encode(text), {}) for text in BEGINNINGS], batch_size=4)
    curves: dict[str, list[float]] = {}
    for form in FORMS:
        options = Reinforcement(
            loss=form,  # type: ignore[arg-type]  # it checks
            group_size=group, max_new_tokens=tokens, beta=beta, sampling={"regex": SENTENCE},
        )  # fmt: skip
        job = reinforce(jobs.full_finetune(lm), prompts, reward, options, "story_rewards:reward")
        optimizer = Optimizer(steps=steps, lr=rate, schedule="constant", weight_decay=0.0)
        run = jobs.run_job(job, prompts, optimizer, TrainPlan(steps=steps, num_iterations=2))
        curves[form] = [record.also["reward"] for record in run.records]
        tuned = dataclasses.replace(lm, params=run.params).generate(
            BEGINNINGS[:3], max_new_tokens=tokens, regex=SENTENCE, temperature=1.0, seed=[1, 2, 3]
        )
        print(f"{form}: reward {_mean(run.records[:10]):.2f}, then {_mean(run.records[-10:]):.2f}")
        print(*(f"  ...{answer.text}" for answer in tuned), sep="\n")
    _draw(plot, curves)


def _mean(records: list[StepRecord]) -> float:
    return sum(record.also["reward"] for record in records) / len(records)


def _draw(path: Path, curves: Mapping[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(curves.items()):
        steps, color = range(1, len(values) + 1), f"C{number}"
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, moving_mean(values, 9), color=color, label=name)
    axes.set(xlabel="step", ylabel="mean reward", title="Stories with colors (demo:llama)")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path, dpi=90)


if __name__ == "__main__":
    signals.setup_process()
    run_command(story_rewards, "python scripts/examples/story_rewards.py", EXAMPLE)
