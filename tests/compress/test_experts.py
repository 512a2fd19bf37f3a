"""Compression of mixtures of experts: supported methods and refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import models
from jaxllm.compress import column_solver
from jaxllm.compress.calibration import Calibration
from jaxllm.compress.pipeline import compress
from jaxllm.compress.recipe import check_recipe, parse_lines
from jaxllm.compress.registry import find_steps
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.models.qwen3_moe import Qwen3MoeConfig
from jaxllm.research.pruning.layer_pruning import cut_layers
from jaxllm.research.pruning.structured_pruning import cut_groups, narrow_config
from jaxllm.research.qat.job import prepare
from jaxllm.weights.formats import as_format, to_dense, weight_format
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.types.int_weight import parse
from tests.compress.models import tiny
from tests.tiny_models import tokens

STACK, ROUTER = "layers.0.mlp.experts.up_proj.weight", "layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny("mixtral", num_hidden_layers=1)


def leaves(lm: LM) -> dict[str, Any]:
    return dict(flatten(lm.params))


@pytest.mark.parametrize(
    "line",
    [r"quantize: rtn int4 on=layers\..*",
     pytest.param("quantize: rtn int4", marks=pytest.mark.full)],
)  # fmt: skip
def test_experts_are_rounded_separately_without_router(lm: LM, line: str) -> None:
    """Each expert is quantized separately, and the router keeps its format."""
    before, after = leaves(lm), leaves(compress(lm, [line]))
    assert weight_format(after[STACK]) == "int4-g64" and weight_format(after[ROUTER]) == "float32"
    wide = np.asarray(to_dense(after[STACK]))
    for expert, matrix in enumerate(before[STACK]):
        np.testing.assert_array_equal(wide[expert], to_dense(as_format(matrix, "int4")))


@pytest.mark.parametrize(
    "line", ["quantize: awq int4", "smooth: smoothquant", "prune: magnitude 50%", "factor: svd 4"]
)
def test_unsupported_methods_refuse_experts(lm: LM, line: str) -> None:
    """Methods that use statistics over all tokens refuse expert matrices; restricted to attention
    they pass.
    """
    recipe = parse_lines([line], find_steps())
    with pytest.raises(ConfigError, match=r"not support experts, .*mlp\.experts\.\w+_proj"):
        check_recipe(recipe, lm.config, has_calibration=True)
    narrowed = parse_lines([rf"{line} on=.*self_attn.*"], find_steps())
    check_recipe(narrowed, lm.config, has_calibration=True)


def test_heads_can_be_dropped_but_not_experts(lm: LM) -> None:
    """A mixture's heads can be dropped, the channels of its experts cannot."""
    with pytest.raises(ConfigError, match="channels of mixtral cannot be dropped: its MLPs"):
        narrow_config(lm.config, "channels", 8)
    config, params = cut_groups(lm.config, lm.params, "heads", [[1]])
    assert (config.num_key_value_heads, config.num_attention_heads) == (1, 4)
    assert params["layers.0"]["self_attn"]["q_proj"]["weight"].shape[0] == 4 * config.head_dim


def test_qat_refuses_experts(lm: LM) -> None:
    """Quantization-aware training refuses expert matrices unless the rules exclude them."""
    with pytest.raises(ConfigError, match=r"experts\.\w+_proj\.weight belongs to experts"):
        prepare(lm.params, "int4")
    made = prepare(lm.params, [(r".*\.experts\..*", None), (r".*self_attn.*", "int4")])
    assert dict(flatten(made))[STACK] is leaves(lm)[STACK]


def test_cut_layers_updates_mixed_layer_types() -> None:
    """Dropping a dense layer of a mixed model updates the list of layer types."""
    both = tiny("qwen3_moe")
    config, params = cut_layers(both.config, both.params, [1])
    assert isinstance(config, Qwen3MoeConfig)
    assert config.mlp_layer_types == ("sparse",)
    assert set(params["layers.0"]["mlp"]) == {"gate", "experts"}


UNUSED = (5, 6)  # experts without tokens: ties go to the first experts


@pytest.fixture(scope="module")
def mixed() -> LM:
    """A dense layer, then one with seven experts, of which each token uses three."""
    lm = tiny("qwen3_moe")
    path = "layers.1.mlp.gate.weight"

    def change(name: str, leaf: Any) -> Any:
        return leaf.at[3:].set(leaf[2]) if name == path else leaf

    return dataclasses.replace(lm, params=map_leaves(change, lm.params))


