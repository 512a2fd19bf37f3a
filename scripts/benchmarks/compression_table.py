"""Size and quality of each method of `jaxllm compress`, on small trained models.

    python scripts/benchmarks/compression_table.py [--models demo:llama demo:gpt2 DIRECTORY ...]
        [--out DIR] [--texts CALIBRATION EVALUATION]

Each recipe is applied to the original model, calibrated on one text and evaluated on another.
Demo models take stories of the demo's grammar. A directory with `corpus.txt` and `char_vocab.json`
takes the two halves of that corpus. Another directory takes text sampled from the model, with
different seeds. --texts names two files instead. A Markdown table for each model goes to stdout;
with --out, its numbers go to DIR as JSON, with a plot of quality against bytes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jaxllm
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress import report
from jaxllm.compress.calibration import Calibration, from_samples, from_tokens
from jaxllm.compress.pipeline import initial_state, run_steps
from jaxllm.compress.plots import plot
from jaxllm.compress.recipe import parse_lines
from jaxllm.compress.registry import find_steps
from jaxllm.errors import JaxllmError
from jaxllm.evaluate.likelihood.data import Loader, loader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import draw_stories

ROWS, WIDTH = 128, 256  # of the calibration data
SMOOTH = "smooth: smoothquant"
INT8 = r"quantize: rtn int8 on=(layers|h)\..*"

# Recipes in one block have equal sizes, or remove equal parts.
RECIPES: dict[str, list[list[str]]] = {
    "formats": [
        [r"store: bfloat16 on=.*"],
        [INT8],
    ],
    "4 bits": [
        [r"quantize: rtn int4-g64 on=(layers|h)\..*"],
        [r"quantize: rtn int4-g64-zp on=(layers|h)\..*"],
        ["quantize: awq int4-g64"],
        ["quantize: awq int4-g64-zp"],
        [r"quantize: rtn int4-g64 on=(layers|h)\..* clip=true"],
        ["quantize: gptq int4-g64 act_order=false"],
        ["quantize: gptq int4-g64"],
    ],
    "3 bits": [
        [r"quantize: rtn int3-g64 on=(layers|h)\..*"],
        [r"quantize: rtn int3-g64-zp on=(layers|h)\..*"],
        ["quantize: awq int3-g64"],
        ["quantize: awq int3-g64-zp"],
        [r"quantize: rtn int3-g64 on=(layers|h)\..* clip=true"],
        ["quantize: gptq int3-g64 act_order=false"],
        ["quantize: gptq int3-g64"],
    ],
    "W8A8": [
        [INT8, "activations: dynamic"],
        [SMOOTH, INT8, "activations: dynamic"],
        [INT8, "activations: static"],
        [SMOOTH, INT8, "activations: static"],
        [INT8, "activations: static range=percentile"],
        [SMOOTH, INT8, "activations: static range=percentile"],
    ],
    "half zero": [
        ["prune: magnitude 50%", "store: float32-bitmap"],
        ["prune: magnitude 50% scope=model", "store: float32-bitmap"],
        ["prune: wanda 50%", "store: float32-bitmap"],
        ["prune: sparsegpt 50%", "store: float32-bitmap"],
    ],
    "2:4": [
        ["prune: magnitude 2:4", "store: float32-2:4"],
        ["prune: wanda 2:4", "store: float32-2:4"],
        ["prune: sparsegpt 2:4", "store: float32-2:4"],
        ["prune: sparsegpt 2:4 quantize=int8", "store: int8-2:4"],
    ],
    "low rank": [
        ["factor: svd 80%"],
        ["factor: asvd 80%"],
        ["factor: svdllm 80%"],
        ["factor: svdllm 80% format=int8"],
    ],
    "structure": [
        ["drop: layers QUARTER"],
        ["drop: heads QUARTER"],
        ["drop: channels 25%"],
        ["drop: channels 25% by=first"],
    ],
}


class Data(NamedTuple):
    """A calibration text, and a different evaluation text."""

    calibration: Calibration
    loader: Loader


def make_data(name: str, lm: jaxllm.LM, texts: Sequence[Path] = ()) -> Data:
    """Return a model's calibration and evaluation data; texts: a file for each."""
    width = min(WIDTH, lm.config.context_length)
    if texts:
        first, second = (lm.encode(file.read_text(encoding="utf-8")) for file in texts)
        rows, rest = np.array(first[: ROWS * width], np.int32).reshape(-1, width), [second]
    elif (Path(name) / "char_vocab.json").is_file():
        ids = json.loads((Path(name) / "char_vocab.json").read_text(encoding="utf-8"))
        text = (Path(name) / "corpus.txt").read_text(encoding="utf-8")
        tokens = np.array([ids[c] for c in text], np.int32)
        half = len(tokens) // 2 // width * width
        rows, rest = tokens[:half].reshape(-1, width), [tokens[half:].tolist()]
    elif name.startswith("demo:"):
        assert lm.tokenizer is not None
        splits = [
            np.array(
                [
                    i
                    for s in draw_stories(count, seed)
                    for i in [*lm.tokenizer.encode(s, bos=True), 2]
                ],
                np.int32,
            )
            for count, seed in ((400, 20_001), (60, 20_002))
        ]
        rows, rest = splits[0][: ROWS * width].reshape(-1, width), [splits[1].tolist()]
    else:
        bos = lm.generation.get("bos_token_id", 1)
        samples = [
            from_samples(
                lm.model, lm.params, bos_id=bos, rows=n, width=width, seed=n, bos=False
            ).token_NT
            for n in (ROWS, 40)
        ]
        rows, rest = samples[0], samples[1].tolist()
    evaluation = loader(rest, window=width, stride=width, protocol="strided", batch=8)
    return Data(from_tokens(rows), evaluation)


