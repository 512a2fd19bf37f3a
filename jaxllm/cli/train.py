"""`jaxllm train`: fine-tuning, adapters, quantization-aware training, distillation."""

from typing import Annotated

import typer

from jaxllm.cli.console import waiting
from jaxllm.cli.options import load_model
from jaxllm.cli.training import Options, Target, TrainedModel, check, trained, with_options

EXAMPLE_FULL = "Example: jaxllm train full demo:llama tuned --data story.txt --rate 3e-4"


@with_options
def full(
    model: TrainedModel,
    target: Target,
    options: Options,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Train what this regex names alone; may be given more than once."),
    ] = None,
    keep_zeros: Annotated[
        bool, typer.Option("--keep-zeros", help="What is zero (pruned) stays zero.")
    ] = False,
) -> None:
    """Train all weights of a model, or some, on texts. The result is a model of its own.

    The state is kept in OUT.parts on the way: a run that was interrupted goes on from it, bit for
    bit, with the same command.
    """
    with waiting("starting"):
        from jaxllm.train import jobs
        from jaxllm.train.trained import ALL

        check(target, options)
    lm = load_model(model, "float32")
    rules = tuple((regex, True) for regex in only) if only else ALL
    job = jobs.full(lm, options.dtype, rules=rules)
    trained(job, target, options, 1e-4, {"title": f"full fine-tuning of {model}"})


# Name: the function that runs, and the example below its --help.
METHODS = {"full": (full, EXAMPLE_FULL)}

app = typer.Typer(
    help="Train a model: all of it, adapters, for integers, or after a teacher.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
for name, (function, epilog) in METHODS.items():
    app.command(name, epilog=epilog)(function)
