"""Memory of loading and quantizing: the resulting weights and little more."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.checkpoints.native import save
from jaxllm.cli.convert import cast_checkpoint
from jaxllm.convert.gguf.tensors import pack_blocks
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.ops import native
from jaxllm.weights.formats import as_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.linear import linear
from jaxllm.weights.load import read_weight
from jaxllm.weights.safetensors import empty_aligned, open_tensors, write_tensors
from jaxllm.weights.types.block_weight import BlockWeight
from tests.conftest import ROOT
from tests.tiny_models import save_random

ROWS = 94 * 512  # of embeddings and head: 48 MB each in bfloat16
OVERHEAD = 24e6  # bytes: half of one of these matrices

STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(
    not STATUS.exists() or "VmHWM" not in STATUS.read_text(encoding="ascii"),
    reason="no /proc with the memory of a process",
)

LOAD = """
import json, sys
import jax, jaxllm

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

small, large, name = sys.argv[1:]
kept = {"dtype": name} if name == "float32" else {"quantize": name}
jaxllm.load(small, **kept)  # imports and compiles everything that the large one needs
before = status("VmRSS")
lm = jaxllm.load(large, **kept)
jax.block_until_ready(lm.params)
print(json.dumps([status("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(lm.params))]))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two bfloat16 models that differ only in vocabulary size, in both file formats."""
    result: Path = tmp_path_factory.mktemp("checkpoints")
    for name, rows in (("small", 512), ("large", ROWS)):
        save_random(
            result / "float32",
            "llama",
            vocab_size=rows,
            hidden_size=512,
            num_hidden_layers=1,
            tie_word_embeddings=False,
        )
        opened = cast_checkpoint(open_hf(result / "float32"), "bfloat16")
        save(result / f"{name}-native", opened)
        write_hf(result / f"{name}-hf", opened)
        shutil.rmtree(result / "float32")
    return result


@pytest.mark.parametrize(
    ("form", "name"), [("native", "int4"), ("hf", "int8"), ("native", "bf16-packed")]
)
def test_loading_peak_memory_excludes_second_matrix_copy(
    checkpoints: Path, form: str, name: str
) -> None:
    """Peak memory while loading stays below the loaded weights plus half of one matrix."""
    directories = [str(checkpoints / f"{size}-{form}") for size in ("small", "large")]
    command = [sys.executable, "-c", LOAD, *directories, name]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    took, result = json.loads(output.splitlines()[-1])
    assert took < result + OVERHEAD


@pytest.mark.parametrize("name", ["int4-g64-zp", "int8-f16", "bf16-packed", "float16", "float32"])
def test_read_weight_in_blocks_equals_whole(name: str) -> None:
    rows = np.random.default_rng(0).normal(0, 0.02, (1100, 131)).astype(np.float32)
    whole = jnp.asarray(rows, jnp.bfloat16 if name == "bf16-packed" else jnp.float32)
    complaints: list[str] = []
    array = np.asarray(whole)
    result = read_weight("w", LazyTensor.from_array(array), [name], complaints)
    assert not complaints
    expected = as_format(whole, name)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_bf16_packed_in_blocks_round_trips_bitwise() -> None:
    bits = np.random.default_rng(0).normal(0, 0.02, (1030, 70)).astype(ml_dtypes.bfloat16)
    bits[[0, 511, 512, 1029], [69, 0, 3, 69]] = [1e-30, 3e30, -0.0, 1e20]  # stored as escapes
    result = read_weight("w", LazyTensor.from_array(bits), ["bf16-packed"], [])
    assert np.asarray(result.to_dense()).tobytes() == bits.tobytes()


def test_packing_compiles_nothing_for_its_escapes() -> None:
    """Another number of escapes needs no other program, which would stay in memory."""
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    def pack(escapes: int) -> None:
        numbers = np.full((512, 128), 0.5, ml_dtypes.bfloat16)
        numbers[3, :escapes] = 1e-30
        weight = read_weight("w", LazyTensor.from_array(numbers), ["bf16-packed"], [])
        assert weight.escape_value.shape == (escapes,)

    pack(5)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        pack(6)
        jax.jit(jnp.negative).lower(np.ones(67, np.float32)).compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1  # the last one, which shows that programs are counted


def test_read_weight_copies_vectors_alone() -> None:
    """A vector does not keep its file's pages; a matrix is used where it is."""
    for shape in ((64,), (4, 16)):
        array = empty_aligned(shape, np.float32, zeroed=True)
        weight = read_weight("w", LazyTensor.from_array(array), ["float32"], [])
        assert (weight.unsafe_buffer_pointer() == array.ctypes.data) == (len(shape) == 2)


@pytest.mark.parametrize("mapped", [True, False])
def test_tensor_blocks_concatenate_to_rows(tmp_path: Path, mapped: bool) -> None:
    tensors = {
        "odd": np.arange(7 * 3, dtype=np.float32).reshape(7, 3),
        "stack": np.arange(2 * 3 * 5, dtype=np.int8).reshape(2, 3, 5),
        "row": np.arange(4, dtype=np.uint8),
        "one": np.array(2, np.float32),
        "none": np.zeros((0, 4), np.float32),
        "narrow": np.zeros((4, 0), np.float32),
    }
    write_tensors(tmp_path / "t", {name: LazyTensor.from_array(x) for name, x in tensors.items()})
    for name, tensor in open_tensors(tmp_path / "t", mapped=mapped).items():
        expected = tensors[name].reshape(-1, tensor.columns) if tensors[name].size else []
        for rows in (1, 2, 100):
            blocks = [block.copy() for block in tensor.blocks(rows)]
            assert all(len(block) <= rows for block in blocks)
            assert np.array_equal(np.concatenate(blocks) if blocks else [], expected)
        assert np.array_equal(tensor.read(), tensors[name])


def test_read_weight_reports_each_problem_once() -> None:
    """Each kind of problem is reported once, with the index in the whole tensor."""
    numbers = np.ones((1030, 3), np.float32)
    numbers[100, 0], numbers[700, 1], numbers[900, 2] = 1e6, np.nan, np.inf
    complaints: list[str] = []
    read_weight("w", LazyTensor.from_array(numbers), ["float16"], complaints)
    assert complaints == [
        "w overflows float16 (largest 65504.0)",
        f"w holds nan at index {700 * 3 + 1}",
    ]


@pytest.mark.parametrize(
    ("name", "isa", "rows"),
    [("nf4", None, 40), ("int8", None, 40), ("int8-g32-zp", None, 3), ("int4-g64", "portable", 40),
     ("bf16-packed", "portable", 40), ("nf4", None, 1)],
)  # fmt: skip
def test_dequantized_layers_do_not_add_up(name: str, isa: str | None, rows: int) -> None:
    """A program that dequantizes weights holds those of one layer at a time, also in a loop; `isa`:
    its kernel dequantizes, else plain JAX does.
    """
    if isa is not None and native.isa() is None:
        pytest.skip("there are no native kernels")
    size, before = 512, native.isa()
    numbers = np.random.default_rng(0).normal(0, 0.02, (size, size)).astype(np.float32)
    array = jnp.asarray(numbers, jnp.bfloat16 if name == "bf16-packed" else jnp.float32)
    weights = [as_format(array, name)] * 6

    def run_layers(x: jax.Array, weights: list[Any]) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for weight in weights:
                x = linear(x, weight).astype(x.dtype)
            return x, None

        return jax.lax.scan(step, x, length=3)[0] if rows == 1 else step(x, None)[0]

    x = jax.ShapeDtypeStruct((rows, size), jnp.bfloat16)
    try:
        if isa is not None:
            native.isa(isa)
        with contextlib.nullcontext() if isa else native.disable_kernels():
            held = [
                jax.jit(run_layers)
                .lower(x, weights[:n])
                .compile()
                .memory_analysis()
                .temp_size_in_bytes
                for n in (2, 6)
            ]
    finally:
        if isa is not None:
            native.isa(before)
    assert held[1] < held[0] + size * size, held


@pytest.mark.parametrize("name", ["int4-g32-f16", "int8-g64", "int3-g64", "nf4", "blocks"])
def test_product_of_many_rows_dequantizes_weight_in_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where XLA multiplies a weight that has a kernel, a program holds a part of it, dequantized;
    the sums are those of the whole. A kernel dequantizes what it can, which keeps programs small.
    """
    if native.isa() is None:
        pytest.skip("there are no native kernels")
    monkeypatch.setattr(native, "kernel_path", lambda *_: native.KernelPath(4, "xla"))
    monkeypatch.setattr("jaxllm.weights.linear.BLOCKED_SIZE", 1 << 19)
    rng = np.random.default_rng(0)
    rows, outputs, columns = 7, 5 * 512 + 77, 384
    numbers = rng.normal(0, 0.02, (outputs, columns)).astype(np.float32)
    weight = as_format(jnp.asarray(numbers), "int4-g32-f16" if name == "blocks" else name)
    dense = np.asarray(weight.to_dense())
    if name == "blocks":
        data, scale = np.asarray(weight.data), np.asarray(weight.scale)
        weight = BlockWeight(
            jnp.asarray(pack_blocks(weight.int_format, data, scale, columns).reshape(-1)),
            "Q4_0",
            columns,
        )
    x = rng.normal(0, 1, (rows, columns)).astype(np.float32)
    program = jax.jit(linear).lower(x, weight).compile()
    assert program.memory_analysis().temp_size_in_bytes < dense.nbytes / 2
    if name != "int3-g64":
        assert program.as_text().count(" = ") < 80
    expected = x.astype(np.float64) @ dense.T.astype(np.float64)
    bound = 1e-6 * (np.abs(x) @ np.abs(dense).T)
    assert (np.abs(program(x, weight) - expected) <= bound).all()


def test_product_in_blocks_runs_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device multiplies its rows of the weight in blocks; x is the same on all of them."""
    if native.isa() is None:
        pytest.skip("there are no native kernels")
    monkeypatch.setattr(native, "kernel_path", lambda *_: native.KernelPath(4, "xla"))
    monkeypatch.setattr("jaxllm.weights.linear.BLOCKED_SIZE", 1 << 16)
    rng = np.random.default_rng(0)
    weight = as_format(jnp.asarray(rng.normal(0, 1, (2 * 579, 128)).astype(np.float32)), "int8-g32")
    x = rng.normal(0, 1, (5, 128)).astype(np.float32)
    specs: Any = jax.P(), jax.P("tensor")
    count = min(2, jax.device_count())  # the types of arrays are checked on one device too
    mesh = jax.make_mesh((count,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(linear, mesh=mesh, in_specs=specs, out_specs=jax.P(None, "tensor"))
    expected = x.astype(np.float64) @ np.asarray(weight.to_dense()).T
    np.testing.assert_allclose(jax.jit(sharded)(x, weight), expected, rtol=0, atol=1e-4)
