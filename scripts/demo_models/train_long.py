"""Training of four models of equal size on long texts, and measurement of their recall.

    python scripts/demo_models/train_long.py --out long-models --picture docs/long_recall.png

They differ only in attention: dense, a sliding window, LongNet's dilated, Infini-attention. A text
has facts early and questions late (long_data.py), first within a window, then over increasing
distances. Then the test of `jaxllm recall` measures a fact at the start of increasingly long texts.
One decision: the loop, the optimizer and the initial weights are those of train_demo.py. An
interrupted run resumes, and a seed gives the same bytes on one machine.

    jaxllm recall long-models/long-infini --texts meetings --lengths 64,256,512 --depths 0,0.5,1
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

import jaxllm
from jaxllm.checkpoints.native import check_output_directory
from jaxllm.files import atomic_file
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.research.needle.grid import Cell, recall
from jaxllm.train.loop import TrainPlan, train
from jaxllm.train.objective import NextToken
from jaxllm.train.step import Setup
from jaxllm.weights.paths import Params

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models import demo_data
from scripts.demo_models.demo_files import save_native
from scripts.demo_models.long_data import LongTextData, Phase, draw_tokenizer_texts
from scripts.demo_models.train_demo import MixedOptimizer, init_params

WINDOW, LONGEST = 64, 512  # tokens of a window or segment, and of the longest training text
VOCAB_SIZE = 768
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": LONGEST,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope": jaxllm.Rope(rope_type="default", rope_theta=10000.0),
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"sliding_window": WINDOW},
    "dilated": {
        "attention": LongAttention(
            kind="dilated", segment_lengths=(WINDOW, LONGEST), dilated_ratios=(1, 2)
        )
    },
    "infini": {"attention": LongAttention(kind="infini", segment_length=WINDOW)},
}
# First within a window, where all four compute the same and learn to copy a name, then over
# increasing distances: the last gradients pass through eight segments.
PHASES = (
    Phase(150, 64, 64),
    Phase(150, 32, 128),
    Phase(150, 16, 256),
    Phase(100, 8, 512),
)
WARMUP, FLOOR = 20, 1 / 30
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # lengths of the evaluation texts
TRIES = 48
README = """# A model with attention of kind {kind}

One of four models of equal size: see scripts/demo_models/train_long.py. It can only answer
questions about names: in training, nothing else had a loss.

