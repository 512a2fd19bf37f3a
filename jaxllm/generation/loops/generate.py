"""Generation: a prefill, then one compiled loop of sampling and decoding until all rows end.

`generate` runs the loop on the device; `stream` runs the same body once per token from Python.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import jax
import numpy as np
from flax import struct

from jaxllm.cache.kv import KVCache, check_usable, init_cache
from jaxllm.cache.operations import rewind
from jaxllm.errors import SamplingError, TokenError, suggest_name
from jaxllm.generation.loops.capacity import (
    check_capacity,
    check_continuation,
    initial_text,
    truncate_to_recent,
)
from jaxllm.generation.loops.finish import Finish, token_budgets
from jaxllm.generation.loops.overflow import OverflowPolicy, OverflowState, make_room
from jaxllm.generation.loops.rounds import ROUND, ROUNDS, LoopInputs, LoopPlan, Tails
from jaxllm.generation.loops.rows import (
    FIRST_DRAW,
    Drawn,
    RowState,
    join_drawn,
    new_tokens,
    start_rows,
)
from jaxllm.generation.sampling.sampler import GREEDY, Sampler, check_sampler
from jaxllm.models.inputs import (
    check_cache,
    check_model,
    check_prompts,
    check_rope_continuation,
    next_positions,
)
from jaxllm.models.packing import promise_packed
from jaxllm.models.site_inputs import check_edits, check_read, label_cache
from jaxllm.models.sites import SITES, split_name
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.ops.padding import bucket_size
from jaxllm.runtime.multihost import to_host
from jaxllm.runtime.validation import check_int
from jaxllm.steps import (
    EditMap,
    MassMode,
    PromptPasses,
    StepOutput,
    check_mass,
    default_chunk,
    plan_passes,
    run_passes,
)
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
        sites: Activations by site: NumPy arrays of the chosen steps in order, on the axis of
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
    until, start_options = _split_until(options)
    by_step = until is not None or bool(options.get("read"))
    start = _prepare(model, params, tokens_BT, by_step=by_step, **start_options)
    run = start.follow_prompt(run_passes(start.passes, donate=start.donate))
    if by_step:
        return _finish_by_step(run, until, options)
    plan, overflow, parts = run.plan, options.get("overflow"), [run.first]
    while run.is_running:
        tails = Tails(run.cache.replace(frozen=()))
        inputs = run.inputs.replace(frozen=run.cache.frozen)
        if run.loop is not None:
            tails, rows, done, drawn = run.loop(plan, inputs, tails, run.rows)
            mass = None
        else:
            counts = (np.int32(plan.rounds), np.int32(1))
            tails, rows, mass, done, drawn = ROUNDS(
                plan, inputs, tails, run.rows, *counts, run.mass
            )
        before_B, run = np.asarray(run.rows.context.length_B), run.follow(tails, rows, mass)
        done, drawn = to_host((done, drawn))
        drawn = jax.tree.map(lambda x, done=done: x[:done], drawn)
        tokens = new_tokens(rows.context, before_B, int(done))
        parts.append(drawn._replace(token_B=tokens))
        if overflow is not None and run.is_running:
            run = run.evict(overflow)
    return _make_result(run, parts, options)


def stream(
    model: Model, params: Params, tokens_BT: Any, **options: Unpack[GenerateKwargs]
) -> Iterator[GenerateResult]:
    """Generate one token at a time; each item holds the newest token of each row (T = 1).

    The next step overwrites the cache of the item before it; the last item's cache stays valid.
    The prefill runs, and errors are raised, at the first `next`. The attention mass covers the
    latest step alone, at first the prompt.
    """
    until, start_options = _split_until(options)
    start = _prepare(model, params, tokens_BT, by_step=True, **start_options)
    run = start.follow_prompt(run_passes(start.passes, donate=start.donate))
    for current, step in _iterate_steps(run, until, options):
        yield _make_result(current, [step.drawn], options, 1).replace(
            sites=step.sites, attention_mass=step.mass
        )


def _finish_by_step(run: "_Run", until: Until | None, options: GenerateKwargs) -> GenerateResult:
    """Return the result of `generate` in steps, each of which Python may see."""
    sites, chosen, parts = list[dict[str, Any]](), options.get("read_steps"), []
    for number, (current, step) in enumerate(_iterate_steps(run, until, options), -1):
        run = current
        parts.append(step.drawn)
        if step.sites and (chosen is None or number in chosen):
            sites.append(to_host(step.sites))
    return _make_result(run, parts, options).replace(sites=join_steps(sites))


def _split_until(options: GenerateKwargs) -> tuple[Until | None, Any]:
    """Return `until`, and the options of `_prepare`."""
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


def join_steps(sites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what each step read on the axis of new tokens."""
    axes = {name: SITES[split_name(name)[1]].axes.index("T") for name in (sites or [{}])[0]}
    return {name: np.concatenate([x[name] for x in sites], axis) for name, axis in axes.items()}


