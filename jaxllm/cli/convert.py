"""`jaxllm convert` and `python -m convert`: one command, in either direction."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import note, waiting
from jaxllm.cli.options import PrecisionFile, dtype_named, precision_over, read_json_option
from jaxllm.errors import CheckpointError, ConfigError

EXAMPLES = """
Examples:

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-bf16 --dtype bfloat16

  jaxllm convert tinyllama-bf16 tinyllama-hf --to-hf

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-mixed --precision formats.json
"""


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A Hugging Face directory, or one of ours.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            callback=dtype_named,
            help="float32, bfloat16 or float16, quantized weights too; by default as is.",
        ),
    ] = None,
    precision: PrecisionFile = None,
    to_hf: Annotated[
        bool, typer.Option("--to-hf", help="Write a Hugging Face directory for transformers.")
    ] = False,
) -> None:
    """Convert a checkpoint to jaxllm's own form (loads by memory map), or back with --to-hf.

    Quantized weights stay so in our own form; in Hugging Face's they are dequantized, to float32
    (bf16-packed to bfloat16) unless --dtype says otherwise.
    """
    if to_hf and precision is not None:
        raise ConfigError(
            "--to-hf: Hugging Face's form has no place for --precision; leave one out"
        )
    with waiting("starting"):  # JAX is imported
        from jaxllm.api import open_checkpoint
        from jaxllm.checkpoint import claim, dequantized, in_memory, load_params, save
        from jaxllm.convert.engine import write_hf
        from jaxllm.text.formats import tokenizer_files
        from jaxllm.weights.formats import DTYPES

    table = None if precision is None else read_json_option("--precision", precision)
    claim(target)  # before the work, not after it
    opened = open_checkpoint(source)
    if opened.formats and (to_hf or dtype is not None):
        opened = dequantized(opened)
    if dtype is not None:
        opened = recast(opened, dtype)
    if table is not None:
        chosen = precision_over(opened.precision, table, f"--precision {precision}")
        opened = in_memory(opened, load_params(opened, chosen), chosen)
    files = tokenizer_files(opened.directory)
    (write_hf if to_hf else save)(target, opened, files=files)
    size = sum(tensor.nbytes for tensor in opened.tensors.values())
    formats = sorted({t.dtype.name for t in opened.tensors.values()} & {*DTYPES})
    named = sorted(set(opened.formats.values())) or formats
    note(
        f"{target}: {opened.config.model_type}, {len(opened.tensors)} tensors,"
        f" {size / 1e6:.1f} MB, {' and '.join(named)}"
        + (", with its tokenizer" if files else ", no tokenizer found")
    )


def recast(opened: Any, dtype: str) -> Any:
    """The checkpoint with every tensor in another format, converted when it is read.

    Raises ConfigError for an unknown format; reading raises CheckpointError for NaN, infinity, or
    a number that the format cannot hold.
    """
    import numpy as np

    from jaxllm.weights.files import LazyTensor, first_non_finite
    from jaxllm.weights.leaves.arrays import DTYPES
    from jaxllm.weights.precision import Precision

    precision = Precision.uniform(dtype)

    def checked(path: str, tensor: LazyTensor) -> LazyTensor:
        def change(part: np.ndarray, first: int) -> np.ndarray:
            with np.errstate(over="ignore"):
                array = part.astype(DTYPES[dtype], copy=False)
            if (bad := first_non_finite(array)) is not None:
                raise CheckpointError(
                    f"{path}: {part.reshape(-1)[bad]} at index {first + bad}"
                    f" is not a finite {dtype}"
                )
            return array

        return tensor.changed(np.dtype(DTYPES[dtype]), change)

    tensors = {path: checked(path, tensor) for path, tensor in opened.tensors.items()}
    return dataclasses.replace(opened, tensors=tensors, precision=precision)
