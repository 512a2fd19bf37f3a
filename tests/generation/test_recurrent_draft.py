"""Draft models with recurrent layers: their state is that of the tokens that the model accepted."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.generation.batching import programs, scheduler
from jaxllm.generation.batching.requests import Request
from jaxllm.generation.loops import speculative
from jaxllm.generation.loops.draft import cut_rows
from jaxllm.generation.loops.draft_pace import DraftPace
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.models.invariance import make_invariant
from jaxllm.ops.recurrent import CHUNK
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.weights.paths import map_leaves
from tests.tiny_models import assert_close, random_model, tokens

FAMILIES = ("qwen3_5_text", "lfm2", "granitemoehybrid")
PROMPTS = tokens(3, CHUNK - 2)
# A prompt of one token, and one that ends before a boundary.
OPTIONS: Any = {"lengths_B": np.array([1, 50, CHUNK - 2]), "max_new_tokens": [CHUNK + 9, 50, 40]}


def cases(*names: str, daily: str = "", more: str = "") -> Any:
    """Return cases of a draft's family, or of a family and a target: in which suite each runs."""
    pairs = [f"{family} {target}".strip() for family in FAMILIES for target in names or ("",)]
    marks = {pair: [pytest.mark.more] for pair in more.split(", ")} | {daily: []}
    chosen = [marks.get(pair, [pytest.mark.full]) for pair in pairs]
    return pytest.mark.parametrize(
        ("family", "target") if names else "family",
        [pytest.param(*pair.split(), marks=each) for pair, each in zip(pairs, chosen, strict=True)],
    )


def set_turns(monkeypatch: pytest.MonkeyPatch, *turns: tuple[bool, int]) -> None:
    """Let drafts rest, or not, for given numbers of rounds, whatever the clock shows."""
    monkeypatch.setattr(DraftPace, "_choices", lambda self: iter(turns * 99))


@cache
def nearly(family: str) -> Any:
    """Return a model that often agrees with `random_model(family)`."""
    (model, params), rng = random_model(family), np.random.default_rng(1)

    def shake(path: str, x: jax.Array) -> jax.Array:
        return x * (1 + 0.02 * jnp.asarray(rng.standard_normal(x.shape, np.float32)))

    return model, map_leaves(shake, params)


@cache
def written(family: str) -> Any:
    """Return a token that ends the second row early, and the texts of `generate`."""
    lm = random_model(family)
    token_BT = np.asarray(jaxllm.generate(*lm, PROMPTS, **OPTIONS).token_BT)
    end = next(int(x) for x in token_BT[1, 9:] if x not in token_BT[[0, 2]])
    return end, jaxllm.generate(*lm, PROMPTS, eos_token_ids=[end], **OPTIONS)


def assert_has_read(lm: Any, tail: Any, state: Any, context: Any, rows: Any) -> None:
    """Check that a draft goes on in these rows as if it had read the texts at once."""
    token_BL, length_B1 = np.asarray(context.token_BL), np.asarray(context.length_B)[:, None]
    at_BL = np.arange(token_BL.shape[1])[None]
    position_BL = np.where(at_BL < length_B1, at_BL, -1)
    token_BL = np.where(position_BL >= 0, token_BL, 0)
    fresh = jaxllm.forward(*lm, None, token_BL, positions_BT=position_BL).logits
    begin_B = jnp.asarray(length_B1[:, 0] - 2)
    tail = cut_rows(jax.tree.map(jnp.copy, tail), None, begin_B)
    cache = jaxllm.init_cache(lm[0], len(token_BL), tail.position_BS.shape[1])
    cache = cache.replace(tail=tail, state=state, next_position_B=begin_B)
    at_B2 = length_B1 + np.array([[-2, -1]])
    out = jaxllm.forward(*lm, cache, np.take_along_axis(token_BL, at_B2, axis=1)).logits
    for row in rows:
        want_2V = np.asarray(fresh)[row, at_B2[row]]
        assert_close(out[row], want_2V)
        assert np.argmax(out[row], axis=1).tolist() == want_2V.argmax(axis=1).tolist()


