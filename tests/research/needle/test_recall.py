"""Recall: seeded probe texts, answers scored as in transformers, policies and command."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.generation.loops.overflow import HeavyHitters, SinksAndWindow, Slide
from jaxllm.models import build
from jaxllm.research.needle import prefill
from jaxllm.research.needle.grid import POLICIES, default_extension, recall
from jaxllm.research.needle.haystack import FRIENDS, KINDS, STYLES, make_probe
from jaxllm.research.needle.prefill import prefill_texts, score_answers
from jaxllm.research.self_extend import SelfExtend
from jaxllm.research.token_merging.policies import PoolOlder
from tests.conftest import Run, assert_refused, succeed
from tests.tiny_models import (
    Twin,
    assert_close,
    load_twin,
    make_twin,
    random_model,
    save_random,
    tokens,
)

ANSWERS = [[[3], [5, 7], [11, 13, 17]], [[4], [6, 8], [9, 9, 9]]]


def encode(text: str) -> list[int]:
    """Encode one letter as one token, so that tests can read the text from the tokens."""
    return [ord(c) % 131 for c in text]


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("style", STYLES)
def test_probe_is_deterministic_except_fact_position(style: str) -> None:
    """A probe depends on its seed alone; depth moves the fact and leaves the rest of the text."""
    made = [make_probe(encode, style, length=1000, depth=d, seed=5) for d in (0, 0.5, 1)]
    assert made[0] == make_probe(encode, style, length=1000, depth=0, seed=5)
    assert made[0] != make_probe(encode, style, length=1000, depth=0, seed=6)
    answers = [decode(ids) for ids in made[0].answers]
    right = answers[made[0].right]
    where = []
    for p in made:
        text = decode(p.tokens)
        assert 850 < len(text) <= 1000 and p.answers == made[0].answers
        others = [a.strip() for a in answers if a != right]
        assert all(other not in text for other in others) or style == "meetings"
        where.append(text.index(right))
        assert sorted(text) == sorted(decode(made[0].tokens))
    assert where[0] < where[1] < where[2]
    assert abs(where[1] / 1000 - 0.5) < 0.15
    assert len(set(answers)) == len(answers) == (10 if style == "passkey" else len(FRIENDS))


def test_meetings_pair_each_kind_with_unique_name() -> None:
    """Parsed from the text: each kind appears once with a unique name, and the right answer is the
    name of the kind asked about.
    """
    for seed in range(6):
        made = make_probe(encode, "meetings", length=2000, depth=0.3, seed=seed)
        text = decode(made.tokens)
        met = re.findall(r"By the road stood the (\w+) (\w+)\.", text)
        assert len(met) == len(KINDS) == len({kind for kind, _ in met})
        assert len({name for _, name in met}) == len(met)
        (asked,) = re.findall(r"Who came back\? It was the (\w+)$", text)
        answers = [decode(ids) for ids in made.answers]
        assert answers[made.right] == f" {dict(met)[asked]}"
        assert sorted(answers) == sorted(f" {name}" for name in FRIENDS)


def test_right_answer_index_is_random() -> None:
    """Over 40 seeds, the right answer takes more than 10 positions in the list of answers."""
    places = {make_probe(encode, "story", length=300, depth=0, seed=s).right for s in range(40)}
    assert len(places) > 10


def test_make_probe_refuses_invalid_arguments() -> None:
    """A length without room for fillers, a depth above 1 and an unknown style raise errors."""
    with pytest.raises(CapacityError, match=r"text without fillers has \d+ tokens"):
        make_probe(encode, "story", length=20, depth=0, seed=0)
    with pytest.raises(ConfigError, match="depth must be from 0"):
        make_probe(encode, "story", length=500, depth=1.5, seed=0)
    with pytest.raises(ConfigError, match="style must be one of passkey, story, meetings"):
        make_probe(encode, "poem", length=500, depth=1, seed=0)


def test_answer_logprobs_equal_transformers(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer log-probabilities and greedy matches equal transformers' for rows of unequal length,
    prefilled in chunks that do not divide them.
    """
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)
    rows = [tokens(1, 37)[0].tolist(), tokens(1, 33, seed=1)[0].tolist()]
    found = prefill_texts(twin.model, twin.params, rows, answer_tokens=3)
    scored = score_answers(twin.model, twin.params, found, ANSWERS, policy=None, answer_tokens=3)
    for b, row in enumerate(rows):
        for c, ids in enumerate(ANSWERS[b]):
            logits = torch.tensor(twin.logits([[*row, *ids]])[0, len(row) - 1 : -1])
            logprobs = logits.double().log_softmax(-1)[range(len(ids)), ids]
            assert scored.logprob_BC[b, c] == pytest.approx(float(logprobs.sum()), rel=1e-4)
            assert scored.greedy_BC[b, c] == (logits.argmax(-1).numpy() == ids).all()
    likeliest = np.argmax(np.asarray(found.logits_BV), axis=1)
    taken = [[[int(t)], *ANSWERS[b][1:]] for b, t in enumerate(likeliest)]
    again = score_answers(twin.model, twin.params, found, taken, policy=None, answer_tokens=3)
    assert again.greedy_BC[:, 0].all()


