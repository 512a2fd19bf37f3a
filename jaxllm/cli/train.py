"""`jaxllm train`: fine-tuning and adapters, and the commands that other packages add."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.cli.console import spinner
from jaxllm.cli.fields import Flags, add_command
from jaxllm.cli.options import Out, V, check_paths
from jaxllm.cli.train_run import (
    ModelToTrain,
    TrainOptions,
    check_run,
    load_training_model,
    run_training,
)
from jaxllm.errors import ConfigError, suggest_name
from jaxllm.runtime.plugins import find_plugins

if TYPE_CHECKING:
    from jaxllm.config.model import ModelConfig
    from jaxllm.train.jobs import TrainJob

HELP = "Train a model by one of these methods."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Flags of mixtures of experts.

    Attributes:
        router_loss: Weight of the load-balancing loss, as in transformers.
        router_loss_by_layer: Average the router loss over layers, instead of pooling.
        capacity_factor: Expert capacity in training, as a multiple of an even share of the tokens
            [default: unlimited].
    """

    router_loss: float = 0.0
    router_loss_by_layer: bool = False
    capacity_factor: float | None = None

    def check(self, config: "ModelConfig") -> None:
        """Raise ConfigError if the model has no experts, or values are out of range."""
        from jaxllm.train.moe_losses import check_experts

        check_experts(config, self.router_loss, self.capacity_factor)

    def add_to(self, job: "TrainJob") -> "TrainJob":
        """Return the job with the loss and the capacity."""
        from jaxllm.train.moe_losses import add_router_loss

        by_layer, capacity = self.router_loss_by_layer, self.capacity_factor
        return add_router_loss(job, self.router_loss, by_layer=by_layer, capacity=capacity)


def full(
    model: ModelToTrain,
    target: Out,
    only: list[str] | None = None,
    keep_zeros: bool = False,
    objective: Annotated[str | None, typer.Option(metavar="NAME[:ARGUMENT]")] = None,
    lr_pattern: Annotated[list[str] | None, typer.Option(metavar="REGEX=LR")] = None,
    *,
    experts: ExpertOptions,
    options: TrainOptions,
) -> None:
    """Train all weights of a model, or some, on texts. The result is a complete model.

    The state is saved in OUT.parts during the run: the same command resumes an interrupted run from
    it, bit for bit.

    Args:
        only: Regex of the only parameters to train; repeatable.
        keep_zeros: Keep zero (pruned) weights at zero.
        objective: Objective of another package instead of the next token's. With --mesh stage=N:
            1f1b:4 or gpipe:4, the same by a schedule of 4 microbatches.
        lr_pattern: Learning rate of the parameters whose path matches REGEX, without decay;
            repeatable.
    """
    with spinner("starting"):
        from jaxllm.train import jobs
        from jaxllm.train.constraints import keep_zeros as find_zeros
        from jaxllm.train.partition import ALL_PARAMS, check_rules, trainable_params

        rates = parse_patterns("--lr-pattern", lr_pattern, float)
        checked = check_run(model, target, options, 1e-4, rates=rates)
        experts.check(checked.checkpoint.config)
        rules = tuple((regex, True) for regex in only) if only else ALL_PARAMS
        check_rules(checked.checkpoint, rules)
        named, _, argument = (objective or "").partition(":")
        others = find_plugins("train_objectives") if named else {}
        if named and named not in others:
            raise ConfigError(
                f"--objective {named!r:.40} is unknown{suggest_name(named, others)}; installed"
                f" packages have {', '.join(others) or 'none'}"
            )
    lm = load_training_model(model, options, "float32")
    chosen = others[named].load()(argument, lm.model) if named else None
    kept = find_zeros(trainable_params(lm.params), rules) if keep_zeros else None
    job = jobs.full_finetune(lm, options.dtype, rules=rules, objective=chosen, constraint=kept)
    job = experts.add_to(job)
    run_training(lm, job, target, options, checked, f"full fine-tuning of {model}")


