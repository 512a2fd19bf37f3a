"""`jaxllm verify`: a checkpoint against transformers, or one variant of it against another."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm import process
from jaxllm.cli.console import note, waiting, write
from jaxllm.cli.options import (
    FullDtype,
    PrecisionFile,
    Quantize,
    check_writable,
    dtype_named,
    load_model,
)

if TYPE_CHECKING:
    from jaxllm.api import LM

EXAMPLE = """
Examples:

  jaxllm verify demo:llama

  jaxllm verify demo:llama --quantize int8 --against demo:llama --tolerance 0.05
"""
TRANSFORMERS = "transformers"
# What both sides read: plain prose, none of any model's own.
TEXT = """\
Every evening the keeper of the lighthouse climbed two hundred and twelve steps, trimmed the lamp
and wrote down what he saw. On most days it was water. "A grey sea," he wrote, "and a wind from
the north-west; one sail, far out, which did not come nearer." But on the third of May, at half
past nine, he counted seven boats where there had been none, and the smallest of them carried no
light at all. He rang the bell three times, waited, and rang it again. Nobody answered. What does
one write about a thing like that? He thought for a long while, dipped his pen, and left the line
empty.
"""


def verify(
    model: Annotated[str, typer.Argument(help="As --model of generate.")],
    against: Annotated[
        str, typer.Option(help='"transformers", or another checkpoint (the same one, too).')
    ] = TRANSFORMERS,
    dtype: FullDtype = "float32",
    quantize: Quantize = None,
    precision: PrecisionFile = None,
    against_dtype: Annotated[
        str | None,
        typer.Option(
            callback=dtype_named,
            help="Of the reference: as --dtype for transformers, else float32.",
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--tokens", "-n", help="Greedy tokens a row.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of the longer of the two prompts.")] = 48,
    tolerance: Annotated[
        float | None,
        typer.Option(help="x max(1, the stage's largest number); by default the format's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of the error by stage to this PNG.")
    ] = None,
) -> None:
    """Compare every stage, the cache and the greedy text with a reference; status 1 if they differ.

    Two prompts of unequal length run as one batch, padded on the left, through both. By default the
    reference is transformers with the same weights in the same format (quantized ones dequantized),
    and both compute in float32, where a difference is an error and not rounding. The tolerance is
    the same at every stage: 1e-5 of the stage's largest number plus 1e-4 of each in float32, 5e-3
    in float16, 1e-2 in bfloat16. In the last two, two correct programs can be further apart: a
    stage then holds while we are at most 1.5 times as far from float32 as transformers is, which
    the logits must be in any case. Against an unquantized checkpoint a quantized one differs by
    design: say by how much with --tolerance. So do activations that --precision
    rounds; formats of weights that it names are the reference's weights too.
    """
    check_writable("--plot", plot)
    lm = load_model(model, dtype, quantize=quantize, precision=precision)
    from jaxllm.evaluate.difference import Tolerance
    from jaxllm.evaluate.equivalence import example
    from jaxllm.evaluate.equivalence import verify as compare
    from jaxllm.evaluate.report import to_json, to_png, to_text
    from jaxllm.evaluate.sides import Ours

    ours = Ours(f"{model} ({quantize or dtype})", lm.model, lm.params)
    ids = lm.tokenizer.encode(TEXT) if lm.tokenizer else None
    case = example(ids, lm.config.vocab_size, length)
    case.check(lm.config, new_tokens)
    other_dtype = against_dtype or (dtype if against == TRANSFORMERS else "float32")
    with _references(model, lm, dtype, against, other_dtype) as (reference, exact):
        report = compare(
            ours,
            reference,
            case,
            new_tokens=new_tokens,
            tolerance=None if tolerance is None else Tolerance(tolerance),
            exact=exact,
        )
    write(json.dumps(to_json(report), allow_nan=False) + "\n" if as_json else to_text(report))
    if plot is not None:
        to_png(report, plot)
        note(f"wrote {plot}")
    if not report.holds:
        raise typer.Exit(1)


@contextlib.contextmanager
def _references(
    model: str, lm: "LM", plain: str, against: str, dtype: str
) -> Iterator[tuple[Any, Any]]:
    """What to compare with, and the float32 side that drift is measured from, if any."""
    from jaxllm.evaluate.sides import Ours

    if against != TRANSFORMERS:
        other = load_model(against, dtype)
        yield Ours(f"{against} ({dtype})", other.model, other.params), None
        return
    from jaxllm.evaluate.reference import Transformers

    with transformers_directory(model, lm, plain) as directory:
        with waiting("transformers loads the model"):
            reference = Transformers.load(directory, dtype)
            exact = None if dtype == "float32" else Transformers.load(directory, "float32")
        if exact is not None:
            exact = dataclasses.replace(exact, name=f"{exact.name} in float32")
        yield reference, exact


@contextlib.contextmanager
def transformers_directory(model: str, lm: "LM", dtype: str) -> Iterator[Path]:
    """A directory that transformers can load: the checkpoint's own, or one written for the time.

    lm: the model that was loaded from it; where its weights are in other formats than `dtype`,
    they are written as they are dequantized.
    """
    from jaxllm.api import open_checkpoint
    from jaxllm.checkpoint import is_native
    from jaxllm.convert.engine import write_hf
    from jaxllm.weights.formats import format_of
    from jaxllm.weights.paths import flatten

    opened = open_checkpoint(model)
    rounded = any(format_of(leaf) != dtype for _, leaf in flatten(lm.params))
    if not rounded and not is_native(opened.directory):
        yield opened.directory
        return
    if rounded:
        opened = dataclasses.replace(opened, tensors=_dequantized(lm.params))
    with tempfile.TemporaryDirectory(prefix="jaxllm-verify-") as name, process.removing(name):
        directory = Path(name) / "hf"
        write_hf(directory, opened)
        yield directory


def _dequantized(params: Any) -> dict[str, Any]:
    import numpy as np

    from jaxllm.weights.files import LazyTensor
    from jaxllm.weights.paths import flatten
    from jaxllm.weights.quantize import dequantize

    return {
        path: LazyTensor.of(np.asarray(leaf).astype(np.float32))
        for path, leaf in flatten(dequantize(params))
    }
