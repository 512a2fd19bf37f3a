"""Dilated attention by gathering, held to the paper's formulas written as loops, and to one softmax
over all that is shown.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import Part
from jaxllm.ops.dilated import attend
from jaxllm.ops.dilation import Dilation, dense_attend

N, K, H = 6, 2, 5
SCALE = 0.6


def pairs(*given: tuple[int, int], heads: int = N) -> tuple[Dilation, ...]:
    return tuple(Dilation(w, r, tuple(j % r for j in range(heads))) for w, r in given)


PAIRS = pairs((4, 1), (6, 2), (12, 4))


def draw(rows: int, length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, length, N, H), np.float32)
    k, v = rng.standard_normal((2, rows, length, K, H), np.float32)
    return q, k, v


def looped(q: Any, k: Any, v: Any, position: Any, dilations: Any, dedupe: bool = False) -> Any:
    """Sections 2.2 to 2.4 for one row, a head and a token at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for j in range(q.shape[1]):
        kv = j // (q.shape[1] // k.shape[1])
        for t, p in enumerate(position):
            total, value, had = 0.0, np.zeros(q.shape[2]), set[int]()
            for w, r, offsets in dilations if p >= 0 else ():
                segment = p // w
                rows = range(segment * w + offsets[j], (segment + 1) * w, r)  # equation 8
                if offsets[j] < 0 or p not in rows:
                    continue
                for s, at in enumerate(position):
                    if at in rows and 0 <= at <= p and not (dedupe and s in had):
                        had.add(s)
                        weight = np.exp(SCALE * (q[t, j] @ k[s, kv]))
                        total += weight  # s_i of equation 10
                        value += weight * v[s, kv]  # s_i O_i
            out[t, j] = value / total if total else 0.0
    return out


def ran(q: Any, k: Any, v: Any, position: Any, dilations: Any = PAIRS, **more: Any) -> Any:
    part = Part(jnp.asarray(k), jnp.asarray(v), jnp.asarray(position, jnp.int32))
    position = jnp.asarray(position, jnp.int32)
    return jax.jit(lambda q, part: attend(q, position, [part], dilations, scale=SCALE, **more))(
        jnp.asarray(q), part
    )


LENGTH = 29
UNEQUAL = np.stack(
    [
        np.arange(LENGTH),  # whole
        np.maximum(np.arange(LENGTH) - 7, -1),  # padded on the left
        np.where(np.arange(LENGTH) < 11, np.arange(LENGTH), -1),  # and on the right
        np.arange(LENGTH) + 5,  # from the middle of a segment
    ]
)


@pytest.mark.parametrize("dedupe", [False, True])
def test_it_is_the_papers_loops(dedupe: bool) -> None:
    q, k, v = draw(4, LENGTH)
    out = ran(q, k, v, UNEQUAL, dedupe=dedupe)
    for row in range(4):
        expected = looped(q[row], k[row], v[row], UNEQUAL[row], PAIRS, dedupe)
        np.testing.assert_allclose(out[row], expected, atol=1e-5)
    assert not out[1, :7].any()


def gradients(function: Any, *args: Any) -> Any:
    def loss(*args: Any) -> jax.Array:
        out = function(*args)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)


@pytest.mark.parametrize("dedupe", [False, True])
def test_values_and_gradients_are_those_of_one_softmax_with_multiplicities(dedupe: bool) -> None:
    q, k, v = map(jnp.asarray, draw(4, LENGTH))
    at = jnp.asarray(UNEQUAL, jnp.int32)
    settings: Any = {"scale": SCALE, "cap": 2.0, "dedupe": dedupe}

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attend(q, at, [Part(k, v, at)], PAIRS, **settings)

    def oracle(q: Any, k: Any, v: Any) -> Any:
        return dense_attend(q, at, [Part(k, v, at)], PAIRS, **settings)

    np.testing.assert_allclose(jax.jit(ours)(q, k, v), oracle(q, k, v), atol=1e-5)
    for found, expected in zip(gradients(ours, q, k, v), gradients(oracle, q, k, v), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.isfinite(found).all()