def _routed_inputs(lm: LM, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the second layer's MoE inputs and each token's experts, chosen in NumPy."""
    at = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    length = np.full(len(rows), rows.shape[1], np.int32)
    read = frozenset({"router", "mlp_norm"})
    trace: Any = lm.model.apply({"params": lm.params}, rows, at, length, read=read)
    sites = trace.layers[1].sites
    score_RE = np.asarray(sites["router"]).reshape(-1, 7)
    expert_RE = np.argsort(-score_RE, axis=1, kind="stable")
    return np.asarray(sites["mlp_norm"]).reshape(len(score_RE), -1), expert_RE[:, :3]


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _output_error(x_RI: np.ndarray, weight: Any, leaf: Any) -> float:
    """Return the sum of squared changes of the outputs."""
    return float(((np.asarray(weight - to_dense(leaf)) @ x_RI.T) ** 2).sum())


def test_gptq_uses_tokens_routed_to_expert(mixed: LM) -> None:
    """Each expert is quantized with the inputs of its routed tokens; experts without tokens are
    rounded to nearest.
    """
    rows, messages, to = tokens(4, 16).astype(np.int32), list[str](), parse("int4-g64")
    made = compress(
        mixed, [r"quantize: gptq int4 act_order=false on=layers\.1\.mlp\..*"],
        calibration=Calibration(rows, {"from": "random"}), log=messages.append,
    )  # fmt: skip
    assert [line for line in messages if "experts 5, 6" in line]
    before, after = leaves(mixed), leaves(made)
    names = [f"layers.1.mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert {weight_format(after[name]) for name in names} == {"int4-g64"}
    assert after["layers.1.mlp.gate.weight"] is before["layers.1.mlp.gate.weight"]
    x_RD, expert_Rk = _routed_inputs(mixed, rows)
    for expert in range(7):
        mine = x_RD[(expert_Rk == expert).any(axis=1)]
        assert (len(mine) == 0) == (expert in UNUSED)
        one = {name: jax.tree.map(lambda x, e=expert: x[e], after[name]) for name in names}
        gate, up = (np.asarray(to_dense(one[name])) for name in names[:2])
        hidden = _silu(mine @ gate.T) * (mine @ up.T)
        for name, inputs in zip(names, (mine, mine, hidden), strict=True):
            weight = before[name][expert]
            plain = as_format(weight, "int4")
            if expert in UNUSED:
                np.testing.assert_array_equal(to_dense(one[name]), to_dense(plain))
                continue
            # GPTQ with the Hessian of these inputs.
            by = column_solver.factor_hessian(
                inputs.T.astype(np.float64) @ inputs, float(len(inputs))
            )
            separate = column_solver.solve_columns(weight, by, target=to)
            assert float(jnp.isclose(to_dense(one[name]), separate.value_OI).mean()) > 0.98, name
            assert _output_error(inputs, weight, one[name]) < _output_error(inputs, weight, plain)


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_gptq_quantizes_dense_layers_and_shared_experts(family: str) -> None:
    """Layers without experts and shared experts are quantized as well; embeddings, head and router
    keep their format.
    """
    rows = Calibration(tokens(4, 16).astype(np.int32), {"from": "random"})
    made = leaves(compress(tiny(family), ["quantize: gptq int4"], calibration=rows))
    whole = ("embed_tokens.weight", "lm_head.weight", "layers.1.mlp.gate.weight")
    for path, leaf in made.items():
        if leaf.ndim > 1:
            assert weight_format(leaf) == ("float32" if path in whole else "int4-g64"), path


@pytest.mark.full
@pytest.mark.parametrize("line", ["prune: sparsegpt 2:4", "prune: wanda 50%"])
def test_expert_pruning_reaches_requested_sparsity(mixed: LM, line: str) -> None:
    """SparseGPT 2:4 and Wanda 50% zero half of the weights, in experts and dense layers, and keep
    them finite.
    """
    rows = Calibration(tokens(4, 16).astype(np.int32), {"from": "random"})
    made = leaves(compress(mixed, [line], calibration=rows))
    for path in (STACK.replace("0", "1"), "layers.0.mlp.up_proj.weight"):
        assert 0.45 < float((made[path] == 0).mean()) <= 0.55
        assert np.isfinite(np.asarray(made[path])).all()


def test_act_order_without_static_groups_refuses_experts(lm: LM) -> None:
    recipe = parse_lines(["quantize: gptq int4 static_groups=false"], find_steps())
    with pytest.raises(ConfigError, match="belongs to experts: act_order requires static_groups"):
        check_recipe(recipe, lm.config, has_calibration=True)


def test_matrix_with_unknown_inputs_is_refused(mixed: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    row = models.get_family("qwen3_moe")
    fewer = dataclasses.replace(row, linear_groups=row.linear_groups[:2])
    monkeypatch.setattr("jaxllm.models.qwen3_moe.FAMILY", fewer)
    rows = Calibration(tokens(4, 16).astype(np.int32), {"from": "random"})
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.\w+_proj\.weight has unknown inputs"):
        compress(mixed, ["quantize: gptq int4"], calibration=rows)
