"""Time saved by training on a frozen prefix that runs once instead of in every step.

    python scripts/benchmarks/prefix_table.py [--prefix 256 384] [--width 32 64]
        [--rows 8] [--steps 7]

It trains LoRA on all linears of the demo model, on stories that follow a prefix of stories. The
prefix is either cache segments that all rows attend to (`train.frozen_prefix`), or the beginning of
every row, without a loss. One decision: steps of the two alternate in one process, after a step of
each that compiles. The Markdown table on stdout reports median seconds per step and two losses.
"loss" is that of the first step, which is equal for both (a new adapter has no effect). "LOSS" is
that of the last step, where they differ: the adapter changes a prefix that runs in each step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm.adapters import LoraConfig, attach_new_lora
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import build_examples
from jaxllm.train.data.rows import Example
from jaxllm.train.frozen_prefix import PrefixLoss, check_context, run_prefix
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import partition
from jaxllm.train.step import Setup, init_state, train_step

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import draw_stories

ADAPTER = ((r".*\.(a|b)", True),)


def make_tokens(lm: Any, count: int, seed: int) -> np.ndarray:
    """Return `count` tokens of concatenated stories."""
    tokens: list[int] = []
    for story in draw_stories(count, seed):  # a story has more than one token, so these suffice
        tokens += lm.tokenizer.encode(story)
        if len(tokens) >= count:
            break
    return np.array(tokens[:count], np.int32)


def measure(lm: Any, prefix: int, width: int, rows: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds and losses of each step, with the prefix run once and in each step."""
    check_context(lm.model, prefix, width)
    prefix_P = make_tokens(lm, prefix, 0)
    bodies = [make_tokens(lm, width + 1, 1000 * (n + 1)) for n in range(rows)]
    # The first token of a separate text has no loss, so it has none in the joined rows either.
    separate = [Example(body, np.arange(width + 1) > 0) for body in bodies]
    joined = [
        Example(np.concatenate([prefix_P, body]), np.arange(prefix + width + 1) > prefix)
        for body in bodies
    ]
    params = attach_new_lora(lm.config, lm.params, LoraConfig(r=8), jax.random.key(0))
    trained, frozen = partition(params, ADAPTER)
    start = time.perf_counter()
    prefix_segments = jax.block_until_ready(run_prefix(lm.model, lm.params, prefix_P.tolist()))
    results = {"prefix": [time.perf_counter() - start]}
    runs: dict[str, list[Any]] = {}
    for name, examples, columns, objective in (
        ("once", separate, width, PrefixLoss()),
        ("each", joined, prefix + width, NextToken()),
    ):
        data = Dataset(
            build_examples([example] for example in examples), width=columns, batch_size=rows
        )
        batch = jax.tree.map(lambda x: x[None], data.batch(0))
        setup = Setup(lm.model, objective, Optimizer(steps=steps + 1, lr=1e-3))
        runs[name] = [init_state(trained, setup), batch, setup]
        results |= {name: [], f"{name} loss": []}
    for _ in range(steps + 1):
        for name, run in runs.items():
            state, batch, setup = run
            segments = prefix_segments if name == "once" else None
            start = time.perf_counter()
            state, metrics = train_step(
                state, frozen, segments, batch, jax.random.key(0), setup=setup
            )
            results[f"{name} loss"].append(float(metrics.loss))
            results[name].append(time.perf_counter() - start)
            run[0] = state
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", default="demo:llama")
    parser.add_argument(
        "--prefix", type=int, nargs="+", default=[256, 384], help="prefix lengths, tokens"
    )
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64], help="tokens per row")
    parser.add_argument("--rows", type=int, default=8, help="batch size")
    parser.add_argument("--steps", type=int, default=7, help="timed steps")
    options = parser.parse_args(arguments)
    lm = jaxllm.load(options.model, dtype="float32")
    print(
        "| prefix | rows | run once, s/step | run each step, s | ratio | loss | LOSS once, each |"
    )
    print("|---|---|---|---|---|---|---|")
    for prefix in options.prefix:
        for width in options.width:
            results = measure(lm, prefix, width, options.rows, options.steps)
            once, each = (statistics.median(results[name][1:]) for name in ("once", "each"))
            first = [results[f"{name} loss"][0] for name in ("once", "each")]
            last = [results[f"{name} loss"][-1] for name in ("once", "each")]
            print(
                f"| {prefix} | {options.rows} x {width} | {once:.3f} | {each:.3f}"
                f" | {each / once:.1f} | {first[0]:.5f} {first[1]:.5f}"
                f" | {last[0]:.5f} {last[1]:.5f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
