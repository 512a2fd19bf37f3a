"""`jaxllm infini`: a model with a compressive memory made from a dense one."""

from typing import Annotated

import typer

from jaxllm.cli.console import note, waiting
from jaxllm.cli.options import Dtype, Model, Out, Quantize, load_model

EXAMPLE = "Example: jaxllm infini demo:llama remembering --segment 128 --update delta_once"


def infini(
    model: Model,
    target: Out,
    segment: Annotated[
        int, typer.Option(min=1, help="Tokens that are attended to as they are.")
    ] = 128,
    update: Annotated[
        str,
        typer.Option(
            help="How the memory is written: linear, delta, or delta_once, by which what is written"
            " twice is not read halved."
        ),
    ] = "linear",
    gate: Annotated[
        float, typer.Option(help="Where gates begin: the memory's share is sigmoid of it.")
    ] = -4.0,
    dtype: Dtype = None,
    quantize: Quantize = None,
) -> None:
    """Write a model with Infini-attention.

    It has segments, and a memory of all that came before them.

    In its first segment it computes what the model does. What its memory is worth it learns by
    training on texts of several segments: jaxllm train full OUT TUNED --no-pack --length 512.
    """
    with waiting("starting"):
        from jaxllm.checkpoint import claim
        from jaxllm.train.infini import as_update, with_memory

    rule = as_update(update)
    claim(target)  # before the work, not after it
    made = with_memory(load_model(model, dtype, quantize=quantize), segment, update=rule, gate=gate)
    made.save(target)
    note(f"{target}: segments of {segment} tokens, and a memory of what was before ({update})")
