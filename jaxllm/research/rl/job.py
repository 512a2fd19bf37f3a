"""Reinforcement learning as a training job, made from its options."""

import dataclasses

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.generation.options.resolve import resolve_options
from jaxllm.generation.sampling.options import ALWAYS_ON, PROCESSORS
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.grammar.grammar import KINDS
from jaxllm.lm import LM
from jaxllm.models.invariance import make_invariant
from jaxllm.research.rl.answers import AnswerSampler
from jaxllm.research.rl.losses import FORMS, PolicyLoss
from jaxllm.research.rl.prompts import Prompts, Reward
from jaxllm.research.rl.settings import Reinforcement
from jaxllm.train.jobs import TrainJob

# Sampling options of an answer; XTC draws random numbers, which the training pass does not have.
SAMPLING = {*PROCESSORS, *KINDS} - {"xtc_probability", "xtc_threshold"}


def reinforce(
    job: TrainJob, prompts: Prompts, reward: Reward | None, options: Reinforcement, name: str = ""
) -> TrainJob:
    """Return a job of `jobs.full_finetune` or `jobs.lora` that learns from rewards instead.

    The first step on new answers has probability ratios of exactly 1 if the model and parameters of
    the result keep the promise of `models.invariance.has_invariant_rows`.

    Args:
        reward: None for prompts with scored answers.
        name: of the reward function, to recognize the run by when it is resumed.

    Raises:
        CapacityError: If prompt and answer exceed the context.
        ConfigError: For a model on a mesh, SamplingError.
        GrammarError: For invalid sampling options.
    """
    lm = dataclasses.replace(job.lm, model=make_invariant(job.lm.model))
    if lm.model.is_sharded:
        raise ConfigError("reinforcement learning runs on one device: drop the mesh")
    answers = [len(answer.token_N) for prompt in prompts.prompts for answer in prompt.answers]
    new_tokens = options.max_new_tokens if reward is not None else max(answers)
    if prompts.width + new_tokens > lm.config.context_length:
        raise CapacityError(
            f"a prompt of {prompts.width} tokens and {new_tokens} new ones exceed the model's"
            f" context of {lm.config.context_length}"
        )
    sampler, eos = make_answer_sampler(lm, options, new_tokens)
    clip_high = FORMS[options.loss].clip_high if options.clip_high is None else options.clip_high
    first = lm.params if job.compute_params is None else job.compute_params
    prepare = AnswerSampler(
        form=options.loss,
        group_size=options.group_size if reward is not None else len(prompts.prompts[0].answers),
        max_new_tokens=new_tokens,
        sampling=options.sampling,
        reward_name=name,
        model=lm.model,
        tokenizer=lm.tokenizer,
        prompts=prompts.prompts,
        reward=reward,
        sampler=sampler,
        eos_token_ids=eos,
        reference=first if options.beta else None,
    )
    return dataclasses.replace(
        job, lm=lm, objective=PolicyLoss(options.clip_low, clip_high, options.beta),
        extra_inputs=sampler, prepare=prepare, data=prompts, metric="reward",
    )  # fmt: skip


def make_answer_sampler(
    lm: LM, options: Reinforcement, new_tokens: int
) -> tuple[Sampler, tuple[int, ...]]:
    """Return the sampler of answers, and the ids that end one."""
    ends = {name: lm.generation[name] for name in ("eos_token_id",) if name in lm.generation}
    asked = {"do_sample": True, "max_new_tokens": new_tokens, **options.sampling}
    config = resolve_options(lm.config, ends, [[0]], asked, tokenizer=lm.tokenizer)
    # Processors that are off would run again on every token of the training pass.
    off = {kind for name, kind in ALWAYS_ON.items() if name not in options.sampling}
    kept = tuple(p for p in config.sampler.processors if type(p) not in off)
    return config.sampler.replace(processors=kept), tuple(config.eos_token_ids)
