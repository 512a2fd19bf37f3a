"""A running `jaxllm serve demo:llama` for the tests of this folder."""

from collections.abc import Iterator
from typing import Any

import pytest

import jaxllm
from tests.server.processes import RunningServer, make_client, start_server

NAMES = ("demo", "gpt-4o", "demo:llama")


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with start_server(*(f"--name={name}" for name in NAMES), "--rows", "16") as running:
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
def lm() -> Any:
    return jaxllm.load("demo:llama")