class _Run(NamedTuple):
    """A generation between two calls of its loop.

    first: The tokens after the prompts. finish_B: Why rows ended, on the host. loop: The model's
    own (`Model.decode_loop`). mass: Attention mass so far.
    """

    plan: LoopPlan
    inputs: LoopInputs
    cache: KVCache
    rows: RowState
    first: Drawn
    finish_B: np.ndarray
    loop: CachedJit | None
    mass: jax.Array | None

    @property
    def is_running(self) -> bool:
        return bool((self.finish_B == Finish.RUNNING).any())

    def follow(self, tails: Tails, rows: RowState, mass: jax.Array | None) -> "_Run":
        """Return the run after its loop has written these tails."""
        assert isinstance(tails.target, KVCache)
        cache = tails.target.replace(frozen=self.cache.frozen)
        return self._replace(cache=cache, rows=rows, mass=mass, finish_B=np.asarray(rows.finish_B))

    def evict(self, overflow: OverflowPolicy) -> "_Run":
        """Return the run with room in its cache."""
        state = OverflowState(
            self.plan.model, self.inputs.params, self.cache, self.rows.context, self.mass
        )
        cache, mass = make_room(overflow, state)
        return self._replace(cache=cache, mass=mass)


class _Start(NamedTuple):
    """A checked generation before its prompts run. donate: whether they may overwrite the cache."""

    plan: LoopPlan
    inputs: LoopInputs
    rows: RowState
    passes: PromptPasses
    donate: bool
    loop: CachedJit | None

    def follow_prompt(self, out: StepOutput) -> _Run:
        """Draw the first token of each row; return the run."""
        plan, inputs = self.plan, self.inputs
        rows, first = FIRST_DRAW(plan.top, plan.processed, self.rows, out.logits)
        finish_B, mass = np.asarray(rows.finish_B), out.attention_mass
        return _Run(plan, inputs, out.cache, rows, first, finish_B, self.loop, mass)


def _prepare(
    model: Model,
    params: Params,
    tokens_BT: Any,
    *,
    by_step: bool,
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
) -> _Start:
    """Check all input; load or compile the programs that run next, in other threads.

    by_step: whether Python sees each step.
    """
    check_model(model, params)
    check_sampler(sampler)
    check_mass(attention_mass)
    if overflow is not None and not isinstance(overflow, OverflowPolicy):
        raise SamplingError(
            "overflow must be an OverflowPolicy of jaxllm.generation.loops.overflow, got"
            f" {overflow!r:.60}"
        )
    tokens_BT, lengths_B = check_prompts(model.config, tokens_BT, lengths_B)
    B, T = tokens_BT.shape
    budget_B = token_budgets(max_new_tokens, B)
    top_logprobs = check_int("top_logprobs", top_logprobs, 0, model.config.vocab_size)
    chunk = default_chunk() if chunk is None else check_int("chunk", chunk, 1, error=TokenError)
    if overflow is not None and attention_mass is not False:
        raise SamplingError("attention_mass and overflow cannot be combined: eviction moves slots")
    names, checked = check_read(model, read), check_edits(model, edits, B, 1, None)
    if overflow is not None and checked.edits:
        raise SamplingError("edits and overflow cannot be combined: a policy may run tokens again")
    needed = T + int(budget_B.max()) - 1  # the last token never runs
    given = cache
    if cache is None:
        capacity = bucket_size(needed)
        if overflow is not None:
            capacity = min(capacity, model.config.default_cache_size)
        cache = init_cache(model, B, capacity)
    check_usable(cache)
    check_cache(model.config, cache, B)
    check_continuation(model, given, lengths_B, budget_B)
    token_BL, length_B = initial_text(given, tokens_BT, lengths_B, needed)
    if overflow is None:
        check_capacity(model, cache, needed)
    else:
        tokens_BT, lengths_B = truncate_to_recent(cache, tokens_BT, lengths_B, overflow)
        attention_mass = overflow.reads_mass
    positions_BT = next_positions(cache, tokens_BT.shape, lengths_B)
    check_rope_continuation(model.config, cache, positions_BT)
    cache = label_cache(cache, checked)
    passes = plan_passes(
        promise_packed(model, cache), params, cache, tokens_BT, positions_BT, chunk, checked,
        attention_mass,
    )  # fmt: skip
    passes.prepare()
    if overflow is None:
        model = promise_packed(model, cache, lengths_B)
    loop = None if by_step or overflow or attention_mass else model.decode_loop(cache.batch)
    rows = start_rows(token_BL, length_B, budget_B, sampler, seed, eos_token_ids)
    plan = LoopPlan(
        model, 1 if by_step else token_BL.shape[1], top=top_logprobs, processed=processed_logprobs,
        brief=not by_step, attention_mass=attention_mass, names=names,
    )  # fmt: skip
    inputs = LoopInputs(params, edits=checked)
    if attention_mass is False:  # while the prompt's program is compiled, and the prompt runs
        logits = jax.ShapeDtypeStruct((B, model.config.vocab_size), np.float32)
        FIRST_DRAW.prepare(top_logprobs, processed_logprobs, rows, logits)
        tails = Tails(cache.replace(frozen=()))
        loop_args = (plan, inputs.replace(frozen=cache.frozen), tails, rows)
        if budget_B.max() > 1:
            if by_step:
                ROUND.prepare(*loop_args)
            elif loop is not None:
                loop.prepare(*loop_args)
            else:
                ROUNDS.prepare(*loop_args, np.int32(0), np.int32(0), None)
    return _Start(plan, inputs, rows, passes, given is None, loop)


