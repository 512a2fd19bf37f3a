"""What it saves to train on a prefix that is run once, against running it in each step.

    python scripts/benchmarks/prefix_table.py [--prefix 256 384] [--width 32 64]
        [--rows 8] [--steps 7]

LoRA of all linears of the demo model is trained on stories after a prefix of stories: as segments
of a cache that every row sees (`train.prefix`), and as the beginning of every row, of which nothing
is learned. Steps of the two take turns in one process, after one of each that compiles. The table
is Markdown, on stdout: medians of seconds a step, and the loss of the first step, which is the same
for both (the adapter does nothing yet). `LOSS` is that after the last step: there the ways differ,
for the adapter changes a prefix that is run with it.
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
from jaxllm.train.data.examples import from_examples
from jaxllm.train.data.rows import Example
from jaxllm.train.frozen_prefix import PrefixLoss, check_context, run_prefix
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import partition
from jaxllm.train.step import Setup, init_state, train_step

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import stories

ADAPTER = ((r".*\.(a|b)", True),)


def text(lm: Any, tokens: int, seed: int) -> np.ndarray:
    """So many tokens of stories, one after the other."""
    found: list[int] = []
    for story in stories(tokens, seed):  # each of more than one token
        found += lm.tokenizer.encode(story)
        if len(found) >= tokens:
            break
    return np.array(found[:tokens], np.int32)


def measured(lm: Any, prefix: int, width: int, rows: int, steps: int) -> dict[str, list[float]]:
    """Seconds and losses of each step, `once` and `each` by name."""
    check_context(lm.model, prefix, width)
    begin_P = text(lm, prefix, 0)
    bodies = [text(lm, width + 1, 1000 * (n + 1)) for n in range(rows)]
    # The first token of a text is not learned: neither is it as part of a longer one.
    after = [Example(body, np.arange(width + 1) > 0) for body in bodies]
    whole = [
        Example(np.concatenate([begin_P, body]), np.arange(prefix + width + 1) > prefix)
        for body in bodies
    ]
    params = attach_new_lora(lm.config, lm.params, LoraConfig(r=8), jax.random.key(0))
    trained, rest = partition(params, ADAPTER)
    began = time.perf_counter()
    given = jax.block_until_ready(run_prefix(lm.model, lm.params, begin_P.tolist()))
    found = {"prefix": [time.perf_counter() - began]}
    ways: dict[str, list[Any]] = {}
    for name, examples, columns, objective in (
        ("once", after, width, PrefixLoss()),
        ("each", whole, prefix + width, NextToken()),
    ):
        data = Dataset(from_examples(examples), width=columns, batch_size=rows)
        batch = jax.tree.map(lambda x: x[None], data.batch(0))
        setup = Setup(lm.model, objective, Optimizer(steps=steps + 1, lr=1e-3))
        ways[name] = [init_state(trained, setup), batch, setup]
        found |= {name: [], f"{name} loss": []}
    for _ in range(steps + 1):
        for name, way in ways.items():
            state, batch, setup = way
            segments = given if name == "once" else None
            began = time.perf_counter()
            state, metrics = train_step(
                state, rest, segments, batch, jax.random.key(0), setup=setup
            )
            found[f"{name} loss"].append(float(metrics.loss))
            found[name].append(time.perf_counter() - began)
            way[0] = state
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", default="demo:llama")
    parser.add_argument("--prefix", type=int, nargs="+", default=[256, 384])
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    asked = parser.parse_args(arguments)
    lm = jaxllm.load(asked.model, dtype="float32")
    print(
        "| prefix | rows | run once, s a step | run each step, s | ratio | loss | LOSS once, each |"
    )
    print("|---|---|---|---|---|---|---|")
    for prefix in asked.prefix:
        for width in asked.width:
            found = measured(lm, prefix, width, asked.rows, asked.steps)
            once, each = (statistics.median(found[name][1:]) for name in ("once", "each"))
            first = [found[f"{name} loss"][0] for name in ("once", "each")]
            last = [found[f"{name} loss"][-1] for name in ("once", "each")]
            print(
                f"| {prefix} | {asked.rows} x {width} | {once:.3f} | {each:.3f} | {each / once:.1f}"
                f" | {first[0]:.5f} {first[1]:.5f} | {last[0]:.5f} {last[1]:.5f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
