"""Models with Infini-attention against PyTorch formulas, the dense model and cached runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm import models
from jaxllm.cache import compact, patch, rewind, shift
from jaxllm.cache.operations import keep_slots
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.export.step import StepSignature, input_shapes, make_step
from jaxllm.generation.loops.overflow import HeavyHitters
from jaxllm.research.long_attention.conversion import with_memory
from jaxllm.research.long_attention.segments import (
    DropSegments,
    current_segment,
    prefill_in_segments,
)
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.research.pruning.structured_pruning import narrow_config
from jaxllm.weights.precision import Precision, cast
from tests.cache.caches import close, peek
from tests.tiny_models import random_model, tokens

L, T = 5, 23
FULL = pytest.mark.full
RULES = ["linear", pytest.param("delta", marks=FULL), "delta_once"]


def make_lm(update: str, precision: Precision | None = None, gate: float | None = None) -> Any:
    """Return a tiny one-layer model with a memory and random gates, or one value for all."""
    model, params = random_model("llama", num_hidden_layers=1, precision=precision)
    kind = LongAttention(kind="infini", segment_length=L, update=update)
    config = dataclasses.replace(model.config, attention=kind)
    drawn = np.random.default_rng(5).standard_normal(8).astype(np.float32)
    gate_N = jnp.asarray(drawn if gate is None else np.full(8, gate, np.float32))
    layer = {**params["layers.0"]}
    layer["self_attn"] = {**layer["self_attn"], "memory_gate": gate_N}
    return models.build(config, model.precision), {**params, "layers.0": layer}


@pytest.fixture(scope="module", params=RULES)
def lm(request: pytest.FixtureRequest) -> Any:
    return make_lm(request.param)


@pytest.fixture(scope="module")
def linear() -> Any:
    return make_lm("linear")


@pytest.fixture(scope="module")
def delta() -> Any:
    return make_lm("delta")


def in_torch(lm: Any, ids: np.ndarray, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits `[T, V]` of one row of a one-layer model, per head and segment."""
    c = lm[0].config
    w = {name: leaves[name] for name in leaves}
    H, N, K = c.head_dim, c.num_attention_heads, c.num_key_value_heads

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + c.norm_eps) * weight

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        inverse = c.rope.rope_theta ** -(torch.arange(0, H, 2, dtype=x.dtype) / H)
        angle = positions[:, None].to(x.dtype) * inverse
        cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
        a, b = x[..., : H // 2], x[..., H // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def sigma(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.elu(x) + 1

    x = w["embed_tokens.weight"][torch.tensor(ids)]
    y = norm(x, w["layers.0.input_layernorm.weight"])
    q, k, v = (
        (y @ w[f"layers.0.self_attn.{n}_proj.weight"].T).reshape(len(ids), -1, H) for n in "qkv"
    )
    at = torch.arange(len(ids))  # only position differences within segments matter
    q_rotated, k_rotated = rotate(q, at), rotate(k, at)
    share = torch.sigmoid(w["layers.0.self_attn.memory_gate"])
    heads = []
    for n in range(N):
        h, out = n // (N // K), []
        m, z = torch.zeros(H, H, dtype=x.dtype), torch.zeros(H, dtype=x.dtype)
        for start in range(0, len(ids), L):
            s = slice(start, min(start + L, len(ids)))
            score = q_rotated[s, n] @ k_rotated[s, h].T * H**-0.5
            future = torch.ones_like(score).triu(1).bool()
            local = score.masked_fill(future, -torch.inf).softmax(-1) @ v[s, h]
            if start:
                found = sigma(q[s, n]) @ m / (sigma(q[s, n]) @ z)[:, None]
                local = share[n] * found + (1 - share[n]) * local
            out.append(local)
            key = sigma(k[s, h])
            retrieved = key @ m / (key @ z)[:, None] if start else torch.zeros_like(v[s, h])
            update = c.attention.update
            if update == "delta_once":
                kept = torch.minimum(torch.ones_like(z), z / key.sum(0))
                m = m + key.T @ v[s, h] - kept[:, None] * (key.T @ retrieved)
                z = torch.maximum(z, key.sum(0))
            else:
                m = m + key.T @ (v[s, h] - (retrieved if update == "delta" else 0))
                z = z + key.sum(0)
        heads.append(torch.cat(out))
    x = x + torch.stack(heads, 1).flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
    y = norm(x, w["layers.0.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"layers.0.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    x = x + (torch.nn.functional.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["lm_head.weight"].T


def test_logits_and_gradients_equal_pytorch_formulas(lm: Any) -> None:
    """Logits and gradients equal the paper's formulas in float64, through five segments and the
    gates, with a memory per key-value head.
    """
    from jaxllm.train.partition import combine, partition

    model, params = lm
    ids = tokens(1, T)
    trained, rest = partition(params)
    weight_TV = np.random.default_rng(6).standard_normal((T, 131)).astype(np.float32)

    def total(trained: Any) -> jax.Array:
        out = jaxllm.forward(model, combine(trained, rest), None, ids)
        return (jax.nn.log_softmax(out.logits[0]) * weight_TV).sum(), out.logits[0]

    (_, logits), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(trained)
    leaves = {
        path: torch.tensor(np.asarray(x, np.float64), requires_grad=True)
        for path, x in trained.items()
    }
    theirs = in_torch(lm, ids[0], leaves)
    close(logits, theirs.detach().numpy(), 2e-5)
    (theirs.log_softmax(-1) * torch.tensor(weight_TV.astype(np.float64))).sum().backward()
    assert "layers.0.self_attn.memory_gate" in gradient
    for path, leaf in leaves.items():
        scale = float(leaf.grad.abs().max())
        assert scale > 0, path
        np.testing.assert_allclose(
            gradient[path], leaf.grad.numpy(), atol=5e-5 * scale, rtol=1e-3, err_msg=path
        )


def test_closed_gates_make_segments_independent(linear: Any) -> None:
    """With gates at -inf, each segment has the logits of a separate text."""
    model, params = make_lm("linear", gate=-np.inf)
    ids = tokens(1, T)
    whole = jaxllm.forward(model, params, None, ids).logits[0]
    for start in range(0, T - L, L):
        alone = jaxllm.forward(model, params, None, ids[:, start : start + L]).logits[0]
        close(whole[start : start + L], alone)


@pytest.mark.parametrize(
    ("update", "chunk"), [("linear", 8), ("delta_once", 3), pytest.param("delta", 8, marks=FULL)]
)
def test_chunked_prefill_and_decode_equal_forward(update: str, chunk: int) -> None:
    """Chunks that cross segment boundaries, padded rows and single steps equal one forward pass."""
    lm, ids, lengths = make_lm(update), tokens(2, T), np.array([T - 4, 7])
    whole = np.asarray(jaxllm.forward(*lm, None, ids).logits)
    cache = jaxllm.init_cache(lm[0], 2, 40)
    logits, cache = jaxllm.prefill(*lm, cache, ids[:, : T - 4], lengths_B=lengths, chunk=chunk)
    close(logits, whole[np.arange(2), lengths - 1], 2e-5)
    for i in range(4):
        logits, cache = jaxllm.decode_step(*lm, cache, ids[np.arange(2), lengths + i])
        close(logits, whole[np.arange(2), lengths + i], 2e-5)


def filled(lm: Any, count: int, rows: int = 1, capacity: int = 40) -> jaxllm.KVCache:
    cache = jaxllm.init_cache(lm[0], rows, capacity)
    ids = tokens(rows, T)[:, :count]
    return jaxllm.prefill(*lm, cache, ids, lengths_B=np.full(rows, count), chunk=8).cache


def test_two_segment_cache_streams_forty_segments(delta: Any) -> None:
    """A cache of two segments gives the logits of a cache for all 40, and its size
    does not grow.
    """
    ids = np.tile(tokens(1, T), 9)[:, : 40 * L]
    small, large = (jaxllm.init_cache(delta[0], 1, n) for n in (2 * L, 41 * L))
    nbytes = small.nbytes
    for start in range(0, ids.shape[1], L):
        part = ids[:, start : start + L]
        logits, small = jaxllm.prefill(*delta, small, part)
        theirs, large = jaxllm.prefill(*delta, large, part)
        close(logits, theirs)
        small = compact(current_segment(small))
        assert (small.nbytes, int(small.cursor)) == (nbytes, 0)


def test_current_segment_drops_only_finished_segments(linear: Any) -> None:
    """The tokens of the current segment stay, and the next logits are unchanged."""
    cache = filled(linear, T, rows=2)
    left = compact(current_segment(cache), capacity=2 * L)
    assert left.length_B.tolist() == [T % L] * 2
    close(peek(linear, left), peek(linear, cache))


@pytest.mark.parametrize("format", [pytest.param("float32", marks=FULL), "int8"])
def test_rewind_within_current_segment_restores_memory(format: str) -> None:
    """Rewinding within the current segment, or exactly to its start, equals a run up to that
    position.
    """
    lm = make_lm("delta", Precision(cache=format))
    cache, atol = filled(lm, T), 1e-5 if format == "float32" else 0.05
    border = T // L * L
    back = rewind(cache, to=border + 1)
    close(peek(lm, back), peek(lm, filled(lm, border + 1)), atol)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (back.state, filled(lm, border + 1).state)), strict=True
    ):
        close(ours, theirs, atol)
    exact = rewind(cache, to=border)
    begun = filled(lm, border)
    close(peek(lm, exact), peek(lm, begun), 2e-6)
    assert rewind(cache, 0).state is cache.state


def test_infini_refuses_unsupported_operations(linear: Any) -> None:
    """Operations that the memory cannot follow raise errors that name the reason."""
    cache, ids = filled(linear, T), tokens(1, T)
    with pytest.raises(CacheMismatchError, match=r"rewound to 20, .* forked or saved before"):
        rewind(cache, to=19)
    gone = keep_slots(cache, cache.position_BS != 20)  # possible in files of older versions
    with pytest.raises(CacheMismatchError, match=r"row 0 has only 1 of the tokens"):
        rewind(gone, to=22)
    with pytest.raises(ConfigError, match="cached tokens cannot move"):
        shift(cache, 3)
    with pytest.raises(CacheMismatchError, match=r"patch: .* state"):
        patch(cache, np.array([[1]]), jaxllm.forward(*linear, None, ids[:, :1]).delta)
    with pytest.raises(TokenError, match=r"position 4 follows 0, .* in order"):
        jaxllm.forward(*linear, None, ids[:, :2], positions_BT=np.array([[0, 4]]))
    with pytest.raises(TokenError, match=r"position 2 is already in .* expected at least 23"):
        jaxllm.forward(*linear, cache, ids[:, :1], positions_BT=np.array([[2]]))
    with pytest.raises(ConfigError, match="'infini' does not support attention mass"):
        jaxllm.forward(*linear, None, ids, attention_mass=True)
    with pytest.raises(ConfigError, match=r"several documents in one row .*--no-pack"):
        at = jnp.zeros((1, 4), jnp.int32)
        jaxllm.steps.run_model(*linear, (), at, jnp.arange(4)[None], document_BT=at)
    inputs = input_shapes(linear[0], StepSignature(), batch=1, num_tokens=2, capacity=8)
    with pytest.raises(ConfigError, match=r"fixed shapes and exports do not support"):
        jax.eval_shape(make_step(linear[0], StepSignature()), linear[1], inputs)
    with pytest.raises(ConfigError, match="'infini' cannot be dropped"):
        narrow_config(linear[0].config, "heads", 1)
    with pytest.raises(ConfigError, match="no segments"):
        current_segment(jaxllm.init_cache(random_model("llama")[0], 1, 4))


def test_half_precision_and_int8_stay_within_ten_percent(linear: Any) -> None:
    """bfloat16 models and int8 caches stay within 10% of the float32 logits, with a
    float32 memory.
    """
    ids = tokens(2, T)
    theirs = np.asarray(jaxllm.forward(*linear, None, ids).logits[:, -1])
    for precision in (Precision.uniform("bfloat16"), Precision(cache="int8")):
        model = models.build(linear[0].config, precision)
        params = cast(linear[1], precision)
        cache = jaxllm.init_cache(model, 2, T)
        logits, cache = jaxllm.prefill(model, params, cache, ids, chunk=8)
        assert np.isfinite(logits).all()
        assert np.abs(logits - theirs).max() < 0.1 * np.abs(theirs).max()
        assert cache.state[0].m_BKHH.dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4}, "excludes sliding_window"),
        ({"max_position_embeddings": L - 1}, "segments of 5 tokens exceed"),
    ],
)
def test_config_refuses_invalid_infini_settings(linear: Any, changes: Any, message: str) -> None:
    """A sliding window, and segments longer than the context, are refused."""
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(linear[0].config, **changes)


