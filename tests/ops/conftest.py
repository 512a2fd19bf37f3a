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


@pytest.fixture(params=native.INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest, kernels: None) -> str:
    """Each instruction set in turn, taken; what this machine has not is skipped by its name."""
    name: str = request.param
    if name not in native.available_isas():
        pytest.skip(f"{name} is not there: it takes {native.INSTRUCTION_SETS[name]}")
    native.isa(name)
    return name
