"""The loop does not change the cache, its captures replay, and culled tokens get no attention."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxllm
from jaxllm.cache import init_cache
from jaxllm.errors import CacheMismatchError, CapacityError
from scripts.examples import context_loop
from scripts.examples.context_loop import Budget, Decision, Fingerprint, Iteration
from tests.tiny_models import assert_close, random_model, tokens

STEPS = 22
BUDGET = Budget(keep=12, sinks=1, recent=4, repair=3)
ROOMY = Budget(keep=14, sinks=1, recent=2, repair=40)  # recomputed to the end of the text
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact the cache after every fourth token."""
    monkeypatch.setattr(context_loop, "SPARE", 4)


@pytest.fixture
def run(
    tmp_path: Path, shallow: Any, little_room: None, capsys: pytest.CaptureFixture[str]
) -> list[Path]:
    """Return the captures of one run on a demo model."""
    options = {k: v for k, v in dataclasses.asdict(BUDGET).items() if k != "decay"}
    context_loop.context_loop(str(shallow("llama")), steps=STEPS, out=tmp_path / "out", **options)
    printed = capsys.readouterr()
    assert f"addresses in {STEPS} of {STEPS} iterations" in printed.err
    assert printed.out.strip()
    return sorted((tmp_path / "out").glob("step_*.safetensors"))


def test_captures_replay(run: list[Path], shallow: Any) -> None:
    """Replaying a captured cache and token gives the same bits; culled tokens get no attention."""
    lm = jaxllm.load(shallow("llama"))
    assert len(run) == STEPS
    assert (run[0].parent / "brightness.png").read_bytes().startswith(PNG)
    empty = init_cache(lm.config, 1, 1, dtype=lm.model.precision.cache)
    culled: set[int] = set()
    for number, path in enumerate(run):
        capture = load_file(path)
        position_S = capture["0.cache.tail.position_BS"][0]
        mass_S = capture["1.attention_mass_BS"][0]
        assert not culled.intersection(position_S.tolist())
        assert (mass_S[:-1][position_S < 0] == 0).all()
        assert (position_S >= 0).sum() <= BUDGET.keep
        culled.update(capture["3.culled"].tolist())
        if number % 10:
            continue
        cache = context_loop.restore_tree(path, "0.cache", empty)
        token_BT = capture["1.token_B"][:, None]
        out = jaxllm.forward(lm.model, lm.params, cache, token_BT, attention_mass=True)
        np.testing.assert_array_equal(out.logits[:, 0], capture["1.logits_BV"])
        decision = context_loop.decide(capture["2.brightness_P"], BUDGET)
        assert decision.culled == tuple(capture["3.culled"])
    assert len(culled) > 5 and 0 not in culled


def test_repaired_text_equals_run_without_culled_tokens() -> None:
    """After full repair, logits equal a pass over the kept tokens at their positions."""
    model, params = random_model("llama")
    prompt = tokens(1, 9)[0].tolist()
    turns = context_loop.run_loop(model, params, prompt, steps=60, budget=ROOMY)
    rounds: list[Iteration] = list(itertools.islice(turns, 12))
    text = np.array([*prompt, *(int(it.next_token_B[0]) for it in rounds)])
    for it in rounds:
        left = np.flatnonzero(~np.isnan(it.share_P))
        padded = np.pad(left, (ROOMY.keep + 1 - left.size, 0), constant_values=-1)[None]
        out = jaxllm.forward(model, params, None, text[padded], positions_BT=padded)
        assert_close(it.output.logits[:, 0], np.asarray(out.logits[:, -1]))
    assert left.size == ROOMY.keep + 1
    with pytest.raises(CapacityError, match="exceed the model's context"):
        next(context_loop.run_loop(model, params, prompt, steps=2000, budget=ROOMY))


def test_changed_cache_is_detected() -> None:
    """check_unchanged raises if one bit of any cache array changes."""
    cache = context_loop.build(*random_model("llama"), [3, 1, 4, 1, 5], 60, ROOMY)[0]
    before = Fingerprint.compute(cache)
    context_loop.check_unchanged(before, cache, 0)
    leaves, form = jax.tree.flatten(cache)
    for index, leaf in enumerate(leaves):
        raw = np.array(leaf)
        raw.reshape(-1).view(np.uint8)[-1] ^= 1
        other = jax.tree.unflatten(form, [*leaves[:index], jnp.asarray(raw), *leaves[index + 1 :]])
        with pytest.raises(CacheMismatchError, match=r"iteration 7: .* changed the cache's bytes"):
            context_loop.check_unchanged(before, other, 7)


def test_decide_culls_dimmest_except_sinks_and_recent() -> None:
    """decide culls the least bright tokens, never sinks or recent ones; none with keep=0."""
    brightness_P = np.array([0.0, 0.9, 0.3, np.nan, 0.1, 0.5, 0.2, 0.0, 0.0, np.nan], np.float32)
    budget = Budget(keep=6, sinks=1, recent=2, repair=2)
    assert context_loop.decide(brightness_P, budget) == Decision((4, 6), (5, 7))
    assert context_loop.decide(brightness_P, dataclasses.replace(budget, keep=0)) == Decision()


def test_brightness_is_moving_average() -> None:
    """Brightness is a moving average of attention shares, from a token's first share on."""
    before_P = np.array([0.5, 0.5, np.nan, np.nan], np.float32)
    mass_S = np.array([2.0, 0.0, 0.0, 6.0], np.float32)
    position_S = np.array([0, -3, -1, 2])  # the token at position 1 was culled, one slot is empty
    share_P, brightness_P = context_loop.score(before_P, mass_S, position_S, decay=0.75)
    np.testing.assert_array_equal(share_P, np.float32([0.25, np.nan, 0.75, np.nan]))
    np.testing.assert_array_equal(brightness_P, np.float32([0.4375, np.nan, 0.75, np.nan]))
