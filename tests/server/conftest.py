"""A running `jaxllm serve` of two layers of demo:llama for the tests of this folder."""

from collections.abc import Iterator
from typing import Any

import pytest

import jaxllm
from tests.server.browser import Browser, open_browser
from tests.server.processes import RunningServer, make_client, start_server

NAMES = ("demo", "gpt-4o", "demo:llama")


@pytest.fixture(scope="session")
def server(shallow: Any) -> Iterator[RunningServer]:
    names = [f"--name={name}" for name in NAMES]
    with start_server(*names, "--rows", "16", model=str(shallow("llama"))) as running:
        yield running


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of coroutine tests."""
    return "asyncio"


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with make_client(server.url) as client:
        yield client


@pytest.fixture(scope="session")
def lm(shallow: Any) -> Any:
    return jaxllm.load(shallow("llama"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened
