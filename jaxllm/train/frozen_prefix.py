"""Training after a frozen prefix that is run once, and training of prompts.

A frozen prefix is the segments of a committed cache of one row: every row of every batch attends to
them by reference and continues after them. Its keys and values are those of the model before
training. This equals running the prefix in each step if the trained parameters do not affect them
(the head, the last layer without its keys and values), or if the result is only used after the
cached prefix. Otherwise running the prefix again gives another loss and another gradient.

A trained prompt is also a segment of one row: of embeddings (prompt tuning, Lester et al. 2021,
arXiv 2104.08691), run once per step for all rows, or of keys and values (prefix tuning, Li and
Liang 2021, arXiv 2101.00190). It is in the parameters under `prompt`; the result is written as an
ordinary cache file. `load_cache` reads it; `LM.generate(cache=...)` and `jaxllm generate
--prompt-cache` continue from it, for texts that start with its initial tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import steps
from jaxllm.cache.commit import commit
from jaxllm.cache.files import save_cache
from jaxllm.cache.kv import Delta, KVCache, Segment, check_no_state, check_usable, init_cache
from jaxllm.cache.operations import compact
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.lm import LM, to_one_device
from jaxllm.models import get_family
from jaxllm.ops import cast
from jaxllm.runtime.multihost import run_on_process_zero
from jaxllm.runtime.validation import check_token_ids
from jaxllm.sharding.sharded_model import replicate_arrays
from jaxllm.train.data.rows import Rows
from jaxllm.train.jobs import TrainJob
from jaxllm.train.objective import LossOutput, NextToken, forward, next_token_loss
from jaxllm.train.partition import Rules
from jaxllm.weights.formats import as_weight
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

PROMPT_KEY = "prompt"
_SEGMENT_FIELDS = tuple(field.name for field in dataclasses.fields(Segment))
PROMPT_RULES: Rules = ((r"prompt\..*", True),)  # train the prompt, freeze the model


def run_prefix(model: Model, params: Params, tokens: Sequence[int]) -> steps.Segments:
    """Run a prefix once and return its segments, for `PrefixLoss`.

    Raises:
        TokenError: For an empty prefix and for ids outside the vocabulary.
        CacheMismatchError: For models with a compressive memory.
    """
    token_1P = _check_prefix_ids(model, tokens)
    cache = init_cache(model, 1, token_1P.shape[1])
    return to_segments(steps.prefill(model, params, cache, token_1P, donate=True).cache)


def to_segments(cache: KVCache) -> steps.Segments:
    """Return the segments of a committed cache of one row, without its free slots.

    Raises CacheMismatchError for several rows, an empty cache, or a compressive memory.
    """
    check_usable(cache)
    check_no_state(cache, "training on a prefix")
    if cache.batch != 1 or not int(cache.length_B[0]):
        raise CacheMismatchError(
            "a prefix for training must be a cache of one row that is not empty: got"
            f" {cache.batch} of {np.asarray(cache.length_B).tolist()} tokens"
        )
    tail: Segment = jax.tree.map(lambda x: x[:, : int(cache.cursor)], cache.tail)
    return tuple(s for s in (*cache.frozen, tail) if s.position_BS.shape[1])


@dataclasses.dataclass(frozen=True)
class PrefixLoss:
    """Cross-entropy of rows that follow a prefix, a trained prompt, or both.

    The prompt, if `params` have one, comes after the prefix. Each document of a row attends to both
    and to itself. As always, the first token of a document is not learned; if the prefix starts
    with the begin-of-text token, documents should not.

    Args of a call:
      extra_inputs: the segments of the prefix (`run_prefix`), or None.

    Raises ConfigError, at compile time, for int8 caches, which have no gradient.
    """

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        if model.precision.cache == "int8":
            raise ConfigError("an int8 cache has no gradient: train with a float cache")
        segments: steps.Segments = tuple(extra_inputs or ())
        if PROMPT_KEY in params:
            prompt = _run_prompt(model, params, segments)
            fields = {name: getattr(prompt, name) for name in _SEGMENT_FIELDS}
            segments = (*segments, Segment(**fields))
        begin, position_BT = next_position(segments), jnp.asarray(rows.position_BT)
        position_BT = jnp.where(position_BT < 0, position_BT, position_BT + begin)
        moved = rows.replace(position_BT=position_BT)
        params = remove_prompt(params)
        trace = forward(model, params, moved, segments)
        return LossOutput(*next_token_loss(model, params, trace, rows.label_BT))


def check_context(model: Model, prefix: int, width: int) -> None:
    """Raise CapacityError if prefix, prompt and row together exceed the context."""
    if prefix + width > model.config.context_length:
        raise CapacityError(
            f"a prefix of {prefix} tokens and rows of {width} columns exceed the model's context of"
            f" {model.config.context_length}: use shorter rows"
        )


def with_soft_prompt(model: Model, params: Params, tokens: Sequence[int]) -> Params:
    """Return the parameters with a prompt of embeddings, initialized with those of `tokens`."""
    token_1P = _check_prefix_ids(model, tokens)
    path = get_family(model.config.model_type).token_table.split(".")
    table = model.gather({path[0]: params[path[0]]})
    for name in path:
        table = table[name]
    embeddings_PD = as_weight(table["weight"]).take(jnp.asarray(token_1P))[0]
    return {**params, PROMPT_KEY: {"embeddings": embeddings_PD, "tokens": jnp.asarray(token_1P[0])}}


def with_trained_prefix(model: Model, params: Params, tokens: Sequence[int]) -> Params:
    """Return the parameters with a prompt of keys and values, initialized with those of `tokens`.

    A token has `2 * layers * kv heads * head_dim` numbers; in a soft prompt it has D.
    """
    (segment,) = run_prefix(model, params, tokens)

    def to_float_dict(entries: tuple[Any, ...]) -> dict[str, Any]:
        floats: Iterator[Any] = (
            cast(x, jnp.dtype("float32")) if x.dtype == jnp.int8 else x for x in entries
        )
        return {str(i): x[0] for i, x in enumerate(floats)}

    entries = {"k": to_float_dict(segment.k), "v": to_float_dict(segment.v)}
    return {**params, PROMPT_KEY: {**entries, "tokens": segment.token_BS[0]}}


def remove_prompt(params: Params) -> Params:
    """Return the parameters without the prompt."""
    return {name: value for name, value in params.items() if name != PROMPT_KEY}


def prompt_cache(
    model: Model, params: Params, *, capacity: int, prefix: KVCache | None = None
) -> KVCache:
    """Return a cache of one row that holds the trained prompt, to generate from, fork and save.

    Its slots have the ids of the tokens that initialized the prompt, so `LM.generate` accepts text
    that starts with them. They are marked as patched, since their keys and values differ.

    Args:
        prefix: the cache that the prompt was trained after; it is not modified.

    Raises:
        ConfigError: If the parameters have no prompt.
        CapacityError: If it does not fit.
    """
    if PROMPT_KEY not in params:
        raise ConfigError("these parameters have no trained prompt")
    past: steps.Segments = ()
    if prefix is None:
        cache = init_cache(model, 1, capacity)
    else:
        cache, past = compact(prefix, capacity=capacity), to_segments(prefix)
    return commit(cache, _jit_run_prompt(model, params, past))


def next_position(segments: steps.Segments) -> jax.Array:
    """Return the position after all segments, int32; 0 if there are none."""
    last = [s.position_BS.max() for s in segments]
    return jnp.stack(last).max() + 1 if last else jnp.zeros((), jnp.int32)


def _run_prompt(model: Model, params: Params, prefix: steps.Segments) -> Delta:
    """Return the trained prompt after `prefix` as a segment of one row, differentiably."""
    prompt = params[PROMPT_KEY]
    token_1P = prompt["tokens"][None]
    position_1P = next_position(prefix) + jnp.arange(token_1P.shape[1], dtype=jnp.int32)[None]
    if "embeddings" in prompt:
        embeddings = {"embeddings_BTD": prompt["embeddings"][None]}
        _, delta, _ = steps.run_model(
            model, remove_prompt(params), prefix, token_1P, position_1P, **embeddings
        )
    else:
        dtype = prefix[0].k[0].dtype if prefix else jnp.dtype(model.precision.cache)
        k, v = (
            tuple(cast(prompt[name][str(i)][None], dtype) for i in range(len(prompt[name])))
            for name in ("k", "v")
        )
        delta = Delta(k, v, position_1P, token_1P, token_1P)
    return delta.replace(patched_BS=jnp.ones(token_1P.shape, bool))


_jit_run_prompt = jax.jit(_run_prompt, static_argnums=0)


def _check_prefix_ids(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """Return the ids, int32 `[1, P]`. Raises TokenError for no ids or invalid ones."""
    token_P = np.asarray(tokens)
    if token_P.ndim != 1 or not token_P.size or token_P.dtype.kind not in "iu":
        raise TokenError(f"a prefix must be a list of at least one token id, got {tokens!r:.60}")
    check_token_ids(token_P, model.config.vocab_size, "the prefix: ")
    return token_P.astype(np.int32)[None]


# The kinds of trained prompts: embeddings, or keys and values ("entries").
PROMPT_KINDS = {"embeddings": with_soft_prompt, "entries": with_trained_prefix}


def with_prefix(job: TrainJob, prefix: Sequence[int]) -> TrainJob:
    """Return the job with all rows after a prefix, which is run once, by the model before training.

    Use the result with that cache: make the cache with the original model, without an adapter, and
    generate from it with the trained one.

    Raises:
        ConfigError: For losses other than `NextToken`, and what `run_prefix` raises.
    """
    if not isinstance(job.objective, NextToken):
        raise ConfigError(f"a prefix needs the next-token loss, got {job.objective!r:.60}")
    params = job.lm.params if job.compute_params is None else job.compute_params
    segments = run_prefix(job.lm.model, params, prefix)
    return dataclasses.replace(job, objective=PrefixLoss(), extra_inputs=segments)


def prompt_tuning(
    lm: LM, tokens: Sequence[int], *, kind: str = "embeddings", prefix: KVCache | None = None
) -> TrainJob:
    """Train a prompt that is initialized with `tokens`; the model is frozen.

    The result is a cache file.

    Args:
        kind: a name in `PROMPT_KINDS`.
        prefix: a committed cache of one row that the prompt comes after.

    Raises:
        ConfigError: For another kind, and what `with_soft_prompt` and `to_segments` raise.
    """
    if kind not in PROMPT_KINDS:
        raise ConfigError(
            f"the kind of a prompt must be {' or '.join(PROMPT_KINDS)}, got {kind!r:.40}"
        )
    before = 0 if prefix is None else int(prefix.length_B[0])
    if lm.model.is_sharded and prefix is not None:
        raise ConfigError("a prompt after a prefix cannot be trained on a mesh: drop --mesh")
    if kind == "entries" and lm.model.joined_layers:
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
