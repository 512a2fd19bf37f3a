"""`jaxllm convert` and `python -m convert`: one command, in either direction."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import note, waiting
from jaxllm.cli.options import (
    Model,
    PrecisionFile,
    Strict,
    check_folder,
    dtype_named,
    precision_over,
    read_json_option,
)
from jaxllm.errors import CheckpointError, ConfigError

EXAMPLES = """
Examples:

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-bf16 --dtype bfloat16

  jaxllm convert tinyllama-bf16 tinyllama-hf --to-hf

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-mixed --precision formats.json

  jaxllm convert tinyllama-q4_k_m.gguf tinyllama-hf --to-hf --dtype bfloat16

  jaxllm convert tinyllama-int4 tinyllama-gptq --to-hf --keep-quantized gptq

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-q4_k_m.gguf --to-gguf Q4_K_M
"""


def convert(
    model: Model,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            callback=check_folder,
            help="The directory, or the GGUF file, to write.",
        ),
    ],
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
    keep_quantized: Annotated[
        str | None,
        typer.Option(
            "--keep-quantized",
            metavar="FORM",
            help="With --to-hf: integer weights stay so, as gptq or compressed-tensors.",
        ),
    ] = None,
    to_gguf: Annotated[
        str | None,
        typer.Option(
            "--to-gguf",
            metavar="TYPE",
            help="Write a GGUF file for llama.cpp: F32, F16, BF16, Q8_0, Q4_0, Q4_K_M, Q6_K, ...",
        ),
    ] = None,
    strict: Strict = False,
) -> None:
    """Convert a checkpoint, to our form or from it.

    Our own form loads by memory map; --to-hf and --to-gguf write the others.

    Quantized weights stay so in our own form; in Hugging Face's they are dequantized, to float32
    (bf16-packed to bfloat16) unless --dtype says otherwise, or --keep-quantized keeps them. In
    GGUF's, matrices are of the type that is named (Q4_K_M and Q5_K_M: a mixture, as in
    llama-quantize), vectors of F32.
    """
    if target.suffix == ".gguf" and to_gguf is None:
        raise ConfigError(
            f"{target} is the name of a GGUF file: give --to-gguf TYPE (Q8_0, Q4_K_M, F16,"
            " ...), or name a directory"
        )
    forms = {"--to-hf": to_hf, "--to-gguf": to_gguf is not None}
    if to_hf and to_gguf is not None:
        raise ConfigError("--to-hf and --to-gguf are two forms; leave one out")
    for form, asked in forms.items():
        if asked and precision is not None:
            raise ConfigError(f"{form}: that form has no place for --precision; leave one out")
    if keep_quantized is not None and not to_hf:
        raise ConfigError("--keep-quantized is a form of --to-hf; add --to-hf")
    if to_gguf is not None and dtype is not None:
        raise ConfigError("--to-gguf names the type of all weights; leave --dtype out")
    with waiting("starting"):  # JAX is imported
        from jaxllm.checkpoint import claim, dequantized, in_memory, load_params, save
        from jaxllm.convert.engine import write_hf
        from jaxllm.forms import texts_files
        from jaxllm.loading import open_checkpoint
        from jaxllm.weights.formats import DTYPES

    table = None if precision is None else read_json_option("--precision", precision)
    if to_gguf is not None:
        _write_gguf(model, target, to_gguf, strict)
        return
    claim(target)  # before the work, not after it
    opened = quantized = open_checkpoint(model, strict=strict)
    if opened.formats and (to_hf or dtype is not None):
        opened = dequantized(opened)
    if dtype is not None:
        opened = recast(opened, dtype)
    if table is not None:
        chosen = precision_over(opened.precision, table, f"--precision {precision}")
        opened = in_memory(opened, load_params(opened, chosen), chosen)
    with texts_files(opened.directory) as files:
        if to_hf:
            keep = None if keep_quantized is None else (keep_quantized, quantized)
            write_hf(target, opened, files=files, keep=keep)
        else:
            save(target, opened, files=files)
    size = sum(tensor.nbytes for tensor in opened.tensors.values())
    formats = sorted({t.dtype.name for t in opened.tensors.values()} & {*DTYPES})
    named = sorted(set(opened.formats.values())) or formats
    if keep_quantized is not None:
        size, named = (target / "model.safetensors").stat().st_size, [keep_quantized]
    note(
        f"{target}: {opened.config.model_type}, {len(opened.tensors)} tensors,"
        f" {size / 1e6:.1f} MB, {' and '.join(named)}"
        + (", with its tokenizer" if files else ", no tokenizer found")
    )


def _write_gguf(model: str, target: Path, kind: str, strict: bool) -> None:
    """The checkpoint as a GGUF file, tokenizer and chat template too."""
    from jaxllm.convert.gguf.writing import check_absent, write_gguf
    from jaxllm.forms import texts_files
    from jaxllm.loading import open_checkpoint
    from jaxllm.text.chat import template_source
    from jaxllm.text.formats import find_form, read_tree

    check_absent(target)
    opened = open_checkpoint(model, strict=strict)
    with texts_files(opened.directory) as files:
        folder = files[0].parent if files else None
        spoken = folder is not None and find_form(folder) is not None
        tokenizer = read_tree(folder) if folder is not None and spoken else None
        template = template_source(folder) if folder is not None and spoken else None
        replaced = write_gguf(target, opened, kind.upper(), tokenizer=tokenizer, template=template)
    note(
        f"{target}: {opened.config.model_type}, {target.stat().st_size / 1e6:.1f} MB,"
        f" {kind.upper()}"
        + (", with its tokenizer" if tokenizer is not None else ", no tokenizer found")
    )
    for name, count in replaced.items():
        note(f"{count} matrices are {name}, as in llama-quantize: their rows are no whole blocks")


def recast(opened: Any, dtype: str) -> Any:
    """The checkpoint with every tensor in another format, converted when it is read.

    Raises ConfigError for an unknown format; reading raises CheckpointError for NaN, infinity, or
    a number that the format cannot hold.
    """
    import numpy as np

    from jaxllm.weights.files import first_non_finite
    from jaxllm.weights.lazy import LazyTensor
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
