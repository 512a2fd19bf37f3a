"""Products keep their precision on devices that would round float32 factors."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.ops.products import einsum, match_dtypes, precision_of


def _dots(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _dots(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize("quantize", [None, "int8", "int4-g64"])
@pytest.mark.parametrize("rows", [3, 40])
def test_float32_model_multiplies_float32(quantize: str | None, rows: int) -> None:
    """Every product of float32 factors in a model and in its gradient asks for full precision:
    otherwise a GPU would round to TF32.
    """
    lm = jaxllm.load("demo:llama", dtype="float32", quantize=quantize)
    token_BT = jnp.ones((1, rows), jnp.int32)

    def run(embedding: Any) -> jax.Array:
        params = {**lm.params, "embed_tokens": embedding}
        return jaxllm.forward(lm.model, params, None, token_BT).logits.sum()

    step = run if quantize else jax.value_and_grad(run)
    jaxpr = jax.make_jaxpr(step)(lm.params["embed_tokens"])
    dots = [d for d in _dots(jaxpr.jaxpr) if d.invars[0].aval.dtype == jnp.float32]
    highest = jax.lax.Precision.HIGHEST
    assert len(dots) >= 2 * lm.config.num_hidden_layers
    assert all(d.params["precision"] in (highest, (highest, highest)) for d in dots)


def test_einsum_widens_factors_of_two_dtypes() -> None:
    """Factors of two dtypes are float32, and bfloat16 ones have float32 sums."""
    a = jnp.asarray(np.linspace(-1, 1, 12).reshape(3, 4), jnp.bfloat16)
    b = jnp.asarray(np.linspace(1, 3, 20).reshape(4, 5), jnp.float32)
    wide = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(einsum("ij,jk->ik", a, b), wide, rtol=0, atol=1e-6)
    assert [x.dtype for x in match_dtypes(a, b)] == [jnp.float32] * 2
    assert einsum("ij,kj->ik", a, a).dtype == jnp.float32
    assert precision_of(jnp.bfloat16) is None
