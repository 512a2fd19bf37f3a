"""Training after a prefix that is run once, and prompts that are themselves trained.

A frozen prefix is the segments of a committed cache of one row: every row of every batch attends to
them by reference and goes on after them. The prefix has the keys and values of the model that ran
it. That is the same as running it in each step where what is trained does not touch them: weights
and adapters of the last layer but for its keys and values, of the head; or an adapter that is meant
for what comes after the prefix alone, as serving goes on from a cache too. Where it does touch
them, running the prefix anew gives another loss and another gradient.

A trained prompt is a segment of one row too: of embeddings (Lester et al. 2021, arXiv 2104.08691),
run once a step however many rows there are, or of the keys and values themselves (Li and Liang
2021, arXiv 2101.00190). It lies in the parameters under `prompt`, and what comes of it is an
ordinary cache.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import steps
from jaxllm.cache.growth import commit
from jaxllm.cache.kv import Delta, KVCache, Segment, check_no_memory, check_usable, init_cache
from jaxllm.cache.surgery import compact
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.models import family
from jaxllm.ops import cast
from jaxllm.train.data.rows import Rows
from jaxllm.train.losses import cross_entropy
from jaxllm.train.objective import Measured, run
from jaxllm.train.trained import Rules
from jaxllm.weights.formats import as_leaf
from jaxllm.weights.paths import Params, Placed
from jaxllm.whole import check_ids

PROMPT = "prompt"
_ENTRIES = tuple(field.name for field in dataclasses.fields(Segment))
PROMPT_RULES: Rules = ((r"prompt\..*", True),)  # the prompt is trained, the model is not


def run_prefix(model: nn.Module, params: Params, tokens: Sequence[int]) -> steps.Segments:
    """The prefix run once: what `AfterPrefix` is given.

    Raises TokenError for an empty one and for ids outside the vocabulary, CacheMismatchError for
    models that keep a memory beside the cache.
    """
    token_1P = _row(model, tokens)
    cache = init_cache(model, 1, token_1P.shape[1])
    return segments_of(steps.prefill(model, params, cache, token_1P, donate=True)[1])


def segments_of(cache: KVCache) -> steps.Segments:
    """What a committed cache of one row holds, without its empty room.

    Raises CacheMismatchError for several rows, an empty cache, or a memory beside it.
    """
    check_usable(cache)
    check_no_memory(cache, "training on a prefix")
    if cache.batch != 1 or not int(cache.length_B[0]):
        raise CacheMismatchError(
            f"training goes on from a cache of one row with a text in it, this has {cache.batch}"
            f" of {np.asarray(cache.length_B).tolist()} tokens"
        )
    tail: Segment = jax.tree.map(lambda x: x[:, : int(cache.cursor)], cache.tail)
    return tuple(s for s in (*cache.frozen, tail) if s.position_BS.shape[1])


@dataclasses.dataclass(frozen=True)
class AfterPrefix:
    """Cross-entropy of rows that go on after a prefix, after a trained prompt, or after both.

    given: the segments of the prefix (`run_prefix`), or None. The prompt, where `params` have one,
    comes after it. Each document of a row sees them and itself. A document's first token is not
    learned, as ever: where the prefix begins with the begin-of-text token, documents should not.

    Raises ConfigError, while it is compiled, for int8 caches, which have no gradient.
    """

    def __call__(
        self, model: nn.Module, params: Params, given: Any, rows: Rows, key: jax.Array
    ) -> Measured:
        if model.precision.cache == "int8":
            raise ConfigError(
                "what is rounded to int8 has no gradient: train with a cache of floats"
            )
        segments: steps.Segments = tuple(given or ())
        if PROMPT in params:
            made = _prompt(model, params, segments)
            segments = (*segments, Segment(**{name: getattr(made, name) for name in _ENTRIES}))
        begin, position_BT = next_position(segments), jnp.asarray(rows.position_BT)
        position_BT = jnp.where(position_BT < 0, position_BT, position_BT + begin)
        moved = rows.replace(position_BT=position_BT)
        trace = run(model, without_prompt(params), moved, segments)
        return Measured(*cross_entropy(trace.logits, rows.label_BT))


def check_room(model: nn.Module, prefix: int, width: int) -> None:
    """Raise CapacityError where a prefix, with a prompt, and a row are longer than the context."""
    if prefix + width > model.config.context_length:
        raise CapacityError(
            f"a prefix of {prefix} tokens and rows of {width} columns exceed the model's context of"
            f" {model.config.context_length}: ask for narrower rows"
        )


def with_soft_prompt(model: nn.Module, params: Params, tokens: Sequence[int]) -> Params:
    """The parameters with a prompt of embeddings, at first those of these tokens."""
    token_1P = _row(model, tokens)
    path = family(model.config.model_type).tokens.split(".")
    table = params
    if isinstance(model, Placed):
        table = model.whole({path[0]: params[path[0]]})
    for name in path:
        table = table[name]
    embeddings_PD = as_leaf(table["weight"]).take(jnp.asarray(token_1P))[0]
    return {**params, PROMPT: {"embeddings": embeddings_PD, "tokens": jnp.asarray(token_1P[0])}}


def with_trained_prefix(model: nn.Module, params: Params, tokens: Sequence[int]) -> Params:
    """The parameters with a prompt of keys and values, at first those that these tokens have at the
    beginning of a text. `2 * layers * kv heads * head_dim` numbers a token, to a soft prompt's D.
    """
    (segment,) = run_prefix(model, params, tokens)

    def each(entries: tuple[Any, ...]) -> dict[str, jax.Array]:
        return {str(i): as_float(x)[0] for i, x in enumerate(entries)}

    def as_float(x: Any) -> jax.Array:
        found: Any = cast(x, jnp.dtype(jnp.float32)) if x.dtype == jnp.int8 else x
        return found

    prompt = {"k": each(segment.k), "v": each(segment.v), "tokens": segment.token_BS[0]}
    return {**params, PROMPT: prompt}


def without_prompt(params: Params) -> Params:
    """The model's own parameters."""
    return {name: value for name, value in params.items() if name != PROMPT}


