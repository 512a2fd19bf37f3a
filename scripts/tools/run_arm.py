"""The kernels for aarch64, cross-compiled and run under an emulator: `make test-arm`.

Debian's g++-aarch64-linux-gnu builds them with `arm_driver.cc`, and qemu-user runs the driver on
seeded random cases. One decision: this script computes the expected results in float64, so that the
driver only compares. The exit status is 1 if a result is wrong. `--library _kernels.so` runs the
cases on the library of a wheel instead.
"""

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SOURCES = ROOT / "jaxllm" / "ops" / "native" / "csrc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"  # the libraries that Debian's compiler links
SETS = {  # as in CMakeLists.txt
    "portable": ("portable", []),
    "neon": ("neon", []),
    "neon_dot": ("neon", ["-march=armv8.2-a+dotprod"]),
    "neon_bf16": ("neon", ["-march=armv8.2-a+dotprod+bf16"]),
}


class Missing(Exception):
    """A required program is not installed."""


def build(folder: Path, library: Path | None) -> Path:
    """Build the driver, with the kernels of the sources or of a library; return its path.

    Raises:
        Missing: if the compiler or the emulator is not installed.
    """
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            raise Missing(program)
    options = [COMPILER, "-std=gnu++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]

    def compile_set(name: str) -> str:
        layer, flags = SETS[name]
        out = str(folder / f"{name}.o")
        define = [f"-DJAXLLM_SET={name}", f'-DJAXLLM_LAYER="layers/{layer}.h"']
        subprocess.run(
            [*options, *flags, *define, "-c", str(SOURCES / "isa_kernels.cc"), "-o", out],
            check=True,
        )
        return out

    if library:
        kernels = ["-DJAXLLM_LIBRARY", str(library), f"-Wl,-rpath,{library.parent}"]
    else:
        with ThreadPoolExecutor(2) as pool:
            kernels = ["-static", *pool.map(compile_set, SETS)]
    driver = folder / "driver"
    source = str(ROOT / "scripts" / "tools" / "arm_driver.cc")
    subprocess.run([*options, source, *kernels, "-o", str(driver)], check=True)
    return driver


def _pack_array(x: np.ndarray | None) -> bytes:
    if x is None:
        return struct.pack("q", -1)
    raw = np.ascontiguousarray(x).tobytes()
    return struct.pack("q", len(raw)) + raw


def _pack_head(kernel: int, name: str) -> bytes:
    return struct.pack("qq", kernel, len(name)) + name.encode()


def _pack_weight(matrix: Any) -> bytes:
    w = matrix.native
    numbers = (
        w.kind,
        w.rows,
        w.columns,
        w.stride,
        w.group,
        w.groups,
        w.half,
        w.base,
        w.nibble_stride,
        w.escapes,
        w.mask_stride,
        w.values,
        w.blocks,
        w.e2m1,
    )
    nibbles, _, begin, column, value = matrix.packed or [None] * 5
    scale, *codebooks = [*matrix.codebook, *[None] * 5][:5]
    scale = matrix.scale if scale is None and not matrix.blocks else scale
    arrays = (matrix.data, scale, matrix.zero, nibbles, begin, column, value)
    arrays += (matrix.mask, matrix.begin, *codebooks)
    return struct.pack("14q", *map(int, numbers)) + b"".join(map(_pack_array, arrays))


def pack_cases(seed: int) -> bytes:
    """Return all cases in the driver's format."""
    from jaxllm.ops.native import Kind
    from tests.ops.ctypes_kernels import bfloat16
    from tests.ops.samples import FORMATS, INPUTS, brute_force, cached, inputs, rounded

    rng, out = np.random.default_rng(seed), []
    for name, draw in FORMATS.items():
        for outputs, columns in ((1, 1), (7, 100), (33, 200), (10, 1300), (4, 0)):
            matrix = draw(rng, outputs, columns)
            answer = _pack_array(matrix.numbers) + _pack_array(2e-7 * np.abs(matrix.numbers))
            head = _pack_head(1, f"dequantize {name} {outputs} {columns}")
            out.append(head + _pack_weight(matrix) + answer)
            for dtype, kind, rows in (
                (np.dtype(np.float32), "normal", 1), (bfloat16, "normal", 3),
                (np.dtype(np.float32), "lone giants", 5), (bfloat16, "near the top", 18),
                (np.dtype(np.float32), str(rng.choice(list(INPUTS))), 2),
            ):  # fmt: skip
                x = inputs(rng, kind, (rows, columns), dtype)
                for int8 in (False, True)[: 1 + matrix.is_integer]:
                    x_64 = (rounded(x, matrix.group) if int8 else x).astype(np.float64)
                    exact, size = x_64 @ matrix.numbers.T, np.abs(x_64) @ matrix.magnitudes.T
                    bound = 1e-6 * max(1.0, (columns / 2048) ** 0.5) * size + 1e-37 * (columns + 1)
                    bound[(size > 3e38)] = np.inf
                    head = _pack_head(0, f"{name} {outputs} {columns} {kind} {dtype} {rows} {int8}")
                    flags = struct.pack("qqq", dtype == bfloat16, rows, int8)
                    arrays = b"".join(map(_pack_array, (x, exact, bound)))
                    out.append(head + _pack_weight(matrix) + flags + arrays)
    for kind in (Kind.FLOAT32, Kind.BFLOAT16, Kind.FLOAT16, Kind.INT8):
        for dtype in (np.dtype(np.float32), bfloat16):
            for B, T, N, K, H, S, window, cap in (
                (1, 1, 4, 2, 20, 90, None, 0), (3, 1, 4, 4, 32, 1030, 7, 0),
                (2, 19, 6, 2, 64, 70, None, 0), (2, 3, 4, 2, 96, 0, None, 0),
                (1, 1, 8, 1, 64, 600, None, 0), (2, 19, 6, 2, 64, 70, 9, 2),
                (1, 1, 4, 2, 20, 600, None, 50),
            ):  # fmt: skip
                part_rows = [(1, 1, 1), (1, 1, B), (B, B, 1), (B, 1, B)]
                parts = [cached(rng, kind, r, (S + i, K, H)) for i, r in enumerate(part_rows)]
                q = rng.normal(0, 1, (B, T, N, H)).astype(dtype)
                at = rng.integers(-1, 60, (B, T)).astype(np.int32)
                exact, size = brute_force(q, at, parts, 0.3, window, cap or None)
                bound = (5e-6 if dtype == np.float32 else 2**-7) * (size + 1e-3)
                head = _pack_head(
                    2, f"attend {kind.name} {dtype} {(B, T, N, K, H, S, window, cap)}"
                )
                limit = -1 if window is None else window
                out.append(head + struct.pack("7q", dtype == bfloat16, B, T, N, K, H, limit))
                out += map(_pack_array, (np.array([0.3, cap], np.float32), q, at))
                out.append(struct.pack("q", len(parts)))
                for p in parts:
                    shared = [len(a) == 1 for a in (p.k, p.v, p.position)]
                    out.append(struct.pack("5q", kind, *shared, p.k.shape[1]))
                    out += map(_pack_array, (p.k, p.v, p.k_scale, p.v_scale, p.position))
                out += map(_pack_array, (exact, bound))
    return b"".join(out)


def run(folder: Path, seed: int, library: Path | None = None) -> tuple[int, str]:
    """Run the driver; return its exit status and its output.

    Raises:
        Missing: if the compiler or the emulator is not installed.
    """
    driver = build(folder, library and library.resolve())
    file = folder / "cases"
    file.write_bytes(pack_cases(seed))
    command = [EMULATOR, "-L", SYSROOT, str(driver), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, metavar="_kernels.so")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            status, output = run(Path(folder), options.seed, options.library)
        except Missing as missing:
            print(f"skipped: {missing} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
            return 0
    print(output, end="")
    return status


if __name__ == "__main__":
    sys.exit(main())
