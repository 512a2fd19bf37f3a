"""`jaxllm convert` and `python -m convert`: convert checkpoints in both directions."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import log, spinner
from jaxllm.cli.options import (
    Model,
    PrecisionFile,
    Strict,
    check_choice,
    check_exclusive,
    check_folder,
    override_precision,
    parse_dtype,
    read_json_option,
)
from jaxllm.errors import CheckpointError, ConfigError

EXAMPLE = """
Examples:

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-bf16 --dtype bfloat16

  jaxllm convert tinyllama-bf16 tinyllama-hf --to-hf

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-mixed --precision formats.json

  jaxllm convert tinyllama-q4_k_m.gguf tinyllama-hf --to-hf --dtype bfloat16

  jaxllm convert tinyllama-int4 tinyllama-gptq --to-hf --keep-quantized gptq

  jaxllm convert ~/models/TinyLlama-1.1B tinyllama-q4_k_m.gguf --to-gguf Q4_K_M
"""

TOKENIZER = {True: "with its tokenizer", False: "no tokenizer found"}


def convert(
    model: Model,
    target: Annotated[Path, typer.Argument(metavar="OUT", callback=check_folder)],
    dtype: Annotated[str | None, typer.Option(callback=parse_dtype)] = None,
    precision: PrecisionFile = None,
    to_hf: bool = False,
    keep_quantized: Annotated[str | None, typer.Option("--keep-quantized", metavar="FORM")] = None,
    to_gguf: Annotated[str | None, typer.Option("--to-gguf", metavar="TYPE")] = None,
    strict: Strict = False,
) -> None:
    """Convert a checkpoint to or from jaxllm's format.

    jaxllm's format is memory-mapped on load; --to-hf and --to-gguf write the others.

    Quantized weights stay quantized in jaxllm's format. --to-hf dequantizes them to --dtype
    [default: float32, or bfloat16 for bf16-packed], unless --keep-quantized is given. --to-gguf
    stores matrices in the given type (for Q4_K_M and Q5_K_M a mixture, as llama-quantize does) and
    vectors in F32.

    Args:
        target: Directory or GGUF file to write.
        dtype: Dtype of all weights, also quantized ones: float32, bfloat16 or float16 [default:
            unchanged].
        to_hf: Write a Hugging Face checkpoint for transformers.
        keep_quantized: With --to-hf: format in which integer weights stay quantized, gptq or
            compressed-tensors.
        to_gguf: Type of a GGUF file to write for llama.cpp: F32, F16, BF16, Q8_0, Q4_0, Q4_K_M,
            Q6_K, ...
    """
    if target.suffix == ".gguf" and to_gguf is None:
        raise ConfigError(
            f"{target} names a GGUF file: give --to-gguf TYPE (Q8_0, Q4_K_M, F16, ...), or name a"
            " directory"
        )
    check_exclusive({"--to-hf": to_hf, "--to-gguf": to_gguf, "--precision": precision})
    if keep_quantized is not None and not to_hf:
        raise ConfigError("--keep-quantized requires --to-hf: add it")
    if to_gguf is not None and dtype is not None:
        raise ConfigError("--to-gguf sets the type of all weights: leave out --dtype")
    with spinner("starting"):  # JAX is imported
        from jaxllm.checkpoints import native
        from jaxllm.convert.hf import write_hf
        from jaxllm.convert.registry import open_checkpoint, open_tokenizer_files
        from jaxllm.weights.formats import DTYPES

    table = None if precision is None else read_json_option("--precision", precision)
    if to_gguf is not None:
        return _write_gguf(model, target, to_gguf, strict)
    native.check_output_directory(target)  # before the work, not after it
    opened = quantized = open_checkpoint(model, strict=strict)
    if opened.formats and (to_hf or dtype is not None):
        opened = native.dequantize_checkpoint(opened)
    if dtype is not None:
        opened = cast_checkpoint(opened, dtype)
    if table is not None:
        chosen = override_precision(opened.precision, table, f"--precision {precision}")
        opened = native.with_params(opened, native.load_params(opened, chosen), chosen)
    with open_tokenizer_files(opened.directory) as files:
        if to_hf:
            keep = None if keep_quantized is None else (keep_quantized, quantized)
            write_hf(target, opened, files=files, keep=keep)
        else:
            native.save(target, opened, files=files)
    size = sum(tensor.nbytes for tensor in opened.tensors.values())
    formats = sorted({t.dtype.name for t in opened.tensors.values()} & {*DTYPES})
    named = sorted(set(opened.formats.values())) or formats
    if keep_quantized is not None:
        size, named = (target / "model.safetensors").stat().st_size, [keep_quantized]
    what = f"{len(opened.tensors)} tensors, {size / 1e6:.1f} MB, {' and '.join(named)}"
    log(f"{target}: {opened.config.model_type}, {what}, {TOKENIZER[bool(files)]}")


def _write_gguf(model: str, target: Path, kind: str, strict: bool) -> None:
    """Write the checkpoint with its tokenizer and chat template as a GGUF file."""
    from jaxllm.convert.gguf.tensor_types import KINDS
    from jaxllm.convert.gguf.writer import check_absent, write_gguf
    from jaxllm.convert.registry import open_checkpoint, open_tokenizer_files
    from jaxllm.text.chat import read_templates
    from jaxllm.text.formats import find_tokenizer_format, read_tree

    check_absent(target)
    kind = kind.upper() if kind.upper() in KINDS else kind
    check_choice("--to-gguf", kind, KINDS)
    opened = open_checkpoint(model, strict=strict)
    with open_tokenizer_files(opened.directory) as files:
        folder = files[0].parent if files else None
        tokenizer, templates = None, dict[str, str]()
        if folder is not None and find_tokenizer_format(folder) is not None:
            tokenizer, templates = read_tree(folder), read_templates(folder)
        replaced = write_gguf(target, opened, kind, tokenizer=tokenizer, templates=templates)
    what = f"{target.stat().st_size / 1e6:.1f} MB, {kind}"
    log(f"{target}: {opened.config.model_type}, {what}, {TOKENIZER[tokenizer is not None]}")
    for name, count in replaced.items():
        log(f"{count} matrices are {name}, as in llama-quantize: their rows do not fill blocks")


def cast_checkpoint(opened: Any, dtype: str) -> Any:
    """Return the checkpoint with every tensor in another dtype, cast lazily when it is read.

    Raises ConfigError for an unknown dtype; reading raises CheckpointError for NaN, infinity, or
    a number that the dtype cannot represent.
    """
    import numpy as np

    from jaxllm.weights.lazy import LazyTensor
    from jaxllm.weights.precision import Precision
    from jaxllm.weights.safetensors import first_non_finite
    from jaxllm.weights.types.arrays import DTYPES

    precision = Precision.uniform(dtype)

    def cast_tensor(path: str, tensor: LazyTensor) -> LazyTensor:
        def cast_part(part: np.ndarray, first: int) -> np.ndarray:
            with np.errstate(over="ignore"):
                array = part.astype(DTYPES[dtype], copy=False)
            if (bad := first_non_finite(array)) is not None:
                raise CheckpointError(
                    f"{path}: {part.reshape(-1)[bad]} at index {first + bad}"
                    f" is not a finite {dtype}"
                )
            return array

        return tensor.map_blocks(np.dtype(DTYPES[dtype]), cast_part)

    tensors = {path: cast_tensor(path, tensor) for path, tensor in opened.tensors.items()}
    return dataclasses.replace(opened, tensors=tensors, precision=precision)
