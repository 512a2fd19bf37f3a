"""Numerical differences between each family and transformers, on tiny random models.

    python scripts/benchmarks/family_table.py [NAME ...] [--new-tokens 64]

One decision: it compares the models of the tests (tests/tiny_models.py), with every tensor random.
In float32 it compares every stage; a column has the largest difference of any layer, relative to
the largest number of its stage. For bfloat16 and float16 it reports two RMS distances from
transformers' float32 logits: of our logits, and of transformers' logits in that dtype.
Example: python scripts/benchmarks/family_table.py qwen3 gemma2
"""

import argparse
import re
import tempfile
from pathlib import Path

import numpy as np

import jaxllm
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.evaluate.parity.activations import JaxBackend, pad_case
from jaxllm.evaluate.parity.compare import Report, verify
from jaxllm.evaluate.parity.transformers_backend import TransformersBackend
from jaxllm.models import FAMILIES
from jaxllm.models.family import Family
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.safetensors import open_tensors

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("embeddings", "attention", "MLP", "layers", "norms", "logits", "decoding")


def group_of(stage: str, f: Family) -> str:
    """Return the column of a stage; queries, keys, values and heads count as attention."""
    layer = re.fullmatch(rf"{f.layers}\.\d+(?:\.(?P<part>.+))?", stage)
    if layer is None:
        return {f.embeddings: "embeddings", f.norm: "norms", "logits": "logits"}[stage]
    if layer["part"] is None:
        return "layers"
    if layer["part"] in (f.attention_norm, f.mlp_norm):
        return "norms"
    return "attention" if layer["part"] in ("q", "k", "v", "heads", f.attention) else "MLP"


def max_differences(report: Report, f: Family) -> dict[str, float]:
    """Return each group's largest difference, relative to the largest number of the stage.

    "decoding" covers the logits of cached steps and the keys and values that they write.
    """
    largest = dict.fromkeys(GROUPS, 0.0)
    for stage in report.stages:
        name = group_of(stage.name, f)
        largest[name] = max(largest[name], stage.relative_max)
    largest["decoding"] = max(stage.relative_max for stage in report.decoding)
    return largest


def make_row(name: str, scratch: Path, new_tokens: int) -> str:
    """Return a family's line of the table."""
    from tests.tiny_models import load_twin, save_random, tokens

    save_random(scratch, name)
    twin = load_twin(scratch)
    case = pad_case([tokens(1, 9)[0].tolist(), tokens(1, 6, 1)[0].tolist()])
    ours = JaxBackend("ours", twin.model, twin.params)
    if (limit := twin.config.original_context) is not None:  # LongRoPE: a cache cannot grow past it
        new_tokens = min(new_tokens, limit - case.token_BT.shape[1])
    report = verify(ours, TransformersBackend.load(scratch), case, new_tokens=new_tokens)
    largest = max_differences(report, FAMILIES[name])
    cells = " | ".join(f"{value:.0e}" for value in largest.values())
    ids = tokens(2, 31)
    exact, distances = twin.logits(ids), []
    for dtype in ("bfloat16", "float16"):
        half = load_twin(scratch, dtype)
        logits = np.asarray(jaxllm.forward(half.model, half.params, None, ids).logits)
        pair = [np.sqrt(np.mean(np.square(x - exact))) for x in (logits, half.logits(ids))]
        distances.append(" / ".join(f"{x:.2g}" for x in pair))
    greedy = f"{report.greedy.agreed} of {report.greedy.compared}"
    return (
        f"| {name} | {cells} | {' | '.join(distances)} |"
        f" {greedy} | {'exact' if is_round_trip_exact(scratch) else 'CHANGED'} |"
    )


def is_round_trip_exact(directory: Path) -> bool:
    """Return whether conversion to our names and back keeps every tensor bit for bit."""
    with tempfile.TemporaryDirectory() as scratch:
        write_hf(Path(scratch) / "hf", open_hf(directory))
        before, after = (
            {
                n.removeprefix("transformer."): t.read().tobytes()  # published GPT-2 files lack it
                for n, t in open_tensors(d / "model.safetensors").items()
            }
            for d in (directory, Path(scratch) / "hf")
        )
    return before == after


def main() -> None:
    """Print the table for the families named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"families: {', '.join(FAMILIES)}")
    parser.add_argument(
        "--new-tokens", type=int, default=64, help="tokens to decode greedily from two texts"
    )
    options = parser.parse_args()
    names = options.names or list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"unknown family {unknown[0]!r}: expected one of {', '.join(FAMILIES)}")
    print(f"| family | {' | '.join(GROUPS)} | bf16 | fp16 | greedy | files |")
    print("|---" * (len(GROUPS) + 5) + "|")
    with steps_bar("families", len(names)) as advance:
        for name in names:
            with tempfile.TemporaryDirectory() as scratch:
                print(make_row(name, Path(scratch), options.new_tokens), flush=True)
            advance()


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(ROOT))  # for tests/tiny_models.py, which is not installed
    main()
