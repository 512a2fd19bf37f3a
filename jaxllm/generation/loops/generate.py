"""Generation: a prefill, then one compiled loop of sampling and decoding until all rows end.

`generate` runs the loop on the device; `stream` runs the same body once per token from Python.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Required, TypedDict, Unpack

import jax
import numpy as np
from flax import struct

from jaxllm.cache.edit import rewind
from jaxllm.cache.kv import KVCache, check_usable, init_cache
from jaxllm.errors import SamplingError, suggest_name
from jaxllm.generation.loops.capacity import (
    check_capacity,
    check_continuation,
    initial_text,
    truncate_to_recent,
)
from jaxllm.generation.loops.finish import NO_TOKEN, Finish, pad_eos_ids, token_budgets
from jaxllm.generation.loops.overflow import OverflowPolicy, OverflowState, make_room
from jaxllm.generation.loops.pipelined import decode_pipelined, row_groups
from jaxllm.generation.loops.state import (
    DecodeState,
    LoopConstants,
    StopLimits,
    decode_and_sample,
    decode_forced,
    decode_until_done,
    is_running,
    sample,
)
from jaxllm.generation.sampling.sampler import GREEDY, Context, Sampler, as_row_keys, check_sampler
from jaxllm.models.inputs import check_model, check_prompts
from jaxllm.models.packing import promise_packed
from jaxllm.models.site_inputs import check_edits, check_read, label_cache
from jaxllm.models.sites import SITES, split_name
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.ops.padding import bucket_size
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int
from jaxllm.steps import EditMap, MassMode, prefill, prepare_prefill
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

# Maps each row's newest token (-1 if the row has ended) to whether the row ends with it.
Until = Callable[[np.ndarray], np.ndarray]
# Returns the tokens that must follow the newest one, after `until` was called with it.
Forced = Callable[[], list[int]]

_FORCED_WIDTHS = (64, 16, 4)  # tokens in one pass: each is a compiled program


class GenerateResult(struct.PyTreeNode):
    """Result of `generate`.

    Attributes:
        token_BT: int32 `[B, max_new_tokens]`, -1 after a row's end; includes end-of-text tokens.
        logprob_BT: float32, each token's log-probability under the model, before any processor.
        processed_logprob_BT: The same under the distribution that it was drawn from, after all
            processors (temperature, truncation, grammars); None unless requested.
        length_B: Number of generated tokens per row.
        finish_B: A `Finish` per row.
        cache: Holds the prompt and all generated tokens but each row's last, so a continuation
            starts with that token.
        top_token_BTN, top_logprob_BTN: The N likeliest tokens of each step, best first, or None.
        attention_mass: Attention that each cache slot received from the tokens run so far, `[B, S]`
            or `[layers, B, S]`; None unless requested or needed by the overflow policy.
        sites: What was read, by site: NumPy arrays of the chosen steps in order, on the axis of
            new tokens. Step i runs the i-th generated token, from 0; the last never runs. The
            results of `stream` hold their own step's alone, on the device.
    """

    token_BT: jax.Array
    logprob_BT: jax.Array
    length_B: jax.Array
    finish_B: jax.Array
    cache: KVCache
    top_token_BTN: jax.Array | None
    top_logprob_BTN: jax.Array | None
    attention_mass: jax.Array | None
    processed_logprob_BT: jax.Array | None = None
    sites: dict[str, Any] = struct.field(default_factory=dict)


class GenerateKwargs(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`.

    Attributes:
        max_new_tokens: One limit, or one per row; required.
        lengths_B: Prompt lengths, if the prompts are padded on the right.
        sampler: Greedy by default.
        seed: An integer, or random keys `[B]`.
        eos_token_ids: A row ends with any of these.
        until: Called in Python after every step with each row's newest token; returns which rows
            end.
        forced: With `until` and a single row: returns the tokens that a grammar forces after the
            newest one, which then run in one pass. The result is the same without it.
        cache: A cache that the prompts continue; it stays valid.
        overflow: Eviction policy for a full cache; without one, a generation that does not fit
            raises an error.
        top_logprobs: Number of likeliest tokens to return per step.
        processed_logprobs: Also return `GenerateResult.processed_logprob_BT`.
        chunk: Prompt tokens to run at once; by default `steps.default_chunk()`.
        attention_mass: As for `forward`.
        read: As for `forward`. Steps then run one by one, and what they read moves to the host.
        read_steps: The steps to read, as in `GenerateResult.sites`; None: all.
        edits: As for `prefill`, of the prompt and of all new tokens.
    """

    max_new_tokens: Required[int | Sequence[int]]
    lengths_B: Any
    sampler: Sampler
    seed: int | jax.Array
    eos_token_ids: Sequence[int]
    until: Until | None
    forced: Forced | None
    cache: KVCache | None
    overflow: OverflowPolicy | None
    top_logprobs: int
    processed_logprobs: bool
    chunk: int | None
    attention_mass: MassMode
    read: Sequence[str]
    read_steps: Sequence[int] | None
    edits: EditMap | None


