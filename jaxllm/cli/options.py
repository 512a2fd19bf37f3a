"""Options that several commands have, and what is made of them."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.compiled import keep_compiled
from jaxllm.errors import ConfigError, SamplingError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.weights.precision import Precision

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A directory, demo:llama, demo:gpt2, or hf:owner/name."),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; by default the checkpoint's.")
]
Quantize = Annotated[
    str | None,
    typer.Option(help="Weights: int8, int4, int4-g32, bf16-packed, ... as in jaxllm quantize."),
]
PrecisionFile = Annotated[
    Path | None,
    typer.Option("--precision", help="A JSON table of formats by module path; see the README."),
]
NewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", help="Default: 256, or what fits.")
]
CacheDtype = Annotated[
    str | None,
    typer.Option(help="Of keys and values: as --dtype, or int8; by default as the activations."),
]
Temperature = Annotated[
    float | None, typer.Option(help="Sample at this temperature; 0 and by default: greedy.")
]
TopK = Annotated[int | None, typer.Option(help="Sample among the k best tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the best tokens of mass p.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given more than once.")
]
Overflow = Annotated[
    str | None, typer.Option(help="When the context is full: refuse (default), slide or sinks.")
]
More = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Any other option of LM.generate, its value as JSON: -o min_p=0.05 -o num_beams=4",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the random numbers: the same seed, the same text.")]


def load_model(
    model: str,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    *,
    quantize: str | None = None,
    precision: Path | None = None,
    int8_inputs: bool = False,
    reuse_compiled: bool = True,
) -> "LM":
    """The model in the formats that the options name; what is not named is the checkpoint's.

    reuse_compiled: look first for programs that an earlier process compiled.
    """
    from jaxllm.api import load, open_checkpoint

    if reuse_compiled:
        keep_compiled()
    chosen = open_checkpoint(model).precision
    if dtype is not None:
        chosen = chosen.in_dtype(dtype)
    if precision is not None:
        chosen = read_precision(precision, chosen)
    if cache_dtype is not None:
        chosen = dataclasses.replace(chosen, cache=cache_dtype)
    if int8_inputs:
        chosen = dataclasses.replace(chosen, int8_inputs=True)
    return load(model, dtype=chosen, quantize=quantize)


def read_precision(file: Path, base: "Precision") -> "Precision":
    """A JSON file over `base`: an object of `Precision`'s fields, or its overrides alone.

    Overrides are rows `[regex over module paths, {"weights": ..., "activations": ..., "output":
    ...}]`, the first that matches wins. Raises ConfigError for what is neither.
    """
    from jaxllm.files import parse_json, read_text
    from jaxllm.weights.precision import Precision

    data = parse_json(read_text(file), f"--precision {file}", ConfigError)
    if isinstance(data, list):
        data = {"overrides": data}
    if not isinstance(data, dict):
        raise ConfigError(f"--precision {file}: an object or a list of rows, got {data!r:.40}")
    return Precision.from_dict({**dataclasses.asdict(base), **data}, f"--precision {file}")


def read_options(more: list[str] | None, **named: Any) -> dict[str, Any]:
    """Options of `LM.generate`: those given. Whoever names a top-k or top-p wants to sample."""
    options = {name: value for name, value in named.items() if value not in (None, [])}
    for item in more or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise SamplingError(f"--option takes NAME=VALUE, got {item!r}")
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.replace("-", "_")] = value  # a text without its quotes
    if options.keys() & {"top_k", "top_p"}:
        options.setdefault("do_sample", True)
    return options