def test_with_memory_preserves_first_segment() -> None:
    """A dense model with an added memory has identical logits in the first segment; invalid
    additions are refused.
    """
    from tests.train.test_moe_training import lm_of

    lm = lm_of(*random_model("llama", num_hidden_layers=1))
    given = with_memory(lm, L, update="delta_once")
    ids = tokens(2, L)
    ours, theirs = (jaxllm.forward(x.model, x.params, None, ids).logits for x in (given, lm))
    assert np.array_equal(ours, theirs)
    for changes, message in (({"update": "dalta"}, "update must be one of"), ({}, "already")):
        with pytest.raises(ConfigError, match=message):
            with_memory(given if message == "already" else lm, L, **changes)
    with pytest.raises(ConfigError, match="a gpt2 cannot have a memory"):
        with_memory(lm_of(*random_model("gpt2")), L)


def test_prefill_in_segments_equals_large_cache(delta: Any) -> None:
    """A text longer than its cache, in rows at different positions, equals prefill into a large
    cache; the given cache stays valid.
    """
    ids = tokens(2, T)
    cache = jaxllm.init_cache(delta[0], 2, 8)
    _, cache = jaxllm.prefill(*delta, cache, ids[:, :4], lengths_B=np.array([4, 1]))
    whole = jaxllm.init_cache(delta[0], 2, 40)
    _, whole = jaxllm.prefill(*delta, whole, ids[:, :4], lengths_B=np.array([4, 1]))
    read = []
    for _ in range(2):  # twice from the same cache, which stays valid
        logits, left = prefill_in_segments(*delta, cache, ids, on_chunk=lambda n, _: read.append(n))
    theirs, whole = jaxllm.prefill(*delta, whole, ids)
    close(logits, theirs, 2e-5)
    close(peek(delta, left), peek(delta, whole), 2e-5)
    assert read == 2 * [3, 6, 9, 12, 15, 18, 21, 23]
    with pytest.raises(CapacityError, match=r"more than the segment length 5. Make one with 10"):
        prefill_in_segments(*delta, jaxllm.init_cache(delta[0], 2, 5), ids)


