"""docs/devices.md: its example and its commands run."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")


@pytest.mark.devices
def test_devices_page_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "devices.md", "exec"), {"__name__": "__main__"})
    spec, shares, collectives = capsys.readouterr().out.splitlines()
    assert "tensor" in spec
    assert shares.count(":") == 4
    assert "all-reduce" in collectives


def test_devices_page_commands_run() -> None:
    """The commands of docs/devices.md that README.md does not contain run without error."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in "".join(found).splitlines():
        if line not in readme and line.startswith("jaxllm "):
            words = shlex.split(line)
            done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
