"""Sparse autoencoders: their arithmetic against NumPy, their files, edits and training."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

import jaxllm
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.inside import load_autoencoder, save_autoencoder, train_autoencoder
from tests.tiny_models import random_model, tokens

D, F, K = 40, 53, 5
KINDS: dict[str, dict[str, Any]] = {
    "standard": {"architecture": "standard", "apply_b_dec_to_input": True},
    "first files": {"activation_fn_str": "relu", "hook_point": "blocks.0.hook_resid_post"},
    "input unshifted": {"architecture": "standard", "apply_b_dec_to_input": False},
    "jumprelu": {"architecture": "jumprelu", "apply_b_dec_to_input": False},
    "topk": {"architecture": "topk", "k": K, "metadata": {"hook_name": "blocks.1.hook_resid_pre"}},
    "first topk": {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}},
    "rescaled topk": {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True},
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def arrays() -> dict[str, np.ndarray]:
    names = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,)}
    made = {name: random(*shape, seed=n) for n, (name, shape) in enumerate(names.items())}
    return {**made, "threshold": np.abs(random(F, seed=9)) * 3}


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """Write the files that SAELens writes."""
    directory.mkdir(exist_ok=True)
    saved = arrays() if tensors is None else tensors
    if config.get("architecture") != "jumprelu":
        saved = {name: x for name, x in saved.items() if name != "threshold"}
    safetensors.numpy.save_file(saved, directory / "sae_weights.safetensors")
    sizes = {"d_in": D, "d_sae": F, "dtype": "float32", "normalize_activations": "none"}
    (directory / "cfg.json").write_text(json.dumps(sizes | config), encoding="utf-8")
    return directory


def encode(config: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """Features, written from the papers' formulas in float64."""
    w = {name: value.astype(np.float64) for name, value in arrays().items()}
    shift = w["b_dec"] if config.get("apply_b_dec_to_input", True) else 0
    f = (x - shift) @ w["W_enc"] + w["b_enc"]
    if config.get("rescale_acts_by_decoder_norm"):
        f = f * np.linalg.norm(w["W_dec"], axis=1)
    if config.get("architecture") == "jumprelu":
        return f * (f > w["threshold"])
    if "topk" in (config.get("architecture"), config.get("activation_fn_str")):
        f = np.where(f >= np.sort(f, axis=-1)[..., -K, None], f, 0)
    return np.maximum(f, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_equal_numpy(kind: str, tmp_path: Path) -> None:
    """Also for a file that was loaded, saved and loaded again, which has the same bits."""
    config = KINDS[kind]
    sae = load_autoencoder(write(tmp_path / "sae", config))
    x = random(2, 7, D, seed=5)
    f = encode(config, x)
    active = (f > 0).sum(axis=-1)
    assert 0 < active.max() <= (K if "topk" in kind else F)
    np.testing.assert_allclose(sae.encode(x), f, atol=2e-5 * np.abs(f).max())
    scale = np.linalg.norm(arrays()["W_dec"], axis=1) if "rescaled" in kind else 1
    y = (f / scale) @ arrays()["W_dec"] + arrays()["b_dec"]
    np.testing.assert_allclose(sae.decode(sae.encode(x)), y, atol=2e-5 * np.abs(y).max())
    save_autoencoder(sae, tmp_path / "again")
    again = load_autoencoder(tmp_path / "again")
    assert jax.tree.structure(again) == jax.tree.structure(sae)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(sae), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    metadata = config.get("metadata", {})
    assert again.site == metadata.get("hook_name", config.get("hook_point"))


@pytest.mark.parametrize("kind", ["standard", "input unshifted", "jumprelu", "rescaled topk"])
def test_clamp_sets_one_feature_and_keeps_the_rest(kind: str, tmp_path: Path) -> None:
    """x changes by the feature's direction times what its activation lacks; at a site of a model,
    at one position.
    """
    sae = load_autoencoder(write(tmp_path / "sae", KINDS[kind]))
    model, params = random_model("llama")
    site, ids = "blocks.0.resid_post", tokens(1, 6)

    def read(**options: Any) -> np.ndarray:
        return np.asarray(
            jaxllm.forward(model, params, None, ids, read=[site], **options).sites[site]
        )

    x = read()
    f = encode(KINDS[kind], x[0])
    at, feature = np.argwhere(f > 0)[0]
    off = int(np.flatnonzero(f[at] == 0)[0])
    scale = np.linalg.norm(arrays()["W_dec"], axis=1) if "rescaled" in kind else np.ones(F)
    for number in (int(feature), off):
        edited = read(edits={site: sae.clamp(number, 9.0, positions=[int(at)])})
        want = x.copy()
        want[0, at] += (9.0 - f[at, number]) * arrays()["W_dec"][number] / scale[number]
        np.testing.assert_allclose(edited, want, atol=1e-4)
    with pytest.raises(ConfigError, match="feature must be a whole number from 0 to 52, got 53"):
        sae.clamp(F, 1.0)


def changed(**tensors: Any) -> dict[str, Any]:
    return {name: x for name, x in (arrays() | tensors).items() if x is not None}


NAN = np.where(np.arange(F) == 3, np.float32("nan"), np.float32(0))
BAD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("lacks threshold", {"architecture": "jumprelu"}, changed(threshold=None)),
    ("lacks W_enc, b_dec", {}, changed(W_enc=None, b_dec=None)),
    (r"W_dec has shape \(52, 40\), expected \(53, 40\)", {}, changed(W_dec=random(52, D))),
    (r"W_enc has shape \(40,\), expected", {}, changed(W_enc=random(D))),
    (r"W_enc has shape \(40, 53\), but cfg.json states \(41, 53\)", {"d_in": 41}, changed()),
    ("b_enc is int32, expected floats", {}, changed(b_enc=np.zeros(F, np.int32))),
    ("b_enc holds nan at index 3", {}, changed(b_enc=NAN)),
    ("architecture is 'gated', expected standard or", {"architecture": "gated"}, changed()),
    ("architecture is 3, expected", {"architecture": 3}, changed()),
    ("activation_fn is 'tanh-relu'", {"activation_fn": "tanh-relu"}, changed()),
    ("normalize_activations is 'layer_norm'", {"normalize_activations": "layer_norm"}, changed()),
    ("finetuning_scaling_factor is True", {"finetuning_scaling_factor": True}, changed()),
    ("rescale_acts_by_decoder_norm is True", {"rescale_acts_by_decoder_norm": True}, changed()),
    ("k must be a whole number from 1 to 53, got 54", {"architecture": "topk", "k": 54}, changed()),
    ("k must be a whole number from 1 to 53, got None", {"architecture": "topk"}, changed()),
    ("got None", {"activation_fn": "topk", "activation_fn_kwargs": [3]}, changed()),
]


