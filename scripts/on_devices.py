"""A program in a process of its own, in which one processor passes for all devices of a mesh."""

import json
import os
import subprocess
import sys


def said_on(mesh: str | None, program: str, *given: object) -> list[int]:
    """The list that a Python program prints last, as JSON. given: its arguments.

    The script ends where the program fails, with the last line of what it said.
    """
    devices = 1
    for part in mesh.split(",") if mesh else ():
        devices *= int(part.partition("=")[2].partition(":")[0])
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, given)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr.splitlines()[-1])
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found
