"""Tests on eight simulated devices run in a second process, which a worker starts once.

JAX fixes the number of devices at startup, and the other tests need one. So the tests of a module
marked `devices` run in a child process with eight devices, and each report is forwarded as its test
ends.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import pytest

DEVICES = 8
REPORTS = "JAXLLM_TEST_REPORTS"  # in the child process: the descriptor for its reports


class _Child(NamedTuple):
    """The process with eight devices."""

    process: subprocess.Popen[str]
    reports: TextIO
    """Its reports, a line of JSON each, as its tests end; `null` after the last of a module."""
    output: TextIO


_started: list[_Child] = []  # none or one
_found: dict[Path, dict[str, list[dict[str, Any]]]] = {}  # reports by module and node id


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORTS in os.environ:
        line = json.dumps(_plain(report._to_json())) + "\n"
        os.write(int(os.environ[REPORTS]), line.encode())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if REPORTS in os.environ or item.get_closest_marker("devices") is None:
        return None
    if item.path not in _found:
        _found[item.path] = {}
        mine = [other.nodeid for other in item.session.items if other.path == item.path]
        _request(item, mine)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in _wait_for_reports(item):
        hook.pytest_runtest_logreport(report=pytest.TestReport._from_json(data))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Tear down the fixtures of the previous test that the next one does not need.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_unconfigure() -> None:
    if _started:
        _end()


def _request(item: pytest.Item, nodeids: list[str]) -> None:
    """Let the child process run the tests of a module."""
    while _started and _next_report() is not None:  # the rest of the module before
        pass
    if _started and _started[0].process.poll() is not None:
        _end()
    if not _started:
        _started.append(_start(item.config.rootpath))
    stdin = _started[0].process.stdin
    assert stdin is not None
    maxfail = item.config.getoption("maxfail") or 0
    stdin.write(json.dumps([f"--maxfail={maxfail}", *nodeids]) + "\n")
    stdin.flush()


def _wait_for_reports(item: pytest.Item) -> list[dict[str, Any]]:
    """Return the reports of a test, once it or its process has ended."""
    found = _found[item.path]
    while not any(report["when"] == "teardown" for report in found.get(item.nodeid, [])):
        report = _next_report()
        if report is None:
            output = _started[0].output
            output.seek(0)
            item.config.get_terminal_writer().write(
                f"{item.path} stopped:\n{output.read()[-8000:]}\n"
            )
            output.seek(0)
            output.truncate()  # the module's other tests say only that they did not run
            return [*found.get(item.nodeid, []), _silent(item)]
        found.setdefault(report["nodeid"], []).append(report)
    return found[item.nodeid]


def _next_report() -> dict[str, Any] | None:
    """Return the next report; None after the last of a module, and if the process has ended."""
    line = _started[0].reports.readline()
    if not line:
        _started[0].process.wait()
    report: dict[str, Any] | None = json.loads(line or "null")
    return report


def _start(root: Path) -> _Child:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.sharding.conftest"],
        cwd=root,
        env={**plain, "JAX_NUM_CPU_DEVICES": str(DEVICES), REPORTS: str(write)},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=[write],
    )
    os.close(write)  # so that reading ends where the process does
    return _Child(process, os.fdopen(read), output)


def _end() -> None:
    child = _started.pop()
    child.process.communicate()  # it ends where its input does
    child.reports.close()
    child.output.close()


def _run_requests() -> None:
    """Run in the child process: pytest for each line of input, its arguments.

    Its programs are dropped after each: they would use up the process's memory maps.
    """
    for line in sys.stdin:
        pytest.main(["-p", "no:cacheprovider", "-q", "-n", "0", "-m", "", *json.loads(line)])
        jax.clear_caches()
        os.write(int(os.environ[REPORTS]), b"null\n")


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


if __name__ == "__main__":
    _run_requests()
