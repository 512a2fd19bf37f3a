"""Jobs around a prefix: any training after it, and prompts as what is trained.

What comes of a prompt is a cache file: `load_cache` reads it, `LM.generate(cache=...)` and
`jaxllm generate --prompt-cache` go on from it, for texts that begin with the prompt's first tokens.
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

# What of a prompt is trained, by name: its embeddings, or its keys and values.
KINDS = {"embeddings": with_soft_prompt, "entries": with_trained_prefix}


def after(job: Job, prefix: Sequence[int]) -> Job:
    """The job with all rows after these tokens, which its model runs once, as it is before training
    and without an adapter. Its result is meant for that cache: make it with the model alone, and
    generate from it with the result.

    Raises ConfigError for another loss than that of the next token, and what `run_prefix` raises.
    """
    if not isinstance(job.objective, NextToken):
        raise ConfigError(
            f"a prefix goes with the loss of the next token, not with {job.objective!r:.60}"
        )
    params = job.lm.params if job.like is None else job.like
    given = run_prefix(job.lm.model, params, prefix)
    return dataclasses.replace(job, objective=AfterPrefix(), given=given)


def prompt(
    lm: LM, tokens: Sequence[int], *, kind: str = "embeddings", prefix: KVCache | None = None
) -> Job:
    """A prompt that begins as these tokens; the model stays as it is. The result is a cache file.

    kind: a name in `KINDS`. prefix: a committed cache of one row that the prompt comes after.
    Raises ConfigError for another kind, and what `with_soft_prompt` and `segments_of` raise.
    """
    if kind not in KINDS:
        raise ConfigError(f"a prompt is trained in its {' or '.join(KINDS)}, got {kind!r:.40}")
    before = 0 if prefix is None else int(prefix.length_B[0])
    many = isinstance(lm.model, Placed)
    if many and prefix is not None:
        raise ConfigError("a prompt after a prefix is trained on one device: leave out the mesh")
    if many and kind == "entries" and lm.model.kept()[0] < lm.config.num_hidden_layers:
        raise ConfigError(
            "keys and values of stages stand side by side: train embeddings, or use a mesh with"
            " stage=1"
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