| | |
|---|---|
{facts}
"""


def make_config(kind: str, vocab_size: int) -> jaxllm.LlamaConfig:
    """Return the configuration of a kind; all have the same sizes."""
    return jaxllm.LlamaConfig(vocab_size=vocab_size, **SIZES, **KINDS[kind])


def train_kind(
    kind: str,
    tokenizer: Tokenizer,
    phases: tuple[Phase, ...],
    seed: int,
    directory: Path | None = None,
) -> Params:
    """Train a kind of model; return its parameters.

    Args:
        directory: where the training state is saved, to resume from.
    """
    model = jaxllm.build(make_config(kind, tokenizer.get_vocab_size()))
    data = LongTextData(tokenizer, phases, seed)
    setup = Setup(model, NextToken(), MixedOptimizer(len(data), WARMUP, FLOOR))
    plan, params = TrainPlan(steps=len(data), seed=seed), init_params(model, jax.random.key(seed))
    return train(params, data, setup, plan, directory=directory).params


def measure_recall(lm: jaxllm.LM, windows: Sequence[int], tries: int, seed: int) -> list[Cell]:
    """Measure recall of a fact at the start of texts: a cell for each length in windows."""
    lengths = [WINDOW * n for n in windows]
    return recall(
        lm.model,
        lm.params,
        lm.encode,
        style="meetings",
        lengths=lengths,
        depths=(0.0,),
        tries=tries,
        seed=seed,
    )


def make_model(kind: str, directory: Path, share: float, seed: int) -> float:
    """Train a kind of model and save it to a directory; return the training seconds.

    Raises:
        CheckpointError: before training, if `directory` has a checkpoint.
    """
    check_output_directory(directory)
    phases = tuple(Phase(max(1, round(p.steps * share)), p.rows, p.width) for p in PHASES)
    tokenizer = demo_data.train_tokenizer(draw_tokenizer_texts(seed), VOCAB_SIZE)
    work, start = directory.with_name(f".{directory.name}.training"), time.monotonic()
    params = train_kind(kind, tokenizer, phases, seed, work)
    seconds = time.monotonic() - start
    half = jaxllm.cast(params, jaxllm.Precision.uniform("float16"))
    facts = {
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(half)):,}",
        "texts": ", ".join(f"{p.steps} x {p.rows} of {p.width} tokens" for p in phases),
        "seed": str(seed),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    config = make_config(kind, tokenizer.get_vocab_size())
    save_native(directory, config, half, tokenizer, README.format(kind=kind, facts=table))
    shutil.rmtree(work)
    return seconds


def format_table(results: dict[str, list[Cell]], windows: Sequence[int]) -> Iterable[str]:
    """Yield lines of Markdown: right / greedy in percent, a column per distance in windows."""
    yield "| attention | " + " | ".join(map(str, windows)) + " |"
    yield "|---" * (1 + len(windows)) + "|"
    for kind, cells in results.items():
        texts = (f"{100 * c.share:.0f}/{100 * c.greedy / c.tries:.0f}" for c in cells)
        yield f"| {kind} | " + " | ".join(texts) + " |"


def plot(results: dict[str, list[Cell]], windows: Sequence[int], path: Path) -> None:
    """Write a PNG file of the hit rate by distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    layers = SIZES["num_hidden_layers"]
    for (kind, cells), mark in zip(results.items(), "osD^", strict=False):
        axes.plot(windows, [100 * c.share for c in cells], marker=mark, markersize=4, label=kind)
    any_cell = next(iter(results.values()))[0]
    axes.axhline(100 / any_cell.choices, color="grey", linestyle=":", label="guessing")
    if "window" in results:
        axes.axvline(layers, color="C1", linewidth=0.7, linestyle="--")
        axes.text(layers, 104, "layers x window", color="C1", fontsize=7, ha="center")
    axes.axvline(LONGEST / WINDOW, color="black", linewidth=0.7, linestyle="--")
    axes.text(LONGEST / WINDOW, 104, "longest training text", fontsize=7, ha="center")
    axes.set_xlabel(f"distance of the fact, in windows of {WINDOW} tokens")
    axes.set_ylabel(f"right of {any_cell.tries} texts, %")
    axes.set_ylim(-3, 112)
    axes.set_xticks(windows)
    axes.legend(fontsize=8)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the models selected on the command line."""
    parser = argparse.ArgumentParser(
        description="Train a dense, a sliding-window, a dilated and an Infini model of equal size"
        " on long texts, and measure their recall by distance.",
        epilog="example: python scripts/demo_models/train_long.py --out long-models",
    )
    parser.add_argument("--out", type=Path, default=Path("long-models"), help="parent directory")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="share of the training steps")
    parser.add_argument(
        "--windows", nargs="+", type=int, default=list(WINDOWS), help="text lengths in windows"
    )
    parser.add_argument("--tries", type=int, default=TRIES, help="texts per distance")
    parser.add_argument(
        "--measure-only", action="store_true", help="no training: measure the models in --out"
    )
    parser.add_argument("--picture", type=Path, help="PNG file for the hit rates")
    parser.add_argument("--report", type=Path, help="JSON file for the cells")
    options = parser.parse_args(arguments)
    if not 0 < options.share <= 100 or min(*options.windows, options.tries) < 1:
        parser.error("--share must be above 0, --windows and --tries at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Cell]] = {}
    for kind in options.kinds:
        directory = options.out / f"long-{kind}"
        if not options.measure_only:
            seconds = make_model(kind, directory, options.share, options.seed)
            print(f"{directory}: trained in {seconds:.0f} s", flush=True)
        lm = jaxllm.load(directory, dtype="float32")
        results[kind] = measure_recall(lm, options.windows, options.tries, options.seed)
    print("\n".join(format_table(results, options.windows)))
    if options.picture:
        plot(results, options.windows, options.picture)
    if options.report:
        cells = {kind: [c.__dict__ for c in cells] for kind, cells in results.items()}
        options.report.write_text(json.dumps(cells) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
