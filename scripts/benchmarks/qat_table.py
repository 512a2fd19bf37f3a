"""How much of the rounding loss quantization-aware training recovers: a table for each model.

    python scripts/benchmarks/qat_table.py [--models demo:llama demo:gpt2]
        [--formats int4-g64 int3-g64]

The tables report held-out loss in nats per token, on stories of the demo's grammar: rounded to
nearest, quantized by GPTQ, and trained with fake quantization in every step. One decision: all
training takes the same number of steps over the same rows in the same order, from the model's own
weights. "float32, trained" is that training without quantization; it separates the gain of more
training from the gain of QAT. "recovered" is the share of the rounding loss that a method recovers.
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
from jaxllm.research.qat.job import convert, prepare
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_ids
from jaxllm.train.loop import TrainPlan, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup, eval_step
from jaxllm.weights.paths import Params
from jaxllm.weights.quantize import quantize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import draw_stories

WIDTH, ROWS, CALIBRATED = 256, 4, 64
METHODS = ("floats", "gptq", "qat", "qat, learned scales")
LAYERS = r"(layers|h)\..*"  # embeddings and head stay floats, so all methods quantize the same set


def make_dataset(lm: jaxllm.LM, count: int, seed: int) -> Dataset:
    assert lm.tokenizer is not None
    encode = lm.tokenizer.encode
    return Dataset(
        from_ids([[*encode(s, bos=True), 2] for s in draw_stories(count, seed)]), WIDTH, ROWS
    )


def mean_loss(lm: jaxllm.LM, params: Params, data: Dataset) -> float:
    setup = Setup(lm.model, NextToken(), Optimizer(steps=1))
    frozen: Any = params
    losses = [
        eval_step({}, frozen, None, data.batch(n), jax.random.key(0), setup=setup)
        for n in range(len(data))
    ]
    return float(sum(m.total for m in losses)) / float(sum(m.weight for m in losses))


def train_params(lm: jaxllm.LM, params: Params, data: Dataset, steps: int, rate: float) -> Params:
    setup = Setup(lm.model, NextToken(), Optimizer(steps=steps, lr=rate, weight_decay=0.0))
    return train(params, data, setup, TrainPlan(steps=steps), show_progress=False).params


def quantize_with_gptq(lm: jaxllm.LM, name: str, data: Dataset) -> Params:
    """Quantize with GPTQ, calibrated on the first rows of the training data."""
    batches = [np.asarray(data.batch(n).token_BT) for n in range(CALIBRATED // ROWS)]
    recipe = parse_lines([f"quantize: gptq {name}"], STEPS)
    made, calibration = initial_state(lm), from_tokens(np.concatenate(batches))
    for stage in run_steps(lm, recipe, calibration, TensorStore(), show_progress=False, log=log):
        made = stage.state or made
    return made.params


def log(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def measure_methods(options: argparse.Namespace, model: str) -> Iterator[dict[str, Any]]:
    """Yield the table's rows for a model."""
    lm = jaxllm.load(model, dtype="float32")
    data, held_out = make_dataset(lm, options.stories, 41), make_dataset(lm, options.held_out, 42)
    floats = mean_loss(lm, lm.params, held_out)
    yield {"format": "float32", "method": "original", "loss": floats, "seconds": 0.0}
    if "floats" in options.methods:
        start = time.perf_counter()
        tuned = mean_loss(
            lm, train_params(lm, lm.params, data, options.steps, options.rate), held_out
        )
        seconds = time.perf_counter() - start
        yield {"format": "float32", "method": "trained", "loss": tuned, "seconds": seconds}
    for name in options.formats:
        rules = [(LAYERS, name)]
        nearest = mean_loss(lm, quantize(lm.params, rules), held_out)
        yield {"format": name, "method": "rounded to nearest", "loss": nearest, "seconds": 0.0}
        for method in options.methods:
            if method == "floats":
                continue
            start = time.perf_counter()
            if method == "gptq":
                params = quantize_with_gptq(lm, name, data)
            else:
                fake = prepare(lm.params, rules, learn_scales=method == "qat, learned scales")
                params = convert(train_params(lm, fake, data, options.steps, options.rate))
            loss = mean_loss(lm, params, held_out)
            yield {
                "format": name,
                "method": method,
                "loss": loss,
                "seconds": time.perf_counter() - start,
                "recovered": (nearest - loss) / (nearest - floats),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo:llama", "demo:gpt2"])
    parser.add_argument("--formats", nargs="+", default=["int4-g64", "int3-g64", "int2-g64"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--stories", type=int, default=600, help="training stories")
    parser.add_argument("--held-out", type=int, default=40, help="evaluation stories")
    parser.add_argument("--out", type=Path, help="JSON Lines file to append the rows to")
    options = parser.parse_args()
    for model in options.models:
        print(f"\n{model}, {options.steps} steps of {ROWS} x {WIDTH} tokens:\n")
        print("| format | method | held-out loss | recovered | seconds |\n|---|---|---:|---:|---:|")
        for row in measure_methods(options, model):
            share = f"{row['recovered']:.0%}" if "recovered" in row else ""
            print(
                f"| {row['format']} | {row['method']} | {row['loss']:.4f} | {share} |"
                f" {row['seconds']:.0f} |",
                flush=True,
            )
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"model": model, **row}) + "\n")


if __name__ == "__main__":
    main()
