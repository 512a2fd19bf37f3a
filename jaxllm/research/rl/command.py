"""`jaxllm train rl`: a model learns from rewards for its answers."""

from typing import Annotated, Any

import typer

from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.cli.console import log, spinner
from jaxllm.cli.fields import Flags
from jaxllm.cli.options import Out, read_extra_options
from jaxllm.cli.train_run import (
    ModelToTrain,
    RewardOptions,
    check_run,
    load_training_model,
    run_training,
)
from jaxllm.errors import ConfigError
from jaxllm.research.rl.settings import Reinforcement

EXAMPLE = "Example: jaxllm train rl demo:llama tuned --data prompts.jsonl --reward rewards:score"


def rl(
    model: ModelToTrain,
    target: Out,
    loss: Annotated[
        dict[str, Any],
        Flags(
            Reinforcement,
            "loss",
            "group_size",
            "clip_low",
            "clip_high",
            "beta",
            max_new_tokens="--max-new-tokens -n",
        ),
    ],
    reward: str | None = None,
    scored: bool = False,
    num_iterations: Annotated[int, typer.Option(min=1)] = 1,
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
        num_iterations: Optimizer steps on the same answers.
        temperature: Sampling temperature.
        more: Another sampling option or grammar, as for generate: -o top_p=0.95 -o regex=...
        rank: LoRA rank, to train an adapter instead of all weights.
    """
    with spinner("starting"):
        from jaxllm.models.invariance import has_invariant_rows
        from jaxllm.research.rl.job import reinforce
        from jaxllm.research.rl.prompts import Prompts, load_reward, read_prompts, read_scored
        from jaxllm.train import jobs

        if (reward is None) != scored:
            raise ConfigError("the reward must be either --reward MODULE:FUNCTION or --scored")
        sampling = {"temperature": temperature, **read_extra_options(more)}
        asked = Reinforcement(**loss, sampling=sampling)
        lr, result = (1e-5, "config.json") if rank is None else (1e-4, "adapter_config.json")
        checked = check_run(model, target, options, lr, result, num_iterations=num_iterations)
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
