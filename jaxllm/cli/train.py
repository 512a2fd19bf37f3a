"""`jaxllm train`: fine-tuning, adapters, quantization-aware training, distillation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxllm.cli.command import Command
from jaxllm.cli.console import waiting
from jaxllm.cli.shared import with_options
from jaxllm.cli.training import (
    Options,
    Target,
    TrainedModel,
    check,
    loaded,
    trained,
)
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.train.data.examples import Examples
    from jaxllm.train.data.rows import Data
    from jaxllm.train.jobs import Job

EXAMPLE_FULL = (
    "Example: jaxllm train full demo:llama tuned --data story.txt --rate 3e-4; on eight devices,"
    " with --mesh data=2,stage=2,tensor=2 --fsdp"
)
EXAMPLE_DISTILL = "Example: jaxllm train distill demo:llama student --data story.txt --layers 3"
EXAMPLE_LORA = "Example: jaxllm train lora demo:llama style --data story.txt --rank 8"
EXAMPLE_PROMPT = (
    "Example: jaxllm train prompt demo:llama a.cache --data story.txt --begin 'Once upon'"
)
RouterLoss = Annotated[
    float,
    typer.Option(
        help="Of mixtures of experts: add the auxiliary loss of transformers, times this."
    ),
]
ByLayer = Annotated[
    bool, typer.Option("--router-loss-by-layer", help="The mean of each layer's own instead.")
]
Capacity = Annotated[
    float | None,
    typer.Option(
        "--capacity-factor",
        help="While training an expert takes no more tokens than this times an even share; by"
        " default all.",
    ),
]
EXAMPLE_QAT = "Example: jaxllm train qat demo:llama small --data story.txt --format int3-g64"


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
    router_loss: RouterLoss = 0.0,
    by_layer: ByLayer = False,
    capacity: Capacity = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="With --mesh stage=N: the order of microbatches, gpipe, or 1f1b, which keeps no"
            " more of them than there are stages."
        ),
    ] = None,
    microbatches: Annotated[
        int, typer.Option(min=1, help="With --pipeline: of a device's rows of a batch.")
    ] = 4,
) -> None:
    """Train all weights of a model, or some, on texts. The result is a model of its own.

    The state is kept in OUT.parts on the way: a run that was interrupted goes on from it, bit for
    bit, with the same command.
    """
    with waiting("starting"):
        from jaxllm.train import jobs
        from jaxllm.train.routing import balanced
        from jaxllm.train.scheduled import Scheduled
        from jaxllm.train.trained import ALL

        check(target, options)
    lm = loaded(model, options, "float32")
    rules = tuple((regex, True) for regex in only) if only else ALL
    scheduled = None if pipeline is None else Scheduled(pipeline, microbatches)
    if scheduled is not None:
        scheduled.of(lm.model)

    def made(data: "Data", held_out: "Data | None") -> "Job":
        kept = jobs.zeros_of(lm, rules) if keep_zeros else None
        job = jobs.full(lm, options.dtype, rules=rules, objective=scheduled, constraint=kept)
        return balanced(job, router_loss, by_layer=by_layer, capacity=capacity)

    trained(lm, made, target, options, 1e-4, f"full fine-tuning of {model}")


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
    prefix: Annotated[
        Path | None,
        typer.Option(
            help="A text that every example goes on after; it is run once, not each step."
        ),
    ] = None,
    router_loss: RouterLoss = 0.0,
    by_layer: ByLayer = False,
    capacity: Capacity = None,
) -> None:
    """Train a LoRA adapter beside a model's weights. The result is a directory as PEFT has it.

    generate --adapter OUT uses it. The state is kept in OUT.parts on the way.
    """
    with waiting("starting"):
        from jaxllm.adapters import LoraConfig, read_adapter
        from jaxllm.files import read_text
        from jaxllm.train import jobs, prompts
        from jaxllm.train.routing import balanced

        check(target, options, "adapter_config.json")
    config = LoraConfig(
        r=rank,
        lora_alpha=2.0 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=tuple(module) if module else "all-linear",
        use_dora=dora,
        use_rslora=rslora,
    )
    lm = loaded(model, options, quantize=quantize)
    start = None if adapter is None else read_adapter(adapter, lm.config, lm.params)
    before = [] if prefix is None else lm.encode(read_text(prefix))

    def made(data: "Data", held_out: "Data | None") -> "Job":
        asked = start.config if start else config
        job = jobs.lora(lm, asked, seed=options.seed, start=start)
        job = prompts.after(job, before) if before else job
        return balanced(job, router_loss, by_layer=by_layer, capacity=capacity)

    trained(lm, made, target, options, 1e-3, f"an adapter of {model}", room=len(before))


@with_options
def prompt(
    model: TrainedModel,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The cache file to write.")],
    options: Options,
    begin: Annotated[
        str, typer.Option("--begin", help="The text that the prompt begins as; its length stays.")
    ],
    entries: Annotated[
        bool, typer.Option("--entries", help="Train keys and values, not embeddings.")
    ] = False,
) -> None:
    """Train a prompt in front of a model that stays as it is. The result is a cache file.

    generate --prompt-cache OUT -p TEXT goes on from it, where TEXT begins as --begin does.
    """
    with waiting("starting"):
        from jaxllm.train import prompts

        check(target, options, None)
    lm = loaded(model, options)
    tokens = lm.encode(begin)

    def made(data: "Data", held_out: "Data | None") -> "Job":
        return prompts.prompt(lm, tokens, kind="entries" if entries else "embeddings")

    trained(lm, made, target, options, 3e-3, f"a prompt for {model}", room=len(tokens))


@with_options
def qat(
    model: TrainedModel,
    target: Target,
    options: Options,
    name: Annotated[
        str, typer.Option("--format", help="Integers, as for quantize: int4-g64, int3-g64-zp, ...")
    ] = "int4-g64",
    rules: Annotated[
        Path | None,
        typer.Option(help="A JSON list of [regex over parameter paths, format or null] in place."),
    ] = None,
    learned_scales: Annotated[
        bool, typer.Option("--learned-scales", help="Scales are trained with the weights (LSQ).")
    ] = False,
    int8_inputs: Annotated[
        bool, typer.Option("--int8-inputs", help="Inputs of integer weights are int8 too.")
    ] = False,
    float_steps: Annotated[
        int, typer.Option(min=0, help="First so many steps without rounding.")
    ] = 0,
) -> None:
    """Train a model for integers: each step rounds as quantize does. The result is quantized.

    Its logits are those of the last step, bit for bit. The state is kept in OUT.parts on the way.
    """
    with waiting("starting"):
        from jaxllm.cli.quantize import read_rules
        from jaxllm.train.fake.job import qat as job_of

        check(target, options)
    if options.fsdp:
        raise ConfigError(
            "train qat rounds weights where they are: without --fsdp (--mesh tensor=N divides them)"
        )
    wanted = name if rules is None else read_rules(rules)
    lm = loaded(model, options, "float32")

    def made(data: "Data", held_out: "Data | None") -> "Job":
        return job_of(
            lm, wanted, dtype=options.dtype, learned=learned_scales, dynamic=int8_inputs,
            starts=float_steps,
        )  # fmt: skip

    trained(lm, made, target, options, 1e-4, f"quantization-aware training of {model}")


@with_options
def distill(
    model: TrainedModel,
    target: Target,
    options: Options,
    student: Annotated[
        str | None, typer.Option(help="A model to be taught; by default a part of MODEL.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of MODEL that the part has.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Likewise key/value heads.")] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Likewise channels of each MLP.")
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="How much the teacher counts; the rest is the text itself.")
    ] = 1.0,
    beta: Annotated[
        float, typer.Option(help="0: forward KL, 1: reverse KL, between: Jensen-Shannon.")
    ] = 0.0,
    temperature: Annotated[float, typer.Option(help="Of both distributions.")] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Record the teacher's likeliest once; 0: it runs beside.")
    ] = 0,
    on_policy: Annotated[
        float, typer.Option(help="The share of steps on the student's own texts (GKD).")
    ] = 0.0,
    hidden: Annotated[
        str | None, typer.Option(help="Compare hidden states too: mse or cosine.")
    ] = None,
    written: Annotated[
        int | None,
        typer.Option(
            min=1, help="Learn texts that the teacher writes, from so many tokens of each example."
        ),
    ] = None,
) -> None:
    """Train a smaller model to do as MODEL does. The result is a model of its own.

    The losses that are told are what is made small: the divergence, with --alpha 1. What the
    teacher said or wrote is kept in OUT.taught; the state in OUT.parts, on the way.
    """
    with waiting("starting"):
        from jaxllm.train.distill import teachers
        from jaxllm.train.distill.job import distill as job_of
        from jaxllm.train.distill.settings import Distillation
        from jaxllm.train.distill.student import Smaller

        check(target, options)
    asked = Distillation(
        alpha=0.0 if written else alpha, beta=beta, temperature=temperature, top_k=top_k,
        on_policy=on_policy, hidden=hidden,  # type: ignore[arg-type]  # it checks
    )  # fmt: skip
    part = Smaller(layers, heads, channels)
    if (student is None) == (part == Smaller()):
        raise ConfigError(
            "give --student DIR, or what of the teacher stays: --layers N and the like"
        )
    teacher = loaded(model, options)
    directory = target.with_name(f"{target.name}.taught")

    def made(data: "Data", held_out: "Data | None") -> "Job":
        taught = None if student is None else loaded(student, options)
        taught = taught or teachers.part_of(teacher, part, data)
        return job_of(
            teacher, taught, data, asked, held_out=held_out, directory=directory,
            seed=options.seed,
        )  # fmt: skip

    def texts(path: Path) -> "Examples":
        assert written is not None
        return teachers.completed(teacher, path, written, directory, options.seed)

    how = None if written is None else texts
    trained(teacher, made, target, options, 3e-4, f"a student of {model}", how)


# Name: the function that runs, and the example below its --help.
METHODS = {
    "full": (full, EXAMPLE_FULL),
    "lora": (lora, EXAMPLE_LORA),
    "prompt": (prompt, EXAMPLE_PROMPT),
    "qat": (qat, EXAMPLE_QAT),
    "distill": (distill, EXAMPLE_DISTILL),
}

app = typer.Typer(
    help="Train a model: all of it, adapters, for integers, or after a teacher.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
for name, (function, epilog) in METHODS.items():
    app.command(name, epilog=epilog, cls=Command)(function)
