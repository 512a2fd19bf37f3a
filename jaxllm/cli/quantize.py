"""`jaxllm quantize`: a checkpoint with smaller weights."""

from pathlib import Path
from typing import Annotated

import typer

from jaxllm.cli.console import note, waiting
from jaxllm.cli.options import Dtype, Model, Out, read_json_option
from jaxllm.errors import ConfigError

EXAMPLE = """
Examples:

  jaxllm quantize ~/models/TinyLlama-1.1B tinyllama-int4 --bits 4 --group 64

  jaxllm quantize ~/models/TinyLlama-1.1B tinyllama-packed --format bf16-packed
"""


def quantize(
    model: Model,
    target: Out,
    bits: Annotated[int, typer.Option(help="8, 4, 3 or 2.")] = 8,
    group: Annotated[
        int | None,
        typer.Option(
            help="Columns that share a scale: 32, 64 or 128; by default a row of 8 bits, else 64."
        ),
    ] = None,
    zero_point: Annotated[
        bool, typer.Option("--zero-point", help="From least to largest, not symmetric.")
    ] = False,
    half_scales: Annotated[
        bool, typer.Option("--half-scales", help="float16 scales in place of float32.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--format", help="In place of the above: bf16-packed, int4-g32, ..."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="A JSON list of [regex over parameter paths, format or null] in place."),
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Write a checkpoint with quantized matrices.

    It is in jaxllm's own form; norms and biases stay.
    """
    with waiting("starting"):  # JAX is imported
        from jaxllm.checkpoint import claim
        from jaxllm.loading import load, open_checkpoint
        from jaxllm.weights.quantize import rules_of

    wanted = read_rules(rules) if rules else name or _name(bits, group, zero_point, half_scales)
    rules_of(wanted)
    claim(target)  # before the work, not after it
    load(model, dtype=dtype, quantize=wanted).save(target)
    opened, made = open_checkpoint(model), open_checkpoint(target)
    before, after = (sum(t.nbytes for t in c.tensors.values()) for c in (opened, made))
    note(
        f"{target}: {len(made.formats)} matrices in"
        f" {', '.join(sorted(set(made.formats.values())))}; {before / 1e6:.1f} MB to"
        f" {after / 1e6:.1f} MB"
    )


def _name(bits: int, group: int | None, zero_point: bool, half_scales: bool) -> str:
    grouped = f"-g{group}" if group else ("" if bits == 8 else "-g64")
    return f"int{bits}{grouped}{'-zp' if zero_point else ''}{'-f16' if half_scales else ''}"


def read_rules(file: Path) -> list[tuple[str, str | None]]:
    """The rules of a JSON file: `[[regex over whole parameter paths, format or null], ...]`.

    Raises ConfigError for a file that is none.
    """
    from jaxllm.files import as_schema

    rows = read_json_option("--rules", file)
    return as_schema(rows, list[tuple[str, str | None]], f"--rules {file}", ConfigError)
