"""Every family against transformers: arithmetic, files, positions and windows.

Features that do not depend on the family are tested with Llama and GPT-2 elsewhere.
"""

import copy
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.cache import shift
from jaxllm.checkpoints.native import open_native
from jaxllm.convert.hf import TABLES, open_hf, read_config, write_hf
from jaxllm.errors import ConfigError
from jaxllm.evaluate.parity.activations import JaxBackend, pad_case
from jaxllm.evaluate.parity.compare import verify
from jaxllm.evaluate.parity.transformers_backend import TransformersBackend
from jaxllm.models import FAMILIES, config_from_dict
from jaxllm.weights.paths import flatten
from jaxllm.weights.safetensors import open_tensors
from tests.tiny_models import (
    KINDS,
    Twin,
    assert_close,
    each_family,
    load_twin,
    save_random,
    theirs,
    tokens,
)

NEW = [name for name in FAMILIES if name not in ("llama", "gpt2")]
of_each_kind = pytest.mark.parametrize("twin", each_family(NEW), indirect=True)
TEXTS = [tokens(1, 9)[0].tolist(), tokens(1, 6, 1)[0].tolist()]


@pytest.fixture(scope="module", params=NEW)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory = tmp_path_factory.mktemp(request.param)
    save_random(directory, request.param)
    return load_twin(directory)


def test_every_family_has_twin_and_converter() -> None:
    assert set(FAMILIES) == set(KINDS) - {"mistral"} == set(TABLES) - {"mistral"}


def test_every_stage_equals_transformers(twin: Twin) -> None:
    """Every activation and 24 greedy tokens equal transformers'."""
    ours = JaxBackend("ours", twin.model, twin.params)
    report = verify(ours, TransformersBackend.load(twin.directory), pad_case(TEXTS), new_tokens=24)
    assert report.holds, report.first


def test_long_text_equals_transformers(twin: Twin) -> None:
    """Logits of 61 tokens equal transformers', beyond every window and beyond LongRoPE's original
    context. In float32 some processors take transformers to 0.8 of the bound by themselves.
    """
    ids = tokens(2, 61)
    found = jaxllm.forward(twin.model, twin.params, None, ids).logits
    exact = copy.deepcopy(twin.torch_model)
    if not hasattr(exact.config, "num_experts_per_tok"):  # torch multiplies experts in float32 only
        exact = exact.double()
    with torch.no_grad():
        logits_BTV = exact(torch.tensor(np.asarray(ids, np.int64))).logits
    assert_close(found, logits_BTV.float().numpy())


def test_longrope_switches_factors_past_original_context(tmp_path: Path) -> None:
    """At 40 and 41 tokens, on both sides of the original context, logits equal transformers'."""
    save_random(tmp_path, "phi3")
    phi = load_twin(tmp_path)
    for length in (40, 41):
        ids = tokens(1, length)
        assert_close(jaxllm.forward(phi.model, phi.params, None, ids).logits, phi.logits(ids))


@of_each_kind
def test_chunked_prefill_and_decode_equal_forward(twin: Twin) -> None:
    ids = tokens(1, 30)
    whole = jaxllm.forward(twin.model, twin.params, None, ids).logits
    cache = jaxllm.init_cache(twin.config, 1, 32)
    logits, cache = jaxllm.prefill(twin.model, twin.params, cache, ids[:, :27], chunk=8)
    assert_close(logits, np.asarray(whole[:, 26]))
    for place in (27, 28):
        logits, cache = jaxllm.decode_step(twin.model, twin.params, cache, ids[:, place])
        assert_close(logits, np.asarray(whole[:, place]))


@pytest.mark.parametrize("twin", ["llama", "gpt2", *each_family(NEW)], indirect=True)
def test_half_precision_error_is_near_transformers(twin: Twin) -> None:
    """In bfloat16 and float16, the RMS error against float32 is at most 1.5 times that of
    transformers.
    """
    ids = tokens(2, 31)
    exact = twin.logits(ids)
    for dtype in ("bfloat16", "float16"):
        half = load_twin(twin.directory, dtype)
        mine = np.asarray(jaxllm.forward(half.model, half.params, None, ids).logits)
        rms = [float(np.sqrt(np.mean(np.square(x - exact)))) for x in (mine, half.logits(ids))]
        assert rms[0] <= 1.5 * rms[1], (dtype, rms)


