"""The kernels with every access to memory and every operation checked (`make sanitize`)."""

from pathlib import Path

import numpy as np
import pytest

from scripts.tools import sanitize
from tests.ops.random_cases import KERNELS


def test_random_cases_are_right(isa: str) -> None:
    """The same cases without the checks, a few of them every day."""
    for name, kernel in KERNELS.items():
        for case in range(60):
            with np.errstate(all="ignore"):
                assert kernel(np.random.default_rng([1, case]), isa), (name, case)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_no_kernel_reads_or_writes_outside_its_arrays(tmp_path: Path, kernels: None) -> None:
    try:
        environment = sanitize.build(tmp_path)
    except sanitize.Missing as missing:
        pytest.skip(f"{missing} is not installed")
    rows = sanitize.check(environment, cases=500, seed=1, through_xla=True)
    assert rows and all(row.cases for row in rows)
    assert not [row for row in rows if row.findings]