def test_eviction_policies_match_forward_over_remaining_tokens() -> None:
    """In a one-layer model, cached entries do not depend on evicted ones, so the logits equal a
    forward pass over the remaining tokens.
    """
    model, params = random_model("llama", num_hidden_layers=1)
    row = tokens(1, 45)[0].tolist()
    for policy, piece in ((SinksAndWindow(sinks=2, window=6), 8), (Slide(5), 8)):
        found = prefill_texts(model, params, [row], policy=policy, slots=16)
        remaining: list[int] = []
        first = 45 % piece  # the padding is on the left
        cuts = [0, first, *range(first + piece, 46, piece)]
        padding_slots = piece - first if first else 0  # slots occupied by padding
        for start, stop in itertools.pairwise(cuts):
            if len(remaining) + padding_slots + piece > 16:
                remaining = (
                    remaining[-5:]
                    if isinstance(policy, Slide)
                    else [*remaining[:2], *remaining[2:][-6:]]
                )
                padding_slots = 0
            remaining += row[start:stop]
        ids = np.array([remaining + [0] * (24 - len(remaining))])
        logits = jaxllm.forward(model, params, None, ids).logits[0, len(remaining) - 1]
        assert_close(found.logits_BV[0], np.asarray(logits))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_chunked_prefill_uses_one_rope_scaling_per_text(
    rope_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts prefilled in chunks, shorter or longer than the original context, equal transformers
    without a cache (dynamic NTK, LongRoPE).
    """
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)
    if rope_type == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}
        given: dict[str, Any] = {"rope_parameters": scaling, "max_position_embeddings": 40}
        save_random(tmp_path, "llama", num_hidden_layers=1, **given)
    else:
        save_random(tmp_path, "phi3", num_hidden_layers=1)
    twin = load_twin(tmp_path)
    answers = [[[3, 5, 7]]]
    for size in (30, 45):
        row = tokens(1, size)[0].tolist()
        found = prefill_texts(twin.model, twin.params, [row], answer_tokens=3)
        scored = score_answers(
            twin.model, twin.params, found, answers, policy=None, answer_tokens=3
        )
        # A new model: with dynamic NTK, transformers keeps the angles of the longest text.
        text = torch.tensor(load_twin(tmp_path).logits([[*row, 3, 5, 7]]))
        logprobs = text[0, size - 1 : -1].double().log_softmax(-1)[range(3), [3, 5, 7]]
        assert scored.logprob_BC[0, 0] == pytest.approx(float(logprobs.sum()), rel=1e-4)
    with pytest.raises(CapacityError, match="expected at most 40: beyond that this model changes"):
        prefill_texts(twin.model, twin.params, [row], policy=Slide(), slots=64)


def test_recall_cells_are_ordered_by_policy_length_depth() -> None:
    """Cells come in the order of policies, lengths and depths, with the same token count at each
    length; bad policies and sizes are refused.
    """
    model, params = random_model("llama", num_hidden_layers=1)
    model_256 = random_model("llama", num_hidden_layers=1, vocab_size=256)
    options: dict[str, Any] = {
        "style": "story",
        "lengths": (260, 300),
        "depths": (0, 1),
        "tries": 2,
    }
    names = ("full", "sinks", "heavy", "pooled")
    cells = recall(*model_256, encode, policies=names, slots=128, **options)
    assert [(c.policy, c.length, c.depth) for c in cells] == [
        (p, n, d) for p in names for n in (260, 300) for d in (0, 1)
    ]
    assert len({c.tokens for c in cells if c.length == 260}) == 1
    assert all(0 <= c.greedy <= c.tries == 2 and c.logprob < 0 for c in cells)
    with pytest.raises(ConfigError, match=r"unknown policy: got fast, expected full, slide"):
        recall(model, params, encode, policies=("fast",), **options)
    with pytest.raises(CapacityError, match="cannot keep 4 sinks"):
        recall(model, params, encode, policies=("pooled",), slots=12, **options)


def test_recall_refuses_unsupported_policies_by_name() -> None:
    """A model with learned positions refuses policies that move tokens, by name, and long texts."""
    model, params = random_model("gpt2")
    options: dict[str, Any] = {"style": "story", "lengths": (260,), "depths": (0,), "tries": 1}
    for name in ("sinks", "window", "heavy", "pooled"):
        with pytest.raises(ConfigError, match=f"policy {name} .* gpt2 has learned positions"):
            recall(model, params, encode, policies=(name,), **options)
    with pytest.raises(CapacityError, match=r"gpt2 has 97 positions\. .* slide"):
        recall(model, params, encode, **options)
    assert isinstance(POLICIES["heavy"], HeavyHitters) and isinstance(POLICIES["pooled"], PoolOlder)


def test_segments_policy_equals_full_cache_for_infini() -> None:
    """With Infini-attention, a cache of two segments gives a full cache's answers; a cache of one
    segment and a dense model are refused.
    """
    kind = {"kind": "infini", "segment_length": 16}
    model, params = random_model("llama", num_hidden_layers=2, vocab_size=256, attention=kind)
    options: dict[str, Any] = {"style": "meetings", "depths": (0, 1), "tries": 3}
    full = recall(model, params, encode, lengths=(250,), **options)
    kept = recall(
        model, params, encode, lengths=(250,), policies=("segments",), slots=32, **options
    )
    for a, b in zip(full, kept, strict=True):
        assert (a.right, a.greedy) == (b.right, b.greedy)
        assert a.logprob == pytest.approx(b.logprob, rel=1e-4)
    named: dict[str, Any] = {**options, "lengths": (250,), "policies": ("segments",)}
    with pytest.raises(CapacityError, match="the cache has 16 slots, expected more"):
        recall(model, params, encode, slots=16, **named)
    with pytest.raises(ConfigError, match="which this llama does not have"):
        recall(*random_model("llama"), encode, slots=32, **named)


def test_self_extend_policy_requires_long_enough_model() -> None:
    """The self-extend policy requires an extended model with a context long enough for the text;
    default_extension chooses sufficient sizes.
    """
    model, params = random_model("llama", max_position_embeddings=97)
    options: dict[str, Any] = {"style": "story", "depths": (0,), "tries": 1}
    named = {**options, "lengths": (300,), "policies": ("self-extend",)}
    with pytest.raises(ConfigError, match="needs extended_model"):
        recall(model, params, encode, **named)
    short = build(model.config.with_attention(SelfExtend(group_size=2, neighbor_window=9)))
    with pytest.raises(CapacityError, match=r"got 300 tokens, expected at most 184\. .*groups"):
        recall(model, params, encode, extended_model=short, **named)
    numbers = default_extension(model.config, 300)
    assert numbers == SelfExtend(group_size=4, neighbor_window=12)
    assert model.config.with_attention(numbers).context_length >= 316
    assert default_extension(model.config, 3000).group_size > 4


def test_recall_command_writes_table_json_and_picture(
    run: Run, shallow: Any, tmp_path: Path
) -> None:
    """`recall` prints a table per policy, writes JSON and a PNG, and logs the chance level."""
    out, picture = tmp_path / "cells.json", tmp_path / "recall.png"
    options = ("--lengths", "60,90", "--depths", "0,1", "--policies", "full,slide", "--tries", 2)
    files = ("--out", out, "--picture", picture)
    model = shallow("llama")
    shown, err = succeed(run, "recall", model, "--texts", "story", *options, *files, "--slots", 32)
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    assert (report["texts"], report["slots"]) == ("story", 32)
    assert [c["policy"] for c in report["cells"]] == ["full"] * 4 + ["slide"] * 4
    assert all(c["share"] == c["right"] / 2 and c["chance"] == 1 / 24 for c in report["cells"])
    lines = shown.splitlines()
    assert lines[0].split() == ["full", "60", "90"]
    assert lines[1].startswith("  depth 0.00") and len(lines) == 6
    assert "chance: 4%" in err


def test_recall_command_refuses_bad_options_first(run: Run, tmp_path: Path) -> None:
    """Bad --lengths, --depths and --picture are refused before the model is loaded."""
    for given, message in {
        ("--lengths", "many"): "--lengths must be numbers separated by commas",
        ("--depths", ""): "--depths must be numbers separated by commas",
        ("--picture", tmp_path / "away" / "x.png"): "is not a directory",
    }.items():
        assert_refused(run, message, "recall", tmp_path, *given)