def test_checkpoint_files_round_trip(twin: Twin, tmp_path: Path) -> None:
    """HF -> HF has the same tensors, config and transformers logits, and HF -> native -> HF the
    same config.json.
    """
    opened = open_hf(twin.directory)
    write_hf(tmp_path / "hf", opened)
    before, after = (
        open_tensors(d / "model.safetensors") for d in (twin.directory, tmp_path / "hf")
    )
    assert set(before) == set(after)
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor.read(), after[name].read())
    assert open_hf(tmp_path / "hf").config == opened.config
    # transformers computes the same from the configuration that jaxllm wrote.
    again = load_twin(tmp_path / "hf")
    ids = tokens(1, 45)
    # PyTorch's bits depend on where its arrays lie.
    np.testing.assert_allclose(again.logits(ids), twin.logits(ids), rtol=0, atol=1e-5)
    assert config_from_dict(json.loads(json.dumps(opened.config.to_dict()))) == opened.config
    lm = jaxllm.load(twin.directory)
    lm.save(tmp_path / "own")
    native = open_native(tmp_path / "own")
    assert native.config == opened.config
    write_hf(tmp_path / "again", native)
    direct, through_ours = (
        (tmp_path / folder / "config.json").read_text() for folder in ("hf", "again")
    )
    assert through_ours == direct


def test_config_defaults_equal_transformers(twin: Twin) -> None:
    """A config.json with only its required fields is read as transformers reads it."""
    kind = twin.config.model_type
    full = theirs(kind).to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads")
    least = {n: full[n] for n in (*sizes, *heads) if n in full}
    if kind == "phi3":  # its default, no grouped heads, is rare in checkpoints
        least["num_key_value_heads"] = least["num_attention_heads"]
    if kind.startswith("granitemoehybrid"):  # by default it has experts, and more Mamba heads
        least |= {n: full[n] for n in ("num_local_experts", "mamba_n_heads")}
    if kind == "lfm2_moe":  # its class derives no types of layers
        least["layer_types"] = full["layer_types"]
    if kind == "deepseek_v2":  # its class has no default that works
        least["num_experts_per_tok"] = full["num_experts_per_tok"]
    whole = type(theirs(kind))(**least).to_dict()
    assert read_config({"model_type": kind, **least})[0] == read_config(whole)[0]


@of_each_kind
def test_moved_positions_equal_run_at_new_positions(twin: Twin) -> None:
    """Shifted keys equal those of a run at the new positions; RoPE that depends on the text length
    is refused.
    """
    ids = tokens(1, 12)
    cache = jaxllm.init_cache(twin.config, 1, 24)
    _, cache = jaxllm.prefill(twin.model, twin.params, cache, ids)
    if twin.config.rope_depends_on_length:
        with pytest.raises(ConfigError, match="follow the text's length"):
            shift(cache, 7)
        return
    moved = shift(cache, 7)
    at = np.arange(12, dtype=np.int32)[None] + 7
    far = jaxllm.forward(twin.model, twin.params, None, ids, positions_BT=at)
    # Queries of Ministral 3 grow with the position, and with them deeper layers' inputs.
    exact = 1 if twin.config.model_type == "ministral3" else len(moved.tail.k)
    for mine, fresh in zip(moved.tail.k[:exact], far.delta.k[:exact], strict=True):
        np.testing.assert_allclose(
            np.asarray(mine)[:, :12], np.asarray(fresh), atol=2e-5, rtol=1e-4
        )


@of_each_kind
@pytest.mark.parametrize("format", ["int8", pytest.param("int4", marks=pytest.mark.full)])
def test_quantized_logits_equal_dequantized_logits(twin: Twin, format: str) -> None:
    from jaxllm.weights.formats import to_dense
    from jaxllm.weights.paths import map_leaves
    from jaxllm.weights.quantize import quantize

    small = quantize(twin.params, format)
    wide = map_leaves(lambda _, leaf: to_dense(leaf, jnp.float32), small)
    ids = tokens(1, 9)
    mine, same = (jaxllm.forward(twin.model, p, None, ids).logits for p in (small, wide))
    assert_close(mine, np.asarray(same))


@of_each_kind
def test_gradients_reach_every_parameter(twin: Twin) -> None:
    ids = tokens(2, 13)

    def loss(params: Any) -> jax.Array:
        at = np.broadcast_to(np.arange(13, dtype=np.int32), ids.shape)
        logits = twin.model.apply({"params": params}, ids, at, np.full(2, 13)).logits
        return jnp.square(logits).mean()

    grads = jax.jit(jax.grad(loss))(twin.params)
    still = [
        path
        for path, g in flatten(grads)
        if not np.abs(np.asarray(g)).max() > 0 and not path.endswith("mlp.selection.bias")
    ]
    assert still == []