@pytest.mark.parametrize(("message", "config", "tensors"), BAD)
def test_bad_files_are_refused(
    message: str, config: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_autoencoder(write(tmp_path / "sae", config, tensors))
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    home = write(tmp_path / "sae", {})
    weights, config = home / "sae_weights.safetensors", home / "cfg.json"
    whole = weights.read_bytes()
    for path, data in (
        (weights, whole[:-1]),
        (weights, whole[:50]),
        (config, b"{"),
        (config, b"[]"),
    ):
        before = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=path.name):
            load_autoencoder(home)
        path.write_bytes(before)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"sae_weights\.safetensors is missing"):
        load_autoencoder(home)
    with pytest.raises(CheckpointError, match=r"cfg\.json is missing"):
        load_autoencoder(tmp_path / "nothing")


@pytest.mark.parametrize("options", [{"k": 3}, {"l1": 1.0}], ids=["topk", "l1"])
def test_training_finds_planted_directions(options: dict[str, Any]) -> None:
    """Activations are sparse sums of 24 known directions: the loss falls, and the dictionary has
    them. The result does not depend on the activations' scale.
    """
    rng = np.random.default_rng(0)
    planted = random(24, 20)
    planted /= np.linalg.norm(planted, axis=1, keepdims=True)
    f = (rng.random((3000, 24)) < 0.08) * (0.5 + rng.random((3000, 24)))
    x = (f @ planted * 7).astype(np.float32)
    settings: Any = {"steps": 400, "batch": 128, "learning_rate": 1e-2, "seed": 1, **options}
    sae, loss = train_autoencoder(x, 48, site="blocks.0.resid_post", **settings)
    assert loss.shape == (400,) and loss[-20:].mean() < 0.4 * loss[:20].mean()
    found = np.array(sae.decoder_FD)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    assert (np.abs(found @ planted.T).max(axis=0) > 0.9).mean() > 0.9
    y = np.asarray(sae.decode(sae.encode(x)))
    assert np.square(x - y).sum() < 0.1 * np.square(x - x.mean(axis=0)).sum()
    larger, _ = train_autoencoder(x * 8, 48, **settings)
    np.testing.assert_allclose(larger.decode(larger.encode(x * 8)), y * 8, atol=1e-2)
    assert sae.site == "blocks.0.resid_post" and sae.k == options.get("k")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "needs either k or l1"),
        ({"l1": 0.1}, "needs either k or l1"),
        ({"k": 9}, "k must be a whole number from 1 to 8"),
        ({"k": None, "l1": -1.0}, "l1 must be a number from 0"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
        ({"x": random(4, 5, 6)}, r"must be finite numbers \[N, D\], got shape \(4, 5, 6\)"),
        ({"x": NAN[:, None]}, "must be finite numbers"),
    ],
)
def test_invalid_training_is_refused(changes: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {"x": random(9, 6), "k": 2, "steps": 1, "seed": 0, **changes}
    with pytest.raises(ConfigError, match=message) as caught:
        train_autoencoder(args.pop("x"), 8, **args)
    assert "\n" not in str(caught.value)
