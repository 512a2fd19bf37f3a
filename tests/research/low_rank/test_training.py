"""Training low-rank weights: both factors train."""

import numpy as np
import pytest

from jaxllm.research.low_rank.weight import LowRankWeight
from jaxllm.train.partition import partition
from tests.train.test_constraints import GIVEN, RATE, WEIGHT, regress, rng_array


def test_low_rank_training_equals_manual_gradient_descent() -> None:
    """Losses equal gradient descent on both factors by hand, and the weight stays factored."""
    factors = LowRankWeight(rng_array(24, 6) * 0.3, rng_array(6, 40, seed=1) * 0.3)
    trained, _ = partition({"w": {"weight": factors}})
    assert trained.keys() == {f"{WEIGHT}.left", f"{WEIGHT}.right"}
    found, losses = regress(factors)
    assert isinstance(found, LowRankWeight)
    assert (found.rank, found.shape) == (6, (24, 40))
    x, y = GIVEN
    left, right = np.asarray(factors.left, np.float64), np.asarray(factors.right, np.float64)
    for expected in losses[:2]:
        error = x @ (left @ right).T - y
        assert expected == pytest.approx((error**2).mean(), rel=1e-4)
        slope = 2 * error / error.size
        left, right = (
            left - RATE * slope.T @ x @ right.T,
            right - RATE * left.T @ slope.T @ x,
        )
