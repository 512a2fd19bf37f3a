"""Mixtures of experts in the rooms that make models smaller: what works, and what is refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.api import LM
from jaxllm.compress.apply import compress
from jaxllm.compress.data.calibration import Calibration
from jaxllm.compress.recipe import check_recipe, parse_lines
from jaxllm.compress.steps import STEPS
from jaxllm.compress.structure import structure
from jaxllm.errors import ConfigError
from jaxllm.models.qwen3_moe import Qwen3MoeConfig
from jaxllm.train.fake.prepare import prepare
from jaxllm.weights.formats import as_format, dense, format_of
from jaxllm.weights.paths import flatten
from tests.compress.models import tiny
from tests.twins import tokens

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
def test_experts_are_rounded_each_by_itself_and_the_router_stays(lm: LM, line: str) -> None:
    before, after = leaves(lm), leaves(compress(lm, [line]))
    assert format_of(after[STACK]) == "int4-g64" and format_of(after[ROUTER]) == "float32"
    wide = np.asarray(dense(after[STACK]))
    for expert, matrix in enumerate(before[STACK]):
        np.testing.assert_array_equal(wide[expert], dense(as_format(matrix, "int4")))


@pytest.mark.full
def test_ranges_of_experts_are_clipped_each_by_itself(lm: LM) -> None:
    before, plain = leaves(lm)[STACK], as_format(leaves(lm)[STACK], "int4")
    clipped = leaves(compress(lm, ["quantize: rtn int4 clip=true"]))[STACK]
    off = [float(jnp.square(dense(x) - before).sum()) for x in (clipped, plain)]
    assert clipped.shape == before.shape and off[0] <= off[1]


@pytest.mark.parametrize(
    "line", ["quantize: gptq int4", "quantize: awq int4", "smooth: smoothquant", "prune: wanda 50%",
             "prune: sparsegpt 50%", "prune: magnitude 50%", "factor: svd 4"],
)  # fmt: skip
def test_a_method_that_sees_what_all_tokens_run_is_refused_for_experts(lm: LM, line: str) -> None:
    recipe = parse_lines([line], STEPS)
    with pytest.raises(ConfigError, match=r"mlp\.experts\.\w+_proj\.weight is of experts"):
        check_recipe(recipe, lm.config, calibrated=True)
    narrowed = parse_lines([rf"{line} on=.*self_attn.*"], STEPS)
    check_recipe(narrowed, lm.config, calibrated=True)


@pytest.mark.full
def test_attention_of_a_mixture_is_quantized_by_its_inputs(lm: LM) -> None:
    rows = tokens(4, 16).astype(np.int32)
    lines = ["quantize: gptq int8 on=.*self_attn.*", "quantize: rtn int4 on=.*experts.*"]
    made = compress(lm, lines, calibration=Calibration(rows, {"from": "random"}))
    found = {path: format_of(leaf) for path, leaf in leaves(made).items()}
    assert found["layers.0.self_attn.q_proj.weight"] == "int8"
    assert (found[STACK], found[ROUTER]) == ("int4-g64", "float32")
    ids = tokens(1, 9)
    small, whole = (np.asarray(jaxllm.forward(x.model, x.params, None, ids).logits)
                    for x in (made, lm))  # fmt: skip
    assert 0 < np.abs(small - whole).max() < np.abs(whole).max()


def test_heads_can_be_cut_and_channels_of_experts_cannot(lm: LM) -> None:
    with pytest.raises(ConfigError, match="channels of mixtral cannot be cut: its MLPs are exp"):
        structure.narrower(lm.config, "channels", 8)
    config, params = structure.cut(lm.config, lm.params, "heads", [[1]])
    assert (config.num_key_value_heads, config.num_attention_heads) == (1, 4)
    assert params["layers.0"]["self_attn"]["q_proj"]["weight"].shape[0] == 4 * config.head_dim


def test_experts_are_not_trained_for_integers(lm: LM) -> None:
    with pytest.raises(ConfigError, match=r"experts\.\w+_proj\.weight is of experts, which"):
        prepare(lm.params, "int4")
    made = prepare(lm.params, [(r".*\.experts\..*", None), (r".*self_attn.*", "int4")])
    assert dict(flatten(made))[STACK] is leaves(lm)[STACK]


def test_layers_of_two_forms_are_cut_by_their_form() -> None:
    both = tiny("qwen3_moe")
    config, params = structure.cut_layers(both.config, both.params, [1])
    assert isinstance(config, Qwen3MoeConfig)
    assert config.mlp_layer_types == ("sparse",)
    assert set(params["layers.0"]["mlp"]) == {"gate", "experts"}
