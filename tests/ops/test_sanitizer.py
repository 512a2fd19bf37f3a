"""The kernels under the address and undefined-behavior sanitizers (`make sanitize`)."""

from pathlib import Path

import numpy as np
import pytest

from scripts.tools import sanitize
from tests.ops.random_cases import KERNELS


def test_kernels_pass_random_cases(isa: str) -> None:
    """The kernels pass random cases in a normal build, a few of those that the sanitizer build
    runs.
    """
    for name, kernel in KERNELS.items():
        for case in range(60):
            with np.errstate(all="ignore"):
                assert kernel(np.random.default_rng([1, case]), isa), (name, case)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_sanitizer_finds_no_invalid_kernel_access(tmp_path: Path, kernels: None) -> None:
    """The sanitizer build reports no read or write outside the arrays and no undefined
    operation.
    """
    try:
        environment = sanitize.build(tmp_path)
    except sanitize.Missing as missing:
        pytest.skip(f"{missing} is not installed")
    rows = sanitize.check(environment, cases=500, seed=1, through_xla=True)
    assert rows and all(row.cases for row in rows)
    assert not [row for row in rows if row.findings]
