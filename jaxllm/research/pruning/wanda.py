"""Wanda: zeroes the smallest |weight| x input norm in each row.

Sun et al. 2024, arXiv 2306.11695.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.recipe import (
    ModelState,
    RuleOptions,
    StepContext,
    StepSpec,
)
from jaxllm.compress.weight_loop import ChangeWeight, change_by_inputs
from jaxllm.research.pruning.sparsity import (
    PATTERN,
    Sparsity,
    check_pattern,
    parse as parse_sparsity,
    zero_lowest,
)
from jaxllm.weights.formats import Weight, to_dense


def wanda(context: StepContext[RuleOptions]) -> ModelState:
    """Zero the smallest |weight| x input norm in each row."""
    sparsity = parse_sparsity(context.argument)

    def prepare(stats: InputStats, where: str) -> ChangeWeight:
        return lambda path, weight: prune_wanda(weight, stats, sparsity)

    return change_by_inputs(context, f"Wanda, {sparsity.name}", prepare)


def prune_wanda(weight: Weight, stats: InputStats, sparsity: Sparsity) -> jax.Array:
    """Zero the weights with the smallest `|w_ij| ||x_j||` in each row."""
    array = jnp.asarray(to_dense(weight))
    norm_I = np.asarray(jnp.sqrt(jnp.diagonal(stats.gram_II)))
    score_OI = np.abs(np.asarray(array, np.float32)) * norm_I[None]
    return zero_lowest(array, score_OI, sparsity, rows=True)


STEP = StepSpec(
    "prune",
    "wanda",
    wanda,
    "zero the smallest |weight| x input norm in each row",
    PATTERN,
    RuleOptions,
    supports_experts=True,
    check=check_pattern,
)
