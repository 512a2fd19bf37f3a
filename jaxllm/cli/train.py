"""`jaxllm train`: fine-tuning, adapters, quantization-aware training, distillation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxllm.cli.console import spinner
from jaxllm.cli.option_groups import with_options
from jaxllm.cli.renamed_options import TrainCommand
from jaxllm.cli.train_common import (
    ModelToTrain,
    Target,
    TrainOptions,
    check_run,
    load_training_model,
    run_training,
)
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.train.data.examples import Examples
    from jaxllm.train.data.rows import Data
    from jaxllm.train.jobs import TrainJob

EXAMPLE_FULL = (
    "Example: jaxllm train full demo:llama tuned --data story.txt --lr 3e-4; on eight devices,"
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
        help="Weight of the load-balancing loss of mixtures of experts, as in transformers."
    ),
]
ByLayer = Annotated[
    bool,
    typer.Option(
        "--router-loss-by-layer", help="Average the router loss over layers, instead of pooling."
    ),
]
Capacity = Annotated[
    float | None,
    typer.Option(
        "--capacity-factor",
        help="Expert capacity in training, as a multiple of an even share of the tokens [default:"
        " unlimited].",
    ),
]
EXAMPLE_QAT = "Example: jaxllm train qat demo:llama small --data story.txt --format int3-g64"


@with_options
def full(
    model: ModelToTrain,
    target: Target,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Regex of the only parameters to train; repeatable."),
    ] = None,
    keep_zeros: Annotated[
        bool, typer.Option("--keep-zeros", help="Keep zero (pruned) weights at zero.")
    ] = False,
    router_loss: RouterLoss = 0.0,
    by_layer: ByLayer = False,
    capacity: Capacity = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="Pipeline schedule with --mesh stage=N: gpipe, or 1f1b (holds at most as many"
            " microbatches as there are stages)."
        ),
    ] = None,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Microbatches per device batch, with --pipeline.")
    ] = 4,
    gate_lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of the gates of an Infini-attention model [default: 0.01]."
        ),
    ] = None,
    *,
    options: TrainOptions,
) -> None:
    """Train all weights of a model, or some, on texts. The result is a complete model.

    The state is saved in OUT.parts during the run: the same command resumes an interrupted run from
    it, bit for bit.
    """
    with spinner("starting"):
        from jaxllm.train import jobs
        from jaxllm.train.constraints import keep_zeros as find_zeros
        from jaxllm.train.moe_losses import add_router_loss, check_experts
        from jaxllm.train.objective import ScheduledLoss
        from jaxllm.train.partition import ALL_PARAMS, check_rules, trainable_params

        checked = check_run(model, target, options, 1e-4, gate_lr=gate_lr)
        check_experts(checked.checkpoint.config, router_loss, capacity)
        rules = tuple((regex, True) for regex in only) if only else ALL_PARAMS
        check_rules(checked.checkpoint, rules)
        if pipeline is not None and options.mesh is None:
            raise ConfigError("--pipeline requires stages: give --mesh stage=N with N >= 2")
    lm = load_training_model(model, options, "float32")
    scheduled = None if pipeline is None else ScheduledLoss(pipeline, microbatches)
    if scheduled is not None:
        scheduled.pipeline_loss(lm.model)
    kept = find_zeros(trainable_params(lm.params), rules) if keep_zeros else None
    job = jobs.full_finetune(lm, options.dtype, rules=rules, objective=scheduled, constraint=kept)
    job = add_router_loss(job, router_loss, by_layer=by_layer, capacity=capacity)
    run_training(lm, job, target, options, checked, f"full fine-tuning of {model}")


@with_options
def lora(
    model: ModelToTrain,
    target: Target,
    rank: Annotated[int, typer.Option("--rank", "-r", min=1, help="LoRA rank.")] = 8,
    lora_alpha: Annotated[
        float | None,
        typer.Option(help="LoRA alpha: the scale is alpha / rank [default: 2 * rank]."),
    ] = None,
    lora_dropout: Annotated[
        float, typer.Option(help="Dropout of the adapter's inputs, 0 to 1.")
    ] = 0.0,
    target_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="Suffixes of module names (q_proj,v_proj), a regex of whole names, or all-linear"
            " (all but the head) [default: all-linear]; repeatable for names."
        ),
    ] = None,
    exclude_modules: Annotated[
        list[str] | None, typer.Option(help="Modules to exclude: name suffixes, or a regex.")
    ] = None,
    layers_to_transform: Annotated[
        str | None,
        typer.Option(
            metavar="N,N-N", help="Layer numbers, as in 0,4-7; with names in --target-modules."
        ),
    ] = None,
    rank_pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=N", help="Rank of modules whose name ends in REGEX; repeatable."
        ),
    ] = None,
    alpha_pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=X", help="Alpha of modules whose name ends in REGEX; repeatable."
        ),
    ] = None,
    dora: Annotated[bool, typer.Option("--dora", help="DoRA: a magnitude per row.")] = False,
    rslora: Annotated[bool, typer.Option("--rslora", help="Scale by alpha / sqrt(rank).")] = False,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Adapter to continue training; it sets rank and the other LoRA options."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="Format of the frozen weights: nf4 (QLoRA), int4, ..., as for quantize."),
    ] = None,
    prefix: Annotated[
        Path | None,
        typer.Option(
            help="File with a text before every example; it is run once, not at each step."
        ),
    ] = None,
    router_loss: RouterLoss = 0.0,
    by_layer: ByLayer = False,
    capacity: Capacity = None,
    *,
    options: TrainOptions,
) -> None:
    """Train a LoRA adapter of a frozen model. The result is a PEFT directory.

    generate --adapter OUT uses it. The state is saved in OUT.parts during the run.
    """
    with spinner("starting"):
        from jaxllm.adapters import LoraConfig, read_adapter
        from jaxllm.adapters.targets import resolve_targets
        from jaxllm.cli.lora import parse_layers, parse_modules, parse_patterns
        from jaxllm.files import read_text
        from jaxllm.train import frozen_prefix, jobs
        from jaxllm.train.moe_losses import add_router_loss, check_experts

        config = LoraConfig(
            r=rank,
            lora_alpha=2.0 * rank if lora_alpha is None else lora_alpha,
            lora_dropout=lora_dropout,
            target_modules=parse_modules("--target-modules", target_modules) or "all-linear",
            exclude_modules=parse_modules("--exclude-modules", exclude_modules),
            layers_to_transform=parse_layers(layers_to_transform),
            rank_pattern=parse_patterns("--rank-pattern", rank_pattern, int),
            alpha_pattern=parse_patterns("--alpha-pattern", alpha_pattern, float),
            use_dora=dora,
            use_rslora=rslora,
        )
        checked = check_run(model, target, options, 1e-3, "adapter_config.json")
        check_experts(checked.checkpoint.config, router_loss, capacity)
        resolve_targets(checked.checkpoint.config, config)
        text = None if prefix is None else read_text(prefix)
    lm = load_training_model(model, options, quantize=quantize)
    start = None if adapter is None else read_adapter(adapter, lm.config, lm.params)
    before = [] if text is None else lm.encode(text)
    job = jobs.lora(lm, start.config if start else config, seed=options.seed, start=start)
    job = frozen_prefix.with_prefix(job, before) if before else job
    job = add_router_loss(job, router_loss, by_layer=by_layer, capacity=capacity)
    run_training(
        lm, job, target, options, checked, f"an adapter of {model}", reserved_tokens=len(before)
    )


@with_options
def prompt(
    model: ModelToTrain,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Cache file to write.")],
    begin: Annotated[
        str, typer.Option("--begin", help="Initial text of the prompt; it fixes the length.")
    ],
    entries: Annotated[
        bool,
        typer.Option("--entries", help="Train keys and values (prefix tuning), not embeddings."),
    ] = False,
    *,
    options: TrainOptions,
) -> None:
    """Train a soft prompt for a frozen model. The result is a cache file.

    generate --prompt-cache OUT -p TEXT continues from it if TEXT starts with the text of --begin.
    """
    with spinner("starting"):
        from jaxllm.train import frozen_prefix

        checked = check_run(model, target, options, 3e-3, None)
    lm = load_training_model(model, options)
    tokens = lm.encode(begin)
    job = frozen_prefix.prompt_tuning(lm, tokens, kind="entries" if entries else "embeddings")
    run_training(
        lm, job, target, options, checked, f"a prompt for {model}", reserved_tokens=len(tokens)
    )


@with_options
def qat(
    model: ModelToTrain,
    target: Target,
    name: Annotated[
        str,
        typer.Option(
            "--format", help="Integer format, as for quantize: int4-g64, int3-g64-zp, ..."
        ),
    ] = "int4-g64",
    rules: Annotated[
        Path | None,
        typer.Option(
            help="JSON file to use instead: a list of [regex over parameter paths, format or null]."
        ),
    ] = None,
    learned_scales: Annotated[
        bool, typer.Option("--learned-scales", help="Train the scales with the weights (LSQ).")
    ] = False,
    int8_inputs: Annotated[
        bool,
        typer.Option("--int8-inputs", help="Quantize the inputs of integer weights to int8, too."),
    ] = False,
    float_steps: Annotated[
        int, typer.Option(min=0, help="Number of first steps without rounding.")
    ] = 0,
    *,
    options: TrainOptions,
) -> None:
    """Train with fake quantization: each step rounds as quantize does. The result is quantized.

    Its logits are those of the last step, bit for bit. The state is saved in OUT.parts during the
    run.
    """
    with spinner("starting"):
        from jaxllm.cli.quantize import read_rules
        from jaxllm.train.qat.job import check_formats, qat as job_of

        if options.fsdp:
            raise ConfigError(
                "--fsdp cannot be combined with train qat, which rounds unsharded weights: use"
                " --mesh tensor=N to shard them"
            )
        wanted = name if rules is None else read_rules(rules)
        check_formats(wanted)
        checked = check_run(model, target, options, 1e-4)
    lm = load_training_model(model, options, "float32")
    job = job_of(
        lm, wanted, dtype=options.dtype, learn_scales=learned_scales, dynamic_inputs=int8_inputs,
        start_step=float_steps,
    )  # fmt: skip
    run_training(lm, job, target, options, checked, f"quantization-aware training of {model}")


@with_options
def distill(
    model: ModelToTrain,
    target: Target,
    student: Annotated[
        str | None, typer.Option(help="Student model [default: a part of MODEL].")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of MODEL's layers in the student.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Number of MODEL's key/value heads in the student.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Number of MODEL's channels per MLP in the student.")
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(help="Weight of the divergence from the teacher; 1 - alpha is cross-entropy."),
    ] = 1.0,
    beta: Annotated[
        float, typer.Option(help="Divergence: 0 forward KL, 1 reverse KL, between Jensen-Shannon.")
    ] = 0.0,
    temperature: Annotated[
        float, typer.Option(help="Temperature of teacher and student in the divergence.")
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of top teacher logits to record once; 0 runs the teacher at each step.",
        ),
    ] = 0,
    on_policy: Annotated[
        float, typer.Option(help="Share of steps on texts sampled from the student (GKD).")
    ] = 0.0,
    hidden: Annotated[
        str | None, typer.Option(help="Additional loss on hidden states: mse or cosine.")
    ] = None,
    written: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train on texts that the teacher generates from this many tokens of each example.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum new tokens for --written or --on-policy [default: 128, or what fits].",
        ),
    ] = None,
    *,
    options: TrainOptions,
) -> None:
    """Distill MODEL into a smaller student. The result is a complete model.

    The logged loss is the training objective: with --alpha 1 the divergence. The teacher's logits
    or texts are saved in OUT.taught; the state in OUT.parts, during the run.
    """
    with spinner("starting"):
        from jaxllm.train.distill import sequence_kd
        from jaxllm.train.distill.job import Distillation, distill as job_of
        from jaxllm.train.distill.student_init import StudentSize, check_student, make_student

        asked = Distillation(
            alpha=0.0 if written else alpha, beta=beta, temperature=temperature, top_k=top_k,
            on_policy=on_policy, hidden=hidden,  # type: ignore[arg-type]  # it checks
            new_tokens=max_new_tokens or 128,
        )  # fmt: skip
        part = StudentSize(layers, heads, channels)
        if (student is None) == (part == StudentSize()):
            raise ConfigError(
                "the student must be either --student DIR or a part of MODEL: --layers, --heads or"
                " --channels"
            )
        checked = check_run(model, target, options, 3e-4)
        check_student(checked.checkpoint.config, part)
        new = 0
        if written is not None:
            new = sequence_kd.new_token_count(checked.checkpoint.config, written, max_new_tokens)
    teacher = load_training_model(model, options)
    directory = target.with_name(f"{target.name}.taught")

    def make_job(data: "Data", eval_data: "Data | None") -> "TrainJob":
        taught = None if student is None else load_training_model(student, options)
        taught = taught or make_student(teacher, part, data)
        return job_of(
            teacher, taught, data, asked, eval_data=eval_data, directory=directory,
            seed=options.seed,
        )  # fmt: skip

    def read_teacher_texts(path: Path) -> "Examples":
        assert written is not None
        return sequence_kd.complete_examples(teacher, path, written, directory, options.seed, new)

    how = None if written is None else read_teacher_texts
    run_training(teacher, make_job, target, options, checked, f"a student of {model}", how)


# Command name -> function, and the example at the end of its --help.
METHODS = {
    "full": (full, EXAMPLE_FULL),
    "lora": (lora, EXAMPLE_LORA),
    "prompt": (prompt, EXAMPLE_PROMPT),
    "qat": (qat, EXAMPLE_QAT),
    "distill": (distill, EXAMPLE_DISTILL),
}

app = typer.Typer(
    help="Train a model: fully, with adapters, quantization-aware, or from a teacher.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
for name, (function, epilog) in METHODS.items():
    app.command(name, cls=TrainCommand, epilog=epilog)(function)
