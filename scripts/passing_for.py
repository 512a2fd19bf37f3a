"""What a program says of a mesh, in a process of its own where one processor passes for devices."""

import json
import os
import subprocess
import sys
from typing import Any

from jaxllm.mesh.axes import parse


def said(program: str, mesh: str | None, *given: object) -> list[Any]:
    """The JSON of the last line that Python's `program` prints, of these arguments (`sys.argv`).

    mesh: as many devices as it takes are there; None: one. Ends the script where the program fails.
    """
    devices = 1 if mesh is None else parse(mesh).devices
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, given)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr.splitlines()[-1])
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found
