"""CUDA kernels for the products of decoding; optional, and off until cards have measured them.

They read weights as they are stored, for up to `MAX_ROWS` rows of bfloat16, with float32 sums in
one order: a row's bits do not depend on the other rows. JAXLLM_GPU_KERNELS=1 turns them on, for
NVIDIA cards from the A100 on; whatever they do not multiply runs as without them. What `early` adds
is in `can_start_early`.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.ops import native
from jaxllm.ops.cuda import compiler, driver, nvrtc
from jaxllm.ops.cuda.launch import Card, Launch, Rows, kernel_source, plan_launch
from jaxllm.ops.target import is_own_program, target

ENV, EARLY = "JAXLLM_GPU_KERNELS", "early"
TARGET, PLATFORM = "jaxllm_cuda_product", "cuda"
# By bits of a weight that XLA reads as it is stored: with more rows an H100 was no faster than by
# XLA's products. Others may have as many rows as kernels take.
MAX_ROWS = {16: 8, 8: 32, 4: 64}
# The fields of `Product` in csrc/arguments.h: pointers, and then numbers of 32 bits.
POINTERS = (
    *("x", "norm", "residual"),
    *(f"{field}{i}" for field in ("weight", "scale", "zero", "y") for i in range(3)),
)
MAX_WEIGHTS = 3
NUMBERS = ("rows", "columns", "outputs0", "outputs1", "outputs2", "epsilon", "offset")
# Of gates: csrc/epilogues.h has these.
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "Silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "GeluTanh"),
}
_H100 = Card(multiprocessors=132, shared_bytes=232448, capability=(9, 0))
_SHARED_BYTES = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}  # of a block
_LEAST_SHARED_BYTES = 101376  # of a block of any other card


class Matrix(NamedTuple):
    """A weight as the kernels take it: its format, and its arrays `[O, ...]` by their names in
    csrc/arguments.h: weight, and scale and zero if it has them.
    """

    format: Rows
    arrays: Mapping[str, jax.Array]

    @property
    def outputs(self) -> int:
        return self.arrays["weight"].shape[0]


def find_problem() -> str | None:
    """Return why programs do without the kernels; None if they have them."""
    if os.environ.get(ENV, "0") not in ("1", EARLY):
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


def can_start_early() -> bool:
    """Return whether launches may read parameters of a model while the kernel before still runs.

    That is an experiment (JAXLLM_GPU_KERNELS=early), for cards from the H100 on. No kernel that may
    still run can have written the parameters, as they are arguments of the program: a program of
    jaxllm's own that is in no other one (`is_own_program`) does not compute any. Nor can a kernel
    of an earlier program: the embeddings come first, by a kernel of XLA's, which never starts
    before all others have ended.
    """
    early = os.environ.get(ENV) == EARLY and is_own_program()
    return early and card().capability >= (9, 0)


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
    return x_RI.dtype == jnp.bfloat16 and fits(x_RI.shape, [matrix])


def fits(shape: tuple[int, ...], matrices: Sequence[Matrix | None]) -> bool:
    """Whether one launch multiplies rows of bfloat16, `[R, I]`, by these weights."""
    if find_problem() is not None:
        return False
    some = [matrix for matrix in matrices if matrix is not None]
    return len(some) == len(matrices) and _plan(shape, some) is not None


def _plan(shape: tuple[int, ...], matrices: Sequence[Matrix]) -> Launch | None:
    """Return how one launch multiplies rows of this shape by weights; None if none does."""
    (rows, columns), form = shape, matrices[0].format
    outputs = [matrix.outputs for matrix in matrices]
    if not form.struct and rows > MAX_ROWS[form.bits]:
        return None
    if len(matrices) > MAX_WEIGHTS or any(n % 16 for n in outputs):
        return None
    if any(matrix.format != form for matrix in matrices):
        return None
    return plan_launch(form, rows, columns, sum(outputs), card())


class Norm(NamedTuple):
    """An RMS norm (`ops.rms_norm`) of the rows before they are multiplied."""

    weight_I: jax.Array  # bfloat16
    eps: float
    weight_offset: float


def multiply(
    x_RI: jax.Array,
    matrices: Sequence[Matrix],
    dtype: DTypeLike = jnp.float32,
    norm: Norm | None = None,
    is_early: bool = False,
) -> list[jax.Array]:
    """Return `x @ weight.T` of each weight, `[R, O]`, for weights that `takes` approves of.

    Weights of one format share launches, and each launch norms x first if it is to.
    """
    products, left = dict[int, jax.Array](), list(range(len(matrices)))
    while left:
        same = [i for i in left if matrices[i].format == matrices[left[0]].format]
        parts = (same[:n] for n in range(MAX_WEIGHTS, 0, -1))
        some = next(x for x in parts if _plan(x_RI.shape, [matrices[i] for i in x]) is not None)
        together = launch(x_RI, [matrices[i] for i in some], dtype, norm=norm, is_early=is_early)
        products.update(zip(some, together, strict=True))
        left = [i for i in left if i not in products]
    return [products[i] for i in range(len(matrices))]


def launch(
    x_RI: jax.Array,
    matrices: Sequence[Matrix],
    dtype: DTypeLike = jnp.bfloat16,
    *,
    norm: Norm | None = None,
    residual_RO: jax.Array | None = None,
    activation: str | None = None,
    is_early: bool = False,
) -> list[jax.Array]:
    """Multiply in one launch, and do what comes before and after it in the same.

    Sums are float32, and are rounded before anything is done with them.

    Args:
        dtype: Of the products, float32 or bfloat16; bfloat16 with what follows.
        norm: Is applied to x first.
        residual_RO: Is added to the product of one weight.
        activation: A name of `ACTIVATIONS`. The one result of two weights is that of the first,
            times the product of the second.
        is_early: Whether `can_start_early` permits it.
    """
    prologue = "Plain" if norm is None else "RmsNorm"
    plan = _plan(x_RI.shape, matrices)
    assert plan is not None
    plan = plan._replace(is_early=is_early)
    (rows, columns), form = x_RI.shape, matrices[0].format
    fields: dict[str, Any] = {"x": x_RI}
    numbers: dict[str, Any] = {"rows": rows, "columns": columns}
    epilogue = "Float32" if dtype == jnp.float32 else "Rounded"
    if norm is not None:
        fields["norm"] = norm.weight_I
        numbers |= {"epsilon": _float_bits(norm.eps), "offset": _float_bits(norm.weight_offset)}
    if residual_RO is not None:
        fields["residual"], epilogue = residual_RO, "Residual"
    if activation is not None:
        epilogue = f"Gated<{ACTIVATIONS[activation]}>"
    for i, matrix in enumerate(matrices):
        fields |= {f"{name}{i}": array for name, array in matrix.arrays.items()}
        numbers[f"outputs{i}"] = matrix.outputs
    written = matrices[:1] if activation is not None else matrices
    places = [*fields, *(f"y{i}" for i in range(len(written)))]
    out = [jax.ShapeDtypeStruct((rows, x.outputs), dtype) for x in written]
    source = kernel_source(form, plan, prologue, epilogue)
    call = jax.ffi.ffi_call(TARGET, out, vmap_method="sequential")
    return list(
        call(
            *fields.values(),
            places=np.array([POINTERS.index(place) for place in places], np.int32),
            numbers=np.array([numbers.get(number, 0) for number in NUMBERS], np.int32),
            **prepare_launch(source, plan),
        )
    )


def _float_bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


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
        "early": np.bool_(launch.is_early),
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