def measure_recipes(
    name: str, recipes: dict[str, list[list[str]]], texts: Sequence[Path] = ()
) -> dict[str, list[report.ReportRow]]:
    """Return the rows of all recipes by block, after a block with the original model."""
    lm = jaxllm.load(name, dtype="float32")
    data = make_data(name, lm, texts)
    evaluator = report.StepEvaluator(lm, data.loader, speed=False, show_progress=False)
    results = {"float32": [evaluator.measure(report.ORIGINAL, initial_state(lm))]}
    for block, lines in recipes.items():
        results[block] = []
        for steps in lines:
            steps = [replace_quarter(step, lm.config) for step in steps]
            recipe, seconds, state = parse_lines(steps, find_steps()), 0.0, initial_state(lm)
            label = "; ".join(map(str, recipe))
            try:
                for result in run_steps(
                    lm, recipe, data.calibration, TensorStore(), show_progress=False, log=log
                ):
                    state, seconds = result.state or state, seconds + (result.seconds or 0)
                results[block].append(evaluator.measure(label, state, seconds))
            except JaxllmError as error:
                print(f"{label}: {error}", file=sys.stderr)
                results[block].append(report.ReportRow(step=f"{label}: refused"))
            print(report.summarize(results[block][-1]), file=sys.stderr, flush=True)
    return results


def format_markdown(rows: Sequence[report.ReportRow]) -> str:
    """Format a table for BENCHMARKS.md."""
    columns = [(name, show) for name, show in report.COLUMNS if name not in ("tokens/s", "+/-")]
    lines = [["recipe", *(name for name, _ in columns)], ["---"] * (len(columns) + 1)]
    lines += [[f"`{row.step}`", *(show(row) for _, show in columns)] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_quarter(step: str, config: jaxllm.ModelConfig) -> str:
    """Replace QUARTER by a quarter of the model's layers or heads, rounded, at least 1."""
    total = config.num_hidden_layers if "layers" in step else config.num_key_value_heads
    return step.replace("QUARTER", str(max(1, round(total / 4))))


def log(line: str) -> None:
    print(f"  {line}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo:llama", "demo:gpt2"])
    parser.add_argument("--blocks", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument(
        "--texts", nargs=2, type=Path, default=(), metavar="FILE",
        help="a calibration file and an evaluation file",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="directory for JSON files and plots")
    options = parser.parse_args()
    for name in options.models:
        recipes = {block: RECIPES[block] for block in options.blocks}
        results = measure_recipes(name, recipes, options.texts)
        rows = [row for block in results.values() for row in block]
        print(f"\n{Path(name).name}:\n\n{format_markdown(rows)}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            stem = options.out / Path(name.replace(":", "-")).name
            stem.with_suffix(".json").write_text(report.as_json(rows, {"model": Path(name).name}))
            plot(results, stem.with_suffix(".png"), f"{Path(name).name}, from float32")


if __name__ == "__main__":
    main()
