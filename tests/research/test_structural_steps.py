"""Recipe steps that factor matrices or drop layers, heads and channels."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm import Override
from jaxllm.compress.calibration import from_tokens
from jaxllm.compress.pipeline import compress
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.research.low_rank.method import decompose_svd_llm, rank_of_share
from jaxllm.research.pruning import layer_pruning, salience
from jaxllm.weights.formats import to_dense, weight_format
from jaxllm.weights.paths import flatten
from tests.compress.models import same, tiny
from tests.tiny_models import tokens

TEXT = from_tokens(tokens(6, 24))


@pytest.fixture(scope="module")
def factored() -> LM:
    """A model with one low-rank matrix."""
    made = tiny("llama")
    rules = [(r"layers\.0.*q_proj", "rank9/int8"), (".*", None)]
    return dataclasses.replace(made, params=jaxllm.quantize(made.params, rules))


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny("llama")


def leaves(lm: LM) -> dict[str, Any]:
    return dict(flatten(lm.params))


def parameters(lm: LM) -> int:
    """Return the parameter count of all matrices in layers, with that of their factors."""
    return sum(
        sum(piece.size for piece in getattr(leaf, "arrays", lambda x=leaf: {"": x})().values())
        for path, leaf in leaves(lm).items()
        if path.startswith("layers") and leaf.ndim == 2
    )


def test_svd_step_equals_low_rank_format(lm: LM) -> None:
    made = compress(lm, ["factor: svd 9 format=int8 on=.*mlp.*"])
    for path, leaf in leaves(made).items():
        if ".mlp." not in path:
            assert weight_format(leaf) == "float32"
            continue
        assert weight_format(leaf) == "rank9/int8", path
        wanted = jaxllm.quantize(lm.params, [(".*mlp.*", "rank9/int8")])
        np.testing.assert_array_equal(to_dense(leaf), to_dense(dict(flatten(wanted))[path]))
    assert made.recipe == ("factor: svd 9 on=.*mlp.* format=int8",)


def test_svd_llm_beats_svd_at_equal_size(lm: LM, tmp_path: Path) -> None:
    """At 60% of the size SVD-LLM has a smaller output error than SVD and ASVD on equal inputs, and
    the predicted one.
    """
    whole, made = parameters(lm), {}
    for line in ("svd 60%", "asvd 60%", "svdllm 60%", "svdllm 60% ranks=spread"):
        made[line] = compress(lm, [f"factor: {line}"], calibration=TEXT)
        assert 0.5 * whole < parameters(made[line]) <= 0.6 * whole, line
    spread = {weight_format(x) for x in leaves(made["svdllm 60% ranks=spread"]).values()}
    even = {weight_format(x) for x in leaves(made["svdllm 60%"]).values()}
    assert len(spread) > len(even)
    made["svdllm 60%"].save(tmp_path / "made")
    again = jaxllm.load(tmp_path / "made")
    same(again.params, made["svdllm 60%"].params)
    # The first linears have equal inputs in every model, so the bound is exact for them.
    q_proj = "layers.0.self_attn.q_proj.weight"
    site = "blocks.0.attn_norm"
    sites = jaxllm.forward(lm.model, lm.params, None, TEXT.token_NT, read=[site]).sites
    x_RI = np.asarray(sites[site], np.float64).reshape(-1, 40)
    weight = np.asarray(leaves(lm)[q_proj], np.float64)
    missed = {
        line: np.linalg.norm(
            x_RI @ (weight - np.asarray(to_dense(leaves(x)[q_proj]), np.float64)).T
        )
        for line, x in made.items()
    }
    assert missed["svdllm 60%"] < min(missed["svd 60%"], missed["asvd 60%"])
    rank = rank_of_share((48, 40), 0.6)
    spectrum = decompose_svd_llm(weight, x_RI.T @ x_RI)
    exact = np.linalg.norm(spectrum.sigma_R[rank:])
    np.testing.assert_allclose(missed["svdllm 60%"], exact, rtol=1e-4)


def test_energy_sets_rank_and_useless_ranks_skip(lm: LM) -> None:
    """An energy determines each matrix's rank; a rank that saves nothing leaves the matrix
    unchanged with a message.
    """
    messages: list[str] = []
    made = compress(lm, ["factor: svd energy:60% on=.*q_proj"], log=messages.append)
    for path in ("layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"):
        sigma = np.linalg.svd(np.asarray(leaves(lm)[path], np.float64), compute_uv=False)
        kept = (np.cumsum(sigma**2) / (sigma**2).sum() < 0.6).sum() + 1
        assert weight_format(leaves(made)[path]) == f"rank{kept}/float32"
    assert not messages
    made = compress(lm, ["factor: svd 40 on=.*q_proj"], log=messages.append)  # 48 x 40
    assert "layers.1.self_attn.q_proj.weight: rank 40 of (48, 40) saves nothing" in messages[-1]
    assert leaves(made).keys() == leaves(lm).keys()
    assert {weight_format(x) for x in leaves(made).values()} == {"float32"}


def test_structured_pruning_removes_least_important_parts(lm: LM, tmp_path: Path) -> None:
    """Dropped channels and layers are those of least salience and influence, and the result loads
    again.
    """
    messages: list[str] = []
    steps = ["drop: channels 25%", "drop: heads 1 by=magnitude", "drop: layers 1 first=0"]
    made = compress(lm, steps, calibration=TEXT, log=messages.append)
    config = made.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 6)
    assert (config.intermediate_size, config.num_hidden_layers) == (42, 1)
    first = compress(lm, steps[:1], calibration=TEXT)
    found = salience.measure_salience(lm.model, lm.params, "channels", "inputs", TEXT.token_NT)
    kept = np.sort(np.argsort(found[0])[14:])
    np.testing.assert_array_equal(
        leaves(first)["layers.0.mlp.up_proj.weight"],
        np.asarray(leaves(lm)["layers.0.mlp.up_proj.weight"])[kept],
    )
    narrow = compress(lm, steps[:2], calibration=TEXT)
    each = layer_pruning.block_influence(narrow.model, narrow.params, TEXT.token_NT)
    assert messages[-1] == f"dropping layers {each.argmin()}"
    made.save(tmp_path / "made")
    again = jaxllm.load(tmp_path / "made")
    assert again.config == config and again.recipe == tuple(steps)
    same(again.params, made.params)


@pytest.mark.parametrize(
    "line",
    [
        "prune: magnitude 50%",
        "prune: magnitude 50% scope=model",
        "prune: wanda 50%",
        "factor: svd 4",
        "factor: svdllm 4",
        "factor: svd 60% ranks=spread",
    ],
)
def test_composite_weights_are_refused(factored: LM, line: str) -> None:
    """Pruning and factoring refuse weights that are already low-rank."""
    with pytest.raises(ConfigError, match=r"layers\.0.*q_proj.weight is rank9/int8, exp"):
        compress(factored, [line], calibration=TEXT)


def test_invalid_structural_steps_are_refused(lm: LM) -> None:
    """Steps with impossible ranks, shares, counts, families or formats raise errors."""
    for line, message in {
        "factor: svd 0": "a rank such as 64",
        "factor: svd 120%": "share must be between",
        "factor: svd energy:0%": "share must be between",
        "factor: svd 41 on=.*q_proj": r"q_proj.weight \(48, 40\): rank 41 is above",
        "factor: svd 0.1%": "is too small: rank 1",
        "factor: svd 9 ranks=spread": "requires a share KEPT",
        "factor: svd 9 ranks=all": "ranks",
        "factor: svd 9 format=int7": "weight format",
        "factor: svd 9 format=rank4/int8": "format of the factors must be simple",
        "factor: svdllm 80%": "needs calibration data",
        "drop: heads 1": "needs calibration data",
        "drop: channels 0": "share must be between",
        "drop: channels ²": "share must be between",
        "drop: layers 1 by=size": "by",
    }.items():
        with pytest.raises(ConfigError, match=message):
            compress(lm, [line])
    for line, message in {
        "drop: heads 2": r"heads to drop, of 2: got 2, expected 1 \(50.0%\)",
        "drop: layers 25%": r"got 25.0% of them, expected 1 \(50.0%\)",
        "drop: layers 1 first=1 last=1": "layers and keep the first 1 and last 1",
        "drop: channels 100": r"channels to drop, of 56: got 100, expected",
    }.items():
        with pytest.raises(ConfigError, match=message):
            compress(lm, [line], calibration=TEXT)
    with pytest.raises(ConfigError, match="heads of gpt2 cannot be dropped"):
        compress(tiny("gpt2"), ["drop: heads 1"], calibration=TEXT)
    with pytest.raises(ConfigError, match=r"q_proj.weight is int8: drop heads before"):
        compress(lm, ["quantize: rtn int8", "drop: heads 1"], calibration=TEXT)
    rows = ((r"layers\.1", Override(activations="bfloat16")),)
    precision = dataclasses.replace(lm.model.precision, overrides=rows)
    by_path = dataclasses.replace(lm, model=lm.model.clone(precision=precision))
    with pytest.raises(ConfigError, match="after modules were given formats"):
        compress(by_path, ["drop: layers 1"], calibration=TEXT)
