"""The kernels for aarch64 under an emulator (`make test-arm`)."""

from pathlib import Path

import pytest

from scripts.tools import run_arm


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_kernels_for_aarch64_are_right_under_an_emulator(tmp_path: Path) -> None:
    try:
        status, output = run_arm.run(tmp_path, seed=1)
    except run_arm.Missing as missing:
        pytest.skip(f"{missing} is not installed")
    assert not status, output
