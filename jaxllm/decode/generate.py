"""Generation: a prefill, then one compiled loop that samples and decodes until every row has ended.

`generate` runs the loop on the device, `stream` runs the same body a token at a time from Python.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Required, TypedDict, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.cache.kv import KVCache, Segment, extend, init_cache, settle
from jaxllm.decode.sampling import GREEDY, Sampler, row_keys, sample
from jaxllm.errors import CapacityError, SamplingError
from jaxllm.steps import Mass, prefill, run
from jaxllm.weights.paths import Params

_EOS_SLOTS = 8  # end-of-text ids are padded to a multiple of this, so their number is not a shape
_NO_TOKEN = -1

Buffers = tuple[jax.Array, jax.Array]


class Finish(IntEnum):
    """Why a row ended."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    NON_FINITE = 3


class Generated(struct.PyTreeNode):
    """What `generate` returns.

    token_BT: int32 `[B, max_new_tokens]`, -1 after a row's end; an end-of-text token is part of
    its row. logprob_BT: float32, each token's log-probability under the model, before any
    sampler. length_B: tokens of each row. finish_B: a `Finish`. cache: holds the prompt and every
    token but each row's last, so that a longer text goes on from the last token. attention_mass:
    what each of the cache's slots received from the tokens run so far, `[B, S]` or
    `[layers, B, S]`; None unless asked for.
    """

    token_BT: jax.Array
    logprob_BT: jax.Array
    length_B: jax.Array
    finish_B: jax.Array
    cache: KVCache
    attention_mass: jax.Array | None


class Plan(struct.PyTreeNode):
    """What a generation was asked for; the same at every step.

    budget_B: how many tokens a row may have in all. eos_E: end-of-text ids, padded with -1.
    key_B: each row's random key.
    """

    budget_B: jax.Array
    eos_E: jax.Array
    key_B: jax.Array
    sampler: Sampler


class Choice(struct.PyTreeNode):
    """Where each row stands: its newest token, which the cache does not hold yet, and its end."""

    token_B: jax.Array
    logprob_B: jax.Array
    length_B: jax.Array
    finish_B: jax.Array


Carry = tuple[KVCache, Choice, jax.Array | None, Buffers]


class Options(TypedDict, total=False):
    """What `generate` and `stream` take beside model, parameters and prompts.

    max_new_tokens: a number, or one a row; required. lengths_B: the prompts' lengths, where they
    are padded on the right. sampler: greedy by default. seed: a number, or keys `[B]`.
    eos_token_ids: a row ends with any of them. cache: what the prompts go on from; it stays valid.
    chunk: tokens of a prompt that are run at once. attention_mass: as for `forward`.
    """

    max_new_tokens: Required[int | Sequence[int]]
    lengths_B: Any
    sampler: Sampler
    seed: int | jax.Array
    eos_token_ids: Sequence[int]
    cache: KVCache | None
    chunk: int
    attention_mass: Mass


def generate(
    model: nn.Module, params: Params, tokens_BT: Any, **options: Unpack[Options]
) -> Generated:
    """Continue each prompt `[B, T]` until it ends: one prefill, one compiled while-loop.

    options: see `Options`. Only shapes compile: a prompt's content, its length within a bucket,
    sampler values, seed, budgets and end-of-text ids do not.

    Raises what `prefill` raises, CapacityError when prompt and new tokens do not fit into the
    cache or the model, SamplingError for a budget below one.
    """
    plan, cache, choice, mass = _begin(model, params, tokens_BT, **options)
    longest = int(np.max(options["max_new_tokens"]))
    tail, choice, mass, token_BT, logprob_BT = _loop(
        model,
        params,
        cache.frozen,
        plan,
        cache.replace(frozen=()),
        choice,
        mass,
        bucket(longest),
        options.get("attention_mass", False),
    )
    return Generated(
        jax.device_put(np.asarray(token_BT)[:, :longest]),  # JAX's own slice would be compiled
        jax.device_put(np.asarray(logprob_BT)[:, :longest]),
        choice.length_B,
        choice.finish_B,
        tail.replace(frozen=cache.frozen),
        mass,
    )


