"""Pruning masks against counting, sorting and scores computed by hand."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compress.input_stats import InputStats
from jaxllm.errors import ConfigError
from jaxllm.research.pruning.magnitude import magnitude_threshold, prune_below, prune_magnitude
from jaxllm.research.pruning.sparsity import Sparsity, lowest_mask, parse
from jaxllm.research.pruning.wanda import prune_wanda


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("62.5%", Sparsity(0.625)),
        ("25%", Sparsity(0.25)),
        (".25", Sparsity(0.25)),
        ("2:4", Sparsity(0.5, (2, 4))),
    ],
)
def test_parse_sparsity_accepts_shares_and_patterns(text: str, means: Sparsity) -> None:
    assert parse(text) == means


@pytest.mark.parametrize("text", ["", "0", "100%", "1.5", "4:2", "2:3", "-1", "2:128", "half"])
def test_parse_sparsity_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"share must be|must have 0 < N"):
        parse(text)


def test_mask_size_is_exact_despite_ties() -> None:
    """Masks have exactly the requested size, per row, per matrix and per N:M group; ties prune the
    first, NaN stays.
    """
    rng = np.random.default_rng(0)
    score = rng.integers(0, 4, (7, 33)).astype(np.float32)  # mostly equal
    assert (lowest_mask(score, parse("30%"), rows=True).sum(1) == int(33 * 0.3)).all()
    whole = lowest_mask(score, parse("30%"), rows=False)
    assert whole.sum() == int(7 * 33 * 0.3)
    assert score[whole].max() <= score[~whole].min()
    for text, pruned in (("1:4", 3), ("2:4", 2), ("5:16", 11)):
        groups = score[:, :32].reshape(-1, int(text.partition(":")[2]))
        pattern = lowest_mask(score[:, :32], parse(text), rows=True).reshape(groups.shape)
        first = np.argsort(groups, axis=1, kind="stable")[:, :pruned]  # ties: the first
        np.testing.assert_array_equal(np.nonzero(pattern)[1].reshape(-1, pruned), np.sort(first))
    odd = lowest_mask(np.array([[np.nan, 1, np.inf, 2]], np.float32), parse("2:4"), rows=True)
    assert odd.tolist() == [[False, True, False, True]]  # NaN and infinity are not pruned


def test_wanda_equals_hand_computed_scores() -> None:
    """Each row loses the smallest products of weight and input norm; equal norms reduce Wanda to
    magnitude.
    """
    rng = np.random.default_rng(1)
    w_OI, x_RI = rng.standard_normal((4, 6)), rng.standard_normal((50, 6)) * [1, 9, 1, 1, 0.1, 1]
    moments = InputStats.empty(6).add(jnp.asarray(x_RI, jnp.float32))
    found = np.asarray(prune_wanda(jnp.asarray(w_OI, jnp.float32), moments, parse("50%")))
    for row, kept in zip(w_OI, found, strict=True):
        score = [abs(w) * np.sqrt(sum(x_RI[:, i] ** 2)) for i, w in enumerate(row)]
        pruned = sorted(range(6), key=lambda i: score[i])[:3]
        assert [i for i in range(6) if kept[i] == 0] == sorted(pruned)
    even = InputStats.empty(6).add(jnp.eye(6))
    for text in ("50%", "1:2"):
        rows = [prune_magnitude(jnp.asarray(row[None], jnp.float32), parse(text)) for row in w_OI]
        same = prune_wanda(jnp.asarray(w_OI, jnp.float32), even, parse(text))
        np.testing.assert_array_equal(same, np.concatenate(rows))


def test_global_magnitude_threshold_is_exact() -> None:
    rng = np.random.default_rng(2)
    some: list[Any] = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((9, 31), (17, 5))]
    some.append(some[1].astype(jnp.bfloat16))
    every = np.sort(np.concatenate([np.abs(np.asarray(w, np.float32)).ravel() for w in some]))
    for fraction in (0.1, 0.5, 0.93):
        bound = magnitude_threshold(some, fraction)
        assert bound == every[int(len(every) * fraction)]
        gone = sum(int((np.asarray(prune_below(w, bound)) == 0).sum()) for w in some)
        assert gone == (every < bound).sum()
