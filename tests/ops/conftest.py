from collections.abc import Iterator

import pytest

from jaxllm.ops import native


@pytest.fixture
def kernels() -> Iterator[None]:
    """Skip without native kernels, and restore the instruction set afterwards."""
    if native.isa() is None:
        pytest.skip("jaxllm is installed without its native kernels")
    before = native.isa()
    yield
    native.isa(before)


@pytest.fixture(params=native.INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest, kernels: None) -> str:
    """Select each instruction set in turn; skip those that this machine lacks."""
    name: str = request.param
    if name not in native.available_isas():
        needs = native.INSTRUCTION_SETS[name]
        pytest.skip(f"{name} is not available: it requires {needs}, and a build that has it")
    native.isa(name)
    return name
