"""Texts longer than their cache: each policy against uncached runs over the remaining tokens."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CapacityError, ConfigError, SamplingError
from jaxllm.generation.loops.overflow import (
    HeavyHitters,
    OverflowPolicy,
    OverflowState,
    SinksAndWindow,
    Slide,
)
from jaxllm.runtime.plugins import find_plugins
from tests.conftest import Run, succeed
from tests.tiny_models import random_model, save_random, tokens

CAPACITY, NEW = 16, 40


def greedy_token(lm: Any, seen: list[int], positions: Any = None) -> int:
    """Return the likeliest next token, from a run without a cache."""
    model, params = lm
    row = np.zeros((1, 32), int)
    at = np.full((1, 32), -1)
    row[0, : len(seen)] = seen
    at[0, : len(seen)] = np.arange(len(seen)) if positions is None else positions
    logits = jaxllm.forward(model, params, None, row, positions_BT=at).logits
    return int(np.argmax(logits[0, len(seen) - 1]))


def expected_tokens(lm: Any, prompts: list[list[int]], policy: OverflowPolicy) -> list[list[int]]:
    """Return the expected tokens, tracking each row's remaining tokens in lists."""
    seen, new = [list(p) for p in prompts], [[] for _ in prompts]  # type: ignore[var-annotated]
    used = max(map(len, prompts))
    for _ in range(NEW):
        for row, text in enumerate(seen):
            new[row].append(greedy_token(lm, text))
        if used == CAPACITY:
            for row, text in enumerate(seen):
                if isinstance(policy, Slide):
                    seen[row] = text[-policy.max_kept(CAPACITY) :]
                else:
                    window = policy.max_kept(CAPACITY) - policy.sinks
                    seen[row] = [*text[: policy.sinks], *text[policy.sinks :][-window:]]
            used = max(map(len, seen))
        used += 1
        for row, text in enumerate(seen):
            text.append(new[row][-1])
    return new


def generate_small_cache(
    lm: Any, prompts: list[list[int]], policy: OverflowPolicy, **options: Any
) -> Any:
    model, params = lm
    longest = max(map(len, prompts))
    ids = np.array([p + [0] * (longest - len(p)) for p in prompts])
    options |= {"lengths_B": np.array(list(map(len, prompts))), "overflow": policy}
    cache = jaxllm.init_cache(model.config, len(prompts), CAPACITY)
    return jaxllm.generate(model, params, ids, max_new_tokens=NEW, cache=cache, **options)


PROMPTS = [tokens(1, 9)[0].tolist(), tokens(1, 5, seed=1)[0].tolist()]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("keep", [None, 5])
def test_sliding_restarts_from_recent_tokens(family: str, keep: int | None) -> None:
    """Slide refills a full cache from the most recent tokens: each token equals a run over those
    tokens without a cache.
    """
    lm = random_model(family)
    result = generate_small_cache(lm, PROMPTS, Slide(keep))
    assert result.token_BT.tolist() == expected_tokens(lm, PROMPTS, Slide(keep))
    assert result.cache.capacity == CAPACITY
    assert int(result.cache.cursor) <= CAPACITY


@pytest.mark.parametrize("window", [None, 7])
def test_sinks_and_window_equal_run_over_remaining_tokens(window: int | None) -> None:
    """In a one-layer model, cached entries do not depend on evicted ones, so each token equals a
    run over the remaining tokens.
    """
    lm = random_model("llama", num_hidden_layers=1)
    policy = SinksAndWindow(sinks=2, window=window)
    result = generate_small_cache(lm, PROMPTS, policy)
    assert result.token_BT.tolist() == expected_tokens(lm, PROMPTS, policy)


