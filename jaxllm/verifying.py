"""Verification in one call: a checkpoint against transformers, or against another variant of it."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm import process
from jaxllm.api import LM
from jaxllm.checkpoint import in_memory
from jaxllm.convert.engine import FORM, write_hf
from jaxllm.errors import ConfigError
from jaxllm.evaluate.equivalence import compare as equivalence
from jaxllm.evaluate.equivalence.difference import Tolerance
from jaxllm.evaluate.equivalence.first import of_first
from jaxllm.evaluate.equivalence.sides import Case, Ours, Side
from jaxllm.loading import load, open_checkpoint
from jaxllm.weights.formats import format_of
from jaxllm.weights.paths import flatten, map_leaves, of_one_device
from jaxllm.weights.quantize import Rules, dequantize
from jaxllm.whole import dtype_name

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
    model: str | Path | LM | Ours,
    reference: str | Path | LM | Side = TRANSFORMERS,
    case: Case | None = None,
    *,
    name: str | None = None,
    files: str | Path | None = None,
    dtype: str | None = None,
    quantize: Rules | None = None,
    reference_dtype: str | None = None,
    length: int = 48,
    new_tokens: int = 32,
    tolerance: Tolerance | None = None,
    exact: Side | None = None,
    show_progress: bool | None = None,
) -> equivalence.Report:
    """Compare a model with a reference: every stage of a case, the cache, and greedy text.

    model: as `load` takes it, or loaded. reference: "transformers", which runs the same weights; or
    another model. Either may be a side of `jaxllm.evaluate.equivalence.sides`, the model with a
    case. case: by default two prompts of unequal length, `length` tokens the longer. name: of the
    model in the report. files: where a loaded model's weights are, so that they need not be written
    for transformers. dtype: of a model that is loaded here, by default "float32". reference_dtype:
    by default the same for transformers, float32 otherwise. The rest is as for
    `equivalence.compare.verify`.

    The report `holds`, or names the `first` stage that does not; `evaluate.report.to_text` prints
    it. Raises ConfigError without transformers, and what `load` and `equivalence.verify` raise.
    """
    dtype = None if dtype is None else dtype_name("dtype", dtype)
    if reference_dtype is not None:
        reference_dtype = dtype_name("reference_dtype", reference_dtype)
    options: Any = {
        "new_tokens": new_tokens,
        "tolerance": tolerance,
        "show_progress": show_progress,
    }
    if isinstance(model, Ours):
        if case is None or isinstance(reference, str | Path | LM):
            raise ConfigError("verify compares a side with another side, in a case")
        return equivalence.verify(model, reference, case, exact=exact, **options)
    if isinstance(model, LM):
        lm, dtype = model, dtype or model.model.precision.activations
    else:
        dtype = dtype or "float32"
        lm = load(model, dtype=dtype, quantize=quantize, show_progress=show_progress)
        files = model
    if case is None:
        ids = lm.tokenizer.encode(TEXT) if lm.tokenizer else None
        case = equivalence.example(ids, lm.config.vocab_size, length)
    case.check(lm.config, new_tokens)
    ours = Ours(name or f"{files or lm.path} ({dtype})", lm.model, lm.params)
    with _sides(files, lm, dtype, reference, reference_dtype) as (other, found):
        return equivalence.verify(ours, other, case, exact=exact or found, **options)


@contextlib.contextmanager
def _sides(
    files: str | Path | None, lm: LM, plain: str, reference: Any, dtype: str | None
) -> Iterator[tuple[Any, Any]]:
    """What to compare with, and the float32 side that drift is measured from, if any."""
    if reference == TRANSFORMERS:
        from jaxllm.evaluate.equivalence.reference import Transformers

        dtype, exact = dtype or plain, None
        with transformers_directory(files, lm, plain) as directory:
            side = of_first(partial(Transformers.load, directory, dtype))
            if dtype != "float32":
                exact = of_first(partial(_in_float32, directory))
            yield side, exact
        return
    if isinstance(reference, str | Path):
        reference = of_first(partial(_other, reference, dtype or "float32"))
    if isinstance(reference, LM):
        reference = Ours(f"{reference.path}", reference.model, reference.params)
    yield reference, None


def _in_float32(directory: Path) -> Side:
    """What drift is measured from."""
    from jaxllm.evaluate.equivalence.reference import Transformers

    exact = Transformers.load(directory, "float32")
    return dataclasses.replace(exact, name=f"{exact.name} in float32")


def _other(reference: str | Path, dtype: str) -> Side:
    """Another checkpoint, on one device."""
    other = load(reference, dtype=dtype)
    return Ours(f"{reference} ({dtype})", other.model, other.params)


@contextlib.contextmanager
def transformers_directory(files: str | Path | None, lm: LM, dtype: str) -> Iterator[Path]:
    """A directory that transformers can load: the checkpoint's own, or one written for the time.

    files: the checkpoint that lm has its weights from, None where only lm has them. Where they are
    in other formats than `dtype`, they are written as they are dequantized. Of several processes
    the first has it.
    """
    opened = open_checkpoint(files or lm.path)
    rounded = any(format_of(leaf) != dtype for _, leaf in flatten(lm.params))
    if files is not None and not rounded and opened.form == FORM:
        yield opened.directory
        return
    if rounded or files is None:
        whole = of_one_device(lm.model, lm.params)
        wide = map_leaves(lambda _, x: x.astype(np.float32), dequantize(whole))
        opened = in_memory(opened, wide, opened.precision.unquantized())
    with tempfile.TemporaryDirectory(prefix="jaxllm-verify-") as name, process.removing(name):
        directory = Path(name) / "hf"
        write_hf(directory, opened)
        yield directory
