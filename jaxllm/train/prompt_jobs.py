"""Jobs with a prefix: any training after a frozen prefix, and training of prompts.

A trained prompt is written as a cache file. `load_cache` reads it; `LM.generate(cache=...)` and
`jaxllm generate --prompt-cache` continue from it, for texts that start with its initial tokens.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxllm.cache.files import save_cache
from jaxllm.cache.kv import KVCache
from jaxllm.errors import ConfigError
from jaxllm.lm import LM, to_one_device
from jaxllm.runtime.multihost import run_on_process_zero
from jaxllm.sharding.sharded_model import replicate_arrays
from jaxllm.train.frozen_prefix import (
    PROMPT_KEY,
    PROMPT_RULES,
    PrefixLoss,
    prompt_cache,
    remove_prompt,
    run_prefix,
    to_segments,
    with_soft_prompt,
    with_trained_prefix,
)
from jaxllm.train.jobs import TrainJob
from jaxllm.train.objective import NextToken
from jaxllm.weights.paths import Params

# The kinds of trained prompts: embeddings, or keys and values ("entries").
PROMPT_KINDS = {"embeddings": with_soft_prompt, "entries": with_trained_prefix}


def with_prefix(job: TrainJob, prefix: Sequence[int]) -> TrainJob:
    """Return the job with all rows after a prefix, which is run once, by the model before training.

    Use the result with that cache: make the cache with the original model, without an adapter, and
    generate from it with the trained one.

    Raises ConfigError for losses other than `NextToken`, and what `run_prefix` raises.
    """
    if not isinstance(job.objective, NextToken):
        raise ConfigError(f"a prefix needs the next-token loss, got {job.objective!r:.60}")
    params = job.lm.params if job.compute_params is None else job.compute_params
    given = run_prefix(job.lm.model, params, prefix)
    return dataclasses.replace(job, objective=PrefixLoss(), extra_inputs=given)


def prompt_tuning(
    lm: LM, tokens: Sequence[int], *, kind: str = "embeddings", prefix: KVCache | None = None
) -> TrainJob:
    """Train a prompt that is initialized with `tokens`; the model is frozen.

    The result is a cache file.

    Args:
      kind: a name in `PROMPT_KINDS`.
      prefix: a committed cache of one row that the prompt comes after.

    Raises ConfigError for another kind, and what `with_soft_prompt` and `to_segments` raise.
    """
    if kind not in PROMPT_KINDS:
        raise ConfigError(
            f"the kind of a prompt must be {' or '.join(PROMPT_KINDS)}, got {kind!r:.40}"
        )
    before = 0 if prefix is None else int(prefix.length_B[0])
    if lm.model.is_sharded and prefix is not None:
        raise ConfigError("a prompt after a prefix cannot be trained on a mesh: drop --mesh")
    if kind == "entries" and lm.model.stage_layers:
        raise ConfigError(
            "a prompt of keys and values cannot be trained in pipeline stages: train embeddings, or"
            " use a mesh with stage=1"
        )
    params = PROMPT_KINDS[kind](lm.model, lm.params, tokens)

    def finish(params: Params, file: Path) -> None:
        room, one = before + len(tokens), to_one_device(dataclasses.replace(lm, params=params))

        def write_cache() -> None:
            cache = prompt_cache(one.model, one.params, capacity=room, prefix=prefix)
            save_cache(file, cache, one.model, remove_prompt(one.params))

        run_on_process_zero(write_cache)

    return TrainJob(
        lm=lm,
        params={**params, PROMPT_KEY: replicate_arrays(lm.model, params[PROMPT_KEY])},
        objective=PrefixLoss(),
        extra_inputs=None if prefix is None else to_segments(prefix),
        rules=PROMPT_RULES,
        finish=finish,
    )
