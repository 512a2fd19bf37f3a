"""Trains four models of one size on texts of several windows, and measures what each still knows.

    python scripts/demo_models/train_long.py --out long-models --picture docs/long_recall.png

They differ in attention alone: dense, a sliding window, LongNet's dilated, Infini-attention. A text
tells facts early and asks for them late (long_data.py), first within a window, then over more and
more. Then `jaxllm recall` hides a fact at the begin of longer and longer texts. The loop, the
optimizer and the numbers that weights start from are those of train_demo.py; an interrupted run
goes on where it was, and the same seed gives the same bytes on one machine.

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
from jaxllm.config.long_attention import LongAttention
from jaxllm.evaluate.needle.grid import Cell, recall
from jaxllm.files import atomic_file
from jaxllm.train.loop import TrainPlan, train
from jaxllm.train.objective import NextToken
from jaxllm.train.step import Setup
from jaxllm.weights.paths import Params

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models import demo_data
from scripts.demo_models.demo_files import save_native
from scripts.demo_models.long_data import Lasting, Stretch, corpus
from scripts.demo_models.train_demo import Mixed, init_params

WINDOW, LONGEST = 64, 512  # tokens: of a window or segment, of the longest text to learn from
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
# First within a window, where all four compute the same and copying a name is learned, then from
# farther and farther away: gradients go through eight segments in the end.
STRETCHES = (
    Stretch(150, 64, 64),
    Stretch(150, 32, 128),
    Stretch(150, 16, 256),
    Stretch(100, 8, 512),
)
WARM, FLOOR = 20, 1 / 30
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # that texts are long when they are asked about
TRIES = 48
README = """# A model with attention of kind {kind}

One of four of one size: see scripts/demo_models/train_long.py. It knows who was met and nothing
else: only answers were learned.

| | |
|---|---|
{facts}
"""


def config_of(kind: str, vocab_size: int) -> jaxllm.LlamaConfig:
    """The configuration of a kind; all have the same sizes."""
    return jaxllm.LlamaConfig(vocab_size=vocab_size, **SIZES, **KINDS[kind])


def learned(
    kind: str,
    tokenizer: Tokenizer,
    stretches: tuple[Stretch, ...],
    seed: int,
    directory: Path | None = None,
) -> Params:
    """A kind's parameters after training. directory: where the state is kept on the way."""
    model = jaxllm.build(config_of(kind, tokenizer.get_vocab_size()))
    data = Lasting(tokenizer, stretches, seed)
    setup = Setup(model, NextToken(), Mixed(len(data), WARM, FLOOR))
    plan, params = TrainPlan(steps=len(data), seed=seed), init_params(model, jax.random.key(seed))
    return train(params, data, setup, plan, directory=directory).params


def measured(lm: jaxllm.LM, windows: Sequence[int], tries: int, seed: int) -> list[Cell]:
    """A fact at the begin of texts of so many windows: a cell for each."""
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


def make(kind: str, directory: Path, share: float, seed: int) -> float:
    """Train a kind and save it to a directory; the seconds that it took.

    Raises CheckpointError, before it begins, where there is a checkpoint.
    """
    check_output_directory(directory)
    stretches = tuple(Stretch(max(1, round(s.steps * share)), s.rows, s.width) for s in STRETCHES)
    tokenizer = demo_data.train_tokenizer(corpus(seed), VOCAB_SIZE)
    work, began = directory.with_name(f".{directory.name}.training"), time.monotonic()
    params = learned(kind, tokenizer, stretches, seed, work)
    seconds = time.monotonic() - began
    half = jaxllm.cast(params, jaxllm.Precision.uniform("float16"))
    facts = {
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(half)):,}",
        "texts": ", ".join(f"{s.steps} x {s.rows} of {s.width} tokens" for s in stretches),
        "seed": str(seed),
    }
    told = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    config = config_of(kind, tokenizer.get_vocab_size())
    save_native(directory, config, half, tokenizer, README.format(kind=kind, facts=told))
    shutil.rmtree(work)
    return seconds


def table(found: dict[str, list[Cell]], windows: Sequence[int]) -> Iterable[str]:
    """Lines of Markdown: right / greedy in percent, a column a distance in windows."""
    yield "| attention | " + " | ".join(map(str, windows)) + " |"
    yield "|---" * (1 + len(windows)) + "|"
    for kind, cells in found.items():
        shown = (f"{100 * c.share:.0f}/{100 * c.greedy / c.tries:.0f}" for c in cells)
        yield f"| {kind} | " + " | ".join(shown) + " |"


def plot(found: dict[str, list[Cell]], windows: Sequence[int], path: Path) -> None:
    """Write a PNG file: hit rate against distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    layers = SIZES["num_hidden_layers"]
    for (kind, cells), mark in zip(found.items(), "osD^", strict=False):
        axes.plot(windows, [100 * c.share for c in cells], marker=mark, markersize=4, label=kind)
    any_cell = next(iter(found.values()))[0]
    axes.axhline(100 / any_cell.choices, color="grey", linestyle=":", label="guessing")
    if "window" in found:
        axes.axvline(layers, color="C1", linewidth=0.7, linestyle="--")
        axes.text(layers, 104, "layers x window", color="C1", fontsize=7, ha="center")
    axes.axvline(LONGEST / WINDOW, color="black", linewidth=0.7, linestyle="--")
    axes.text(LONGEST / WINDOW, 104, "longest learned from", fontsize=7, ha="center")
    axes.set_xlabel(f"distance of the fact, in windows of {WINDOW} tokens")
    axes.set_ylabel(f"right of {any_cell.tries} texts, %")
    axes.set_ylim(-3, 112)
    axes.set_xticks(windows)
    axes.legend(fontsize=8)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a dense, a sliding-window, a dilated and an Infini model of one size on"
        " long texts, and measure how far back each remembers.",
        epilog="example: python scripts/demo_models/train_long.py --out long-models",
    )
    parser.add_argument("--out", type=Path, default=Path("long-models"), help="parent directory")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, for a quick look")
    parser.add_argument("--windows", nargs="+", type=int, default=list(WINDOWS))
    parser.add_argument("--tries", type=int, default=TRIES, help="texts a distance")
    parser.add_argument("--measure-only", action="store_true", help="what is in --out already")
    parser.add_argument("--picture", type=Path, help="draw the hit rates as a PNG file")
    parser.add_argument("--report", type=Path, help="write the cells as JSON")
    options = parser.parse_args(arguments)
    if not 0 < options.share <= 100 or min(*options.windows, options.tries) < 1:
        parser.error("--share must be above 0, --windows and --tries at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Cell]] = {}
    for kind in options.kinds:
        directory = options.out / f"long-{kind}"
        if not options.measure_only:
            seconds = make(kind, directory, options.share, options.seed)
            print(f"{directory}: trained in {seconds:.0f} s", flush=True)
        lm = jaxllm.load(directory, dtype="float32")
        found[kind] = measured(lm, options.windows, options.tries, options.seed)
    print("\n".join(table(found, options.windows)))
    if options.picture:
        plot(found, options.windows, options.picture)
    if options.report:
        cells = {kind: [c.__dict__ for c in cells] for kind, cells in found.items()}
        options.report.write_text(json.dumps(cells) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