def stream(
    model: nn.Module, params: Params, tokens_BT: Any, **options: Unpack[Options]
) -> Iterator[Generated]:
    """As `generate`, a token at a time: yields what came since, with T = 1.

    The caches inside what is yielded are written over by the next step; the last one is the
    caller's. Prefill runs, and errors are raised, when the first item is asked for. The attention
    mass is each step's own, the prompt's at first.
    """
    plan, cache, choice, mass = _begin(model, params, tokens_BT, **options)
    frozen, tail = cache.frozen, cache.replace(frozen=())
    ended_B = np.zeros(choice.token_B.shape, bool)
    while True:
        yield Generated(
            jax.device_put(np.where(ended_B, _NO_TOKEN, choice.token_B)[:, None]),
            jax.device_put(np.where(ended_B, np.float32(0), choice.logprob_B)[:, None]),
            choice.length_B,
            choice.finish_B,
            tail.replace(frozen=frozen),
            mass,
        )
        ended_B = np.asarray(choice.finish_B) != Finish.RUNNING
        if ended_B.all():
            return
        tail, choice, mass = _one(
            model, params, frozen, plan, tail, choice, options.get("attention_mass", False)
        )


def bucket(tokens: int) -> int:
    """The capacity made for this many tokens: powers of two, so that few programs are compiled."""
    return max(128, 1 << (tokens - 1).bit_length())


