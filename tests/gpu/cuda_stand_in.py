"""The CUDA kernels on a CPU: their sources compiled against stand_in/stand_in.h."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from jaxllm.ops import cuda
from jaxllm.ops.cuda.launch import Launch, Rows, kernel_source

CSRC = Path(cuda.__file__).parent / "csrc"
STAND_IN = Path(__file__).parent / "stand_in"
BF16 = np.dtype(ml_dtypes.bfloat16)
PRODUCED = ("x", "residual")  # by the kernel before, also with EARLY


class Product(ctypes.Structure):
    """The struct of csrc/arguments.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in cuda.POINTERS],
        *[(name, ctypes.c_int) for name in cuda.NUMBERS],
    ]


class Array(ctypes.Structure):
    """The struct of stand_in.h: an array, and what it holds once the kernel before has ended."""

    _fields_ = [("data", ctypes.c_void_p), ("late", ctypes.c_void_p), ("size", ctypes.c_int64)]


class Variant(NamedTuple):
    """A variant of the kernel; the number of stages and of tiles are the test's own."""

    weight: Rows
    cluster: int = 1
    tiles: int = 1
    stages: int = 3
    prologue: str = "Plain"
    epilogue: str = "Float32"
    is_early: bool = True


def launch_of(variant: Variant) -> Launch:
    launch = Launch(variant.cluster, variant.tiles, variant.stages, 1, 0, 0)
    return launch._replace(is_early=variant.is_early)


class Kernels:
    """Compiles variants, each once, into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, Any] = {}

    def load(self, variant: Variant) -> Any:
        """Return the library of a variant."""
        launch = launch_of(variant)
        return self.compile(kernel_source(variant.weight, launch, *variant[4:6]))

    def compile(self, source: str) -> Any:
        """Return the library of a variant's source."""
        if source in self._libraries:
            return self._libraries[source]
        gxx = shutil.which("g++")
        if gxx is None:
            pytest.skip("g++ is not installed")
        path = self._folder / f"variant{len(self._libraries)}"
        path.with_suffix(".cc").write_text(source.replace("kernel.cu", "launch.cc"))
        flags = "-std=c++17 -O1 -shared -fPIC -ffp-contract=off -Wall -Wextra -Werror"
        flags += " -U_FORTIFY_SOURCE -DJAXLLM_STAND_IN"
        command = [gxx, *flags.split(), "-I", CSRC, "-I", STAND_IN, path.with_suffix(".cc")]
        done = subprocess.run([*command, "-o", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        library = ctypes.CDLL(str(path))
        library.launch.restype = ctypes.c_char_p
        self._libraries[source] = library
        return library

    def run(
        self, variant: Variant, clusters: int, outputs: dict[str, np.ndarray],
        epsilon: float = 1e-5, seed: int = 1, offset: float = 0.0, **inputs: np.ndarray,
    ) -> None:  # fmt: skip
        """Run a variant on a grid of some clusters.

        What the kernel before writes is NaN until the kernel waits for it.

        Args:
            variant: The variant.
            clusters: Clusters of blocks, at most.
            outputs: Arrays that are written, by name.
            epsilon: Of RmsNorm.
            seed: Of what a GPU leaves open.
            offset: Of RmsNorm.
            **inputs: Arrays that are read, by name.
        """
        library, product, keep, arrays = self.load(variant), Product(), [], []
        for name, array in inputs.items():
            late = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            late = np.concatenate([late, np.zeros(-late.size % 4, np.uint8)])
            is_late = name in PRODUCED or not variant.is_early
            data = _aligned(late.size)
            data[:] = 0xFF if is_late else late
            keep += [data, late]
            setattr(product, name, data.ctypes.data)
            arrays.append(Array(data.ctypes.data, late.ctypes.data if is_late else None, late.size))
        for name, array in outputs.items():
            setattr(product, name, array.ctypes.data)
        product.rows, product.columns = inputs["x"].shape
        sizes = [len(inputs.get(name, ())) for name in cuda.POINTERS if name.startswith("weight")]
        product.outputs0, product.outputs1, product.outputs2 = sizes
        product.epsilon, product.offset = (
            int(np.float32(x).view(np.int32)) for x in (epsilon, offset)
        )
        clusters = min(clusters, sum(sizes) // (16 * variant.cluster))
        shared = variant.weight.shared_bytes(*inputs["x"].shape, *variant[1:4])
        assert library.shared_bytes(*inputs["x"].shape) == shared
        mistake = library.launch(
            ctypes.byref(product), clusters * variant.cluster, shared, seed,
            (Array * len(arrays))(*arrays), len(arrays),
        )  # fmt: skip
        assert mistake is None, mistake.decode()


def _aligned(size: int) -> np.ndarray:
    """Return an array of bytes that begins at a multiple of 16."""
    data = np.empty(size + 16, np.uint8)
    begin = -data.ctypes.data % 16
    return data[begin : begin + size]
