"""The loop leaves the cache alone, its captures replay, and what it culls is seen no more."""

import contextlib
import ctypes
import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import context_heatmap
import context_loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_loop import Budget, Decision, Imprint, Iteration
from safetensors import safe_open
from safetensors.numpy import load_file

import jaxllm
from jaxllm.cache import init_cache
from jaxllm.cli import run_command
from jaxllm.errors import CacheMismatchError, CapacityError, NonFiniteError
from tests.twins import BOTH, assert_close, random_model, tokens

STEPS = 22
BUDGET = Budget(keep=12, sinks=1, recent=4, repair=3)
ROOMY = Budget(keep=14, sinks=1, recent=2, repair=2)  # of the tiny models: one shape for all
PNG = b"\x89PNG\r\n\x1a\n"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of the script left behind."""

    out: Path
    stdout: str
    stderr: str

    def captures(self) -> list[dict[str, np.ndarray]]:
        """Every capture, as another program reads it."""
        return [load_file(path) for path in sorted(self.out.glob("step_*.safetensors"))]

    def restored(self, number: int, lm: jaxllm.LM) -> tuple[Any, Any]:
        """(cache, delta) of an iteration."""
        path = self.out / f"step_{number:04}.safetensors"
        cache = init_cache(lm.config, 1, 1, dtype=lm.model.precision.cache)
        form = jaxllm.Delta(**vars(cache.tail))
        read = context_loop.restored
        return read(path, "0.cache", cache), read(path, "1.delta", form)


@pytest.fixture(scope="module")
def lm(shallow: Any) -> jaxllm.LM:
    return jaxllm.load(shallow("llama"))


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is compacted after every fourth token."""
    monkeypatch.setattr(context_loop, "SPARE", 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shallow: Any) -> Iterator[Run]:
    """One run on the demo, its cache as small."""
    out = tmp_path_factory.mktemp("loop") / "new" / "out"
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_loop, "SPARE", 4)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            options = {k: v for k, v in dataclasses.asdict(BUDGET).items() if k != "decay"}
            context_loop.context_loop(str(shallow("llama")), steps=STEPS, out=out, **options)
    yield Run(out, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the script with arguments in this process: (exit status, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["context_loop.py", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            run_command(context_loop.context_loop, "context_loop", context_loop.EXAMPLE)
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def loop(family: str, rounds: int, budget: Budget, **options: Any) -> list[Iteration]:
    """Some rounds on a tiny random model, from 9 random tokens."""
    model, params = random_model(family)
    prompt = tokens(1, 9)[0].tolist()
    turns = context_loop.run_loop(model, params, prompt, steps=60, budget=budget, **options)
    return list(itertools.islice(turns, rounds))


def shares_of(family: str, text: list[int], layers_and_heads: int = 16) -> np.ndarray:
    """What each query gives each token, without any cache: `[T, T]`, rows sum to 1.

    From the mass of every beginning of the text: the last query's is what it adds.
    """
    model, params = random_model(family)
    position_T, total = np.arange(len(text)), [np.zeros(len(text))]
    for length in range(1, len(text) + 1):
        at_BT = np.where(position_T < length, position_T, -1)[None]  # one shape, compiled once
        out = jaxllm.forward(model, params, None, [text], positions_BT=at_BT, attention_mass=True)
        total.append(np.asarray(out.attention_mass)[0])
    return np.diff(total, axis=0) / layers_and_heads


def made(rounds: list[Iteration]) -> list[int]:
    return [int(it.next_token_B[0]) for it in rounds]


def test_a_run_leaves_a_capture_a_round_and_a_picture(run: Run) -> None:
    names = sorted(path.name for path in run.out.iterdir())
    assert names == ["brightness.png", *(f"step_{i:04}.safetensors" for i in range(STEPS))]
    assert f"{STEPS} tokens made" in run.stderr
    assert f"alone in {STEPS} of {STEPS} iterations" in run.stderr
    with safe_open(run.out / names[-1], framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["iteration"] == str(STEPS - 1)
    assert metadata["text"] == run.stdout.rstrip("\n")
    assert json.loads(metadata["budget"]) == dataclasses.asdict(BUDGET)


def test_the_picture_is_a_png_that_can_be_read(run: Run) -> None:
    data = (run.out / "brightness.png").read_bytes()
    assert data.startswith(PNG)
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert 800 < width < 4000
    assert 500 < height < 3000
    assert len(data) > 20_000


def test_a_captured_step_1_replays_to_the_same_bits(run: Run, lm: jaxllm.LM) -> None:
    for number in (0, 11, STEPS - 1):
        capture = run.captures()[number]
        cache, delta = run.restored(number, lm)
        token_BT = capture["1.token_B"][:, None]
        out = jaxllm.forward(lm.model, lm.params, cache, token_BT, attention_mass=True)
        np.testing.assert_array_equal(out.logits[:, 0], capture["1.logits_BV"])
        np.testing.assert_array_equal(out.attention_mass, capture["1.attention_mass_BS"])
        jax.tree.map(np.testing.assert_array_equal, out.delta, delta)
        assert out.logits.argmax() == capture["1.next_token_B"]


def test_captured_steps_2_and_3_replay(run: Run) -> None:
    for capture in run.captures():
        position_S = np.append(
            capture["0.cache.tail.position_BS"][0], capture["1.delta.position_BS"][0]
        )
        before_P, mass_S = capture["2.before_P"], capture["1.attention_mass_BS"][0]
        share_P, brightness_P = context_loop.score(before_P, mass_S, position_S, BUDGET.decay)
        np.testing.assert_array_equal(share_P, capture["2.share_P"])
        np.testing.assert_array_equal(brightness_P, capture["2.brightness_P"])
        decision = context_loop.decide(brightness_P, BUDGET)
        assert decision.culled == tuple(capture["3.culled"])
        assert (decision.repair or ()) == tuple(capture["3.repair"])


def test_a_capture_holds_all_that_the_next_step_0_needs(run: Run, lm: jaxllm.LM) -> None:
    captures, capacities, compacted = run.captures(), set(), 0
    for number, capture in enumerate(captures[:-1]):
        cache, delta = run.restored(number, lm)
        repair = tuple(capture["3.repair"].tolist()) or None
        decision = Decision(tuple(capture["3.culled"].tolist()), repair)
        patched = context_loop.patch(lm.model, lm.params, cache, delta, decision)
        jax.tree.map(np.testing.assert_array_equal, patched, run.restored(number + 1, lm)[0])
        capacities.add(patched.capacity)
        compacted += int(patched.cursor) <= int(cache.cursor)
    assert len(capacities) == 1  # nothing is compiled anew
    assert compacted


def test_a_culled_token_receives_nothing_ever_after(run: Run) -> None:
    gone: set[int] = set()
    for capture in run.captures():
        position_S = capture["0.cache.tail.position_BS"][0]
        mass_S = capture["1.attention_mass_BS"][0]
        assert (mass_S[:-1][position_S < 0] == 0).all()
        assert (mass_S[:-1][position_S >= 0] > 0).all()
        assert np.isnan(capture["2.share_P"][sorted(gone)]).all()
        assert not gone.intersection(position_S.tolist())
        gone.update(capture["3.culled"].tolist())
    assert len(gone) > 5
    assert 0 not in gone


def test_the_cache_holds_no_more_than_the_budget(run: Run) -> None:
    lengths = [int((c["0.cache.tail.position_BS"] >= 0).sum()) for c in run.captures()]
    assert max(lengths) == lengths[-1] == BUDGET.keep


def test_repaired_entries_are_marked_in_the_cache(run: Run) -> None:
    captures = run.captures()
    for before, after in itertools.pairwise(captures):
        position_S, patched_S = (after[f"0.cache.tail.{n}_BS"][0] for n in ("position", "patched"))
        where = np.isin(
            position_S, np.arange(*before["3.repair"]) if before["3.repair"].size else []
        )
        assert patched_S[where].all()
        np.testing.assert_array_equal(np.sort(position_S[where]), after["0.repaired"])
    assert sum(c["0.repaired"].size for c in captures) > 5


def test_without_a_budget_the_text_is_that_of_generate(
    command: Any, lm: jaxllm.LM, tmp_path: Path
) -> None:
    status, text, _ = command(
        "--model", lm.path, "--keep", 0, "--steps", 11, "-o", tmp_path / "out"
    )
    assert status == 0
    assert text == lm.generate("Once upon a time", max_new_tokens=11).text + "\n"


@pytest.mark.full
def test_it_samples_as_generate_does_with_the_same_seed() -> None:
    model, params = random_model("llama")
    seed, texts = (1 << 40) + 5, []
    for temperature in (0.0, 0.9):
        options: dict[str, Any] = {"sampler": jaxllm.make_sampler(temperature=temperature)}
        theirs = jaxllm.generate(
            model, params, tokens(1, 9), max_new_tokens=5, seed=seed, **options
        )
        texts.append(made(loop("llama", 5, ROOMY, seed=seed, **options)))
        assert texts[-1] == theirs.token_BT[0].tolist()
    assert texts[0] != texts[1]


@pytest.mark.parametrize("family", BOTH)
def test_brightness_is_what_a_run_without_a_cache_says(family: str) -> None:
    rounds = loop(family, 5, ROOMY)
    text = [*tokens(1, 9)[0].tolist(), *made(rounds)[:-1]]
    share_TT = shares_of(family, text)
    for it in rounds:
        length = 9 + it.number
        assert_close(it.share_P[:length], share_TT[length - 1, :length])
        assert np.isnan(it.share_P[length:]).all()
    # What the prompt starts with: the mean over the queries that saw a token.
    assert_close(rounds[0].before_P[:8], share_TT[:8, :8].sum(axis=0) / np.arange(8, 0, -1))


@pytest.mark.parametrize("family", BOTH)
def test_repaired_to_the_end_it_is_a_text_that_never_had_the_culled_tokens(family: str) -> None:
    model, params = random_model(family)
    rounds = loop(family, 18, dataclasses.replace(ROOMY, repair=40))
    text = np.array([*tokens(1, 9)[0].tolist(), *made(rounds)])
    for it in rounds:
        left = np.flatnonzero(~np.isnan(it.share_P))
        padded = np.pad(left, (ROOMY.keep + 1 - left.size, 0), constant_values=-1)[None]
        out = jaxllm.forward(model, params, None, text[padded], positions_BT=padded)
        assert_close(it.output.logits[:, 0], np.asarray(out.logits[:, -1]))
    assert left.size == ROOMY.keep + 1
    assert left[-1] > rounds[-1].cache.capacity  # so it was compacted, too


@pytest.mark.full
def test_it_ends_with_an_end_of_text_token() -> None:
    without = made(loop("llama", 12, ROOMY))
    ended = made(loop("llama", 12, ROOMY, eos=(without[5], 130)))
    assert ended == without[: without.index(without[5]) + 1]


def test_a_prompt_of_one_token_begins_with_an_empty_cache() -> None:
    model, params = random_model("llama")
    first = next(context_loop.run_loop(model, params, [7], steps=60, budget=ROOMY))
    assert int(first.cache.length_B[0]) == 0
    assert first.share_P[0] == 1


def small_cache() -> jaxllm.KVCache:
    model, params = random_model("llama")
    return context_loop.build(model, params, [3, 1, 4, 1, 5], 60, ROOMY)[0]


def test_an_unchanged_cache_passes() -> None:
    cache = small_cache()
    context_loop.check_unchanged(Imprint.of(cache), cache, 0)


def test_one_changed_bit_anywhere_is_noticed() -> None:
    cache = small_cache()
    leaves, form = jax.tree.flatten(cache)
    before = Imprint.of(cache)
    for index, leaf in enumerate(leaves):
        raw = np.array(leaf)
        raw.reshape(-1).view(np.uint8)[-1] ^= 1
        other = jax.tree.unflatten(form, [*leaves[:index], jnp.asarray(raw), *leaves[index + 1 :]])
        with pytest.raises(CacheMismatchError, match=r"iteration 7: .* changed the cache's bytes"):
            context_loop.check_unchanged(before, other, 7)


def test_a_write_behind_the_back_of_jax_is_noticed() -> None:
    cache = small_cache()
    before = Imprint.of(cache)
    ctypes.c_ubyte.from_address(cache.tail.v[1].unsafe_buffer_pointer()).value ^= 1
    with pytest.raises(CacheMismatchError, match="bytes"):
        context_loop.check_unchanged(before, cache, 7)


def test_the_same_bytes_at_another_address_are_noticed() -> None:
    cache = small_cache()
    copy = cache.replace(tail=jax.tree.map(jnp.copy, cache.tail))
    with pytest.raises(CacheMismatchError, match="addresses"):
        context_loop.check_unchanged(Imprint.of(cache), copy, 7)


def test_a_step_that_writes_into_the_cache_stops_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    make_token = context_loop.make_token

    def careless(model: Any, params: Any, cache: Any, *args: Any) -> Any:
        out, token_B = make_token(model, params, cache, *args)
        jaxllm.commit(cache, out.delta, donate=True)
        return out, token_B

    monkeypatch.setattr(context_loop, "make_token", careless)
    with pytest.raises(CacheMismatchError, match="donated"):
        loop("llama", 3, ROOMY)


def test_a_model_that_returns_nan_is_named() -> None:
    model, params = random_model("llama")
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    with pytest.raises(NonFiniteError):
        next(context_loop.run_loop(model, broken, [3, 1], steps=60, budget=ROOMY))


def test_the_dimmest_go_but_neither_sinks_nor_recent_ones() -> None:
    brightness_P = np.array([0.0, 0.9, 0.3, np.nan, 0.1, 0.5, 0.2, 0.0, 0.0, np.nan], np.float32)
    budget = Budget(keep=6, sinks=1, recent=2, repair=2)
    assert context_loop.decide(brightness_P, budget) == Decision((4, 6), (5, 7))
    wide = dataclasses.replace(budget, keep=8)
    assert context_loop.decide(brightness_P, wide) == Decision()
    assert context_loop.decide(brightness_P, dataclasses.replace(budget, keep=0)) == Decision()
    none = dataclasses.replace(budget, repair=0)
    assert context_loop.decide(brightness_P, none) == Decision((4, 6), None)


def test_brightness_is_a_moving_average_that_begins_with_the_first_share() -> None:
    before_P = np.array([0.5, 0.5, np.nan, np.nan], np.float32)
    mass_S = np.array([2.0, 0.0, 0.0, 6.0], np.float32)
    position_S = np.array([0, -3, -1, 2])  # the token at 1 was culled, a slot is empty
    share_P, brightness_P = context_loop.score(before_P, mass_S, position_S, decay=0.75)
    np.testing.assert_array_equal(share_P, np.float32([0.25, np.nan, 0.75, np.nan]))
    np.testing.assert_array_equal(brightness_P, np.float32([0.4375, np.nan, 0.75, np.nan]))


@pytest.mark.parametrize(
    "flags, named",
    [
        (("--keep", 5, "--recent", 4), "--keep 5 is less than --sinks 2 and --recent 4"),
        (("--keep", -1), "--keep"),
        (("--recent", 0), "--recent"),
        (("--decay", 1), "--decay"),
        (("--steps", 0), "--steps must be at least 1"),
        (("--steps", 9999), "exceed the model's context of 512"),
        (("--temperature", -1), "temperature"),
        (("--seed", -1), "seed"),
        (("--model", "nowhere"), "nowhere is not a directory"),
    ],
)
def test_bad_input_is_refused_by_name_and_leaves_nothing(
    command: Any, tmp_path: Path, flags: tuple[object, ...], named: str
) -> None:
    status, out, err = command("--out", tmp_path / "out", *flags)
    assert (status, out) == (1, "")
    assert named in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_captures_of_another_loop_are_left_alone(command: Any, run: Run) -> None:
    before = {path: path.read_bytes() for path in run.out.iterdir()}
    status, _, err = command("--out", run.out)
    assert status == 1
    assert "holds the captures of another loop" in err
    assert before == {path: path.read_bytes() for path in run.out.iterdir()}
    status, _, err = command("--out", run.out / "brightness.png")
    assert status == 1
    assert "is not a directory" in err


def test_help_has_an_example(command: Any) -> None:
    status, out, _ = command("--help")
    assert status == 0
    assert "Example: python scripts/context_loop.py" in out


def test_a_text_larger_than_the_model_is_refused_before_anything_runs() -> None:
    model, params = random_model("gpt2")
    with pytest.raises(CapacityError, match=r"90 tokens and 20 steps exceed .* context of 97"):
        next(context_loop.run_loop(model, params, [1] * 90, steps=20, budget=Budget()))


@pytest.mark.parametrize("pieces", [["$x_", "雪", "a\n\t ", "<b>", "w" * 40], ["a"] * 150])
def test_any_text_can_be_drawn(tmp_path: Path, pieces: list[str]) -> None:
    share_PI = np.tril(np.full((len(pieces), 4), 0.25, np.float32), k=-1)
    share_PI[share_PI == 0] = np.nan
    share_PI[:1, :2] = 0.0
    context_heatmap.draw(tmp_path / "p.png", share_PI, share_PI > 0.2, pieces, "a title")
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)
