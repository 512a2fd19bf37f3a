"""Self-Extend against brute force in NumPy, and transformers with the paper's attention."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import jaxllm
from jaxllm.config.model import Rope
from jaxllm.convert.gguf.settings import write_config
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.generation.loops.overflow import SinksAndWindow
from jaxllm.models import build
from jaxllm.ops import Part, attend
from jaxllm.research.self_extend import SelfExtend
from tests.cache.caches import rotated
from tests.conftest import Run, assert_refused, succeed
from tests.tiny_models import Twin, assert_close, load_twin, random_model, save_random, tokens

THETA, H = 100.0, 6
GROUP, WINDOW = 3, 7  # coprime


def self_extend(group: int = GROUP, window: int = WINDOW) -> SelfExtend:
    return SelfExtend(group_size=group, neighbor_window=window)


def attend_self_extend(q: Any, at_BT: Any, parts: Any, kind: SelfExtend) -> tuple[Any, Any]:
    context: Any = types.SimpleNamespace(
        mask_BTS=None, document_BT=None, position_BT=at_BT, mass=True
    )
    site: Any = types.SimpleNamespace(touches=lambda *_: False)
    rope = Rope(rope_type="default", rope_theta=THETA)
    options: Any = {"rope": rope, "window": None, "sink_N": None, "scale": 0.4, "cap": None}
    return kind.attend(context, site, q, parts, None, **options)[:2]


def brute_force(
    q_TNH: np.ndarray, k_SKH: np.ndarray, v_SKH: np.ndarray, q_T: Any, k_S: Any, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of the paper's algorithm 1 on unrotated vectors, and each slot's mass."""
    N, K = q_TNH.shape[1], k_SKH.shape[1]
    out, mass = np.zeros(q_TNH.shape), np.zeros(len(k_S))
    for t, p in enumerate(q_T):
        seen = [s for s, x in enumerate(k_S) if 0 <= x <= p]
        for n in range(N):
            scores = []
            for s in seen:
                k = k_S[s]
                if p - k < WINDOW:
                    here, there = p, k
                else:
                    here, there = p // GROUP + WINDOW - WINDOW // GROUP, k // GROUP
                scores.append(
                    scale
                    * rotated(q_TNH[t, n], here, THETA)
                    @ rotated(k_SKH[s, n * K // N], there, THETA)
                )
            w = np.exp(np.array(scores) - max(scores, default=0))
            w /= w.sum() if seen else 1
            for s, share in zip(seen, w, strict=True):
                out[t, n] += share * v_SKH[s, n * K // N]
                mass[s] += share
    return out, mass


@pytest.mark.parametrize("slots", [40, 530])  # one block, and several with a remainder
def test_attention_equals_paper_formula(slots: int) -> None:
    """Outputs and attention mass equal the paper's algorithm 1 in float64, in one block and in
    several.
    """
    rng = np.random.default_rng(0)
    T, N, K = 3, 4, 2
    k_S = np.where(rng.random(slots) < 0.3, -1, np.arange(slots) * 3 % 97)
    q_T = [41, 60, 95]
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((T, N, H), (slots, K, H), (slots, K, H))
    )
    out, mass = brute_force(q, k, v, q_T, k_S, 0.4)
    rotated_q = np.stack([rotated(row, p, THETA) for row, p in zip(q, q_T, strict=True)])
    rotated_k = np.stack([rotated(row, p, THETA) for row, p in zip(k, k_S, strict=True)])
    cut = slots // 2
    parts = [
        Part(
            jnp.asarray(rotated_k[None, a:b], jnp.float32),
            jnp.asarray(v[None, a:b]),
            jnp.asarray(k_S[None, a:b], jnp.int32),
        )
        for a, b in ((0, cut), (cut, slots))
    ]
    if slots > 512:
        parts = [Part(*(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)))]
    rotated_BTNH, at_BT = jnp.asarray(rotated_q[None], jnp.float32), jnp.asarray([q_T], jnp.int32)
    found, received = attend_self_extend(rotated_BTNH, at_BT, parts, self_extend())
    np.testing.assert_allclose(found[0], out, atol=2e-5)
    assert received is not None
    np.testing.assert_allclose(received[0], mass, atol=2e-5)


def test_group_size_one_equals_plain_attention() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 2, H)), jnp.float32) for _ in range(3))
    at_BT = jnp.tile(jnp.arange(9, dtype=jnp.int32)[None], (2, 1))
    parts = [Part(k, v, at_BT)]
    plain, _ = attend(q, at_BT, parts, scale=0.4, window=None)
    same, _ = attend_self_extend(q, at_BT, parts, self_extend(1, 3))
    assert_close(same, np.asarray(plain))


