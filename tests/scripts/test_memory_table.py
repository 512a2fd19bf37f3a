"""The table of memory: a process says what it held, and the goal is what it should be."""

from pathlib import Path

import memory_table
import pytest

pytestmark = pytest.mark.skipif(
    "VmHWM" not in memory_table.resident(), reason="no /proc that says what a process holds"
)


def test_a_process_is_watched_while_it_loads_and_decodes(tmp_path: Path) -> None:
    found = memory_table.measured(
        "demo:llama", "int8", "int8", prompt=20, new=4, programs=str(tmp_path)
    )
    assert any(tmp_path.iterdir())  # its programs
    assert 1.0e6 < found.weights < 1.6e6  # a million of 8 bits, and the norms
    assert 0 < found.cache < 1e6
    assert 1e8 < found.imported <= found.loaded <= found.peak.resident < 1e9
    assert found.peak.anonymous < found.peak.resident
    assert found.goal == 1.1 * (found.weights + found.cache) + 0.2e9


def test_a_command_that_fails_ends_the_table() -> None:
    with pytest.raises(memory_table.subprocess.CalledProcessError):
        memory_table.watched(["false"], {})
