"""Fixtures for tests on eight simulated devices, which run in a separate process per module.

JAX fixes the number of devices at startup, and the other tests need one. So a module marked
`devices` runs in a child process with eight devices, and its reports are forwarded.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

DEVICES = 8
REPORTS = "JAXLLM_TEST_REPORTS"  # in the child process: the file for its reports

_found = pytest.StashKey[dict[Path, dict[str, list[dict[str, Any]]]]]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (file := os.environ.get(REPORTS)) is not None:
        with open(file, "a") as out:
            out.write(json.dumps(_plain(report._to_json())) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if REPORTS in os.environ or item.get_closest_marker("devices") is None:
        return None
    modules = item.config.stash.setdefault(_found, {})
    if item.path not in modules:
        mine = [other.nodeid for other in item.session.items if other.path == item.path]
        modules[item.path] = _run(item, mine)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in modules[item.path].get(item.nodeid) or [_silent(item)]:
        hook.pytest_runtest_logreport(report=pytest.TestReport._from_json(data))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Tear down the fixtures of the previous test that the next one does not need.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _run(item: pytest.Item, nodeids: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run the tests of a module in a child process; return their reports by node id."""
    options = ["-p", "no:cacheprovider", "-q", "-n", "0", "-m", ""]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory(prefix="jaxllm-tests-") as folder:
        reports = Path(folder) / "reports"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *nodeids],
            cwd=item.config.rootpath,
            env={**plain, "JAX_NUM_CPU_DEVICES": str(DEVICES), REPORTS: str(reports)},
            capture_output=True,
            text=True,
        )
        lines = reports.read_text().splitlines() if reports.exists() else []
    found: dict[str, list[dict[str, Any]]] = {}
    for data in map(json.loads, lines):
        found.setdefault(data["nodeid"], []).append(data)
    missing = [nodeid for nodeid in nodeids if nodeid not in found]
    if missing:
        output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        item.config.get_terminal_writer().write(f"{item.path} stopped:\n{output}\n")
    return found


def _silent(item: pytest.Item) -> dict[str, Any]:
    """Return a failure report for a test whose process ended without one."""
    report = pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        "failed",
        "the process with eight devices ended before this test reported a result",
        "call",
    )
    return _plain(report._to_json())


def _plain(data: Any) -> Any:
    """Convert a report to JSON types."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return data if isinstance(data, str | int | float | bool | None) else str(data)
