"""`jaxllm upcycle`: a mixture of experts made from a dense model."""

from typing import Annotated

import typer

from jaxllm.cli.console import note, waiting
from jaxllm.cli.options import Dtype, Model, Out, Quantize, load_model

EXAMPLE = "Example: jaxllm upcycle demo:llama mixture --experts 4"


def upcycle(
    model: Model,
    target: Out,
    experts: Annotated[int, typer.Option(min=1, help="Copies of each MLP.")] = 8,
    per_token: Annotated[
        int, typer.Option("--per-token", min=1, help="How many of them a token runs.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the routers.")] = 0,
    dtype: Dtype = None,
    quantize: Quantize = None,
) -> None:
    """Write a mixture of experts made from a model.

    It computes what the model does: every expert is its MLP.

    Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE. Training takes the experts apart:
    jaxllm train full OUT TUNED --router-loss 0.001.
    """
    with waiting("starting"):
        from jaxllm.checkpoint import claim
        from jaxllm.train.upcycle import upcycled

    claim(target)  # before the work, not after it
    made = upcycled(load_model(model, dtype, quantize=quantize), experts, per_token, seed=seed)
    made.save(target)
    note(f"{target}: a {made.config.model_type} of {experts} experts, {per_token} for each token")
