"""Lenses and direct logit attribution, against NumPy, explicit Jacobians and their laws."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import inside, models
from jaxllm.errors import CheckpointError, ConfigError, NonFiniteError, TokenError
from jaxllm.inside import (
    Lens,
    Set,
    attribute_logits,
    decompose_stream,
    fit_jacobian_lens,
    fit_tuned_lens,
    lens_divergence,
    lens_logits,
    read_lens,
    top_tokens,
    write_lens,
)
from jaxllm.inside.lens import unembed
from tests.conftest import Run, assert_refused, succeed
from tests.tiny_models import each_family, random_model, tokens

B, T = 2, 7


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama")


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def random_lens(model: Any) -> Lens:
    L, D = model.config.num_hidden_layers, model.config.hidden_size
    rng = np.random.default_rng(0)
    weight_LDD = rng.standard_normal((L, D, D), np.float32) / 5
    return Lens(weight_LDD, rng.standard_normal((L, D), np.float32))


def numpy_lens(lm: Any, ids: Any, lens: Lens | None) -> np.ndarray:
    """The logits of a Llama's streams, by its norm and output matrix in NumPy."""
    model, params = lm
    out = jaxllm.forward(model, params, None, ids, read=["blocks.*.resid_post"])
    x_LBTD = np.stack([np.asarray(x, np.float64) for x in out.sites.values()])
    if lens is not None:
        x_LBTD = x_LBTD @ lens.weight_LDD[:, None].swapaxes(-1, -2) + lens.bias_LD[:, None, None]
    rms = np.sqrt(np.square(x_LBTD).mean(axis=-1, keepdims=True) + model.config.norm_eps)
    y_LBTD = x_LBTD / rms * np.asarray(params["norm"]["weight"])
    logits: np.ndarray = y_LBTD @ np.asarray(params["lm_head"]["weight"]).T
    return logits


@pytest.mark.parametrize("family", each_family(models.FAMILIES))
def test_last_layer_of_logit_lens_is_the_model(family: str) -> None:
    model, params = random_model(family)
    ids = tokens(B, T)
    logits_LBTV = lens_logits(model, params, ids)
    assert len(logits_LBTV) == model.config.num_hidden_layers
    want = jaxllm.forward(model, params, None, ids).logits
    np.testing.assert_allclose(logits_LBTV[-1], want, atol=1e-5)


@pytest.mark.parametrize("mapped", [False, True])
def test_lens_equals_numpy(lm: Any, mapped: bool) -> None:
    ids, lens = tokens(B, T), random_lens(lm[0]) if mapped else None
    want = numpy_lens(lm, ids, lens)
    np.testing.assert_allclose(lens_logits(*lm, ids, lens), want, atol=1e-4)
    token_LBTK, logprob_LBTK = top_tokens(*lm, ids, lens, count=3)
    order = np.argsort(-want, axis=-1)[..., :3]
    np.testing.assert_array_equal(token_LBTK, order)
    want = np.take_along_axis(log_softmax(want), order, axis=-1)
    np.testing.assert_allclose(logprob_LBTK, want, atol=1e-4)


def test_jacobian_lens_equals_explicit_jacobians(lm: Any) -> None:
    """The matrices are means over tokens of all texts of dh[t]/dx[s], summed over t, from the whole
    Jacobian of the last stream by the first layer's. The texts are padded.
    """
    model, params = lm
    D, (name, last) = model.config.hidden_size, ("blocks.0.resid_post", "blocks.1.resid_post")
    texts, want_DD = tokens(2, 5), np.zeros((D, D))

    @jax.jit
    def jacobian(x_TD: Any, text_T: Any) -> Any:
        def run(x_TD: Any) -> Any:
            edits = {name: Set(x_TD)}
            out = jaxllm.forward(model, params, None, text_T[None], read=[last], edits=edits)
            return out.sites[last][0]

        return jax.jacfwd(run)(x_TD)

    x_BTD = jaxllm.forward(model, params, None, texts, read=[name]).sites[name]
    for x_TD, text_T in zip(x_BTD, texts, strict=True):
        jacobian_TDSD = np.asarray(jacobian(x_TD, text_T))
        assert np.abs(jacobian_TDSD[4, :, 0]).max() > 1e-3
        want_DD += jacobian_TDSD.sum(axis=(0, 2))
    lens = fit_jacobian_lens(model, params, list(texts), batch=2, rows=7)
    np.testing.assert_allclose(lens.weight_LDD[0], want_DD / 10, atol=2e-5)
    np.testing.assert_allclose(lens.weight_LDD[1], np.eye(D), atol=1e-6)
    assert not lens.bias_LD.any()