def generate(
    model: Model, params: Params, tokens_BT: Any, **options: Unpack[GenerateKwargs]
) -> GenerateResult:
    """Continue each prompt `[B, T]` until it ends, with one prefill and one compiled while-loop.

    Only new shapes compile: a prompt's content, its length within a bucket, sampler values, seeds,
    token limits and end-of-text ids do not.

    Args:
        options: See `GenerateKwargs`.

    Raises:
        CapacityError: If prompt and new tokens do not fit into the cache or the model.
        SamplingError: For max_new_tokens below 1.
        JaxllmError: Whatever else `prefill` raises.
    """
    until, asked = _split_until(options)
    by_step = until is not None or bool(options.get("read"))
    program = _STEP if by_step else _LOOP
    model, constants, cache, state = _prefill(program, model, params, tokens_BT, **asked)
    if by_step:
        found, chosen = list[dict[str, Any]](), options.get("read_steps")
        steps = _iterate_steps(model, constants, cache, state, until, options)
        for number, newest in enumerate(steps, -1):
            cache, state = newest
            if state.sites and (chosen is None or number in chosen):
                found.append(to_host(state.sites))
        return _make_result(state, cache, options).replace(sites=join_steps(found))
    mass, overflow = _requested_mass(options), options.get("overflow")
    is_simple = overflow is None and mass is False
    in_groups = is_simple and row_groups(model, cache.batch) is not None
    loop = _PIPELINED_LOOP if in_groups else _LOOP
    while True:
        cache, state = _run_program(loop, model, constants, cache, state, mass)
        if overflow is None or not is_running(state):
            return _make_result(state, cache, options)
        cache, total = make_room(
            overflow, OverflowState(model, params, cache, state.context, state.mass)
        )
        state = state.replace(mass=total)


def stream(
    model: Model, params: Params, tokens_BT: Any, **options: Unpack[GenerateKwargs]
) -> Iterator[GenerateResult]:
    """Generate one token at a time; each item holds the newest token of each row (T = 1).

    The next step overwrites the cache of the item before it; the last item's cache stays valid.
    The prefill runs, and errors are raised, at the first `next`. The attention mass is that of the
    latest step alone, initially that of the prompt.
    """
    until, asked = _split_until(options)
    model, constants, cache, state = _prefill(_STEP, model, params, tokens_BT, **asked)
    before_B = np.asarray(state.context.prompt_B)
    for now, step in _iterate_steps(model, constants, cache, state, until, options):
        yield _make_result(step, now, options, before_B, width=1)
        before_B = np.asarray(step.context.length_B)


def _split_until(options: GenerateKwargs) -> tuple[Until | None, Any]:
    """Return `until` and the other options."""
    for name in options.keys() - GenerateKwargs.__annotations__.keys():
        known = suggest_name(name, GenerateKwargs.__annotations__)
        raise SamplingError(f"generate has no option {name:.60}{known}")
    until = options.get("until")
    if until is not None and not callable(until):
        raise SamplingError(f"until must be a function of the newest tokens, got {until!r:.60}")
    if options.get("forced") is not None and options.get("read"):
        raise SamplingError("read and forced cannot be combined: forced tokens run in one pass")
    apart = ("until", "forced", "read_steps")
    return until, {k: v for k, v in options.items() if k not in apart}


