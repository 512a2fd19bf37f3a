"""Each process reads and keeps its own share of the weights, and no more."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import WITHIN, free_port
from tests.twins import save_random

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
PROGRAM = """
import json, re, sys
from pathlib import Path
from jaxllm.distributed import Group, join
from jaxllm.mesh.placing import Shared, per_device

def anonymous():  # bytes of this process's own, without what is mapped from files
    said = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", said)[1]) << 10

asked = [0]  # bytes of the checkpoint's tensors
tensor = Shared.tensor

def counted(self, path, lazy, read, exact):
    def one(some):
        asked[0] += some.nbytes
        return read(some)

    return tensor(self, path, lazy, one, exact)

Shared.tensor = counted
address, number, small, model, quantize, mesh = sys.argv[1:]
join(Group(address, 2, int(number)))
import jax, jaxllm
jaxllm.load(small, mesh=mesh, quantize=quantize or None)  # code and threads are not counted
asked[0], before = 0, anonymous()
lm = jaxllm.load(model, mesh=mesh, quantize=quantize or None)
print(json.dumps({
    "devices": sum(per_device(lm.params).values()),
    "all": sum(x.nbytes for x in jax.tree.leaves(lm.params)),
    "anonymous": anonymous() - before,
    "read": asked[0],
}), file=sys.__stdout__, flush=True)  # of all but the first join takes stdout
jax.distributed.shutdown()
"""


def shares(small: Path, model: Path, quantize: str, mesh: str) -> list[dict[str, Any]]:
    """What each of two processes has of a model that both have loaded."""
    address = f"127.0.0.1:{free_port()}"
    given = str(small), str(model), quantize, mesh
    at_once = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed is given back, by glibc
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(number), *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **at_once, "JAX_NUM_CPU_DEVICES": "1"},
        )
        for number in (0, 1)
    ]
    found = []
    for process in both:
        out, err = process.communicate(timeout=2 * WITHIN)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("quantize", "mesh"), [("", "tensor=2"), ("int8", "tensor=2"), ("", "stage=2")]
)
def test_each_process_has_its_share_of_the_weights(
    tmp_path: Path, quantize: str, mesh: str
) -> None:
    small, model = tmp_path / "small", tmp_path / "model"
    save_random(small, "llama", num_hidden_layers=2)
    save_random(model, "llama", **SIZES)
    total = (model / "model.safetensors").stat().st_size
    for mine in shares(small, model, quantize, mesh):
        assert mine["devices"] < 0.51 * mine["all"]
        # Made small by the way, what is split by columns is read whole, a matrix at a time: of
        # columns alone the numbers would have other scales.
        assert mine["read"] < (0.75 if quantize else 0.51) * total
        assert mine["anonymous"] < mine["devices"] + (0.3 if quantize else 0.15) * total
