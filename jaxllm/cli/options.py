"""Options that several commands have, and what is made of them."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.errors import SamplingError

if TYPE_CHECKING:
    from jaxllm.api import LM

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A directory, demo:llama, demo:gpt2, or hf:owner/name."),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; by default the checkpoint's.")
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


def load_model(model: str, dtype: str | None, cache_dtype: str | None) -> "LM":
    from jaxllm.api import load, open_checkpoint
    from jaxllm.weights.precision import Precision

    if cache_dtype is None:
        return load(model, dtype=dtype)
    precision = Precision.uniform(dtype) if dtype else open_checkpoint(model).precision
    return load(model, dtype=dataclasses.replace(precision, cache=cache_dtype))


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
