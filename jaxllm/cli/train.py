"""`jaxllm train`: fine-tuning, adapters, quantization-aware training, distillation, rewards."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.command import Command, make_command
from jaxllm.cli.console import log, spinner
from jaxllm.cli.options import read_extra_options
from jaxllm.cli.train_common import (
    ModelToTrain,
    RewardOptions,
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
EXAMPLE_RL = "Example: jaxllm train rl demo:llama tuned --data prompts.jsonl --reward rewards:score"
EXAMPLE_QAT = "Example: jaxllm train qat demo:llama small --data story.txt --format int3-g64"


def full(
    model: ModelToTrain,
    target: Target,
    only: list[str] | None = None,
    keep_zeros: bool = False,
    router_loss: RouterLoss = 0.0,
    by_layer: ByLayer = False,
    capacity: Capacity = None,
    pipeline: str | None = None,
    microbatches: Annotated[int, typer.Option(min=1)] = 4,
    gate_lr: float | None = None,
    *,
    options: TrainOptions,
) -> None:
    """Train all weights of a model, or some, on texts. The result is a complete model.

    The state is saved in OUT.parts during the run: the same command resumes an interrupted run from
    it, bit for bit.

    Args:
      only: Regex of the only parameters to train; repeatable.
      keep_zeros: Keep zero (pruned) weights at zero.
      pipeline: Pipeline schedule with --mesh stage=N: gpipe, or 1f1b (holds at most as many
        microbatches as there are stages).
      microbatches: Microbatches per device batch, with --pipeline.
      gate_lr: Learning rate of the gates of an Infini-attention model [default: 0.01].
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


def lora(
    model: ModelToTrain,
    target: Target,
    rank: Annotated[int, typer.Option("--rank", "-r", min=1)] = 8,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    target_modules: list[str] | None = None,
    exclude_modules: list[str] | None = None,
    layers_to_transform: Annotated[str | None, typer.Option(metavar="N,N-N")] = None,
    rank_pattern: Annotated[list[str] | None, typer.Option(metavar="REGEX=N")] = None,
    alpha_pattern: Annotated[list[str] | None, typer.Option(metavar="REGEX=X")] = None,
    dora: bool = False,
    rslora: bool = False,
    adapter: Path | None = None,
    quantize: str | None = None,
    prefix: Path | None = None,
    router_loss: RouterLoss = 0.0,
    by_layer: ByLayer = False,
    capacity: Capacity = None,
    *,
    options: TrainOptions,
) -> None:
    """Train a LoRA adapter of a frozen model. The result is a PEFT directory.

    generate --adapter OUT uses it. The state is saved in OUT.parts during the run.

    Args:
      rank: LoRA rank.
      lora_alpha: LoRA alpha: the scale is alpha / rank [default: 2 * rank].
      lora_dropout: Dropout of the adapter's inputs, 0 to 1.
      target_modules: Suffixes of module names (q_proj,v_proj), a regex of whole names, or
        all-linear (all but the head) [default: all-linear]; repeatable for names.
      exclude_modules: Modules to exclude: name suffixes, or a regex.
      layers_to_transform: Layer numbers, as in 0,4-7; with names in --target-modules.
      rank_pattern: Rank of modules whose name ends in REGEX; repeatable.
      alpha_pattern: Alpha of modules whose name ends in REGEX; repeatable.
      dora: DoRA: a magnitude per row.
      rslora: Scale by alpha / sqrt(rank).
      adapter: Adapter to continue training; it sets rank and the other LoRA options.
      quantize: Format of the frozen weights: nf4 (QLoRA), int4, ..., as for quantize.
      prefix: File with a text before every example; it is run once, not at each step.
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


def prompt(
    model: ModelToTrain,
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    begin: Annotated[str, typer.Option("--begin")],
    entries: bool = False,
    *,
    options: TrainOptions,
) -> None:
    """Train a soft prompt for a frozen model. The result is a cache file.

    generate --prompt-cache OUT -p TEXT continues from it if TEXT starts with the text of --begin.

    Args:
      target: Cache file to write.
      begin: Initial text of the prompt; it fixes the length.
      entries: Train keys and values (prefix tuning), not embeddings.
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