def paper_forward(group: int, window: int, rotary: Any) -> Any:
    """Return `LlamaAttention.forward` as in the paper's reference code, without a cache."""

    def forward(self: Any, hidden_states: Any, *_: Any, **__: Any) -> Any:
        B, T, _D = hidden_states.shape

        def heads(linear: Any) -> Any:
            return linear(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        i = torch.arange(T)

        def rotated(position: Any) -> tuple[Any, Any]:
            return apply_rotary_pos_emb(q, k, *rotary(hidden_states, position[None]))

        def scores(q: Any, k: Any) -> Any:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            return q @ k.transpose(2, 3) * self.scaling

        near = scores(*rotated(i))
        far = scores(rotated(i // group + window - window // group)[0], rotated(i // group)[1])
        distance = i[:, None] - i[None]
        score = torch.where(distance < window, near, far)
        weight = score.masked_fill(distance < 0, -torch.inf).softmax(-1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return self.o_proj((weight @ v).transpose(1, 2).reshape(B, T, -1)), None

    return forward


@pytest.fixture(scope="module", params=["default", "yarn"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Return a two-layer model, in which grouped positions also act through the first layer."""
    directory = tmp_path_factory.mktemp(request.param)
    scaling: dict[str, Any] = {"rope_type": request.param, "rope_theta": THETA}
    if request.param == "yarn":
        scaling |= {"factor": 2.0, "original_max_position_embeddings": 24}
    changes = {"num_hidden_layers": 2, "max_position_embeddings": 24}
    save_random(directory, "llama", rope_parameters=scaling, **changes)
    found = load_twin(directory)
    forward = paper_forward(GROUP, WINDOW, found.torch_model.model.rotary_emb)
    for layer in found.torch_model.model.layers:
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)
    config = found.config.with_attention(self_extend())
    return dataclasses.replace(found, config=config, model=build(config))


EXTENDED = "self-extend:group_size=4,neighbor_window=64"
IDS = tokens(2, 45)  # the twins' context is 24


def test_all_run_modes_equal_transformers_with_formula(twin: Twin) -> None:
    """Forward, chunked prefill and decode steps equal transformers with the paper's attention;
    within the window they equal the plain model.
    """
    expected = twin.logits(IDS)
    assert_close(jaxllm.forward(twin.model, twin.params, None, IDS).logits, expected)
    cache = jaxllm.init_cache(twin.model, 2, 48)
    for chunk in (64, 16):
        logits, full = jaxllm.prefill(twin.model, twin.params, cache, IDS[:, :41], chunk=chunk)
        assert_close(logits, expected[:, 40])
    for t in range(41, 45):
        logits, full = jaxllm.decode_step(twin.model, twin.params, full, IDS[:, t])
        assert_close(logits, expected[:, t])
    plain = build(dataclasses.replace(twin.config, attention=None))
    near = jaxllm.forward(plain, twin.params, None, IDS).logits
    assert_close(near[:, :WINDOW], expected[:, :WINDOW])
    assert np.abs(np.asarray(near[:, -1]) - expected[:, -1]).max() > 0.01


def test_forked_rows_equal_transformers(twin: Twin) -> None:
    """Rows that share a frozen cache segment equal transformers on each row's text."""
    cache = jaxllm.init_cache(twin.model, 1, 48)
    _, cache = jaxllm.prefill(twin.model, twin.params, cache, IDS[:1, :30])
    forked = jaxllm.cache.fork(cache, 2)
    ids = np.array([[3, 5], [7, 9]])
    ours = jaxllm.forward(twin.model, twin.params, forked, ids).logits
    for row in range(2):
        text = np.concatenate([IDS[:1, :30], ids[row : row + 1]], axis=1)
        assert_close(ours[row], twin.logits(text)[0, 30:])


def test_attention_mass_sums_to_one_per_query() -> None:
    """Each query has a mass of 1 in every layer and head, and SinksAndWindow generates past the
    context.
    """
    model, params = random_model("llama", max_position_embeddings=24)
    model = build(model.config.with_attention(self_extend()))
    out = jaxllm.forward(model, params, None, IDS, attention_mass=True)
    assert out.attention_mass is not None
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    np.testing.assert_allclose(out.attention_mass.sum(1), 45 * layers * heads, rtol=1e-5)
    found = jaxllm.generate(
        model, params, IDS[:, :12], max_new_tokens=60, overflow=SinksAndWindow(),
    )  # fmt: skip
    assert found.length_B.tolist() == [60, 60]


@pytest.mark.parametrize(("group", "window"), [(1, 5), (2, 8), (3, 7), (5, 3), (4, 23)])
def test_context_length_limits_distances_to_trained(group: int, window: int) -> None:
    """The context is the longest for which every relative position was trained."""
    config = random_model("llama", max_position_embeddings=24)[0].config
    reach = config.with_attention(self_extend(group, window)).context_length

    def farthest(length: int) -> int:
        p = length - 1
        far = p // group + window - window // group
        return far if p >= window else p

    assert farthest(reach) <= 23 < farthest(reach + 1)


def test_overlong_text_error_suggests_slide(shallow: Any) -> None:
    lm = jaxllm.load(shallow("llama"))
    longer = lm.with_attention(self_extend(2, 500))
    for model, context in ((lm, 512), (longer, 524)):
        with pytest.raises(CapacityError, match=rf"context of {context}.*overflow='slide'"):
            model.generate([5] * 520, max_new_tokens=10)


def test_self_extend_refuses_unsupported_models(tmp_path: Path) -> None:
    """Learned positions, bad sizes, length-dependent RoPE and attention_weights are refused."""
    with pytest.raises(ConfigError, match="gpt2 does not support attention of kind 'self-extend'"):
        random_model("gpt2")[0].config.with_attention(self_extend(2, 8))
    config = random_model("llama")[0].config
    with pytest.raises(ConfigError, match="neighbor_window must be at least 1"):
        self_extend(2, 0)
    with pytest.raises(ConfigError, match="group_size must be"):
        self_extend(0, 2)
    with pytest.raises(ConfigError, match=r"neighbor_window 97 .* less than the context of 97"):
        config.with_attention(self_extend(2, 97))
    for kind in ("dynamic", "longrope"):
        more = {"factor": 2.0} if kind == "dynamic" else {
            "short_factor": (1.0,), "long_factor": (2.0,), "original_max_position_embeddings": 8
        }  # fmt: skip
        rope = Rope(rope_type=kind, rope_theta=THETA, **more)
        changes: dict[str, Any] = {"rope": rope, "head_dim": 4 if kind == "dynamic" else 2}
        with pytest.raises(ConfigError, match="angles depend on the text length"):
            dataclasses.replace(config, **changes, attention=self_extend())
    model, params = random_model("llama", num_hidden_layers=1)
    model = build(model.config.with_attention(self_extend(2, 8)))
    with pytest.raises(ConfigError, match="Self-Extend does not support attention_weights"):
        jaxllm.forward(model, params, None, IDS, attention_weights=True)


def test_self_extend_is_saved_only_natively(shallow: Any, tmp_path: Path) -> None:
    """The native form stores the setting; Hugging Face and GGUF refuse it."""
    lm = jaxllm.load(shallow("llama")).with_attention(self_extend(4, 64))
    assert lm.config.context_length == 4 * (512 - 64) + 64
    lm.save(tmp_path / "longer")
    again = jaxllm.load(tmp_path / "longer")
    assert again.config == lm.config
    opened = open_hf(shallow("llama"))
    opened = dataclasses.replace(opened, config=lm.config)
    with pytest.raises(ConfigError, match="'self-extend' cannot be saved in the Hugging Face"):
        write_hf(tmp_path / "hf", opened)
    with pytest.raises(ConfigError, match="GGUF does not support attention of kind 'self-extend'"):
        write_config(lm.config)


def test_generate_and_recall_accept_self_extend(run: Run, shallow: Any, tmp_path: Path) -> None:
    """Both commands run with Self-Extend, and bad values are refused."""
    demo = shallow("llama")
    out, _ = succeed(
        run, "generate", demo, "-p", "Once", "-n", 4, "--attention", EXTENDED, "--json"
    )
    assert len(json.loads(out)["tokens"]) == 4
    asked = ("--lengths", 60, "--depths", 0, "--tries", 1, "--texts", "story", "--json")
    out, _ = succeed(run, "recall", demo, *asked, "--policies", "self-extend")
    assert [c["policy"] for c in json.loads(out)["cells"]] == ["self-extend"]
    for given, message in {
        ("recall", demo, "--policies", "self-extend", "--self-extend", "8"): "for example 8,512",
        ("generate", demo, "--attention", EXTENDED.replace("64", "0")): "must be at least 1",
        ("generate", demo, "--attention", EXTENDED.replace("64", "512")): "the context of 512",
        ("generate", demo, "--attention", "self-extend:group_size=4"): "neighbor_window",
        ("generate", demo, "--attention", "other:size=4"): "attention of kind 'other'",
        ("recall", demo, "--self-extend", "8,16"): "requires --policies self-extend",
    }.items():
        assert_refused(run, message, *given)
