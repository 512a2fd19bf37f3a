"""Tests on eight simulated devices run in a second process, which a worker starts once.

JAX fixes the number of devices at startup, and the other tests need one. So the tests of a module
marked `devices` run in a child process with eight devices, and their reports are forwarded.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

DEVICES = 8
REPORTS = "JAXLLM_TEST_REPORTS"  # in the child process: the file for its reports

_found = pytest.StashKey[dict[Path, dict[str, list[dict[str, Any]]]]]()
_child: list[subprocess.Popen[str]] = []  # the process with eight devices, once it is started


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


def pytest_unconfigure() -> None:
    for child in _child:
        child.communicate()  # it ends where its input does


def _run(item: pytest.Item, nodeids: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run the tests of a module in the child process; return their reports by node id."""
    if not _child or _child[0].poll() is not None:
        _child[:] = [_start(item.config.rootpath)]
    stdin, stdout = _child[0].stdin, _child[0].stdout
    assert stdin is not None and stdout is not None
    with tempfile.TemporaryDirectory(prefix="jaxllm-tests-") as folder:
        reports = Path(folder) / "reports"
        stdin.write(json.dumps([str(reports), nodeids]) + "\n")
        stdin.flush()
        output = []
        while (line := stdout.readline()) and line != f"{reports}\n":
            output.append(line)
        lines = reports.read_text().splitlines() if reports.exists() else []
    found: dict[str, list[dict[str, Any]]] = {}
    for data in map(json.loads, lines):
        found.setdefault(data["nodeid"], []).append(data)
    if any(nodeid not in found for nodeid in nodeids):
        last = "".join(output)[-8000:]
        item.config.get_terminal_writer().write(f"{item.path} stopped:\n{last}\n")
    return found


def _start(root: Path) -> subprocess.Popen[str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.sharding.conftest"],
        cwd=root,
        env={**plain, "JAX_NUM_CPU_DEVICES": str(DEVICES)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run_requests() -> None:
    """Run in the child process: pytest for each line of input, `[file for reports, node ids]`.

    The file's name is printed after each. Its programs are dropped: they would use up the process's
    memory maps.
    """
    for line in sys.stdin:
        os.environ[REPORTS], nodeids = json.loads(line)
        pytest.main(["-p", "no:cacheprovider", "-q", "-n", "0", "-m", "", *nodeids])
        jax.clear_caches()
        print(f"\n{os.environ[REPORTS]}")


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