def test_unembedding_runs_no_layers(lm: Any) -> None:
    """Of the model's kernels, a compiled read-out has those of the final norm and the head."""
    model, params = lm

    def count(function: Any, *arguments: Any) -> int:
        text = str(jax.jit(function).lower(params, *arguments).as_text())
        return text.count("stablehlo.custom_call") + text.count("stablehlo.dot_general")

    read_out = partial(unembed, model)
    whole = count(lambda params: jaxllm.forward(model, params, None, tokens(1, 3)).logits)
    assert count(read_out, np.zeros((1, 3, 40), np.float32)) <= 2 < 8 < whole


def test_tuned_lens_learns_to_predict_the_model(lm: Any) -> None:
    """The divergence is NumPy's; training reduces it by far, and leaves the last layer alone."""
    ids, lens = tokens(B, T), random_lens(lm[0])
    logprob_LBTV = log_softmax(numpy_lens(lm, ids, lens))
    model_BTV = log_softmax(numpy_lens(lm, ids, None)[-1])
    divergence_LBT = (np.exp(model_BTV) * (model_BTV - logprob_LBTV)).sum(axis=-1)
    texts = [ids[0], ids[1, :4]]
    want_L = np.concatenate([divergence_LBT[:, 0], divergence_LBT[:, 1, :4]], axis=1).mean(axis=1)
    np.testing.assert_allclose(lens_divergence(*lm, texts, lens, batch=2), want_L, rtol=1e-4)
    before_L = lens_divergence(*lm, texts)
    lines = list[str]()
    tuned = fit_tuned_lens(*lm, texts, steps=40, learning_rate=1e-2, batch=2, log=lines.append)
    assert re.fullmatch(r"training takes about \d+ s, and 0.0 GiB besides the model", *lines)
    after_L = lens_divergence(*lm, texts, tuned)
    assert (after_L[:-1] < 0.2 * before_L[:-1]).all()
    assert after_L[-1] < 0.01


