"""docs/server.md: its commands and snippets run against a server."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from tests.conftest import ROOT
from tests.server.processes import RunningServer

PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    return found


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_snippets_run(
    number: int, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(blocks("python")[number].replace(ADDRESS, server.url), "server.md", "exec"), names)
    if "client" in names:
        names["client"].close()
    assert capsys.readouterr().out.strip()


def test_commands_run(server: RunningServer, shallow: Callable[[str], Path]) -> None:
    """The first command is what the fixture runs, with fewer layers; the others ask it, and get the
    text of `generate`.
    """
    first, *others = [command for block in blocks("sh") for command in block.splitlines()]
    assert first == "jaxllm serve demo:llama --port 8000"
    assert [command.split()[0] for command in others] == ["curl"]
    for command in others:
        if command.startswith("curl") and shutil.which("curl") is None:
            continue
        command = command.replace(ADDRESS, server.url)
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120
        )
        asked = json.loads(command.split("'")[1])
        expected = jaxllm.load(shallow("llama")).generate(
            asked["prompt"], max_new_tokens=asked["max_tokens"], seed=asked["seed"], temperature=1.0
        )
        assert json.loads(done.stdout)["choices"][0]["text"] == expected.text


def test_limits_of_page_are_those_of_code() -> None:
    pytest.importorskip("uvicorn")
    from jaxllm.server import listen
    from jaxllm.server.backend import ServerSettings

    settings = ServerSettings(("x",))
    row = (
        f"{listen.HEADER_SECONDS:g} s to send the headers, {settings.read_seconds:g} s for the body"
    )
    assert f"{row}, {listen.WRITE_SECONDS:g} s" in PAGE
    assert f"{listen.HEADER_BYTES >> 10} kB of headers" in PAGE
    assert f"{listen.MAX_CONNECTIONS:,} connections" in PAGE
    assert f"every {settings.ping_seconds:g} seconds" in PAGE
