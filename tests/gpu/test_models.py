"""Whole models as an accelerator computes them, run on a CPU in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.ops import flash
from jaxllm.ops.target import trace_for
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import NextToken
from tests.gpu import cudnn
from tests.tiny_models import KINDS, assert_close, random_model, tokens

_MORE = ("gpt2", "gpt_neox", "mixtral")
FAMILIES = [
    name
    if name in ("llama", "gemma2")
    else pytest.param(name, marks=pytest.mark.more if name in _MORE else pytest.mark.full)
    for name in KINDS
]


def run(model: Any, params: Any, equal: bool = False) -> tuple[Any, Any]:
    """Return the greedy text of two prompts, and log-probabilities, in passes of 16 tokens."""
    lengths_B = None if equal else np.array([21, 9])
    found = jaxllm.generate(
        model, params, tokens(2, 21), lengths_B=lengths_B, max_new_tokens=12, chunk=16
    )
    return found.token_BT, found.logprob_BT


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_each_family_equals_cpu(family: str) -> None:
    model, params = random_model(family)
    expected = run(model, params)
    with trace_for("rocm"):
        found = run(model, params)
    np.testing.assert_array_equal(found[0], expected[0])
    assert_close(found[1], np.asarray(expected[1]))


@pytest.mark.parametrize("equal", [True, False])
def test_text_by_lengths_equals_cpu(monkeypatch: pytest.MonkeyPatch, equal: bool) -> None:
    """Prompts in passes and decoding by cuDNN's lengths; unequal prompts leave gaps, so that only
    their passes are read so.
    """
    calls = []

    def attend(query: Any, *args: Any, **options: Any) -> Any:
        calls.append(query.shape[1])
        return cudnn.dot_product_attention(query, *args, **options)

    model, params = random_model("llama", head_dim=8, num_hidden_layers=1)
    expected = run(model, params, equal)
    monkeypatch.setattr(flash, "DTYPES", ("float32",))
    monkeypatch.setattr(flash, "find_problem", lambda: None)
    fake = type("cuDNN", (), {**vars(cudnn), "dot_product_attention": staticmethod(attend)})
    monkeypatch.setattr(flash, "_cudnn", lambda: fake)
    with trace_for("cuda"):
        found = run(model, params, equal)
    np.testing.assert_array_equal(found[0], expected[0])
    assert_close(found[1], np.asarray(expected[1]))
    assert (1 in calls) == equal and 16 in calls


@pytest.mark.parametrize("rows", [1, 3])
def test_served_text_by_lengths_equals_cpu(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Rows of a serving loop, which are filled again and again, write each token to its slot."""
    model, params = random_model("llama", head_dim=8, num_hidden_layers=1)
    prompts = [tokens(1, n, seed=n)[0] for n in (3, 17, 9, 30, 4)]

    def serve() -> dict[Any, list[int]]:
        asked = [
            jaxllm.Request(id=i, prompt=p, max_new_tokens=5 + i) for i, p in enumerate(prompts)
        ]
        found: dict[Any, list[int]] = {}
        for event in jaxllm.serve(model, params, asked, rows=rows, capacity=48, chunk=16):
            assert event.error is None and event.token is not None
            found.setdefault(event.id, []).append(event.token)
        return found

    expected = serve()
    monkeypatch.setattr(flash, "DTYPES", ("float32",))
    monkeypatch.setattr(flash, "find_problem", lambda: None)
    monkeypatch.setattr(flash, "_cudnn", lambda: cudnn)
    with trace_for("cuda"):
        assert serve() == expected


def test_gap_forbids_lengths() -> None:
    """A cache with a culled token, or rows of unequal lengths, is read by positions."""
    from jaxllm.models.packing import is_packed

    model, params = random_model("llama")
    cache = jaxllm.init_cache(model, 2, 32)
    assert is_packed(cache)
    full = jaxllm.prefill(model, params, cache, tokens(2, 9)).cache
    assert is_packed(full) and is_packed(jaxllm.cache.select(full, [1, 0, 1]))
    assert is_packed(jaxllm.cache.rewind(full, 2))
    assert not is_packed(jaxllm.cache.drop_range(full, 2, 4))
    uneven = jaxllm.prefill(model, params, cache, tokens(2, 9), lengths_B=np.array([9, 4])).cache
    assert not is_packed(uneven)
    later = full.replace(next_position_B=jnp.full_like(full.next_position_B, 4))
    assert not is_packed(later)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.more)])
def test_training_gradients_equal_cpu(family: str) -> None:
    """The loss of rows with several documents, and its gradients by all weights."""
    model, params = random_model(family)
    at = np.stack([np.r_[np.arange(9), np.arange(6)], np.r_[np.arange(12), [-1] * 3]])
    number = np.stack([np.repeat([0, 1], [9, 6]), np.repeat([0, -1], [12, 3])])
    label = np.where(at >= 0, np.roll(tokens(2, 15), -1, axis=1), IGNORED)
    rows = Rows(*(jnp.asarray(x, jnp.int32) for x in (tokens(2, 15), label, at, number)))

    def loss(params: Any) -> jax.Array:
        return NextToken()(model, params, None, rows, jax.random.key(0)).total

    expected = jax.jit(jax.value_and_grad(loss))(params)
    with trace_for("rocm"):
        found = jax.jit(jax.value_and_grad(loss))(params)
    jax.tree.map(assert_close, found, jax.tree.map(np.asarray, expected))


def test_reason_against_cudnn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt of a model that cuDNN cannot read warns once, with the reason."""
    from jaxllm.models import packing

    monkeypatch.setattr(flash, "find_problem", lambda: None)
    monkeypatch.setattr(packing, "LONG_TEXT", 16)
    packing._warn_once.cache_clear()
    llama, gemma = random_model("llama", head_dim=8), random_model("gemma2", head_dim=8)
    assert "CPU" in packing.describe_attention(llama[0].config, "bfloat16")
    with trace_for("cuda"):
        assert packing.describe_attention(llama[0].config, "bfloat16").startswith("cuDNN")
        assert "int8" in packing.describe_attention(llama[0].config, "int8")
        assert "window" in packing.describe_attention(gemma[0].config, "bfloat16")
        cache = jaxllm.init_cache(gemma[0], 1, 32, dtype="bfloat16")
        with pytest.warns(UserWarning, match="slower than this GPU allows.*sliding window"):
            jaxllm.prefill(*gemma, cache, tokens(1, 20))
        jaxllm.prefill(*gemma, cache, tokens(1, 20))