def _begin(
    model: nn.Module,
    params: Params,
    tokens_BT: Any,
    *,
    max_new_tokens: int | Sequence[int],
    lengths_B: Any = None,
    sampler: Sampler = GREEDY,
    seed: int | jax.Array = 0,
    eos_token_ids: Sequence[int] = (),
    cache: KVCache | None = None,
    chunk: int = 256,
    attention_mass: Mass = False,
) -> tuple[Plan, KVCache, Choice, jax.Array | None]:
    """Check the room, prefill, and sample the first token of each row; the mass of the prompt."""
    B, T = np.shape(tokens_BT)
    budget_B = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (B,))
    if budget_B.min() < 1:
        raise SamplingError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    longest = int(budget_B.max())
    start = 0 if cache is None else int(cache.next_position_B.max())
    limit = model.config.position_limit
    if start + T + longest - 1 > limit:
        raise CapacityError(
            f"{start + T} tokens and {longest} new ones do not fit into the model's {limit}"
            " positions. Shorten the prompt or max_new_tokens"
        )
    needed = T + longest - 1  # the last token is never run
    fresh = cache is None
    if cache is None:
        cache = init_cache(model.config, B, bucket(needed), dtype=model.precision.cache)
    elif int(cache.cursor) + needed > cache.capacity:
        raise CapacityError(
            f"{T} tokens and {longest} new ones do not fit: {int(cache.cursor)} of the cache's"
            f" {cache.capacity} slots are used. Make the cache with a larger capacity"
        )
    given = {"lengths_B": lengths_B, "chunk": chunk, "donate": fresh}
    mass = None
    if attention_mass is False:
        logits_BV, cache = prefill(model, params, cache, tokens_BT, **given)
    else:
        logits_BV, cache, mass = prefill(
            model, params, cache, tokens_BT, attention_mass=attention_mass, **given
        )
    slots = _EOS_SLOTS * max(1, -(-len(eos_token_ids) // _EOS_SLOTS))
    eos = [*eos_token_ids, *[_NO_TOKEN] * (slots - len(eos_token_ids))]
    plan = Plan(
        budget_B=jax.device_put(budget_B),
        eos_E=jax.device_put(np.array(eos, np.int32)),
        key_B=row_keys(seed, B) if isinstance(seed, int) else seed,
        sampler=sampler,
    )
    zeros, running = np.zeros(B, np.int32), np.full(B, Finish.RUNNING, np.int32)
    nothing = Choice(*jax.device_put((zeros, np.zeros(B, np.float32), zeros, running)))
    return plan, cache, _first(plan, nothing, cache.next_position_B, logits_BV), mass


def _choose(plan: Plan, last: Choice, position_B: jax.Array, logits_BV: jax.Array) -> Choice:
    """Sample a token for every row that still runs, and see whether it ends with it."""
    running_B = last.finish_B == Finish.RUNNING
    key_B = jax.vmap(jax.random.fold_in)(plan.key_B, position_B)
    token_B = sample(key_B, logits_BV, plan.sampler)
    logprob_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    logprob_B = jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)[:, 0]
    finite_B = jnp.isfinite(logits_BV).all(axis=1)
    length_B = last.length_B + (running_B & finite_B).astype(jnp.int32)
    finish_B = jnp.where(length_B >= plan.budget_B, Finish.LENGTH, Finish.RUNNING)
    finish_B = jnp.where((token_B[:, None] == plan.eos_E[None]).any(axis=1), Finish.EOS, finish_B)
    finish_B = jnp.where(finite_B, finish_B, Finish.NON_FINITE)
    return Choice(
        token_B=jnp.where(running_B, token_B, last.token_B),
        logprob_B=jnp.where(running_B, logprob_B, last.logprob_B),
        length_B=length_B,
        finish_B=jnp.where(running_B, finish_B, last.finish_B),
    )


def _advance(
    model: nn.Module,
    params: Params,
    frozen: tuple[Segment, ...],
    plan: Plan,
    tail: KVCache,
    choice: Choice,
    attention_mass: Mass,
) -> tuple[KVCache, Choice, jax.Array | None]:
    """Run the chosen tokens, commit them (of running rows only), and choose the next."""
    running_B = choice.finish_B == Finish.RUNNING
    position_BT = jnp.where(running_B, tail.next_position_B, -1)[:, None]
    segments = (*frozen, tail.tail)
    token_BT = choice.token_B[:, None]
    trace, delta, mass = run(
        model, params, segments, token_BT, position_BT, attention_mass=attention_mass
    )
    mass = None if mass is None else settle(mass, tail, 1)
    tail = extend(tail, delta)
    return tail, _choose(plan, choice, tail.next_position_B, trace.logits[:, 0]), mass


@partial(jax.jit, static_argnums=(0, 7, 8), donate_argnums=(4, 6))
def _loop(
    model: nn.Module,
    params: Params,
    frozen: tuple[Segment, ...],
    plan: Plan,
    tail: KVCache,
    choice: Choice,
    mass: jax.Array | None,
    width: int,
    attention_mass: Mass,
) -> tuple[KVCache, Choice, jax.Array | None, jax.Array, jax.Array]:
    B = choice.token_B.shape[0]
    rows = jnp.arange(B)

    def keep(choice: Choice, length_B: jax.Array, buffers: Buffers) -> Buffers:
        # Each row writes at its own length; one without a new token writes outside: dropped.
        at_B = jnp.where(choice.length_B > length_B, length_B, width)
        token_BT, logprob_BT = buffers
        return (
            token_BT.at[rows, at_B].set(choice.token_B, mode="drop"),
            logprob_BT.at[rows, at_B].set(choice.logprob_B, mode="drop"),
        )

    def unfinished(carry: Carry) -> jax.Array:
        return (carry[1].finish_B == Finish.RUNNING).any()

    def body(carry: Carry) -> Carry:
        tail, last, total, buffers = carry
        tail, choice, mass = _advance(model, params, frozen, plan, tail, last, attention_mass)
        total = None if total is None or mass is None else total + mass
        return tail, choice, total, keep(choice, last.length_B, buffers)

    buffers = (jnp.full((B, width), _NO_TOKEN, jnp.int32), jnp.zeros((B, width), jnp.float32))
    buffers = keep(choice, jnp.zeros((B,), jnp.int32), buffers)
    carry = jax.lax.while_loop(unfinished, body, (tail, choice, mass, buffers))
    return *carry[:3], *carry[3]


_first = jax.jit(_choose)
_one = jax.jit(_advance, static_argnums=(0, 6), donate_argnums=4)