def test_generation_crosses_segment_boundaries(delta: Any) -> None:
    """Greedy tokens equal a forward pass without a cache, also in a small cache with DropSegments;
    unsuitable policies are refused.
    """
    ids = tokens(2, 7)
    generated = jaxllm.generate(*delta, ids, max_new_tokens=9)
    text = np.concatenate([ids, generated.token_BT], axis=1)
    logits = jaxllm.forward(*delta, None, text[:, :-1]).logits
    assert np.array_equal(np.asarray(logits)[:, 6:].argmax(-1), generated.token_BT)
    small = jaxllm.init_cache(delta[0], 2, 8)
    again = jaxllm.generate(*delta, ids, max_new_tokens=9, cache=small, overflow=DropSegments())
    assert np.array_equal(again.token_BT, generated.token_BT)
    assert again.cache.capacity == 8
    for policy, capacity, error, message in (
        (HeavyHitters(), 12, ConfigError, "cached tokens cannot be moved"),
        (DropSegments(), 5, CapacityError, "more than the segment length 5. Make one with 10"),
        (DropSegments(), 6, CapacityError, "a prompt of 7 tokens .*prefill_in_segments"),
    ):
        cache = jaxllm.init_cache(delta[0], 2, capacity)
        with pytest.raises(error, match=message):
            jaxllm.generate(*delta, ids, max_new_tokens=9, cache=cache, overflow=policy)
    plain = random_model("llama")
    with pytest.raises(ConfigError, match="which this llama does not have"):
        jaxllm.generate(*plain, ids, max_new_tokens=2, overflow=DropSegments())