@pytest.mark.parametrize(("heavy", "recent"), [(None, None), (3, 5)])
def test_heavy_hitters_equal_summed_attention_weights(
    heavy: int | None, recent: int | None
) -> None:
    """In a one-layer model, the tokens retained are those with the largest attention weights summed
    over runs without a cache.
    """
    model, params = lm = random_model("llama", num_hidden_layers=1)
    policy = HeavyHitters(heavy, recent)
    result = generate_small_cache(lm, PROMPTS, policy)
    stays = policy.max_kept(CAPACITY) - (recent or CAPACITY // 4)
    for row, prompt in enumerate(PROMPTS):
        # All rows are cut when the longest row fills its cache.
        seen, mass, new = list(prompt), np.zeros(0), []
        used = max(map(len, PROMPTS))
        for _ in range(NEW):
            ids, at = np.zeros((1, 32), int), np.full((1, 32), -1)
            ids[0, : len(seen)], at[0, : len(seen)] = seen, np.arange(len(seen))
            out = jaxllm.forward(model, params, None, ids, positions_BT=at, attention_weights=True)
            fresh_T = np.asarray(out.attention_weights)[0, 0].sum(axis=0)[:, : len(seen)]
            added = len(seen) - len(mass)
            mass = np.pad(mass, (0, added)) + fresh_T[len(seen) - added : len(seen)].sum(axis=0)
            new.append(int(np.argmax(out.logits[0, len(seen) - 1])))
            if used == CAPACITY:
                old = len(seen) - (recent or CAPACITY // 4)
                best = sorted(np.argsort(-mass[:old], kind="stable")[:stays].tolist())
                kept = [*best, *range(max(old, 0), len(seen))]
                seen, mass = [seen[i] for i in kept], mass[kept]
                used = policy.max_kept(CAPACITY)
            used += 1
            seen.append(new[-1])
        assert result.token_BT[row].tolist() == new
    steps = jaxllm.stream(
        model, params, [PROMPTS[0]], max_new_tokens=NEW, overflow=policy,
        cache=jaxllm.init_cache(model, 1, CAPACITY),
    )  # fmt: skip
    assert [int(s.token_BT[0, 0]) for s in steps] == result.token_BT[0].tolist()


def test_slide_truncates_long_prompt_to_end() -> None:
    """A prompt of 150 tokens is cut to its last 20 with Slide(20)."""
    model, params = lm = random_model("gpt2")
    long = tokens(1, 150)
    result = jaxllm.generate(model, params, long, max_new_tokens=3, overflow=Slide(20))
    seen = long[0, -20:].tolist()
    for token in result.token_BT[0].tolist():
        assert token == greedy_token(lm, seen)
        seen.append(token)


class Idle(Slide):
    def __call__(self, state: OverflowState) -> Any:
        return state.cache, None


def test_overflow_refuses_unsupported_cases() -> None:
    """Learned positions, sizes that leave no room, a policy that frees no slot and attention_mass
    raise errors, as does overflow without a policy.
    """
    model, params = lm = random_model("gpt2")
    with pytest.raises(CapacityError, match="do not fit"):
        jaxllm.generate(model, params, tokens(1, 90), max_new_tokens=20)
    with pytest.raises(ConfigError, match="cannot move"):
        generate_small_cache(lm, PROMPTS, SinksAndWindow())
    with pytest.raises(CapacityError, match="cannot keep 16 tokens and slide"):
        generate_small_cache(lm, PROMPTS, Slide(16))
    with pytest.raises(CapacityError, match="cannot keep 4 sinks"):
        generate_small_cache(lm, PROMPTS, SinksAndWindow(4, 12))
    with pytest.raises(CapacityError, match=r"Idle\(keep=None\) frees none of the cache's 16"):
        generate_small_cache(lm, PROMPTS, Idle())
    with pytest.raises(SamplingError, match="attention_mass"):
        generate_small_cache(lm, PROMPTS, Slide(), attention_mass=True)


LATEST = """
import dataclasses

from jaxllm.cache import close_gaps, compact, keep
from jaxllm.errors import CapacityError
from jaxllm.generation.loops.overflow import OverflowPolicy


@dataclasses.dataclass(frozen=True)
class Latest(OverflowPolicy):
    count: int = 6

    def max_kept(self, capacity):
        if self.count >= capacity:
            raise CapacityError(f"no slot is free of {capacity}")
        return self.count

    def __call__(self, state):
        cache = state.cache
        latest_BS = cache.position_BS >= cache.next_position_B[:, None] - self.count
        return compact(close_gaps(keep(cache, latest_BS)), capacity=cache.capacity), None
"""


@pytest.fixture
def latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the class of an installed package, which adds it under the name "latest"."""
    info = tmp_path / "latest-1.dist-info"
    info.mkdir()
    (tmp_path / "latest_policy.py").write_text(LATEST)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: latest\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[jaxllm.overflow_policies]\nlatest = latest_policy:Latest\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    find_plugins.cache_clear()
    yield importlib.import_module("latest_policy").Latest
    find_plugins.cache_clear()


def test_policy_of_another_package_is_found_by_name(latest: Any, tmp_path: Path, run: Run) -> None:
    """A class outside jaxllm is a policy as an object and by the name of its entry point, which
    --help and the error of an unknown name list.
    """
    lm = random_model("llama", num_hidden_layers=1)
    theirs = generate_small_cache(lm, PROMPTS, SinksAndWindow(sinks=0, window=6))
    ours = generate_small_cache(lm, PROMPTS, latest())
    assert ours.token_BT.tolist() == theirs.token_BT.tolist()
    with pytest.raises(CapacityError, match="no slot is free of 16"):
        generate_small_cache(lm, PROMPTS, latest(16))
    save_random(tmp_path / "model", "llama", eos_token_id=None, num_hidden_layers=1)
    loaded = jaxllm.load(tmp_path / "model")
    by_name, by_object = (
        loaded.generate([1] * 90, max_new_tokens=20, overflow=policy).tokens
        for policy in ("latest", latest())
    )
    assert len(by_name) == 20 and by_name == by_object
    with pytest.raises(SamplingError, match=r"one of refuse, slide, .* latest, .*'newest'"):
        loaded.generate([1], overflow="newest")
    out, _ = succeed(run, "generate", "--help")
    assert re.search(r"--overflow refuse\|slide\|\S*\|latest\|", out)
