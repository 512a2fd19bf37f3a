"""What every method of jaxllm compress costs and brings, on small models that were really trained.

    python scripts/benchmarks/compression_table.py [--models demo:llama demo:gpt2 DIRECTORY ...]
        [--out DIR] [--texts CALIBRATION EVALUATION]

Each recipe is applied to each model by itself, calibrated on one text and measured on another that
the model was not calibrated on: stories of the demo's grammar for the demo models; what a model
says by itself for a directory with a tokenizer, with other seeds; of a directory with a
`corpus.txt` and a `char_vocab.json`, the first half and the second; with `--texts`, these files. A
table for each model goes to
stdout as Markdown, its numbers to DIR as JSON, a picture of quality against bytes beside it.
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
from jaxllm.compress.registry import STEPS
from jaxllm.errors import JaxllmError
from jaxllm.evaluate.likelihood.data import Loader, loader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story_grammar import stories

ROWS, WIDTH = 128, 256  # to calibrate on
SMOOTH = "smooth: smoothquant"
INT8 = r"quantize: rtn int8 on=(layers|h)\..*"

# By what is compared: rows of one block have equal bytes, or equal parts that are gone.
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
        ["quantize: gptq int4-g64"],
        ["quantize: gptq int4-g64 act_order=true"],
    ],
    "3 bits": [
        [r"quantize: rtn int3-g64 on=(layers|h)\..*"],
        [r"quantize: rtn int3-g64-zp on=(layers|h)\..*"],
        ["quantize: awq int3-g64"],
        ["quantize: awq int3-g64-zp"],
        [r"quantize: rtn int3-g64 on=(layers|h)\..* clip=true"],
        ["quantize: gptq int3-g64"],
        ["quantize: gptq int3-g64 act_order=true"],
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
    """A calibration text, and another to measure on."""

    calibration: Calibration
    loader: Loader


def data_of(name: str, lm: jaxllm.LM, texts: Sequence[Path] = ()) -> Data:
    """Return what a model is calibrated and measured on; texts: a file for each."""
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
        told = [
            np.array(
                [i for s in stories(count, seed) for i in [*lm.tokenizer.encode(s, bos=True), 2]],
                np.int32,
            )
            for count, seed in ((400, 20_001), (60, 20_002))
        ]
        rows, rest = told[0][: ROWS * width].reshape(-1, width), [told[1].tolist()]
    else:
        bos = lm.generation.get("bos_token_id", 1)
        said = [
            from_samples(lm.model, lm.params, bos_id=bos, rows=n, width=width, seed=n).token_NT
            for n in (ROWS, 40)
        ]
        rows, rest = said[0], said[1].tolist()
    made = loader(rest, window=width, stride=width, protocol="strided", batch=8)
    return Data(from_tokens(rows), made)


def measured(
    name: str, recipes: dict[str, list[list[str]]], texts: Sequence[Path] = ()
) -> dict[str, list[report.Row]]:
    """The rows of every recipe by block, those of the first the original too."""
    lm = jaxllm.load(name, dtype="float32")
    data = data_of(name, lm, texts)
    scale = report.StepEvaluator(lm, data.loader, speed=False, show_progress=False)
    found = {"float32": [scale.measure(report.ORIGINAL, initial_state(lm))]}
    for block, lines in recipes.items():
        found[block] = []
        for steps in lines:
            steps = [_counted(step, lm.config) for step in steps]
            recipe, seconds, made = parse_lines(steps, STEPS), 0.0, initial_state(lm)
            label = "; ".join(map(str, recipe))
            try:
                for stage in run_steps(
                    lm, recipe, data.calibration, TensorStore(), show_progress=False, log=_noted
                ):
                    made, seconds = stage.state or made, seconds + (stage.seconds or 0)
                found[block].append(scale.measure(label, made, seconds))
            except JaxllmError as error:
                print(f"{label}: {error}", file=sys.stderr)
                found[block].append(report.Row(step=f"{label}: refused"))
            print(report.summarize(found[block][-1]), file=sys.stderr, flush=True)
    return found


def as_markdown(rows: Sequence[report.Row]) -> str:
    """A table for BENCHMARKS.md."""
    columns = [(name, show) for name, show in report.COLUMNS if name not in ("tokens/s", "+/-")]
    lines = [["recipe", *(name for name, _ in columns)], ["---"] * (len(columns) + 1)]
    lines += [[f"`{row.step}`", *(show(row) for _, show in columns)] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _counted(step: str, config: jaxllm.ModelConfig) -> str:
    """A step with the whole number that is nearest to a quarter of what a model has, and not 0."""
    many = config.num_hidden_layers if "layers" in step else config.num_key_value_heads
    return step.replace("QUARTER", str(max(1, round(many / 4))))


def _noted(line: str) -> None:
    print(f"  {line}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo:llama", "demo:gpt2"])
    parser.add_argument("--blocks", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument(
        "--texts", nargs=2, type=Path, default=(), metavar="FILE",
        help="calibrate on the first file, measure on the second",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="a directory for JSON files and pictures")
    given = parser.parse_args()
    for name in given.models:
        found = measured(name, {block: RECIPES[block] for block in given.blocks}, given.texts)
        rows = [row for block in found.values() for row in block]
        print(f"\n{Path(name).name}:\n\n{as_markdown(rows)}", flush=True)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            stem = given.out / Path(name.replace(":", "-")).name
            stem.with_suffix(".json").write_text(report.as_json(rows, {"model": Path(name).name}))
            plot(found, stem.with_suffix(".png"), f"{Path(name).name}, from float32")


if __name__ == "__main__":
    main()