def qat(
    model: ModelToTrain,
    target: Target,
    name: Annotated[str, typer.Option("--format")] = "int4-g64",
    rules: Path | None = None,
    learned_scales: bool = False,
    int8_inputs: bool = False,
    float_steps: Annotated[int, typer.Option(min=0)] = 0,
    *,
    options: TrainOptions,
) -> None:
    """Train with fake quantization: each step rounds as quantize does. The result is quantized.

    Its logits are those of the last step, bit for bit. The state is saved in OUT.parts during the
    run.

    Args:
      name: Integer format, as for quantize: int4-g64, int3-g64-zp, ...
      rules: JSON file to use instead: a list of [regex over parameter paths, format or null].
      learned_scales: Train the scales with the weights (LSQ).
      int8_inputs: Quantize the inputs of integer weights to int8, too.
      float_steps: Number of first steps without rounding.
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


def distill(
    model: ModelToTrain,
    target: Target,
    student: str | None = None,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    channels: Annotated[int | None, typer.Option(min=1)] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    temperature: float = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    on_policy: float = 0.0,
    hidden: str | None = None,
    written: Annotated[int | None, typer.Option(min=1)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    *,
    options: TrainOptions,
) -> None:
    """Distill MODEL into a smaller student. The result is a complete model.

    The logged loss is the training objective: with --alpha 1 the divergence. The teacher's logits
    or texts are saved in OUT.taught; the state in OUT.parts, during the run.

    Args:
      student: Student model [default: a part of MODEL].
      layers: Number of MODEL's layers in the student.
      heads: Number of MODEL's key/value heads in the student.
      channels: Number of MODEL's channels per MLP in the student.
      alpha: Weight of the divergence from the teacher; 1 - alpha is cross-entropy.
      beta: Divergence: 0 forward KL, 1 reverse KL, between Jensen-Shannon.
      temperature: Temperature of teacher and student in the divergence.
      top_k: Number of top teacher logits to record once; 0 runs the teacher at each step.
      on_policy: Share of steps on texts sampled from the student (GKD).
      hidden: Additional loss on hidden states: mse or cosine.
      written: Train on the teacher's continuations of this many tokens of each example.
      max_new_tokens: Maximum new tokens for --written or --on-policy [default: 128, or what fits].
    """
    with spinner("starting"):
        from jaxllm.compress.student import StudentSize, check_student, make_student
        from jaxllm.train.data.rows import select_full_rows
        from jaxllm.train.distill import sequence_kd
        from jaxllm.train.distill.job import Distillation, distill as job_of

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
        taught = taught or make_student(teacher, part, select_full_rows(data.batch(0)))
        return job_of(
            teacher, taught, data, asked, eval_data=eval_data, directory=directory,
            seed=options.seed,
        )  # fmt: skip

    def read_teacher_texts(path: Path) -> "Examples":
        assert written is not None
        return sequence_kd.complete_examples(teacher, path, written, directory, options.seed, new)

    how = None if written is None else read_teacher_texts
    run_training(teacher, make_job, target, options, checked, f"a student of {model}", how)


def rl(
    model: ModelToTrain,
    target: Target,
    reward: str | None = None,
    scored: bool = False,
    loss: str = "grpo",
    group_size: int = 8,
    num_iterations: Annotated[int, typer.Option(min=1)] = 1,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    beta: float = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 64,
    temperature: float = 1.0,
    more: Annotated[list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE")] = None,
    rank: Annotated[int | None, typer.Option("--rank", "-r", min=1)] = None,
    *,
    options: RewardOptions,
) -> None:
    """Train on rewards: the model answers prompts, and better answers become likelier.

    The result is a complete model, or with --rank a PEFT directory. The state is saved in OUT.parts
    during the run.

    Args:
      reward: Python function MODULE:FUNCTION of (prompt, answer, line of the file), a number.
      scored: The data have answers with rewards: lines with "prompt", "completion" and "reward".
      loss: Loss: grpo, dr-grpo or dapo.
      group_size: Answers per prompt, which are compared with each other.
      num_iterations: Optimizer steps on the same answers.
      clip_low: Limit of the probability ratio: 1 - X.
      clip_high: Limit of the probability ratio: 1 + X [default: 0.2; dapo 0.28].
      beta: Weight of the divergence from the model before training.
      max_new_tokens: Maximum number of tokens of an answer.
      temperature: Sampling temperature.
      more: Another sampling option or grammar, as for generate: -o top_p=0.95 -o regex=...
      rank: LoRA rank, to train an adapter instead of all weights.
    """
    with spinner("starting"):
        from jaxllm.adapters import LoraConfig
        from jaxllm.models.invariance import has_invariant_rows
        from jaxllm.train import jobs
        from jaxllm.train.rl.job import Reinforcement, reinforce
        from jaxllm.train.rl.prompts import Prompts, load_reward, read_prompts, read_scored

        options.check()
        if (reward is None) != scored:
            raise ConfigError("the reward must be either --reward MODULE:FUNCTION or --scored")
        asked = Reinforcement(
            loss=loss,  # type: ignore[arg-type]  # it checks
            group_size=group_size, max_new_tokens=max_new_tokens, clip_low=clip_low,
            clip_high=clip_high, beta=beta,
            sampling={"temperature": temperature, **read_extra_options(more)},
        )  # fmt: skip
        result = "config.json" if rank is None else "adapter_config.json"
        checked = check_run(model, target, options, 1e-5 if rank is None else 1e-4, result)
        checked = checked._replace(
            plan=dataclasses.replace(checked.plan, num_iterations=num_iterations)
        )
        function = None if reward is None else load_reward(reward)
    lm = load_training_model(model, options, "float32" if rank is None else None)
    read = read_scored if scored else read_prompts
    prompts = Prompts(read(options.data, lm), options.batch_size, options.seed)
    if rank is None:
        base = jobs.full_finetune(lm, options.dtype)
    else:
        base = jobs.lora(lm, LoraConfig(r=rank, lora_alpha=2.0 * rank), seed=options.seed)
    job = reinforce(base, prompts, function, asked, reward or "")
    if not has_invariant_rows(job.lm.model, job.params):
        log("sampling and training may round differently here: the first ratios are near 1")
    title = f"{model} from the rewards of {reward or options.data.name}"
    run_training(lm, job, target, options, checked, title, data=prompts)


# Old and foreign names of options: each error names the current option.
RENAMED = {
    "--rate": "--lr",
    "--learning-rate": "--lr",
    "--decay": "--weight-decay",
    "--clip": "--max-grad-norm",
    "--eval": "--eval-data",
    "--prompts": "--data",
    "--num-generations": "--group-size",
    "--loss-type": "--loss",
    "--max-completion-length": "--max-new-tokens",
    "--held-out": "--eval-split",
    "--evaluate-every": "--eval-steps",
    "--save-every": "--save-steps",
    "--batch": "--batch-size",
    "--per-device-train-batch-size": "--batch-size",
    "--accumulate": "--gradient-accumulation-steps",
    "--grad-accum": "--gradient-accumulation-steps",
    "--remat": "--gradient-checkpointing",
    "--max-steps": "--steps",
    "--num-train-epochs": "--epochs",
    "--warmup-ratio": "--warmup",
    "--max-length": "--length",
    "--gate-rate": "--gate-lr",
    "--target": "--target-modules",
    "--alpha": "--lora-alpha",
    "--dropout": "--lora-dropout",
    "--layers": "--layers-to-transform",
}


class TrainCommand(Command):
    """A command whose errors for old option names give the new ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            option = getattr(error, "option_name", "")
            name = RENAMED.get(option)
            if name is not None and any(name in parameter.opts for parameter in self.params):
                raise ConfigError(f"no such option: {option}. Use {name}") from None
            raise


# Command name -> function, and the example at the end of its --help.
METHODS: dict[str, tuple[Callable[..., None], str]] = {
    "full": (full, EXAMPLE_FULL),
    "lora": (lora, EXAMPLE_LORA),
    "prompt": (prompt, EXAMPLE_PROMPT),
    "qat": (qat, EXAMPLE_QAT),
    "distill": (distill, EXAMPLE_DISTILL),
    "rl": (rl, EXAMPLE_RL),
}

app = typer.Typer(
    help="Train a model: fully, with adapters, quantization-aware, from a teacher or from rewards.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
for name, (function, epilog) in METHODS.items():
    app.command(name, cls=TrainCommand, epilog=epilog)(make_command(function))
