"""`jaxllm train`: fine-tuning, adapters, quantization-aware training, distillation."""

from pathlib import Path
from typing import Annotated

import typer

from jaxllm.cli.console import waiting
from jaxllm.cli.options import load_model
from jaxllm.cli.training import Options, Target, TrainedModel, check, trained, with_options

EXAMPLE_FULL = "Example: jaxllm train full demo:llama tuned --data story.txt --rate 3e-4"
EXAMPLE_LORA = "Example: jaxllm train lora demo:llama style --data story.txt --rank 8"


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


@with_options
def lora(
    model: TrainedModel,
    target: Target,
    options: Options,
    rank: Annotated[int, typer.Option(min=1, help="Of the two matrices.")] = 8,
    alpha: Annotated[
        float | None, typer.Option(help="The sum's scale is alpha / rank; by default twice it.")
    ] = None,
    dropout: Annotated[float, typer.Option(help="Of the inputs, while training.")] = 0.0,
    module: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="The end of a module's name, as q_proj; may be given more than once. By default"
            " every linear but the head.",
        ),
    ] = None,
    dora: Annotated[bool, typer.Option("--dora", help="Lengths of rows of their own.")] = False,
    rslora: Annotated[bool, typer.Option("--rslora", help="Scale by alpha / sqrt(rank).")] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="Go on with this one; rank and the like are then its own.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="Weights of the model below: nf4 (QLoRA), int4, ..., as for quantize."),
    ] = None,
) -> None:
    """Train a LoRA adapter beside a model's weights. The result is a directory as PEFT has it.

    generate --adapter OUT uses it. The state is kept in OUT.parts on the way.
    """
    with waiting("starting"):
        from jaxllm.adapters import LoraConfig, read_adapter
        from jaxllm.train import jobs

        check(target, options, "adapter_config.json")
    config = LoraConfig(
        r=rank,
        lora_alpha=2.0 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=tuple(module) if module else "all-linear",
        use_dora=dora,
        use_rslora=rslora,
    )
    lm = load_model(model, options.dtype, quantize=quantize)
    start = None if adapter is None else read_adapter(adapter, lm.config, lm.params)
    job = jobs.lora(lm, start.config if start else config, seed=options.seed, start=start)
    trained(job, target, options, 1e-3, {"title": f"an adapter of {model}"})


# Name: the function that runs, and the example below its --help.
METHODS = {"full": (full, EXAMPLE_FULL), "lora": (lora, EXAMPLE_LORA)}

app = typer.Typer(
    help="Train a model: all of it, adapters, for integers, or after a teacher.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
for name, (function, epilog) in METHODS.items():
    app.command(name, epilog=epilog)(function)
