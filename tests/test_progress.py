"""The progress bar appears on a terminal and in a notebook that a person watches."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.runtime.progress import bytes_bar


@pytest.mark.parametrize(("show", "seen"), [(True, True), (False, False), (None, False)])
def test_bytes_bar_writes_only_to_stderr(
    show: bool | None, seen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar appears on stderr if shown; by default only on a terminal."""
    with bytes_bar("loading tinyllama", 100, show) as advance:
        advance(60)
        advance(40)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("loading tinyllama" in err) is seen


# Runs cells in a Jupyter kernel; prints the frames of each cell's display. The second cell waits
# longer than the delay, the third is run as by nbclient, the fourth is captured.
KERNEL = """
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel()
bar = "import time\\nwith progress.bytes_bar('loading tiny', 100) as advance:\\n  advance(60)\\n"
slow = bar + "  time.sleep(0.6)"
begin = "from jaxllm.runtime import progress; progress.NOTEBOOK_DELAY = 0.2"
cells = (begin, True), (bar, True), (slow, True), (slow, False), ("%%capture\\n" + slow, True)
for code, watched in cells:
    frames = []

    def note(message):
        if message["msg_type"] in ("stream", "display_data", "update_display_data", "error"):
            content = message["content"]
            frames.append(content["data"]["text/plain"] if "data" in content else str(content))

    client.execute_interactive(code, allow_stdin=watched, output_hook=note, timeout=60)
    print(frames)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.mark.more
def test_bar_appears_in_watched_notebook_after_delay(tmp_path: Path) -> None:
    folders = {name: str(tmp_path) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], capture_output=True, text=True, env=os.environ | folders
    )
    assert done.returncode == 0, done.stderr
    begin, quick, slow, executed, captured = map(ast.literal_eval, done.stdout.splitlines())
    assert begin == quick == executed == captured == []
    assert slow[0].startswith("loading tiny") and "60/100 bytes" in slow[0]
    assert slow[-1] == ""
