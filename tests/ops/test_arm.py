"""The kernels for aarch64 under an emulator (`make test-arm`)."""

from pathlib import Path

import pytest

from scripts.tools import run_arm


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_aarch64_kernels_pass_under_emulator(tmp_path: Path) -> None:
    try:
        status, output = run_arm.run(tmp_path, seed=1)
    except run_arm.Missing as missing:
        pytest.skip(f"{missing} is not installed")
    assert not status, output
