"""`verify`: compare a model with transformers, or with another variant of the model."""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.native import HF_FORMAT, with_params
from jaxllm.convert.hf import write_hf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.evaluate.parity import compare
from jaxllm.evaluate.parity.activations import Backend, JaxBackend, example_case, on_process_zero
from jaxllm.lm import LM, load
from jaxllm.models.inputs import check_predicts_tokens
from jaxllm.runtime import signals
from jaxllm.runtime.validation import check_dtype
from jaxllm.weights.formats import weight_format
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.quantize import Rules, dequantize

TRANSFORMERS = "transformers"
# The test prompt for both backends: plain prose.
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
    model: str | Path | LM,
    reference: str | Path | LM = TRANSFORMERS,
    *,
    name: str | None = None,
    files: str | Path | None = None,
    dtype: str | None = None,
    quantize: Rules | None = None,
    reference_dtype: str | None = None,
    length: int = 48,
    new_tokens: int = 32,
    tolerance: compare.Tolerance | None = None,
    show_progress: bool | None = None,
) -> compare.Report:
    """Compare a model with a reference: all activations, the cache, and greedily decoded tokens.

    Two prompts run as one batch. For other cases and backends see `parity.compare.verify`.

    Args:
        model: as for `load`, or a loaded model.
        reference: "transformers" with the same weights, or another model.
        name: the model's name in the report.
        files: the directory of a loaded model's weights, which saves writing them for transformers.
        dtype: dtype of a model loaded here; by default "float32".
        reference_dtype: by default `dtype` for transformers, "float32" otherwise.
        length: tokens of the longer prompt.
        new_tokens, tolerance: as for `parity.compare.verify`.

    Returns a report that `holds`, or names the `first` activation that differs;
    `evaluate.parity.compare.to_text` formats it. Raises ConfigError without transformers, and
    what `load` and `parity.compare.verify` raise.
    """
    dtype = None if dtype is None else check_dtype("dtype", dtype)
    if reference_dtype is not None:
        reference_dtype = check_dtype("reference_dtype", reference_dtype)
    if isinstance(model, LM):
        lm, dtype = model, dtype or model.model.precision.activations
    else:
        dtype = dtype or "float32"
        lm = load(model, dtype=dtype, quantize=quantize, show_progress=show_progress)
        files = model
    check_predicts_tokens(lm.config)
    ids = lm.tokenizer.encode(TEXT) if lm.tokenizer else None
    case = example_case(ids, lm.config.vocab_size, length)
    case.check(lm.config, new_tokens)
    backend = JaxBackend(name or f"{files or lm.path} ({dtype})", lm.model, lm.params)
    with _open_backends(files, lm, dtype, reference, reference_dtype) as (other, exact):
        return compare.verify(
            backend,
            other,
            case,
            new_tokens=new_tokens,
            tolerance=tolerance,
            exact=exact,
            show_progress=show_progress,
        )


@contextlib.contextmanager
def _open_backends(
    files: str | Path | None, lm: LM, plain: str, reference: Any, dtype: str | None
) -> Iterator[tuple[Any, Any]]:
    """Yield the reference, and a float32 reference to measure drift from, if there is one."""
    if reference == TRANSFORMERS:
        from jaxllm.evaluate.parity.transformers_backend import TransformersBackend

        dtype = dtype or plain
        with transformers_directory(files, lm, plain) as directory:
            hf, exact = (
                on_process_zero(partial(TransformersBackend.load, directory, d)) if d else None
                for d in (dtype, None if dtype == "float32" else "float32")
            )
            yield hf, exact
    elif isinstance(reference, LM):
        yield JaxBackend(f"{reference.path}", reference.model, reference.params), None
    else:
        yield on_process_zero(partial(_load_other, reference, dtype or "float32")), None


def _load_other(reference: str | Path, dtype: str) -> Backend:
    """Load another checkpoint, on one device."""
    other = load(reference, dtype=dtype)
    return JaxBackend(f"{reference} ({dtype})", other.model, other.params)


@contextlib.contextmanager
def transformers_directory(files: str | Path | None, lm: LM, dtype: str) -> Iterator[Path]:
    """Yield a directory that transformers can load: the checkpoint's own, or a temporary one.

    files: the checkpoint that the weights came from, or None to write lm's weights. Weights in
    formats other than `dtype` are dequantized and written. With several processes, only process 0
    has the files.
    """
    opened = open_checkpoint(files or lm.path)
    rounded = any(weight_format(leaf) != dtype for _, leaf in flatten(lm.params))
    if files is not None and not rounded and opened.file_format == HF_FORMAT:
        yield opened.directory
        return
    if rounded or files is None:
        whole = lm.model.gather(lm.params)
        wide = map_leaves(lambda _, x: x.astype(np.float32), dequantize(whole))
        opened = with_params(opened, wide, opened.precision.without_quantization())
    with (
        tempfile.TemporaryDirectory(prefix="jaxllm-verify-") as name,
        signals.cleanup_on_exit(name),
    ):
        directory = Path(name) / "hf"
        write_hf(directory, opened)
        yield directory
