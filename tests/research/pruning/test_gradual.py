"""Gradual pruning against the published schedule and sorted magnitudes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.research.pruning.gradual import PruneGradually, gradual_sparsity, prune_gradually
from jaxllm.research.pruning.sparsity import Sparsity, lowest_mask
from jaxllm.train.partition import partition
from tests.tiny_models import random_model
from tests.train.test_constraints import SHAPES, regress, rng_array


def test_gradual_sparsity_follows_cubic_schedule() -> None:
    """Zhu and Gupta 2017 (arXiv 1710.01878), equation 1."""
    at = [
        gradual_sparsity(t, begin=10, end=110, first=0.2, last=0.8) for t in (0, 10, 60, 110, 500)
    ]
    assert at == pytest.approx([0.2, 0.2, 0.8 - 0.6 * 0.125, 0.8, 0.8])
    with pytest.raises(ConfigError, match="before it ends"):
        gradual_sparsity(0, begin=5, end=5, first=0.0, last=0.5)


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_prune_gradually_follows_published_schedule(pattern: tuple[int, int] | None) -> None:
    """The fraction follows the closed form of Zhu and Gupta; the pruned set is the one found by
    sorting magnitudes.
    """
    weight = rng_array(6, 24)
    last = 0.5 if pattern else 0.8
    prune = PruneGradually(paths=("w",), sparsity=Sparsity(last, pattern), begin=2, end=11, every=3)
    apply = jax.jit(prune)
    before = {"w": weight, "b": jnp.zeros(3)}
    for step in range(14):
        # The update restores every weight; pruned weights must stay zero.
        after = {"w": weight + 0.01 * step, "b": before["b"] + 1}
        now = apply(before, after, jnp.asarray(step))
        is_pruned = np.asarray(now["w"]) == 0
        when = max(s for s in (0, 2, 5, 8, 11) if s <= step)
        share = 0.0 if when < 2 else last * (1 - (1 - (when - 2) / 9) ** 3)
        if pattern:
            groups = is_pruned.reshape(-1, 4).sum(axis=1)
            assert set(groups.tolist()) == {int(4 * share + 1e-9)}
        else:
            assert is_pruned.sum() == int(weight.size * share)
        if step in (2, 5, 8, 11):
            masked = np.where(np.asarray(before["w"]) == 0, 0, after["w"])
            per = 4 if pattern else weight.size
            count = int(per * share + 1e-9)
            order = np.argsort(np.abs(masked).reshape(-1, per), axis=1, kind="stable")[:, :count]
            mask = np.zeros_like(masked, bool).reshape(-1, per)
            np.put_along_axis(mask, order, True, axis=1)
            np.testing.assert_array_equal(is_pruned, mask.reshape(is_pruned.shape))
        else:
            np.testing.assert_array_equal(is_pruned, np.asarray(before["w"]) == 0)
        assert float(now["b"][0]) == step + 1
        before = now
    np.testing.assert_array_equal(
        is_pruned, lowest_mask(np.abs(np.asarray(masked)), prune.sparsity, rows=False)
    )


def test_prune_gradually_reaches_final_sparsity_at_end() -> None:
    """The last pruning happens at the end step, even if the interval does not divide it."""
    prune = PruneGradually(paths=("w",), sparsity=Sparsity(0.75), begin=0, end=5, every=2)
    apply, now = jax.jit(prune), {"w": rng_array(4, 20)}
    for step, share in ((4, 0.75 * (1 - (1 - 4 / 5) ** 3)), (5, 0.75)):
        now = apply(now, now, jnp.asarray(step))
        assert int((now["w"] == 0).sum()) == int(80 * share)


def test_prune_gradually_during_training_gives_2_4_pattern() -> None:
    """The trained weight has the 2:4 pattern and the loss falls after the last pruning."""
    weight = rng_array(24, 40)
    trained, _ = partition({"w": {"weight": weight}})
    prune = prune_gradually(trained, "2:4", begin=1, end=6, every=2)
    found, losses = regress(weight, prune, steps=12)
    assert ((np.asarray(found) == 0).reshape(-1, 4).sum(axis=1) == 2).all()
    assert losses[-1] < losses[7]  # after the last pruning


def test_gradual_pruning_refuses_invalid_input() -> None:
    _, params = random_model("llama", **SHAPES)
    trained, _ = partition(params)
    steps = {"begin": 0, "end": 4, "every": 2}
    for make, message in (
        (lambda: prune_gradually(trained, "half", **steps), "share must be between 0 and 100%"),
        (lambda: prune_gradually(trained, "2:64", **steps), "not a multiple of 64"),
        (lambda: prune_gradually(trained, "0.5", **steps, rules=(("norm", True),)), "no matrix"),
        (lambda: prune_gradually(trained, "0.5", begin=4, end=4, every=1), "end of pruning must"),
        (lambda: prune_gradually(trained, "0.5", begin=0, end=4, every=0), "between prunings"),
        (
            lambda: PruneGradually(paths=(), sparsity=Sparsity(0.5), initial_fraction=0.6, **steps),
            "at least 0 and below its last one, 0.5",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
