"""Jobs with a prefix: any training after a frozen prefix, and training of prompts.

A trained prompt is written as a cache file. `load_cache` reads it; `LM.generate(cache=...)` and
`jaxllm generate --prompt-cache` continue from it, for texts that start with its initial tokens.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxllm.api import LM
from jaxllm.cache.files import save_cache
from jaxllm.cache.kv import KVCache
from jaxllm.distributed import once
from jaxllm.errors import ConfigError
from jaxllm.train.jobs import Job, alone, everywhere
from jaxllm.train.objective import NextToken
from jaxllm.train.prefix import (
    PROMPT,
    PROMPT_RULES,
    AfterPrefix,
    prompt_cache,
    run_prefix,
    segments_of,
    with_soft_prompt,
    with_trained_prefix,
    without_prompt,
)
from jaxllm.weights.paths import Params, Placed

# The kinds of trained prompts: embeddings, or keys and values ("entries").
KINDS = {"embeddings": with_soft_prompt, "entries": with_trained_prefix}


def after(job: Job, prefix: Sequence[int]) -> Job:
    """Return the job with all rows after a prefix, which is run once, by the model before training.

    Use the result with that cache: make the cache with the original model, without an adapter, and
    generate from it with the trained one.

    Raises ConfigError for losses other than `NextToken`, and what `run_prefix` raises.
    """
    if not isinstance(job.objective, NextToken):
        raise ConfigError(f"a prefix needs the next-token loss, got {job.objective!r:.60}")
    params = job.lm.params if job.like is None else job.like
    given = run_prefix(job.lm.model, params, prefix)
    return dataclasses.replace(job, objective=AfterPrefix(), given=given)


def prompt(
    lm: LM, tokens: Sequence[int], *, kind: str = "embeddings", prefix: KVCache | None = None
) -> Job:
    """Train a prompt that is initialized with `tokens`; the model is frozen.

    The result is a cache file.

    Args:
      kind: a name in `KINDS`.
      prefix: a committed cache of one row that the prompt comes after.

    Raises ConfigError for another kind, and what `with_soft_prompt` and `segments_of` raise.
    """
    if kind not in KINDS:
        raise ConfigError(f"the kind of a prompt must be {' or '.join(KINDS)}, got {kind!r:.40}")
    before = 0 if prefix is None else int(prefix.length_B[0])
    many = isinstance(lm.model, Placed)
    if many and prefix is not None:
        raise ConfigError("a prompt after a prefix cannot be trained on a mesh: drop --mesh")
    if many and kind == "entries" and lm.model.kept()[0] < lm.config.num_hidden_layers:
        raise ConfigError(
            "a prompt of keys and values cannot be trained in pipeline stages: train embeddings, or"
            " use a mesh with stage=1"
        )
    params = KINDS[kind](lm.model, lm.params, tokens)

    def finish(params: Params, file: Path) -> None:
        room, one = before + len(tokens), alone(dataclasses.replace(lm, params=params))

        def write() -> None:
            cache = prompt_cache(one.model, one.params, capacity=room, prefix=prefix)
            save_cache(file, cache, one.model, without_prompt(one.params))

        once(write)

    return Job(
        lm=lm,
        params={**params, PROMPT: everywhere(lm.model, params[PROMPT])},
        objective=AfterPrefix(),
        given=None if prefix is None else segments_of(prefix),
        rules=PROMPT_RULES,
        finish=finish,
    )