def lora(
    model: ModelToTrain,
    target: Out,
    config: Annotated[
        dict[str, Any],
        Flags(LoraConfig, "lora_dropout", r="--rank -r", use_dora="--dora", use_rslora="--rslora"),
    ],
    lora_alpha: float | None = None,
    target_modules: list[str] | None = None,
    exclude_modules: list[str] | None = None,
    layers_to_transform: Annotated[str | None, typer.Option(metavar="N,N-N")] = None,
    rank_pattern: Annotated[list[str] | None, typer.Option(metavar="REGEX=N")] = None,
    alpha_pattern: Annotated[list[str] | None, typer.Option(metavar="REGEX=X")] = None,
    adapter: Path | None = None,
    quantize: str | None = None,
    prefix: Path | None = None,
    *,
    experts: ExpertOptions,
    options: TrainOptions,
) -> None:
    """Train a LoRA adapter of a frozen model. The result is a PEFT directory.

    generate --adapter OUT uses it. The state is saved in OUT.parts during the run.

    Args:
        lora_alpha: LoRA alpha: the scale is alpha / rank [default: 2 * rank].
        target_modules: Suffixes of module names (q_proj,v_proj), a regex of whole names, or
            all-linear (all but the head) [default: all-linear]; repeatable for names.
        exclude_modules: Modules to exclude: name suffixes, or a regex.
        layers_to_transform: Layer numbers, as in 0,4-7; with names in --target-modules.
        rank_pattern: Rank N for module names that end in REGEX; repeatable.
        alpha_pattern: Alpha X for module names that end in REGEX; repeatable.
        adapter: Adapter to continue training; it sets rank and the other LoRA options.
        quantize: Format of the frozen weights: nf4 (QLoRA), int4, ..., as for quantize.
        prefix: File with a text before every example; it is run once, not at each step.
    """
    with spinner("starting"):
        from jaxllm.adapters import read_adapter
        from jaxllm.adapters.targets import resolve_targets
        from jaxllm.files import read_text
        from jaxllm.train import frozen_prefix, jobs

        asked = LoraConfig(
            **config,
            lora_alpha=2.0 * config["r"] if lora_alpha is None else lora_alpha,
            target_modules=parse_modules("--target-modules", target_modules) or "all-linear",
            exclude_modules=parse_modules("--exclude-modules", exclude_modules),
            layers_to_transform=parse_layers(layers_to_transform),
            rank_pattern=parse_patterns("--rank-pattern", rank_pattern, int),
            alpha_pattern=parse_patterns("--alpha-pattern", alpha_pattern, float),
        )
        checked = check_run(model, target, options, 1e-3, "adapter_config.json")
        experts.check(checked.checkpoint.config)
        resolve_targets(checked.checkpoint.config, asked)
        text = None if prefix is None else read_text(prefix)
    lm = load_training_model(model, options, quantize=quantize)
    start = None if adapter is None else read_adapter(adapter, lm.config, lm.params)
    before = [] if text is None else lm.encode(text)
    job = jobs.lora(lm, start.config if start else asked, seed=options.seed, start=start)
    job = experts.add_to(frozen_prefix.with_prefix(job, before) if before else job)
    title = f"an adapter of {model}"
    run_training(lm, job, target, options, checked, title, reserved_tokens=len(before))


def parse_modules(option: str, values: list[str] | None) -> str | list[str] | None:
    """Return module names for `LoraConfig`: a list of name suffixes, one regex, or "all-linear".

    Values of only word characters, dots, dashes and commas are names; any other is a regex. Raises
    ConfigError for a regex among several values.
    """
    if not values:
        return None
    if len(values) == 1 and values[0].lower() == "all-linear":
        return values[0].lower()
    if all(re.fullmatch(r"[\w.,-]+", text) for text in values):
        return [name for text in values for name in text.split(",") if name]
    if len(values) > 1:
        raise ConfigError(
            f"{option} must be names or one regex: got {', '.join(values):.80}. Join regexes with"
            " |."
        )
    return values[0]


def parse_layers(text: str | None) -> list[int] | None:
    """Parse layer numbers like "0,4-7". Raises ConfigError for any other text."""
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        numbers = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if numbers is None or int(numbers[2] or numbers[1]) < int(numbers[1]):
            raise ConfigError(
                f"--layers-to-transform must be numbers or ranges, as in 0,4-7: got {text!r:.60}"
            )
        layers += range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
    return layers


def parse_patterns(
    option: str, values: list[str] | None, to_number: Callable[[str], V]
) -> dict[str, V]:
    """Parse "REGEX=NUMBER" texts to a dict. Raises ConfigError for any other text."""
    patterns: dict[str, V] = {}
    for text in values or []:
        regex, _, value = text.rpartition("=")
        try:
            patterns[regex] = to_number(value)
        except ValueError:
            regex = ""
        if not regex:
            raise ConfigError(
                f"{option} must be REGEX=NUMBER, as in down_proj=16: got {text!r:.60}"
            )
    return patterns


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
    title = f"a prompt for {model}"
    run_training(lm, job, target, options, checked, title, reserved_tokens=len(tokens))


# Command name -> function, and the example at the end of its --help. Other packages add commands by
# entry points of the group `jaxllm.train_commands`.
METHODS: dict[Callable[..., None], str] = {
    full: "train full demo:llama tuned --data story.txt --lr 3e-4; on eight devices, with --mesh"
    " data=2,stage=2,tensor=2 --fsdp",
    lora: "train lora demo:llama style --data story.txt --rank 8",
    prompt: "train prompt demo:llama a.cache --data story.txt --begin 'Once upon'",
}


def make_app(listed: bool = False) -> typer.Typer:
    """Return the command with its subcommands; listed: without their flags."""
    app = typer.Typer(help=HELP, rich_markup_mode=None, no_args_is_help=True)
    for function, example in METHODS.items():
        add_command(app, function, f"Example: jaxllm {example}", check_paths, listed)
    for name, entry in find_plugins("train_commands").items():
        module = entry.load()
        add_command(app, getattr(module, name), module.EXAMPLE, check_paths, listed)
    return app
