"""Mesh specs, partition rules, and the errors for meshes that do not fit."""

import pytest

import jaxllm
from jaxllm import models
from jaxllm.errors import ConfigError
from jaxllm.sharding import MeshSpec, make_sharded_model
from jaxllm.sharding.collective_stats import CollectiveStats, count_collectives
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.sharding.partition_rules import REPLICATED, find_rule, resolve_mesh
from jaxllm.sharding.sharded_model import check_int8_blocks
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision
from tests.sharding.tiny_models import FAMILIES, make_model
from tests.tiny_models import random_model


def test_mesh_spec_accepts_axes_in_any_order() -> None:
    assert (
        parse_mesh("tensor=4,data=2")
        == parse_mesh(" data = 2 , tensor=4 ")
        == MeshSpec(data=2, tensor=4)
    )
    assert parse_mesh("tensor=8").num_devices == 8
    assert str(MeshSpec(data=2, tensor=2, kv_replicas=4)) == "data=2,tensor=8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must look like data=2,tensor=4"),
        ("tensor", "must look like data=2,tensor=4"),
        ("heads=2", "tensor splits heads.*'heads=2'"),
        ("kv_replicas=2", "'kv_replicas=2'"),
        ("tensor=2,tensor=2", "names the axis tensor twice"),
        ("tensor=0", "from 1 to 1,048,576, got '0'"),
        ("tensor=-2", "from 1 to 1,048,576, got '-2'"),
        ("tensor=two", "from 1 to 1,048,576, got 'two'"),
        ("tensor=99999999999", "from 1 to 1,048,576"),
        (4, "got 4"),
    ],
)
def test_mesh_spec_refuses_invalid_text(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_mesh(text)


def test_mesh_larger_than_device_count_is_refused() -> None:
    """The error names the device counts and the variable that simulates more devices."""
    config = make_model("llama")[0].config
    with pytest.raises(
        ConfigError, match=r"needs 8 devices, 1 cpu device is available.*_DEVICES=8 in"
    ):
        make_sharded_model(config, Precision(), parse_mesh("data=2,tensor=4"))


NOT_SPLIT = ("mlp.gate.weight", "mlp.router.weight", "wpe.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_partition_rules_cover_every_parameter(family: str) -> None:
    """Every parameter of every family has a rule; only gates and position tables are replicated
    among matrices.
    """
    model, _ = make_model(family)
    for exact in (False, True):
        splits = {
            path: find_rule(model.config, exact, path)
            for path, _ in flatten(models.param_shapes(model))
        }
        matrices = {
            p for p in splits if p.endswith("weight") and "norm" not in p and "ln_" not in p
        }
        whole = {p for p in matrices if splits[p] is REPLICATED}
        assert whole <= {p for p in matrices if p.endswith(NOT_SPLIT)}
        rows = {p for p, split in splits.items() if split.kind == ("gathered" if exact else "row")}
        assert all(splits[p.replace("weight", "bias")] is REPLICATED for p in rows if "mlp.c_" in p)


def test_unknown_parameter_is_refused_by_path() -> None:
    model, _ = make_model("llama")
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.sinks: no partition rule"):
        find_rule(model.config, False, "layers.0.self_attn.sinks")


def test_indivisible_dimensions_are_refused_by_name() -> None:
    config = make_model("llama")[0].config
    with pytest.raises(ConfigError, match="num_attention_heads 8 is not divisible by tensor=3"):
        resolve_mesh(MeshSpec(tensor=3), config)
    three = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}
    config = make_model("llama", **three)[0].config
    with pytest.raises(ConfigError, match="num_key_value_heads 3 is not divisible by tensor=4"):
        resolve_mesh(MeshSpec(tensor=4), config)
    config = make_model("llama", intermediate_size=52)[0].config
    with pytest.raises(ConfigError, match="intermediate_size 52 is not divisible by tensor=8"):
        resolve_mesh(MeshSpec(tensor=8), config)


def test_kv_heads_fewer_than_devices_are_replicated() -> None:
    config = make_model("llama")[0].config
    assert resolve_mesh(MeshSpec(tensor=2), config) == MeshSpec(tensor=2)
    assert resolve_mesh(MeshSpec(data=1, tensor=8), config) == MeshSpec(tensor=2, kv_replicas=4)


def test_mesh_and_place_cannot_be_combined() -> None:
    """load refuses mesh together with place, and exact without a mesh."""
    with pytest.raises(ConfigError, match="both place every array"):
        jaxllm.load("demo:llama", mesh="tensor=2", place=lambda path, x: None)
    with pytest.raises(ConfigError, match="exact requires a mesh"):
        jaxllm.load("demo:llama", exact=True)


def test_int8_input_blocks_must_not_be_split() -> None:
    """A mesh is refused if a shard would end inside a block of inputs that are rounded to int8
    together.
    """
    config, precision = make_model("llama")[0].config, Precision(int8_inputs=True)
    check_int8_blocks(config, Precision(), MeshSpec(tensor=2))
    with pytest.raises(ConfigError, match="the heads' width 48 over tensor=2 splits a block"):
        check_int8_blocks(config, precision, MeshSpec(tensor=2))


def test_collectives_are_counted_by_kind_and_bytes() -> None:
    text = """
  %a = f32[2,128]{1,0} all-reduce(%x), channel_id=1
  %b = (f32[4]{0}, bf16[3]{0}) all-reduce(%x, %y), channel_id=2
  %c = (f32[2]{0}, f32[16]{0}) all-gather-start(%x), channel_id=3
  %d = f32[16]{0} all-gather-done(%c)
  %e = pred[5]{0} collective-permute(%x)
"""
    assert count_collectives(text) == {
        "all-reduce": CollectiveStats(2, 1024 + 16 + 6, 1024),
        "all-gather": CollectiveStats(1, 64, 64),
        "collective-permute": CollectiveStats(1, 5, 5),
    }


@pytest.mark.parametrize(
    ("family", "what"), [("lfm2", "recurrent layers"), ("minicpm3", "latent attention")]
)
def test_layers_of_one_device_refuse_a_mesh(family: str, what: str) -> None:
    model, _ = random_model(family)
    with pytest.raises(ConfigError, match=f"{family} has {what}, which runs? on one device"):
        resolve_mesh(parse_mesh("data=2"), model.config)
    assert resolve_mesh(parse_mesh("data=1"), model.config).num_devices == 1