@cases(daily="qwen3_5_text", more="granitemoehybrid")
def test_model_accepts_all_of_its_own_proposals(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a boundary, in rows of unequal lengths, of which one ends early."""
    set_turns(monkeypatch, (True, 1 << 20))
    (end, want), lm = written(family), random_model(family)
    result = speculative.speculative_generate(
        *lm, PROMPTS, draft=lm, eos_token_ids=[end], **OPTIONS
    )
    assert result.token_BT.tolist() == want.token_BT.tolist()
    assert result.finish_B.tolist() == [Finish.LENGTH, Finish.EOS, Finish.LENGTH]
    assert result.accepted_B.tolist() == result.proposed_B.tolist()
    # Five tokens per round after the first token.
    assert result.rounds_B.tolist() == [-(-(n - 1) // 5) for n in result.length_B.tolist()]


@cases(
    "itself",
    "llama",
    daily="qwen3_5_text itself",
    more="qwen3_5_text llama, lfm2 itself",
)
def test_rejected_tokens_leave_nothing_in_the_state(
    family: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a draft that is often wrong rests and comes back, it goes on as if it had read the
    accepted tokens alone.
    """
    set_turns(monkeypatch, (True, 4), (False, 5))
    name = family if target == "itself" else target
    (end, want), lm, draft = written(name), random_model(name), nearly(family)
    rounds, checked = speculative.ROUNDS, list[int]()

    def run(*arguments: Any) -> Any:
        tails, rows, *others = rounds(*arguments)
        running = np.flatnonzero(np.asarray(rows.finish_B) == Finish.RUNNING)
        if tails.draft is not None:
            assert_has_read(draft, tails.draft, tails.states[1], rows.context, running)
            checked.extend(np.asarray(rows.context.length_B)[running])
        return tails, rows, *others

    monkeypatch.setattr(speculative, "ROUNDS", run)
    result = speculative.speculative_generate(
        *lm, PROMPTS, draft=draft, eos_token_ids=[end], **OPTIONS
    )
    assert result.token_BT.tolist() == want.token_BT.tolist()
    assert result.finish_B.tolist() == want.finish_B.tolist()
    accepted, proposed = int(result.accepted_B.sum()), int(result.proposed_B.sum())
    assert accepted < proposed and (accepted > proposed / 4 or target != "itself")
    assert min(checked) < CHUNK < max(checked) and len(checked) > 4


@cases(more="lfm2")
def test_draft_with_a_state_accepts_by_distribution(family: str) -> None:
    """By the rule of "distribution", a model accepts itself, and another in part."""
    lm, sampler = random_model(family), make_sampler(temperature=0.7)
    for draft in (lm, nearly(family)):
        result = speculative.speculative_generate(
            *lm, PROMPTS, draft=draft, sampler=sampler, acceptance="distribution", **OPTIONS
        )
        assert result.length_B.tolist() == OPTIONS["max_new_tokens"]
        accepted, proposed = int(result.accepted_B.sum()), int(result.proposed_B.sum())
        assert 0 < accepted == proposed if draft is lm else 0 < accepted < proposed


@cases("itself", "llama", daily="lfm2 llama")
def test_served_rows_have_states_of_their_own(
    family: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join and leave rows of a draft that rests and comes back: the texts are those
    without, and the draft has read them.
    """
    set_turns(monkeypatch, (True, 4), (False, 3))
    if target == "itself":  # which `serve` refuses: no promise of equal bits
        monkeypatch.setattr(scheduler, "has_invariant_rows", lambda *lm: True)
        monkeypatch.setattr(programs, "can_join", lambda groups: False)  # as without the promise
    lm = random_model(family if target == "itself" else target)
    model, params, draft = make_invariant(lm[0]), lm[1], nearly(family)
    rounds, checked = scheduler.run_rounds, set[int]()

    def run(*arguments: Any) -> Any:
        state, steps = rounds(*arguments)
        running = np.flatnonzero(np.asarray(state.rows.finish_B) == Finish.RUNNING)
        rows = [row for row in running if row in state.active]
        if state.draft.width:
            cache = state.draft.cache
            assert_has_read(draft, cache.tail, cache.state, state.rows.context, rows)
            checked.update(state.active[row].request.id for row in rows)
        return state, steps

    monkeypatch.setattr(scheduler, "run_rounds", run)
    requests = [
        Request(id=i, prompt=PROMPTS[i % 3][: 1 + 60 * (i % 2)], max_new_tokens=16 + 4 * i)
        for i in range(6)
    ]

    def texts(**options: Any) -> Any:
        found: dict[Any, list[Any]] = {i: [] for i in range(6)}
        for event in scheduler.serve(
            model, params, requests, rows=3, capacity=2 * CHUNK, chunk=16, burst=2, **options
        ):
            assert event.error is None
            found[event.id].append(event.token)
        return found, event.step.draft_stats

    (want, _), (found, stats) = texts(), texts(draft=draft)
    assert found == want
    assert {4, 5} <= checked  # they follow others in their rows
    assert stats.proposed > stats.accepted and (stats.accepted or target != "itself")


def test_other_states_and_long_drafts_are_refused() -> None:
    lm, (model, params) = random_model("qwen3_5_text"), random_model("llama")
    attention = LongAttention(kind="infini", segment_length=8)
    infini = model.clone(config=dataclasses.replace(model.config, attention=attention)), params
    for target, draft, tokens_BT, message in (
        (lm, infini, 4, "memory of segments that the draft has"),
        (infini, lm, 4, "memory of segments that the model has"),
        (lm, (model, params), CHUNK, "the model has recurrent layers.* fewer than 64 tokens"),
        ((model, params), lm, CHUNK, "the draft has recurrent layers.* fewer than 64 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            speculative.check_states([one[0].config for one in (target, draft)], tokens_BT)
    with pytest.raises(ConfigError, match="that the draft has"):
        jaxllm.speculative_generate(*lm, [[1]], draft=infini, max_new_tokens=1)
