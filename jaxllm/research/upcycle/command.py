"""`jaxllm upcycle`: convert a dense model to a mixture of experts."""

from typing import Annotated

import typer

from jaxllm.cli.console import log, spinner
from jaxllm.cli.options import Dtype, Model, NewModel, Quantize, load_model

EXAMPLE = "Example: jaxllm upcycle demo:llama mixture --experts 4"


def upcycle(
    model: Model,
    target: NewModel,
    experts: Annotated[int, typer.Option(min=1)] = 8,
    per_token: Annotated[int, typer.Option("--per-token", min=1)] = 2,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Dtype = None,
    quantize: Quantize = None,
) -> None:
    """Convert a model to a mixture of experts.

    Every expert is a copy of the MLP, so the outputs are identical.

    Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE. To specialize the experts, train the
    result: jaxllm train full OUT TUNED --router-loss 0.001.

    Args:
        experts: Number of experts: copies of each MLP.
        per_token: Number of experts per token.
        seed: Random seed of the routers.
    """
    with spinner("starting"):
        from jaxllm.research.upcycle.model import upcycle_model

    dense = load_model(model, dtype, quantize=quantize)
    mixture = upcycle_model(dense, experts, per_token, seed=seed)
    mixture.save(target)
    log(f"{target}: {mixture.config.model_type} with {experts} experts, {per_token} per token")