def join_steps(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what each step read on the axis of new tokens."""
    axes = {name: SITES[split_name(name)[1]].axes.index("T") for name in (found or [{}])[0]}
    return {name: np.concatenate([x[name] for x in found], axis) for name, axis in axes.items()}


def _prefill(
    program: CachedJit,
    model: Model,
    params: Params,
    tokens_BT: Any,
    *,
    max_new_tokens: int | Sequence[int],
    lengths_B: Any = None,
    sampler: Sampler = GREEDY,
    seed: int | jax.Array = 0,
    eos_token_ids: Sequence[int] = (),
    cache: KVCache | None = None,
    overflow: OverflowPolicy | None = None,
    top_logprobs: int = 0,
    processed_logprobs: bool = False,
    chunk: int | None = None,
    attention_mass: MassMode = False,
    read: Sequence[str] = (),
    edits: EditMap | None = None,
) -> tuple[Model, LoopConstants, KVCache, DecodeState]:
    """Check capacities, prefill, and sample the first token of each row; return the loop's model
    and its first state.

    program: the one that runs next, which is compiled while the prompt runs.
    """
    check_model(model, params)
    check_sampler(sampler)
    if overflow is not None and not isinstance(overflow, OverflowPolicy):
        raise SamplingError(
            f"overflow must be a policy of jaxllm.generation.loops.overflow, got {overflow!r:.60}"
        )
    tokens_BT, lengths_B = check_prompts(model.config, tokens_BT, lengths_B)
    B, T = tokens_BT.shape
    budget_B = token_budgets(max_new_tokens, B)
    top_logprobs = check_int("top_logprobs", top_logprobs, 0, model.config.vocab_size)
    if overflow is not None and attention_mass is not False:
        raise SamplingError("attention_mass and overflow cannot be combined: eviction moves slots")
    names, checked = check_read(model, read), check_edits(model, edits, B, 1, None)
    if overflow is not None and checked.edits:
        raise SamplingError("edits and overflow cannot be combined: a policy may run tokens again")
    needed = T + int(budget_B.max()) - 1  # the last token never runs
    fresh = cache is None
    if cache is None:
        capacity = bucket_size(needed)
        if overflow is not None:
            capacity = min(capacity, model.config.default_cache_size)
        cache = init_cache(model, B, capacity)
    check_usable(cache)
    check_continuation(model, None if fresh else cache, lengths_B, budget_B)
    token_BL, length_B = initial_text(None if fresh else cache, tokens_BT, lengths_B, needed)
    if overflow is None:
        check_capacity(model, cache, needed)
    else:
        tokens_BT, lengths_B = truncate_to_recent(cache, tokens_BT, lengths_B, overflow)
    if overflow is not None and overflow.reads_mass:
        attention_mass = True
    reading: Any = {"lengths_B": lengths_B, "chunk": chunk, "attention_mass": attention_mass}
    reading["edits"] = checked
    prepare_prefill(model, params, cache, tokens_BT, **reading)
    if overflow is None:
        model = promise_packed(model, cache, lengths_B)
    limits = StopLimits(*jax.device_put((budget_B, pad_eos_ids(eos_token_ids))))
    constants = LoopConstants(params, (), limits, checked, names)
    cache = label_cache(cache, checked)
    key_B = as_row_keys(seed, B)
    L, N = token_BL.shape[1], top_logprobs
    token_BL, length_B, newest_B, finish_B, logprob_BL, top_token, top_logprob = jax.device_put(
        (
            token_BL,
            length_B,
            np.zeros(B, np.int32),
            np.full(B, Finish.RUNNING, np.int32),
            np.zeros((B, L), np.float32),
            np.full((B, L, N), NO_TOKEN, np.int32),
            np.zeros((B, L, N), np.float32),
        )
    )
    context, sampler = Context(token_BL, length_B, length_B, key_B), sampler.begin(B)
    top_BLN = (top_token, top_logprob)
    processed_BL = logprob_BL if processed_logprobs else None
    state = DecodeState(
        newest_B, finish_B, context, sampler, logprob_BL, top_BLN, None, processed_BL
    )
    if attention_mass is False:  # while the prompt's program is compiled, and the prompt runs
        logits = jax.ShapeDtypeStruct((B, model.config.vocab_size), np.float32)
        _SAMPLE.prepare(limits, state, logits)
        if budget_B.max() > 1:
            args = _program_arguments(model, constants, cache, state, attention_mass)
            program.prepare(*args)
    out = prefill(model, params, cache, tokens_BT, donate=fresh, **reading)
    state = state.replace(mass=out.attention_mass)
    return model, constants, out.cache, _SAMPLE(limits, state, out.logits)


def _make_result(
    state: DecodeState,
    cache: KVCache,
    options: GenerateKwargs,
    start_B: np.ndarray | None = None,
    width: int | None = None,
) -> GenerateResult:
    """Extract the tokens from `start_B` on (default: after the prompt), on the host."""
    prompt_B, length_B = np.asarray(state.context.prompt_B), np.asarray(state.context.length_B)
    start_B = prompt_B if start_B is None else start_B
    width = int(np.max(options["max_new_tokens"])) if width is None else width
    index_BT = start_B[:, None] + np.arange(width)[None]
    there_BT = index_BT < length_B[:, None]
    index_BT = np.where(there_BT, index_BT, 0)

    def cut(array: jax.Array, blank: Any) -> jax.Array:  # in numpy: a JAX slice would compile
        x: np.ndarray = to_host(array)
        there = there_BT.reshape(there_BT.shape + (1,) * (x.ndim - 2))
        found: np.ndarray = np.take_along_axis(x, index_BT.reshape(there.shape), axis=1)
        return jax.device_put(np.where(there, found, x.dtype.type(blank)))

    asked = bool(options.get("top_logprobs", 0))
    return GenerateResult(
        cut(state.context.token_BL, NO_TOKEN),
        cut(state.logprob_BL, 0),
        jax.device_put(length_B - prompt_B),
        state.finish_B,
        cache,
        cut(state.top_BLN[0], NO_TOKEN) if asked else None,
        cut(state.top_BLN[1], 0) if asked else None,
        state.mass,
        None if state.processed_BL is None else cut(state.processed_BL, 0),
        state.sites,
    )


def _iterate_steps(
    model: Model,
    constants: LoopConstants,
    cache: KVCache,
    state: DecodeState,
    until: Until | None,
    options: GenerateKwargs,
) -> Iterator[tuple[KVCache, DecodeState]]:
    """Yield cache and state after each step, until every row has ended."""
    overflow, forced = options.get("overflow"), options.get("forced")
    mass, before_B = _requested_mass(options), np.asarray(state.context.prompt_B)
    total = state.mass
    while True:
        for cache_now, now in _each_token(cache, state, before_B):
            if until is not None:
                grown_B = np.asarray(now.context.length_B) > before_B
                ends_B = until(np.where(grown_B, now.newest_B, NO_TOKEN))
                finish_B = np.where(ends_B & grown_B, np.int32(Finish.STOP), now.finish_B)
                now = now.replace(finish_B=jax.device_put(finish_B))
            before_B = np.asarray(now.context.length_B)
            yield cache_now, now
            if not is_running(now):
                return
        state = now
        if forced is not None and (token_1T := _forced_run(forced(), state, options)) is not None:
            *args, _ = _program_arguments(model, constants, cache, state, mass)
            tail, state = _FORCED(*args, token_1T)
            cache = tail.replace(frozen=cache.frozen)
            continue
        if overflow is not None and int(cache.cursor) >= cache.capacity:
            cache, total = make_room(
                overflow, OverflowState(model, constants.params, cache, state.context, total)
            )
            state = state.replace(mass=total)
        cache, state = _run_program(_STEP, model, constants, cache, state, mass)
        if total is not None and state.mass is not None:
            total = total + state.mass


def _each_token(
    cache: KVCache, state: DecodeState, before_B: np.ndarray
) -> Iterator[tuple[KVCache, DecodeState]]:
    """Yield cache and state after each of the newest tokens, of which one row may have several."""
    length_B = np.asarray(state.context.length_B)
    more = int((length_B - before_B).max()) - 1
    for back in range(more, 0, -1):
        at_B = length_B - back
        context = state.context.replace(length_B=jax.device_put(at_B))
        newest_B = np.asarray(state.context.token_BL)[np.arange(at_B.size), at_B - 1]
        running_B = np.full_like(state.finish_B, Finish.RUNNING)
        newest_B, running_B = jax.device_put((newest_B, running_B))
        then = state.replace(context=context, newest_B=newest_B, finish_B=running_B)
        yield rewind(cache, back), then
    yield cache, state


def _forced_run(
    tokens: list[int], state: DecodeState, options: GenerateKwargs
) -> np.ndarray | None:
    """Return the newest token and forced ones to run in one pass, `[1, T]`; None for few."""
    new = int(state.context.length_B[0]) - int(state.context.prompt_B[0])
    room = int(np.max(options["max_new_tokens"])) - new
    count = min(len(tokens) + 1, room)
    for width in _FORCED_WIDTHS:
        if width <= count:
            return np.array([[int(state.newest_B[0]), *tokens[: width - 1]]])
    return None


def _run_program(
    program: CachedJit,
    model: Model,
    constants: LoopConstants,
    cache: KVCache,
    state: DecodeState,
    mass: MassMode,
) -> tuple[KVCache, DecodeState]:
    """Run a program on the tail; frozen segments are inputs only, so they are never copied."""
    tail, state = program(*_program_arguments(model, constants, cache, state, mass))
    return tail.replace(frozen=cache.frozen), state


def _program_arguments(
    model: Model,
    constants: LoopConstants,
    cache: KVCache,
    state: DecodeState,
    mass: MassMode,
) -> tuple[Any, ...]:
    constants = constants.replace(frozen=cache.frozen)
    return model, constants, cache.replace(frozen=()), state.replace(sites={}), mass


def _requested_mass(options: GenerateKwargs) -> MassMode:
    """Return the attention mass to compute: as requested, or as the overflow policy needs it."""
    overflow = options.get("overflow")
    asked = options.get("attention_mass", False)
    return True if overflow is not None and overflow.reads_mass else asked


_SAMPLE = CachedJit(sample)
_STEP = CachedJit(decode_and_sample, static_argnums=(0, 4), donate_argnums=2)
_LOOP = CachedJit(decode_until_done, static_argnums=(0, 4), donate_argnums=2)
_FORCED = CachedJit(decode_forced, static_argnums=(0,), donate_argnums=2)
_PIPELINED_LOOP = CachedJit(decode_pipelined, static_argnums=(0, 4), donate_argnums=2)
