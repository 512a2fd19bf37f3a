"""`jaxllm merge`: an adapter into the weights, and what that costs."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from jaxllm.cli.console import note, waiting
from jaxllm.cli.corpus import Text, bos_id, described, make_loader, read_corpus
from jaxllm.cli.options import Dtype, Exact, Mesh, Model, Out, Quantize, load_model
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.evaluate.likelihood.data import Loader

EXAMPLE = "Example: jaxllm merge demo:llama merged --adapter pirate"
ROWS, WIDTH = 8, 128  # of text that the model says by itself, to measure on


def merge(
    model: Model,
    target: Out,
    adapter: Annotated[
        str,
        typer.Option("--adapter", metavar="DIR", help="An adapter in PEFT's form."),
    ],
    format: Annotated[
        str,
        typer.Option(
            help="Of the matrices that have an adapter: float32, or bfloat16, int8, ... which"
            " round the sum."
        ),
    ] = "float32",
    dtype: Dtype = None,
    quantize: Quantize = None,
    mesh: Mesh = None,
    exact: Exact = False,
    text: Text = None,
) -> None:
    """Write a model with an adapter merged into it.

    A line says how far it is from the two.

    The KL divergence is that of the merged model from the model with the adapter beside it, over
    --text, or else over what the latter says by itself. The rest keeps its format. A mesh is for
    these passes: the sum itself is made on one device.
    """
    with waiting("starting"):  # JAX is imported
        from jaxllm.checkpoint import claim
        from jaxllm.weights.formats import parse

    parse(format)
    claim(target)  # before the work, not after it
    corpus = None if text is None else read_corpus(text, None, False)
    lm = load_model(model, dtype, quantize=quantize, adapters=[adapter], mesh=mesh, exact=exact)
    from jaxllm.evaluate.likelihood.divergence import divergence
    from jaxllm.train.jobs import alone, spread_as

    made = merged_model(alone(lm), format)
    there = spread_as(made, lm)
    if corpus is None:
        loader, measured = _said(lm), f"{ROWS} texts that it says by itself"
    else:
        loader, facts = make_loader(lm, corpus, window=None)
        measured = described(facts)
    both = divergence(lm.model, lm.params, there.model, there.params, loader)
    made.save(target)
    note(
        f"{target}: {lm.adapter} merged, in {format}. KL divergence from the model with the adapter"
        f" beside it: {both.kl.mean:.2e} nats a token, at most {both.kl_max:.2e}; the same token"
        f" first in {100 * both.same_top.mean:.2f}% ({measured})"
    )


def merged_model(lm: "LM", format: str) -> "LM":
    """The model with the adapter that it takes in its weights, in a format of `weights.formats`."""
    from jaxllm import models
    from jaxllm.adapters import merged
    from jaxllm.weights.leaves.adapted import alone
    from jaxllm.weights.precision import exactly

    config, params = merged(lm.config, alone(lm.params), format)
    model = models.build(config, exactly(params, lm.model.precision))
    return dataclasses.replace(
        lm, config=config, model=model, params=params, adapters=(), adapter=None
    )


def _said(lm: "LM") -> "Loader":
    from jaxllm.compress.data.calibration import from_samples
    from jaxllm.evaluate.likelihood.data import loader

    width = min(WIDTH, lm.config.context_length)
    if width < 2:
        raise ConfigError("the model's context is too short to measure on")
    rows = from_samples(
        lm.model, lm.params, bos_id=bos_id(lm), rows=ROWS, width=width, seed=0, bos=True
    )
    return loader([row.tolist() for row in rows.token_NT], window=width, batch=ROWS)
