"""`python -m convert` and `jaxllm convert`: one command, in either direction."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

EXAMPLES = """
Examples:

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-bf16 --dtype bfloat16

  jaxllm convert tinyllama-bf16 tinyllama-hf --to-hf
"""


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A Hugging Face directory, or one of ours.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default as the source has it."),
    ] = None,
    to_hf: Annotated[
        bool, typer.Option("--to-hf", help="Write a Hugging Face directory for transformers.")
    ] = False,
) -> None:
    """Convert a checkpoint to jaxllm's own form (loads by memory map), or back with --to-hf."""
    from rich.console import Console

    from convert.engine import write_hf
    from jaxllm.api import open_checkpoint
    from jaxllm.checkpoint import save
    from jaxllm.text.tokenizer import TOKENIZER_FILES

    opened = open_checkpoint(source)
    if dtype is not None:
        opened = recast(opened, dtype)
    files = [path for name in TOKENIZER_FILES if (path := opened.directory / name).is_file()]
    (write_hf if to_hf else save)(target, opened, files=files)
    size = sum(tensor.nbytes for tensor in opened.tensors.values())
    Console(stderr=True, soft_wrap=True).print(
        f"{target}: {opened.config.model_type}, {len(opened.tensors)} tensors,"
        f" {size / 1e6:.1f} MB, {opened.precision.weights}"
        + (", with its tokenizer" if files else ", no tokenizer found"),
        highlight=False,
    )


def recast(opened: Any, dtype: str) -> Any:
    """The checkpoint with every tensor in another format, converted when it is read.

    Raises ConfigError for an unknown format; reading raises CheckpointError for NaN, infinity, or
    a number that the format cannot hold.
    """
    import numpy as np

    from jaxllm.errors import CheckpointError
    from jaxllm.weights.files import LazyTensor, first_non_finite
    from jaxllm.weights.formats import DTYPES
    from jaxllm.weights.precision import Precision

    precision = Precision.uniform(dtype)

    def checked(path: str, tensor: LazyTensor) -> LazyTensor:
        def read() -> np.ndarray:
            with np.errstate(over="ignore"):
                array = tensor.astype(np.dtype(DTYPES[dtype])).read()
            if (bad := first_non_finite(array)) is not None:
                raise CheckpointError(
                    f"{path}: {tensor.read().reshape(-1)[bad]} at index {bad}"
                    f" is not a finite {dtype}"
                )
            return array

        return LazyTensor(np.dtype(DTYPES[dtype]), tensor.shape, read)

    tensors = {path: checked(path, tensor) for path, tensor in opened.tensors.items()}
    return dataclasses.replace(opened, tensors=tensors, precision=precision)
