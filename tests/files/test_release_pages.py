"""release_pages: mapped files leave memory and read the same again."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from jaxllm.files import release_pages


def resident_kilobytes(path: Path) -> int:
    """Return the kilobytes of a mapped file that are resident."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    part = maps.split(str(path), 1)[1]
    return int(part.split("Rss:", 1)[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc/self/smaps")
def test_release_pages_frees_and_rereads_mapped_file(tmp_path: Path) -> None:
    """The mapped pages leave resident memory, and reading them again gives the same numbers."""
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(1 << 20, dtype=np.int64).tobytes())
    with path.open("rb") as file:
        array = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.int64)
    assert array.sum() == (1 << 19) * ((1 << 20) - 1)
    assert resident_kilobytes(path) > 8000  # of 8192
    begin = array.ctypes.data
    release_pages(begin + 8, begin + array.nbytes)  # the first page also holds other data
    assert resident_kilobytes(path) <= 2 * mmap.PAGESIZE // 1024
    assert array.sum() == (1 << 19) * ((1 << 20) - 1)


def test_release_pages_preserves_ordinary_memory() -> None:
    array = np.arange(1 << 18)
    release_pages(array.ctypes.data, array.ctypes.data + array.nbytes)
    np.testing.assert_array_equal(array, np.arange(1 << 18))
