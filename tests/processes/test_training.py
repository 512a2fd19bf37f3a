"""Training by two processes: the losses, the state and the result of one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.processes.conftest import WITHIN, Start, ended, free_port, kill, together
from tests.processes.training import run
from tests.twins import save_random

ROOT = Path(__file__).parents[2]


def both(model: Path, out: Path, devices: int, *each: dict[str, Any]) -> list[Any]:
    """What two processes say of runs, one after the other; both say the same."""
    address = f"127.0.0.1:{free_port()}"
    given = str(model), str(out), json.dumps(each)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.training", address, str(number), *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
            cwd=ROOT,
        )
        for number in (0, 1)
    ]
    found = []
    for process in processes:
        said, err = process.communicate(timeout=3 * WITHIN)
        assert process.returncode == 0, err
        found.append(json.loads(said.splitlines()[-1]))
    assert found[0] == found[1]
    return list(found[0])


def assert_as_alone(found: Any, expected: Any, out: Path, alone: Path, kind: str) -> None:
    for mine, theirs in zip(found["records"], expected["records"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4)
    name = "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    weights, others = (load_file(folder / name) for folder in (out, alone))
    assert weights.keys() == others.keys()
    for name, x in others.items():
        np.testing.assert_allclose(weights[name], x, rtol=0, atol=2e-4 * max(1, np.abs(x).max()))


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "kind", "hows"),
    [
        (1, "full", [{"mesh": "data=2", "fsdp": True, "stop": 2}, {"mesh": "tensor=2"}]),
        (1, "full", [{"mesh": "stage=2", "stop": 1}, {"mesh": "data=2"}]),
        (2, "full", [{"mesh": "data=2,tensor=2", "fsdp": True}]),
        (1, "lora", [{"mesh": "tensor=2", "stop": 2}, {"mesh": "data=2"}]),
        (1, "dora", [{"mesh": "tensor=2", "stop": 1}, {"mesh": "tensor=2"}]),
    ],
)
def test_two_processes_train_as_one_and_go_on_from_its_state(
    devices: int, kind: str, hows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """One process begins, two go on, on one mesh after another, and write what one would have. What
    DoRA begins with is a sum over rows, of other bits on another mesh.
    """
    model, alone, out = (tmp_path / name for name in ("model", "alone", "out"))
    save_random(model, "llama", num_hidden_layers=2)
    expected = run(str(model), alone, kind=kind)
    assert kind == "dora" or run(str(model), out, kind=kind, stop=1) is None
    found = both(model, out, devices, *({"kind": kind, **how} for how in hows))
    assert found[:-1] == [None] * (len(hows) - 1)
    assert found[-1]["said"].startswith("going on after step ")
    assert_as_alone(found[-1], expected, out, alone, kind)
    assert not out.with_name("out.parts").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "model", "out"]
