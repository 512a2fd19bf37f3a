"""CUDA kernels for the products of decoding; optional, and off until cards have measured them.

They read weights as they are stored, for up to `MAX_ROWS` rows of bfloat16, with float32 sums in
one order: a row's bits do not depend on the other rows. JAXLLM_GPU_KERNELS=1 turns them on, for
NVIDIA cards from the A100 on; whatever they do not multiply runs as without them.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops import native
from jaxllm.ops.cuda import compiler, driver, nvrtc
from jaxllm.ops.cuda.launch import Card, Launch, Rows, kernel_source, plan_launch
from jaxllm.ops.target import target

ENV = "JAXLLM_GPU_KERNELS"
TARGET, PLATFORM = "jaxllm_cuda_product", "cuda"
# By bits of a weight: an H100 was no faster with more rows than XLA's products.
MAX_ROWS = {16: 8, 8: 32, 4: 64}
# The fields of `Product` in csrc/arguments.h: pointers, and then numbers.
POINTERS = (
    *("weight", "scale", "zero", "x", "y", "norm", "residual"),
    *("cosine", "sine", "keys", "values", "slot"),
)
NUMBERS = (
    *("rows", "columns", "outputs", "epsilon"),
    *("slots", "heads", "kv_heads", "head_size"),
)
_H100 = Card(multiprocessors=132, shared_bytes=232448, capability=(9, 0))
_SHARED_BYTES = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}  # of a block
_LEAST_SHARED_BYTES = 101376  # of a block of any other card


class Matrix(NamedTuple):
    """A weight as the kernels take it: its format, and its arrays `[O, ...]`: data, and scales and
    zero points if it has them.
    """

    format: Rows
    arrays: Sequence[jax.Array]


def find_problem() -> str | None:
    """Return why programs do without the kernels; None if they have them."""
    if os.environ.get(ENV, "0") != "1":
        return f"no card has measured them yet ({ENV}=1 turns them on)"
    if target() != "cuda":
        return "there is no NVIDIA GPU"
    if not native.is_enabled():
        return "jaxllm's native library is missing or turned off"
    if is_present() and nvrtc.load_nvrtc() is None:
        return "NVRTC, which compiles them, is missing: pip install nvidia-cuda-nvrtc"
    if is_present() and driver.load_driver() is None:
        return "the driver is older than CUDA 12"
    return None if card().capability >= (8, 0) else "the card is older than the A100"


def is_present() -> bool:
    """Whether there is a GPU: programs can also be made for one that is not (`trace_for`)."""
    return jax.default_backend() == "gpu"


def card() -> Card:
    """Return the GPU, or an H100 where there is none."""
    return _describe_card() if is_present() else _H100


@cache
def _describe_card() -> Card:
    device = jax.devices()[0]
    major, minor = (int(number) for number in device.compute_capability.split("."))
    shared_bytes = _SHARED_BYTES.get((major, minor), _LEAST_SHARED_BYTES)
    return Card(device.core_count, shared_bytes, (major, minor))


def takes(x_RI: jax.Array, matrix: Matrix | None) -> bool:
    """Whether there are kernels for these."""
    return matrix is not None and find_problem() is None and _plan(x_RI, matrix) is not None


def _plan(x_RI: jax.Array, matrix: Matrix) -> Launch | None:
    rows, columns = x_RI.shape
    if x_RI.dtype != jnp.bfloat16 or rows > MAX_ROWS[matrix.format.bits]:
        return None
    return plan_launch(matrix.format, rows, columns, matrix.arrays[0].shape[0], card())


def multiply(x_RI: jax.Array, matrix: Matrix) -> jax.Array:
    """Return `x @ weight.T`, float32 `[R, O]`, for what `takes` approves of."""
    launch = _plan(x_RI, matrix)
    assert launch is not None
    (rows, columns), outputs = x_RI.shape, matrix.arrays[0].shape[0]
    source = kernel_source(matrix.format, launch, "Plain", "Float32", is_early=False)
    fields = ["x", *POINTERS[: len(matrix.arrays)], "y"]
    numbers = {"rows": rows, "columns": columns, "outputs": outputs}
    y: jax.Array = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((rows, outputs), jnp.float32))(
        x_RI,
        *matrix.arrays,
        places=np.array([POINTERS.index(field) for field in fields], np.int32),
        numbers=np.array([numbers.get(field, 0) for field in NUMBERS], np.int32),
        **prepare_launch(source, launch),
    )
    return y


def prepare_launch(source: str, launch: Launch) -> dict[str, np.generic]:
    """Return the attributes of a call that launches a kernel.

    Where there is a GPU, the kernel is compiled and loaded. For a program that only is compiled,
    its key is enough.
    """
    register_target()
    architecture, grid = _name_architecture(card()), launch.grid
    key = compiler.find_key(source, architecture)
    if is_present():
        machine_code = compiler.compile_kernel(source, architecture)
        kernel = driver.load_kernel(key, machine_code, card().shared_bytes)
        if launch.cluster > 1:
            grid = launch.capped_grid(driver.count_clusters(kernel, launch))
    return describe_launch(key, launch, grid)


def describe_launch(key: int, launch: Launch, grid: int) -> dict[str, np.generic]:
    """Return the attributes of a call that launches a kernel on so many blocks."""
    return {
        "key": np.int64(key),
        "grid": np.int32(grid),
        "cluster": np.int32(launch.cluster),
        "shared_bytes": np.int32(launch.shared_bytes),
        "early": np.bool_(False),
    }


def _name_architecture(card: Card) -> str:
    major, minor = card.capability
    return f"sm_{major}{minor}{'a' * (major in (9, 10))}"


@cache
def register_target() -> None:
    """Tell XLA of the call, once."""
    loaded = native.load_kernels()
    assert loaded is not None
    capsule = jax.ffi.pycapsule(loaded.jaxllm_cuda_product)
    jax.ffi.register_ffi_target(TARGET, capsule, platform="CUDA")
