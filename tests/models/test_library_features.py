"""Library features in the families that differ most from Llama and GPT-2.

Each test compares a feature with a plain forward pass, which test_families.py compares with
transformers.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import compact, drop_range, fork, load_cache, rewind, save_cache
from jaxllm.export import FixedShapeRunner, runtime
from jaxllm.export.command_line import export
from jaxllm.generation.batching.scheduler import Request, serve
from tests.cache.caches import close, filled, fresh, peek
from tests.tiny_models import random_model, tokens

FAMILIES = ["gemma3_text", "olmo2", "phi3", "gpt_neox"]
IDS = tokens(1, 13)
TEXT = IDS[0].tolist()
NEW = 6


def daily(*families: str) -> pytest.MarkDecorator:
    """Run these families daily and the rest in `make test-full`, since compiling dominates."""
    full = [pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name not in families]
    return pytest.mark.parametrize("lm", [*families, *full], indirect=True)


@pytest.fixture(scope="module")
def lm(request: pytest.FixtureRequest) -> Any:
    """Return a tiny model; Gemma 3's window is 5 tokens, shorter than any text."""
    return random_model(request.param, num_hidden_layers=1)


@pytest.fixture(scope="module")
def greedy(lm: Any) -> list[int]:
    """Return six greedy tokens, each from a forward pass over the whole text."""
    text = list(TEXT)
    for _ in range(NEW):
        row = np.pad([text], ((0, 0), (0, 32 - len(text))))
        at = np.pad([np.arange(len(text))], ((0, 0), (0, 32 - len(text))), constant_values=-1)
        logits = jaxllm.forward(*lm, None, row, positions_BT=at).logits
        text.append(int(logits[0, len(text) - 1].argmax()))
    return text[len(TEXT) :]


@daily("phi3")
def test_greedy_and_speculative_equal_full_forward(lm: Any, greedy: list[int]) -> None:
    """Greedy and speculative tokens equal the argmax of a forward pass over the whole text."""
    assert jaxllm.generate(*lm, IDS, max_new_tokens=NEW).token_BT[0].tolist() == greedy
    draft = random_model(lm[0].config.model_type, seed=3, num_hidden_layers=1)
    drafted = jaxllm.speculative_generate(*lm, IDS, draft=draft, max_new_tokens=NEW)
    assert drafted.token_BT[0].tolist() == greedy


@daily("olmo2")
def test_beam_score_equals_full_forward_logprob(lm: Any) -> None:
    """The best beam's score is the mean log-probability of its tokens in a forward pass over the
    whole text.
    """
    found = jaxllm.beam_search(*lm, IDS, num_beams=2, max_new_tokens=NEW)
    best = np.asarray(found.token_BNT)[0, 0].tolist()
    row = np.pad([TEXT + best], ((0, 0), (0, 32 - len(TEXT) - NEW)))
    logits = jaxllm.forward(*lm, None, row).logits[0]
    scores = np.asarray(jax.nn.log_softmax(logits, axis=-1))[len(TEXT) - 1 :]
    each = [scores[i, token] for i, token in enumerate(best)]
    close(np.asarray(found.score_BN)[0, 0], np.mean(each))


PROMPTS = {"long": TEXT, "short": TEXT[:4], "one": TEXT[:1]}


@daily("gpt_neox")
def test_unequal_rows_equal_single_row_generation(lm: Any, greedy: list[int]) -> None:
    assert _batch(lm)[0] == greedy
    row = jaxllm.generate(*lm, [PROMPTS["short"]], max_new_tokens=NEW).token_BT[0].tolist()
    assert _batch(lm)[1] == row


@daily()
def test_served_requests_equal_batched_generation(lm: Any) -> None:
    requests = [Request(id=n, prompt=p, max_new_tokens=NEW) for n, p in PROMPTS.items()]
    served: dict[Any, list[int]] = {name: [] for name in PROMPTS}
    for event in serve(*lm, requests, rows=2, capacity=32, chunk=8, burst=2):
        assert event.error is None
        if event.token is not None:
            served[event.id].append(event.token)
    assert list(served.values()) == _batch(lm)


