"""Packed documents that do not attend to each other, and rematerialization."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import steps
from tests.tiny_models import assert_close, load_twin, random_model, save_random, tokens

LENGTHS = (5, 7, 4)


def packed() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ids, positions and documents of one row, int32 `[1, T]` each."""
    position = np.concatenate([np.arange(n) for n in LENGTHS])
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    row = (tokens(1, sum(LENGTHS)), position[None], document[None])
    return tuple(jnp.asarray(x, jnp.int32) for x in row)  # type: ignore[return-value]


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_packed_documents_equal_transformers(family: str, tmp_path: Path) -> None:
    """Each document packed in one row has the logits that transformers gives it as a
    separate text.
    """
    changes = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1, "sliding_window": 3}
    save_random(tmp_path, family, **changes)
    twin = load_twin(tmp_path)
    token_BT, position_BT, document_BT = packed()
    trace, _, _ = steps.run_model(
        twin.model, twin.params, (), token_BT, position_BT, document_BT=document_BT
    )
    for part in np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1]):
        expected = twin.logits(np.asarray(token_BT)[:, part])
        assert_close(trace.logits[:, part], expected)


def test_packed_documents_attend_to_cache() -> None:
    model, params = random_model("llama", num_hidden_layers=1)
    prefix, (token_BT, _, document_BT) = tokens(1, 6, seed=1), packed()
    cache = jaxllm.init_cache(model, 1, 6)
    _, cache = jaxllm.prefill(model, params, cache, prefix)
    position_BT = packed()[1] + 6
    trace, _, _ = steps.run_model(
        model, params, cache.segments, token_BT, position_BT, document_BT=document_BT
    )
    part = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    whole = np.concatenate([prefix, np.asarray(token_BT)[:, part]], axis=1)
    assert_close(trace.logits[:, part], jaxllm.forward(model, params, None, whole).logits[:, 6:])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_remat_gradients_equal_plain(family: str) -> None:
    model, params = random_model(family)
    given = packed()

    def gradients(remat: bool) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            token_BT, position_BT, document_BT = given
            again = model.clone(remat=remat)
            trace, _, _ = steps.run_model(
                again, params, (), token_BT, position_BT, document_BT=document_BT
            )
            return trace.logits.std()

        return jax.jit(jax.grad(loss))(params)

    plain, remat = gradients(False), gradients(True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, remat)
