"""A running `jaxllm serve demo:llama` for the tests of this folder."""

from collections.abc import Iterator
from typing import Any

import pytest

import jaxllm
from tests.server.processes import RunningServer, start_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with start_server("--name", "demo", "--name", "gpt-4o", "--rows", "16") as running:
        yield running


@pytest.fixture(scope="session")
def lm() -> Any:
    return jaxllm.load("demo:llama")
