"""How far each family is from transformers: a table of figures, on tiny random models.

    python scripts/benchmarks/family_table.py [NAME ...] [--new-tokens 64]

One decision: what is compared are the models of the tests (tests/tiny_models.py), every tensor
random, in float32 at every stage and in half precision at the logits. Stages of one kind are told
together, by
the largest difference of any layer as a share of the largest number of its stage. Of bfloat16 and
float16 the distances (RMS) of ours and of transformers' logits to transformers' in float32.
Example: python scripts/benchmarks/family_table.py qwen3 gemma2
"""

import argparse
import re
import tempfile
from pathlib import Path

import numpy as np

import jaxllm
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.evaluate.parity.backends import JaxBackend, pad_case
from jaxllm.evaluate.parity.compare import Report, verify
from jaxllm.evaluate.parity.transformers_backend import TransformersBackend
from jaxllm.models import FAMILIES
from jaxllm.models.family import Family
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.safetensors import open_tensors

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("embeddings", "attention", "MLP", "layers", "norms", "logits", "decoding")


def group(stage: str, f: Family) -> str:
    """The column of a stage: queries, keys, values and heads are attention's."""
    layer = re.fullmatch(rf"{f.layers}\.\d+(?:\.(?P<part>.+))?", stage)
    if layer is None:
        return {f.embeddings: "embeddings", f.norm: "norms", "logits": "logits"}[stage]
    if layer["part"] is None:
        return "layers"
    if layer["part"] in (f.attention_norm, f.mlp_norm):
        return "norms"
    return "attention" if layer["part"] in ("q", "k", "v", "heads", f.attention) else "MLP"


def differences(report: Report, f: Family) -> dict[str, float]:
    """The largest difference of each group of stages, as a share of the stage's largest number.

    decoding: of cached steps, their logits and the keys and values that they leave.
    """
    found = dict.fromkeys(GROUPS, 0.0)
    for stage in report.stages:
        name = group(stage.name, f)
        found[name] = max(found[name], stage.relative_max)
    found["decoding"] = max(stage.relative_max for stage in report.decoding)
    return found


def row(name: str, scratch: Path, new_tokens: int) -> str:
    """A family's line of the table."""
    from tests.tiny_models import load_twin, save_random, tokens

    save_random(scratch, name)
    twin = load_twin(scratch)
    case = pad_case([tokens(1, 9)[0].tolist(), tokens(1, 6, 1)[0].tolist()])
    ours = JaxBackend("ours", twin.model, twin.params)
    if (border := twin.config.original_context) is not None:  # no cached text can go on beyond it
        new_tokens = min(new_tokens, border - case.token_BT.shape[1])
    report = verify(ours, TransformersBackend.load(scratch), case, new_tokens=new_tokens)
    far = " | ".join(f"{value:.0e}" for value in differences(report, FAMILIES[name]).values())
    ids = tokens(2, 31)
    exact, distances = twin.logits(ids), []
    for dtype in ("bfloat16", "float16"):
        half = load_twin(scratch, dtype)
        mine = np.asarray(jaxllm.forward(half.model, half.params, None, ids).logits)
        pair = [np.sqrt(np.mean(np.square(x - exact))) for x in (mine, half.logits(ids))]
        distances.append(" / ".join(f"{x:.2g}" for x in pair))
    greedy = f"{report.greedy.agreed} of {report.greedy.compared}"
    return (
        f"| {name} | {far} | {' | '.join(distances)} |"
        f" {greedy} | {'exact' if _same(scratch) else 'CHANGED'} |"
    )


def _same(directory: Path) -> bool:
    """Whether converting to our names and back gives the file's tensors, bit for bit."""
    with tempfile.TemporaryDirectory() as scratch:
        write_hf(Path(scratch) / "hf", open_hf(directory))
        before, after = (
            {
                n.removeprefix("transformer."): t.read().tobytes()  # GPT-2 is published without
                for n, t in open_tensors(d / "model.safetensors").items()
            }
            for d in (directory, Path(scratch) / "hf")
        )
    return before == after


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--new-tokens", type=int, default=64, help="greedy ones, of two texts")
    options = parser.parse_args()
    names = options.names or list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"no family {unknown[0]!r}: there are {', '.join(FAMILIES)}")
    print(f"| family | {' | '.join(GROUPS)} | bf16 | fp16 | greedy | files |")
    print("|---" * (len(GROUPS) + 5) + "|")
    with steps_bar("families", len(names)) as advance:
        for name in names:
            with tempfile.TemporaryDirectory() as scratch:
                print(row(name, Path(scratch), options.new_tokens), flush=True)
            advance()


if __name__ == "__main__":
    import sys

    sys.path.insert(
        0, str(ROOT)
    )  # tests/tiny_models.py stands beside, in no package that is installed
    main()
