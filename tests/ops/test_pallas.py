"""The Pallas kernel of integer weights, in interpret mode, against float64."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops import pallas
from jaxllm.weights.formats import as_format
from jaxllm.weights.linear import linear

FORMATS = (
    "int8", "int8-g32", "int8-g128-f16", "int4-g32", "int4-g64-f16", "int4-g128", "int4-g64-zp",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [2, 5, 16])
def test_pallas_product_equals_dense_weights(name: str, rows: int) -> None:
    """The Pallas product equals the float64 product of the dequantized weight within float32
    rounding.
    """
    rng = np.random.default_rng(rows)
    weight = as_format(jnp.asarray(rng.normal(0, 1, (64, 300)), jnp.float32), name)
    if weight.data.dtype == jnp.int8:
        weight = weight.replace(data=weight.data.at[::3, ::2].set(-128))
    x_RI = jnp.asarray(rng.normal(0, 1, (rows, 300)), jnp.bfloat16)
    assert pallas.is_supported(x_RI, weight.data, weight.bits)
    y_RO = pallas.multiply(
        x_RI, weight.data, weight.scale, weight.zero, bits=weight.bits, group=weight.group,
        interpret=True,
    )  # fmt: skip
    x, dense = np.asarray(x_RI, np.float64), np.asarray(weight.to_dense(), np.float64)
    bound = 1e-6 * np.abs(x) @ np.abs(dense).T
    assert (np.abs(y_RO - x @ dense.T) <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_pallas_product_compiles_for_a_gpu(name: str) -> None:
    """The product is translated to a Triton kernel without a warning; no GPU is needed."""
    weight = as_format(jnp.zeros((128, 1024), jnp.float32), name)
    x_RI = jax.ShapeDtypeStruct((2, 1024), jnp.bfloat16)
    product = jax.jit(partial(pallas.multiply, bits=weight.bits, group=weight.group))
    device = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")  # jax 0.11 asks which GPU
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = product.trace(x_RI, weight.data, weight.scale, weight.zero)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_is_supported_rejects_unsupported_shapes_and_types() -> None:
    """is_supported is false for float32 inputs, more than 16 rows, one row, and 47 outputs."""
    data = jnp.zeros((64, 128), jnp.int8)
    x = jnp.zeros((16, 100), jnp.bfloat16)
    assert pallas.is_supported(x, data, 8)
    assert pallas.is_supported(x, data, 4)
    assert not pallas.is_supported(x.astype(jnp.float32), data, 8)
    assert not pallas.is_supported(jnp.zeros((17, 100), jnp.bfloat16), data, 8)
    assert not pallas.is_supported(x[:1], data, 8)
    assert not pallas.is_supported(x, data[:47], 8)
    assert not pallas.is_supported(x, data, 2)


@pytest.mark.parametrize(
    ("capabilities", "switch", "enabled"),
    [(["9.0"], "1", True), (["9.0"], "0", False), (["7.5"], "1", False), (["10.0"], "1", True),
     (["9.0", "9.0"], "1", False), (["gfx942"], "1", False), ([], "1", False)],
)  # fmt: skip
def test_kernel_needs_one_ampere_gpu(
    capabilities: list[str], switch: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is used on one NVIDIA GPU of compute capability 8.0 or more, unless disabled."""
    devices = [SimpleNamespace(compute_capability=c) for c in capabilities] or [SimpleNamespace()]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setenv("JAXLLM_PALLAS", switch)
    assert pallas.is_enabled() == enabled


@pytest.mark.parametrize(("rows", "kernels"), [(1, 0), (2, 1), (16, 1), (17, 0)])
def test_two_to_sixteen_rows_use_the_kernel(
    rows: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`linear` of a GPU calls the kernel for 2 to 16 rows of bfloat16, and for no others."""
    monkeypatch.setattr(pallas, "is_enabled", lambda: True)
    weight = as_format(jnp.ones((64, 128), jnp.float32), "int8")
    jaxpr = str(jax.make_jaxpr(linear)(jnp.ones((rows, 128), jnp.bfloat16), weight))
    assert jaxpr.count("pallas_call") == kernels


def test_shards_do_not_use_the_kernel() -> None:
    """is_supported is false inside `shard_map`: the kernel does not support its axes."""
    supported = []

    def look(x_RI: jax.Array) -> jax.Array:
        supported.append(pallas.is_supported(x_RI, jnp.zeros((64, 128), jnp.int8), 8))
        return x_RI

    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    x_RI = look(jnp.ones((4, 128), jnp.bfloat16))
    jax.shard_map(look, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))(x_RI)
    assert supported == [True, False]
