"""Functions of the vector layer, on the sets of this machine, against NumPy in float64."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.ops.test_sources import NEEDS, SOURCES

LAYERS = {"portable": "portable.h", "avx2": "avx2.h", "avx512": "avx512.h", "neon": "neon.h"}

PROGRAM = """
#include <cstdio>
#include "vector.h"
using namespace jaxllm;
int main() {
  float in[kLanes], out[kLanes];
  while (std::fread(in, sizeof in, 1, stdin) == 1) {
    store(out, tanh_of(load<Floats>(in)));
    std::fwrite(out, sizeof out, 1, stdout);
  }
}
"""


def _numbers() -> np.ndarray:
    """Return values of every magnitude, around the point where the formulas meet, inf and NaN."""
    rng = np.random.default_rng(0)
    size = np.concatenate([
        np.exp2(rng.uniform(-126, 127, 100_000)), rng.uniform(0, 12, 200_000),
        [0, 0.625, np.nextafter(np.float32(0.625), np.float32(1)), np.inf, np.nan],
    ]).astype(np.float32)  # fmt: skip
    both = np.concatenate([size, -size])
    return np.pad(both, (0, -len(both) % 64))


def test_tanh_is_within_two_ulps(isa: str, tmp_path: Path) -> None:
    """tanh is within 2 ulps of float64, bounded by 1, exact at infinity, and NaN
    exactly for NaN.
    """
    if isa not in LAYERS:
        pytest.skip("uses the layer of another instruction set")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not available")
    (tmp_path / "main.cc").write_text(PROGRAM)
    flags = NEEDS.get(LAYERS[isa], "-DPLAIN").split()
    command = ["g++", "-std=gnu++17", "-O1", "-w", *flags, f"-I{SOURCES}", "main.cc", "-o", "main"]
    layer = f'-DJAXLLM_LAYER="layers/{LAYERS[isa]}"'
    subprocess.run([*command, layer], cwd=tmp_path, check=True)
    x = _numbers()
    done = subprocess.run([tmp_path / "main"], input=x.tobytes(), capture_output=True, check=True)
    ours, exact = np.frombuffer(done.stdout, np.float32), np.tanh(x.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(x))
    real = ~np.isnan(x)
    off = np.abs(ours.astype(np.float64) - exact)[real]
    unit = np.spacing(np.abs(exact[real]).astype(np.float32))
    assert (off <= 2 * unit).all() and off.max() <= 1e-7
    assert (np.abs(ours[real]) <= 1).all()
    np.testing.assert_array_equal(ours[np.isinf(x)], np.sign(x[np.isinf(x)]))
