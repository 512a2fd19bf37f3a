"""Expert parallelism equals one device, for any routing of rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm import steps
from jaxllm.errors import ConfigError
from jaxllm.generation.loops.generate import generate
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.sharding import make_sharded_model
from jaxllm.sharding.collective_stats import count_collectives
from jaxllm.sharding.expert_parallel import ExpertParallel
from jaxllm.sharding.mesh_spec import MeshSpec, build_mesh, parse_mesh
from jaxllm.sharding.shard_params import bytes_per_device
from jaxllm.weights.quantize import quantize
from tests.sharding.tiny_models import largest_difference, make_model, shard_model
from tests.tiny_models import tokens

pytestmark = pytest.mark.devices

EIGHT: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": []},
    "gpt_oss": {"num_local_experts": 8},
}


@pytest.mark.parametrize("sharded_rows", [True, False])
def test_expert_rows_are_routed_and_returned(sharded_rows: bool) -> None:
    """Routing equals brute force for uniform rows, one expert, one device, and no expert at all."""
    rng = np.random.default_rng(0)
    stack = rng.standard_normal((8, 3, 5), np.float32)
    each, devices = 12, 4
    rows = each * devices if sharded_rows else each
    x = rng.standard_normal((rows, 5), np.float32)

    def run(stack: jax.Array, x: jax.Array, expert: jax.Array) -> jax.Array:
        def product(x: jax.Array, expert: jax.Array) -> jax.Array:
            y = jnp.einsum("ai,aoi->ao", x, stack[jnp.maximum(expert, 0)])
            return jnp.where((expert >= 0)[:, None], y, 0.0)

        return ExpertParallel(stack, "expert", sharded_rows).run_experts(x, expert, product)

    by = P("expert") if sharded_rows else P()
    spreading = partial(jax.shard_map, mesh=build_mesh(MeshSpec(expert=devices)), check_vma=False)
    spread_run = jax.jit(spreading(run, in_specs=(P("expert"), by, by), out_specs=by))
    for expert in (
        rng.integers(-1, 8, rows),
        np.full(rows, 5),
        rng.integers(2, 4, rows),
        np.full(rows, -1),
    ):
        wanted = np.einsum("ai,aoi->ao", x, stack[expert]) * (expert >= 0)[:, None]
        found = spread_run(stack, x, expert.astype(np.int32))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


CASES = [
    ("gpt_oss", "expert=2,tensor=2", None),  # biases of experts, and sinks
    pytest.param("mixtral", "expert=4", None, marks=pytest.mark.full),
    pytest.param("mixtral", "expert=8", None, marks=pytest.mark.full),
    pytest.param("mixtral", "expert=2,tensor=2", "int8", marks=pytest.mark.full),
    pytest.param("mixtral", "stage=2,expert=2,tensor=2", None, marks=pytest.mark.full),
    pytest.param("qwen3_moe", "data=2,expert=2,tensor=2", None, marks=pytest.mark.full),
    pytest.param("qwen3_moe", "data=2,expert=4", "int4", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("family", "mesh", "format"), CASES)
def test_expert_parallel_model_equals_single_device(
    family: str, mesh: str, format: str | None
) -> None:
    """Logits and generated tokens equal one device, with sharded and with replicated rows."""
    model, params = make_model(family, **EIGHT[family])
    params = params if format is None else quantize(params, format)
    over, shared = shard_model(model, params, mesh)
    # Rows that divide over the devices, and rows that are replicated.
    for rows, sampler in ((4, Sampler()), (3, Sampler(greedy=True))):
        ours = steps.forward(over, shared, None, tokens(rows, 6)).logits
        theirs = steps.forward(model, params, None, tokens(rows, 6)).logits
        assert largest_difference(ours, theirs) < 3e-5
        options: dict[str, Any] = {"max_new_tokens": 4, "sampler": sampler, "seed": 2}
        np.testing.assert_array_equal(
            generate(over, shared, tokens(rows, 6), **options).token_BT,
            generate(model, params, tokens(rows, 6), **options).token_BT,
        )


def test_expert_weights_are_sharded_and_rows_exchanged() -> None:
    """Each device holds a quarter of the expert weights; rows move by all-to-all and nothing is
    gathered.
    """
    model, params = make_model("mixtral", **EIGHT["mixtral"])
    over, shared = shard_model(model, params, "expert=4")
    stacks = [layer["mlp"]["experts"] for name, layer in shared.items() if "layers." in name]
    total = sum(x.nbytes for x in jax.tree.leaves(stacks))
    assert set(bytes_per_device(stacks).values()) == {total // 4}

    def step(params: Any, token_BT: jax.Array) -> jax.Array:
        position_BT = jnp.zeros_like(token_BT)
        return steps.run_model(over, params, (), token_BT, position_BT)[0].logits

    found = count_collectives(
        jax.jit(step).lower(shared, jnp.zeros((4, 1), jnp.int32)).compile().as_text()
    )
    # Per layer: rows, expert ids and results, for two buffer sizes; one sum selects the size.
    assert found["all-to-all"].calls == 2 * 3 * 2
    assert found["all-reduce"].calls == 2
    assert "all-gather" not in found


def test_indivisible_expert_counts_are_refused() -> None:
    mixtral, _ = make_model("mixtral", num_local_experts=6)
    with pytest.raises(ConfigError, match="num_experts 6 is not divisible by expert=4"):
        make_sharded_model(mixtral.config, mixtral.precision, parse_mesh("expert=4"))
    llama, _ = make_model("llama")
    with pytest.raises(ConfigError, match="llama without experts is not divisible by expert=2"):
        make_sharded_model(llama.config, llama.precision, parse_mesh("expert=2"))
