"""`jaxllm quantize`: write a checkpoint with quantized weights."""

from pathlib import Path
from typing import Annotated

import typer

from jaxllm.cli.console import log, spinner
from jaxllm.cli.options import Dtype, Model, NewModel, read_json_option
from jaxllm.errors import ConfigError

EXAMPLE = """
Examples:

  jaxllm quantize ~/models/TinyLlama-1.1B tinyllama-int4 --bits 4 --group 64

  jaxllm quantize ~/models/TinyLlama-1.1B tinyllama-packed --format bf16-packed
"""


def quantize(
    model: Model,
    target: NewModel,
    bits: int = 8,
    group: int | None = None,
    zero_point: bool = False,
    half_scales: bool = False,
    name: Annotated[str | None, typer.Option("--format")] = None,
    rules: Path | None = None,
    dtype: Dtype = None,
) -> None:
    """Write a checkpoint with quantized matrices.

    Writes jaxllm's format; norms and biases are not quantized.

    Args:
        bits: Bits per weight: 8, 4, 3 or 2.
        group: Group size, in columns per scale: 32, 64 or 128 [default: the whole row for 8 bits,
            else 64].
        zero_point: Asymmetric quantization (with zero points).
        half_scales: Scales in float16 instead of float32.
        name: Format to use instead of the above: int4 (a mixture), q6_k, bf16-packed, ...
        rules: JSON file to use instead: a list of [regex over parameter paths, format or null].
    """
    with spinner("starting"):  # JAX is imported
        from jaxllm.convert.registry import open_checkpoint
        from jaxllm.lm import load
        from jaxllm.weights.formats import log_slow_formats
        from jaxllm.weights.quantize import resolve_rules

    grouped = f"-g{group}" if group else "" if bits == 8 else "-g64"
    named = f"int{bits}{grouped}{'-zp' * zero_point}{'-f16' * half_scales}"
    chosen = read_rules(rules) if rules else name or named
    rows = resolve_rules(chosen)
    log_slow_formats([format for _, format in rows], log)
    load(model, dtype=dtype, quantize=chosen).save(target)
    opened, result = open_checkpoint(model), open_checkpoint(target)
    before, after = (sum(t.nbytes for t in c.tensors.values()) for c in (opened, result))
    formats = sorted(set(result.formats.values()))
    sizes = f"{before / 1e6:.1f} MB to {after / 1e6:.1f} MB"
    log(f"{target}: {len(result.formats)} matrices in {', '.join(formats)}; {sizes}")


def read_rules(file: Path) -> list[tuple[str, str | None]]:
    """Read rules from a JSON file: `[[regex over whole parameter paths, format or null], ...]`.

    Raises ConfigError if the file has any other form.
    """
    from jaxllm.runtime.schema import as_schema

    rows = read_json_option("--rules", file)
    return as_schema(rows, list[tuple[str, str | None]], f"--rules {file}", ConfigError)