def _make_result(
    run: _Run, parts: Sequence[Drawn], options: GenerateKwargs, width: int | None = None
) -> GenerateResult:
    """Return the tokens that were drawn, `[B, width]`; by default as wide as the largest limit."""
    width = int(np.max(options["max_new_tokens"])) if width is None else width
    joined = join_drawn(to_host(list(parts)), width)
    asked, context = bool(options.get("top_logprobs", 0)), run.rows.context
    joined["length_B"] = np.asarray(context.length_B) - np.asarray(context.prompt_B)
    arrays = jax.device_put(joined)
    return GenerateResult(
        arrays["token_B"],
        arrays["logprob_B"],
        arrays["length_B"],
        run.rows.finish_B,
        run.cache,
        arrays["top_token_BN"] if asked else None,
        arrays["top_logprob_BN"] if asked else None,
        run.mass,
        arrays.get("processed_B"),
    )


class _Step(NamedTuple):
    """A step's tokens, as a round of one column, and the activations it read."""

    drawn: Drawn
    mass: jax.Array | None = None
    sites: Mapping[str, jax.Array] = MappingProxyType({})


def _iterate_steps(
    run: _Run, until: Until | None, options: GenerateKwargs
) -> Iterator[tuple[_Run, _Step]]:
    """Yield run and step after each token, until every row has ended."""
    overflow, forced = options.get("overflow"), options.get("forced")
    step = _Step(run.first, run.mass)
    while True:
        for current, one in _each_column(run, step):
            if until is not None:
                token_B = np.asarray(one.drawn.token_B)[0, 0]
                if (ends_B := until(token_B) & (token_B >= 0)).any():
                    finish_B = np.where(ends_B, np.int32(Finish.STOP), current.finish_B)
                    rows = current.rows.replace(finish_B=jax.device_put(finish_B))
                    current = current._replace(rows=rows, finish_B=finish_B)
            yield current, one
            if not current.is_running:
                return
        run = current
        inputs = run.inputs
        if forced is not None and (token_1K := _forced_run(forced(), run, options)) is not None:
            inputs = inputs.replace(forced_RK=token_1K)
        elif overflow is not None and int(run.cache.cursor) >= run.cache.capacity:
            run = run.evict(overflow)
        inputs = inputs.replace(frozen=run.cache.frozen)
        tails, rows, out = ROUND(run.plan, inputs, Tails(run.cache.replace(frozen=())), run.rows)
        mass = None if run.mass is None else run.mass + out.mass
        step = _Step(out.drawn, out.mass, out.sites)
        run = run.follow(tails, rows, mass)


def _each_column(run: _Run, step: _Step) -> Iterator[tuple[_Run, _Step]]:
    """Yield run and step after each of a round's tokens, of which a single row may have several."""
    columns, context = step.drawn.token_B.shape[1], run.rows.context
    if columns == 1:
        yield run, step
        return
    valid = int(np.asarray(step.drawn.valid_B)[0, :, 0].sum())
    for i in range(valid):
        drawn = jax.tree.map(lambda x, i=i: x[:, i : i + 1], step.drawn)
        at_B = jax.device_put(np.asarray(context.length_B) - (valid - 1 - i))
        finish_B = drawn.finish_B[0, 0]
        rows = run.rows.replace(context=context.replace(length_B=at_B), finish_B=finish_B)
        cache = rewind(run.cache, columns - 1 - i) if i < columns - 1 else run.cache
        current = run._replace(cache=cache, rows=rows, finish_B=np.asarray(finish_B))
        yield current, _Step(drawn)


def _forced_run(tokens: list[int], run: _Run, options: GenerateKwargs) -> np.ndarray | None:
    """Return forced tokens to run after the newest in one pass, `[1, K]`; None for few."""
    ends = {*options.get("eos_token_ids", ())}
    tokens = [*takewhile(lambda token: token not in ends, tokens)]
    context = run.rows.context
    new = int(context.length_B[0]) - int(context.prompt_B[0])
    count = min(len(tokens) + 1, int(np.max(options["max_new_tokens"])) - new)
    width = next((width for width in _FORCED_WIDTHS if width <= count), None)
    return None if width is None else np.array([tokens[: width - 1]], np.int32)
