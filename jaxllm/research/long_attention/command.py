"""`jaxllm infini`: convert a dense model to one with compressive memory."""

from typing import Annotated

import typer

from jaxllm.cli.console import log, spinner
from jaxllm.cli.options import Dtype, Model, NewModel, Quantize, load_model

EXAMPLE = "Example: jaxllm infini demo:llama remembering --segment 128 --update delta_once"


def infini(
    model: Model,
    target: NewModel,
    segment: Annotated[int, typer.Option(min=1)] = 128,
    update: str = "linear",
    gate: float = -4.0,
    dtype: Dtype = None,
    quantize: Quantize = None,
) -> None:
    """Convert a model to Infini-attention.

    It attends within a segment, and to a memory of all earlier segments.

    Its first segment is identical to the original model. To use the memory, train it on texts of
    several segments: jaxllm train full OUT TUNED --no-pack --length 512.

    Args:
        segment: Segment length in tokens, with full attention within it.
        update: Memory update: linear, delta, or delta_once (content that is written twice is not
            read at half strength).
        gate: Initial gate logit; sigmoid of it is the share of the memory.
    """
    with spinner("starting"):
        from jaxllm.research.long_attention.conversion import check_update, with_memory

    rule = check_update(update)
    lm = load_model(model, dtype, quantize=quantize)
    converted = with_memory(lm, segment, update=rule, gate=gate)
    converted.save(target)
    log(f"{target}: segments of {segment} tokens, with a memory of earlier ones ({update})")