def _batch(lm: Any) -> list[list[int]]:
    lengths = np.array([len(p) for p in PROMPTS.values()])
    rows = np.array([p + [0] * (len(TEXT) - len(p)) for p in PROMPTS.values()])
    made = jaxllm.generate(*lm, rows, lengths_B=lengths, max_new_tokens=NEW)
    found: list[list[int]] = made.token_BT.tolist()
    return found


@daily("gemma3_text")
def test_cache_edits_equal_run_over_remaining_tokens(lm: Any) -> None:
    """Rewound, compacted and culled caches have the logits of a fresh run; tokens after a culled
    range are recomputed first.
    """
    cache = filled(lm, IDS)
    close(peek(lm, rewind(cache, 4))[0], fresh(lm, TEXT[:9]))
    close(peek(lm, compact(rewind(cache, 4)))[0], fresh(lm, TEXT[:9]))
    # Tokens after a culled one depend on it until they are recomputed.
    culled = drop_range(cache, 3, 6)
    again = jaxllm.recompute(*lm, culled, 6, 13)
    kept = [*range(3), *range(6, 13)]
    expected = fresh(lm, [TEXT[i] for i in kept], [*kept, 13])
    close(peek(lm, again)[0], expected)
    close(peek(lm, compact(again))[0], expected)


@daily()
def test_forked_rows_equal_fresh_run(lm: Any) -> None:
    forked = fork(filled(lm, IDS), 2, capacity=4)
    close(peek(lm, forked), np.stack([fresh(lm, TEXT)] * 2))


@pytest.mark.parametrize("family", [pytest.param("gemma2", marks=pytest.mark.full), "gemma3_text"])
def test_sliding_window_counts_positions_not_slots(family: str) -> None:
    """One layer sees 5 positions: a culled text equals a fresh run without recomputation, compacted
    or not.
    """
    lm = random_model(family, num_hidden_layers=1)
    assert lm[0].config.window(0) == 5
    cache = filled(lm, IDS)
    for begin, end in ((1, 5), (9, 12)):  # outside the window, and within it
        kept = [i for i in range(13) if not begin <= i < end]
        culled = drop_range(cache, begin, end)
        expected = fresh(lm, [TEXT[i] for i in kept], [*kept, 13])
        close(peek(lm, culled)[0], expected)
        close(peek(lm, compact(culled))[0], expected)


@daily("olmo2")
def test_cache_file_restores_and_checks_model(lm: Any, tmp_path: Path) -> None:
    """A loaded cache gives identical logits, and another model's cache is refused."""
    cache = filled(lm, IDS)
    save_cache(tmp_path / "c", cache, *lm)
    close(peek(lm, load_cache(tmp_path / "c", *lm, prefix=TEXT)), peek(lm, cache), atol=0)
    other = random_model(lm[0].config.model_type, seed=9, num_hidden_layers=1)
    with pytest.raises(jaxllm.errors.CacheMismatchError):
        load_cache(tmp_path / "c", *other)


@daily("gpt_neox")
def test_fixed_shape_runner_equals_forward(lm: Any) -> None:
    whole = np.asarray(jaxllm.forward(*lm, None, IDS).logits)
    close(FixedShapeRunner(*lm, 4, 16)(tokens=IDS).logits, whole)


@daily()
def test_exported_prefill_equals_forward(lm: Any, tmp_path: Path) -> None:
    whole = np.asarray(jaxllm.forward(*lm, None, IDS).logits)
    export(*lm, tmp_path / "graph", num_tokens=4, max_tokens=16, step_names=["prefill"])
    step = runtime.load(tmp_path / "graph")["prefill"]
    run = FixedShapeRunner(*lm, 4, 16, step=step)
    close(run(tokens=IDS).logits, whole)