def test_chunked_divergence_has_gradient_of_whole(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over chunks of three tokens, the divergence and its gradient by the lens are those of the
    whole, by automatic differentiation.
    """
    model, params = lm
    monkeypatch.setattr(inside.lens, "CHUNK_LOGITS", 3 * model.config.vocab_size)
    ids, real_BT = tokens(B, T), np.arange(T)[None] < np.array([[T], [4]])
    positions = np.where(real_BT, np.arange(T), -1).astype(np.int32)

    def divergence(lens: Lens) -> tuple[jax.Array, jax.Array]:
        logprob_LBTV = jax.nn.log_softmax(lens_logits(*lm, ids, lens))
        model_BTV = jax.nn.log_softmax(jaxllm.forward(model, params, None, ids).logits)
        each_LBT = (jnp.exp(model_BTV) * (model_BTV - logprob_LBTV)).sum(axis=-1)
        mean_L = each_LBT.mean(axis=(1, 2), where=real_BT)
        return mean_L.sum(), mean_L

    lens = jax.tree.map(jnp.asarray, random_lens(model))
    with jax.numpy_rank_promotion("allow"):
        (_, want_L), want = jax.value_and_grad(divergence, has_aux=True)(lens)
    found_L, found = inside.lens._jit_divergence(model, params, ids, positions, lens)
    np.testing.assert_allclose(found_L, want_L, rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_lens_file_round_trip_and_refusals(lm: Any, tmp_path: Path) -> None:
    lens, path = random_lens(lm[0]), tmp_path / "a.safetensors"
    write_lens(path, lens)
    read = read_lens(path, lm[0].config)
    np.testing.assert_array_equal(read.weight_LDD, lens.weight_LDD)
    np.testing.assert_array_equal(read.bias_LD, lens.bias_LD)
    with pytest.raises(CheckpointError, match="already exists"):
        write_lens(path, lens)
    other = models.build(models.config_from_dict({**lm[0].config.to_dict(), "hidden_size": 48}))
    with pytest.raises(CheckpointError, match=r"not a lens of this model: weight is float32"):
        read_lens(path, other.config)
    write_lens(tmp_path / "nan.safetensors", lens.replace(bias_LD=lens.bias_LD * np.nan))
    with pytest.raises(CheckpointError, match="bias holds NaN"):
        read_lens(tmp_path / "nan.safetensors", lm[0].config)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_lens(tmp_path / "junk", lm[0].config)


def test_invalid_lens_calls_are_refused(lm: Any) -> None:
    with pytest.raises(ConfigError, match="does not fit a model of"):
        lens_logits(*lm, tokens(1, 3), Lens(np.eye(3), np.zeros(3)))
    with pytest.raises(ConfigError, match="at least one text"):
        fit_tuned_lens(*lm, [])
    with pytest.raises(TokenError, match="text 0"):
        fit_jacobian_lens(*lm, [[]])
    with pytest.raises(NonFiniteError, match="diverged"):
        fit_tuned_lens(*lm, [[1, 2, 3]], steps=3, learning_rate=float("nan"))
    with pytest.raises(ConfigError, match="targets must have the tokens' shape"):
        attribute_logits(*lm, tokens(1, 3), tokens(1, 2))


@pytest.mark.parametrize("family", each_family(models.FAMILIES))
def test_attributions_add_up_to_logits(family: str) -> None:
    """The parts add up to the final norm's output, and what they add to a token's logit to it."""
    model, params = random_model(family)
    ids, targets = tokens(B, T), tokens(B, T, seed=1)
    out = jaxllm.forward(model, params, None, ids, read=["final_norm"])
    parts = decompose_stream(model, params, ids)
    total_BTD = sum(x.sum(axis=2) if x.ndim == 4 else x for x in parts.values())
    np.testing.assert_allclose(total_BTD, out.sites["final_norm"], atol=2e-5)
    shares = attribute_logits(model, params, ids, targets)
    assert shares.keys() == parts.keys()
    total_BT = np.asarray(sum(x.sum(axis=2) if x.ndim == 3 else x for x in shares.values()))
    if (cap := model.config.logits_cap) is not None:
        total_BT = cap * np.tanh(total_BT / cap)
    want_BT = np.take_along_axis(np.asarray(out.logits), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(total_BT, want_BT, atol=5e-5)


def test_attributions_equal_numpy(lm: Any) -> None:
    """An MLP's and each head's share of a difference of logits, by weights and the frozen norm."""
    model, params = lm
    ids, targets, others = tokens(B, T), tokens(B, T, seed=1), tokens(B, T, seed=2)
    names = ["blocks.0.mlp_out", "blocks.1.attn.result", "blocks.1.resid_post"]
    site = jaxllm.forward(model, params, None, ids, read=names).sites
    rms = np.sqrt(np.square(np.asarray(site[names[2]])).mean(axis=-1, keepdims=True) + 1e-3)
    head_VD = np.asarray(params["lm_head"]["weight"])
    column_BTD = (head_VD[targets] - head_VD[others]) * np.asarray(params["norm"]["weight"]) / rms
    shares = attribute_logits(model, params, ids, targets, others)
    for name, column in ((names[0], column_BTD), (names[1], column_BTD[:, :, None])):
        want = (np.asarray(site[name]) * column).sum(axis=-1)
        np.testing.assert_allclose(shares[name], want, atol=1e-5)
    assert np.abs(shares["blocks.0.attn.bias"]).max() < 1e-5  # Llama's attention has no bias


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_heads_go_through_post_norms(family: str) -> None:
    """Where a norm follows attention and there is no bias, the heads are all of its output."""
    parts = decompose_stream(*random_model(family), tokens(B, T))
    for name, x in parts.items():
        assert not name.endswith("attn.bias") or np.abs(x).max() < 1e-5, name


def test_lens_command(run: Run, demo_names: None, tmp_path: Path, figures: list[Any]) -> None:
    """The table and the JSON have the tokens of `top_tokens`; the picture shows them; a fitted lens
    is written and used.
    """
    lm = jaxllm.load("demo:llama")
    ids = np.array([lm.encode("One day")])
    token_LTK, _ = top_tokens(lm.model, lm.params, ids, count=2)
    want = [[lm.decode([t]) for t in row] for row in token_LTK[:, 0, :, 0].tolist()]
    plot, saved = tmp_path / "lens.png", tmp_path / "lens.safetensors"
    out, _ = succeed(run, "lens", "demo:llama", "-p", "One day", "--top", 2, "--plot", plot)
    head, *lines = out.splitlines()
    assert head.split() == ["token", "layer", "0", "layer", "1"]
    assert len(lines) == 2 * ids.shape[1]
    assert lines[-2].split()[1:] == [row[-1].strip()[:10] for row in want]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = [text.get_text() for text in figures[0].axes[0].texts]
    assert shown == [x[:11] for row in want for x in row]
    fit = ["--fit", "tuned", "--text", "One day there was a girl", "--steps", 3]
    _, err = succeed(run, "lens", "-p", "One", *fit, "--save", saved)
    assert "divergence of the tuned lens" in err
    out, _ = succeed(run, "lens", "-p", "One day", "--lens", saved, "--json")
    found = json.loads(out)
    lens = read_lens(saved, lm.config)
    token_LTK, logprob_LTK = top_tokens(lm.model, lm.params, ids, lens)
    assert found["layers"][0][-1][0][0] == lm.decode(token_LTK[0, 0, -1])
    np.testing.assert_allclose(
        found["layers"][1][0][0][1], np.exp(logprob_LTK[1, 0, 0, 0]), atol=1e-6
    )
    assert_refused(run, "--fit requires --text", "lens", "--fit", "tuned")
    assert_refused(run, "not both", "lens", "--lens", saved, *fit)
    assert_refused(run, "already exists", "lens", *fit, "--save", saved)