def prompt_cache(
    model: nn.Module, params: Params, *, capacity: int, prefix: KVCache | None = None
) -> KVCache:
    """A cache of one row whose text is the trained prompt, to generate from, fork and save.

    Its slots have the ids of the tokens that the prompt began as, so that `LM.generate` takes a
    prompt that begins with these, and are marked as patched: they hold other keys and values.
    prefix: the cache that the prompt was trained after, which stays as it is.

    Raises ConfigError where the parameters have no prompt, CapacityError where it does not fit.
    """
    if PROMPT not in params:
        raise ConfigError("these parameters have no trained prompt")
    past: steps.Segments = ()
    if prefix is None:
        cache = init_cache(model, 1, capacity)
    else:
        cache, past = compact(prefix, capacity=capacity), segments_of(prefix)
    return commit(cache, _prompt_of(model, params, past))


def next_position(segments: steps.Segments) -> jax.Array:
    """The position that follows all of them, int32; 0 after none."""
    last = [s.position_BS.max() for s in segments]
    return jnp.stack(last).max() + 1 if last else jnp.zeros((), jnp.int32)


def _prompt(model: nn.Module, params: Params, past: steps.Segments) -> Delta:
    """The trained prompt after `past`, as a segment of one row. Differentiable in the prompt."""
    prompt = params[PROMPT]
    token_1P = prompt["tokens"][None]
    position_1P = next_position(past) + jnp.arange(token_1P.shape[1], dtype=jnp.int32)[None]
    if "embeddings" in prompt:
        embeddings_1PD = prompt["embeddings"][None]
        _, delta, _ = steps.run(
            model,
            without_prompt(params),
            past,
            token_1P,
            position_1P,
            embeddings_BTD=embeddings_1PD,
        )
    else:
        kept = past[0].k[0].dtype if past else jnp.dtype(model.precision.cache)
        k, v = (
            tuple(cast(prompt[name][str(i)][None], kept) for i in range(len(prompt[name])))
            for name in ("k", "v")
        )
        delta = Delta(k, v, position_1P, token_1P, token_1P)
    return delta.replace(patched_BS=jnp.ones(token_1P.shape, bool))


_prompt_of = jax.jit(_prompt, static_argnums=0)


def _row(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """The ids, int32 `[1, P]`. Raises TokenError for none, or what the model does not know."""
    token_P = np.asarray(tokens)
    if token_P.ndim != 1 or not token_P.size or token_P.dtype.kind not in "iu":
        raise TokenError(f"a prefix is a list of at least one token id, got {tokens!r:.60}")
    check_ids(token_P, model.config.vocab_size, "the prefix: ")
    return token_P.astype(np.int32)[None]
