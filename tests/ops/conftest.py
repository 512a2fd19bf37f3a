from collections.abc import Iterator

import pytest

from jaxllm.ops import native


@pytest.fixture
def kernels() -> Iterator[None]:
    """Skips a test where there are none; the instruction set is afterwards what it was."""
    if native.isa() is None:
        pytest.skip("jaxllm is installed without its native kernels")
    before = native.isa()
    yield
    native.isa(before)
