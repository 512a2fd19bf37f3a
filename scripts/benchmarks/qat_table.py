"""What quantization-aware training brings back of what rounding loses: a table for each model.

    python scripts/benchmarks/qat_table.py [--models demo:llama demo:gpt2]
        [--formats int4-g64 int3-g64]

Held-out loss, nats a token, of stories of the demo's grammar: rounded to the nearest, by GPTQ, and
after training with the integers in every step. All training is the same number of steps over the
same rows in the same order, from the model's own weights; "float32, trained" is that training
without quantization, so that nobody takes what more training brings for what training for integers
does. "recovered": the share of what rounding loses that a method brings back.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress.calibration import from_tokens
from jaxllm.compress.pipeline import initial_state, run_steps
from jaxllm.compress.recipe import parse_lines
from jaxllm.compress.registry import STEPS
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_ids
from jaxllm.train.loop import TrainPlan, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.qat.prepare import convert, prepare
from jaxllm.train.step import Setup, eval_step
from jaxllm.weights.paths import Params
from jaxllm.weights.quantize import quantize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import stories

WIDTH, ROWS, CALIBRATED = 256, 4, 64
METHODS = ("floats", "gptq", "qat", "qat, learned scales")
LAYERS = r"(layers|h)\..*"  # tables and head stay floats: every method has the same matrices


def data_of(lm: jaxllm.LM, count: int, seed: int) -> Dataset:
    assert lm.tokenizer is not None
    encode = lm.tokenizer.encode
    return Dataset(from_ids([[*encode(s, bos=True), 2] for s in stories(count, seed)]), WIDTH, ROWS)


def loss(lm: jaxllm.LM, params: Params, data: Dataset) -> float:
    setup = Setup(lm.model, NextToken(), Optimizer(steps=1))
    rest: Any = params
    each = [
        eval_step({}, rest, None, data.batch(n), jax.random.key(0), setup=setup)
        for n in range(len(data))
    ]
    return float(sum(m.total for m in each)) / float(sum(m.weight for m in each))


def trained(lm: jaxllm.LM, params: Params, data: Dataset, steps: int, rate: float) -> Params:
    setup = Setup(lm.model, NextToken(), Optimizer(steps=steps, lr=rate, weight_decay=0.0))
    return train(params, data, setup, TrainPlan(steps=steps), show_progress=False).params


def by_gptq(lm: jaxllm.LM, name: str, data: Dataset) -> Params:
    """Calibrated on the first rows that the others train on."""
    batches = [np.asarray(data.batch(n).token_BT) for n in range(CALIBRATED // ROWS)]
    recipe = parse_lines([f"quantize: gptq {name} act_order=true"], STEPS)
    made, calibration = initial_state(lm), from_tokens(np.concatenate(batches))
    for stage in run_steps(lm, recipe, calibration, TensorStore(), show_progress=False, log=noted):
        made = stage.state or made
    return made.params


def noted(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def rows(asked: argparse.Namespace, model: str) -> Iterator[dict[str, Any]]:
    lm = jaxllm.load(model, dtype="float32")
    data, held_out = data_of(lm, asked.stories, 41), data_of(lm, asked.held_out, 42)
    floats = loss(lm, lm.params, held_out)
    yield {"format": "float32", "method": "as it is", "loss": floats, "seconds": 0.0}
    if "floats" in asked.methods:
        began = time.perf_counter()
        tuned = loss(lm, trained(lm, lm.params, data, asked.steps, asked.rate), held_out)
        seconds = time.perf_counter() - began
        yield {"format": "float32", "method": "trained", "loss": tuned, "seconds": seconds}
    for name in asked.formats:
        rules = [(LAYERS, name)]
        nearest = loss(lm, quantize(lm.params, rules), held_out)
        yield {"format": name, "method": "to the nearest", "loss": nearest, "seconds": 0.0}
        for method in asked.methods:
            if method == "floats":
                continue
            began = time.perf_counter()
            if method == "gptq":
                made = by_gptq(lm, name, data)
            else:
                fake = prepare(lm.params, rules, learn_scales=method == "qat, learned scales")
                made = convert(trained(lm, fake, data, asked.steps, asked.rate))
            found = loss(lm, made, held_out)
            yield {
                "format": name,
                "method": method,
                "loss": found,
                "seconds": time.perf_counter() - began,
                "recovered": (nearest - found) / (nearest - floats),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo:llama", "demo:gpt2"])
    parser.add_argument("--formats", nargs="+", default=["int4-g64", "int3-g64", "int2-g64"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--stories", type=int, default=600, help="to train on")
    parser.add_argument("--held-out", type=int, default=40, help="to measure on")
    parser.add_argument("--out", type=Path, help="a file for the numbers, JSON lines")
    asked = parser.parse_args()
    for model in asked.models:
        print(f"\n{model}, {asked.steps} steps of {ROWS} x {WIDTH} tokens:\n")
        print("| format | method | held-out loss | recovered | seconds |\n|---|---|---:|---:|---:|")
        for row in rows(asked, model):
            share = f"{row['recovered']:.0%}" if "recovered" in row else ""
            print(
                f"| {row['format']} | {row['method']} | {row['loss']:.4f} | {share} |"
                f" {row['seconds']:.0f} |",
                flush=True,
            )
            if asked.out:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"model": model, **row}) + "\n")


if __name__ == "__main__":
    main()
