"""`jaxllm merge`: merge an adapter into the weights and measure the difference."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from jaxllm.cli.console import log, spinner
from jaxllm.cli.eval_data import Text, bos_id, describe_text, make_loader, read_corpus
from jaxllm.cli.options import Dtype, Exact, Mesh, Model, NewModel, Quantize, load_model
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.evaluate.likelihood.data import Loader
    from jaxllm.lm import LM

EXAMPLE = "Example: jaxllm merge demo:llama merged --adapter pirate"
ROWS, WIDTH = 8, 128  # of the texts sampled from the model for the measurement


def merge(
    model: Model,
    target: NewModel,
    adapter: Annotated[str, typer.Option("--adapter", metavar="DIR")],
    format: str = "float32",
    dtype: Dtype = None,
    quantize: Quantize = None,
    mesh: Mesh = None,
    exact: Exact = False,
    text: Text = None,
) -> None:
    """Write a model with an adapter merged into it.

    Prints the KL divergence of the merged model from the model with the adapter.

    It is measured on --text, or else on texts sampled from the model with the adapter. Matrices
    without an adapter keep their format. --mesh applies to the measurement only: the merge runs on
    one device.

    Args:
        adapter: Adapter directory in PEFT's format.
        format: Format of the merged matrices: float32, or bfloat16, int8, ... which round the sum.
    """
    with spinner("starting"):  # JAX is imported
        from jaxllm.weights.formats import parse_format

    parse_format(format)
    corpus = None if text is None else read_corpus(text, None, False)
    lm = load_model(model, dtype, quantize=quantize, adapters=[adapter], mesh=mesh, exact=exact)
    from jaxllm.evaluate.likelihood.divergence import divergence
    from jaxllm.lm import shard_like, to_one_device

    made = merge_into_weights(to_one_device(lm), format)
    sharded = shard_like(made, lm)
    if corpus is None:
        loader, measured = _sample_loader(lm), f"{ROWS} texts sampled from it"
    else:
        loader, facts = make_loader(lm, corpus, window=None)
        measured = describe_text(facts)
    both = divergence(lm.model, lm.params, sharded.model, sharded.params, loader)
    made.save(target)
    log(
        f"{target}: {lm.adapter} merged, in {format}. KL divergence from the model with the"
        f" adapter: {both.kl.mean:.2e} nats per token, at most {both.kl_max:.2e}; same top-1 token"
        f" in {100 * both.same_top.mean:.2f}% ({measured})"
    )


def merge_into_weights(lm: "LM", format: str) -> "LM":
    """Return the model with its adapter merged into the weights, in a given weight format."""
    from jaxllm import models
    from jaxllm.adapters import merge_adapter
    from jaxllm.weights.precision import match_precision
    from jaxllm.weights.types.lora import keep_chosen_adapter

    config, params = merge_adapter(lm.config, keep_chosen_adapter(lm.params), format)
    model = models.build(config, match_precision(params, lm.model.precision))
    return dataclasses.replace(
        lm, config=config, model=model, params=params, adapters=(), adapter=None
    )


def _sample_loader(lm: "LM") -> "Loader":
    from jaxllm.compress.calibration import from_samples
    from jaxllm.evaluate.likelihood.data import loader

    width = min(WIDTH, lm.config.context_length)
    if width < 2:
        raise ConfigError("the model's context is too short to measure: expected at least 2 tokens")
    rows = from_samples(
        lm.model, lm.params, bos_id=bos_id(lm), rows=ROWS, width=width, seed=0, bos=True
    )
    return loader([row.tolist() for row in rows.token_NT], window=width, batch=ROWS)
