"""Weight clipping against trying every range of each group."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.compress.input_stats import InputStats
from jaxllm.compress.methods.rtn import SHRINK_STEPS, round_to_nearest
from jaxllm.compress.pipeline import compress
from jaxllm.weights.formats import to_dense
from jaxllm.weights.types.int_weight import parse


@pytest.mark.parametrize("name", ["int3-g32", "int4-g64-zp", "int8"])
@pytest.mark.parametrize("data", [True, False])
def test_clipping_search_finds_least_error(name: str, data: bool) -> None:
    """The chosen clipping range of each group has the least output error of all candidate ranges,
    with or without data.
    """
    rng = np.random.default_rng(0)
    w_OI = rng.standard_t(3, (6, 100)).astype(np.float32)
    x_RI = (rng.standard_normal((300, 100)) @ rng.standard_normal((100, 100))).astype(np.float32)
    to = parse(name)
    assert to is not None
    moments = InputStats.empty(100).add(jnp.asarray(x_RI)) if data else None
    found = np.asarray(round_to_nearest(jnp.asarray(w_OI), to, moments, clip=True).to_dense())
    size = to.group_size(100)
    for begin in range(0, 100, size):
        some = slice(begin, min(begin + size, 100))
        w_OGg = np.zeros((6, 1, size), np.float32)
        w_OGg[:, 0, : some.stop - begin] = w_OI[:, some]
        x_Rg = x_RI[:, some].astype(np.float64) if data else np.eye(some.stop - begin)

        def error(q_Og: np.ndarray, some: slice = some, x_Rg: np.ndarray = x_Rg) -> np.ndarray:
            return np.asarray((((q_Og - w_OI[:, some]) @ x_Rg.T) ** 2).sum(-1))

        least = np.full(6, np.inf)
        for step in range(SHRINK_STEPS // 2):
            scale, zero = to.choose_grid(jnp.asarray(w_OGg), 1 - step / SHRINK_STEPS)
            codes = to.to_codes(jnp.asarray(w_OGg), scale[..., None], zero[..., None])
            q = np.asarray(to.to_values(codes, scale[..., None], zero[..., None]))[:, 0]
            least = np.minimum(least, error(q[:, : some.stop - begin]))
        np.testing.assert_allclose(error(found[:, some]), least, rtol=2e-3)


def test_clip_option_lowers_weight_error(shallow_demos: Path) -> None:
    lm = jaxllm.load(shallow_demos / "llama", dtype="float32")
    plain, clipped = (
        compress(lm, [f"quantize: rtn int4-g64 on=.*down_proj{more}"])
        for more in ("", " clip=true")
    )
    for layer in ("layers.0", "layers.1"):
        weight, *found = (
            to_dense(one.params[layer]["mlp"]["down_proj"]["weight"])
            for one in (lm, plain, clipped)
        )
        errors = [float(((q - weight) ** 2).sum()) for q in found]
        assert errors[1] < errors[0]
