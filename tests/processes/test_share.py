"""Each process reads, keeps and writes its own share of the weights, and no more."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import WITHIN, free_port
from tests.twins import save_random

# A vocabulary that two stages divide: what a state has beyond one is nobody's, and is not kept.
SIZES = {"vocab_size": 132, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
PROGRAM = """
import json, re, sys
from pathlib import Path
from jaxllm.runtime.multihost import Group, join_group
from jaxllm.sharding.shard_params import ParamSharder, bytes_per_device

def anonymous():  # bytes of this process's own, without what is mapped from files
    said = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", said)[1]) << 10

asked = [0]  # bytes of the checkpoint's tensors
tensor = ParamSharder.load_tensor

def counted(self, path, lazy, read, exact):
    def one(some):
        asked[0] += some.nbytes
        return read(some)

    return tensor(self, path, lazy, one, exact)

ParamSharder.load_tensor = counted
address, number, small, model, quantize, mesh = sys.argv[1:]
join_group(Group(address, 2, int(number)))
import jax, jaxllm
jaxllm.load(small, mesh=mesh, quantize=quantize or None)  # code and threads are not counted
asked[0], before = 0, anonymous()
lm = jaxllm.load(model, mesh=mesh, quantize=quantize or None)
print(json.dumps({
    "devices": sum(bytes_per_device(lm.params).values()),
    "all": sum(x.nbytes for x in jax.tree.leaves(lm.params)),
    "anonymous": anonymous() - before,
    "read": asked[0],
}), file=sys.__stdout__, flush=True)  # `join_group` takes the others'
jax.distributed.shutdown()
"""


KEEPING = """
import json, re, sys
from pathlib import Path
from jaxllm.runtime.multihost import Group, join_group

def said(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def most(work):  # bytes by which the process grows meanwhile, of all pages that it has
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = said("VmRSS")
    found = work()
    return found, said("VmHWM") - before

address, number, small, model, mesh, out = sys.argv[1:]
join_group(Group(address, 2, int(number)))
import jax, jaxllm
from jaxllm.checkpoints.resume import Journal
from jaxllm.train import jobs
from jaxllm.train.checkpointing import load_state, save_state
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.sharded_state import StateLayout
from jaxllm.train.step import Setup, init_state
from jaxllm.train.partition import partition

def measured(path, out):
    lm = jaxllm.load(path, mesh=mesh, fsdp=mesh.startswith("data"), dtype="float32")
    trained, rest = partition(lm.params, names=lm.model.unsharded_paths)
    form = StateLayout.from_model(lm.model, rest)
    setup = Setup(lm.model, NextToken(), Optimizer(steps=2))
    state, journal = init_state(trained, setup), Journal(out)
    with journal.lock():
        kept_by = most(lambda: save_state(journal, state, {}, form))[1]
        found, read_by = most(lambda: load_state(journal, state, form))
        again = [bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (found[0], state)))]
        del found
    saved_by = most(lambda: lm.save(out / "model"))[1]
    arrays = [x for x in jax.tree.leaves(state) if x.ndim]
    total, mine = (sum(size(x) for x in arrays) for size in (lambda x: x.nbytes, here))
    largest = max(x.nbytes for x in arrays)
    return {"state": total, "mine": mine, "largest": largest, "keep": kept_by, "read": read_by,
            "save": saved_by, "again": all(again)}

def here(x):
    return sum(shard.data.nbytes for shard in x.addressable_shards)

measured(small, Path(out) / "small")  # code and programs are not counted
print(json.dumps(measured(model, Path(out) / "model")), file=sys.__stdout__, flush=True)
jax.distributed.shutdown()
"""


def of_both(program: str, *given: str) -> list[dict[str, Any]]:
    """What each of two processes says of itself."""
    address = f"127.0.0.1:{free_port()}"
    at_once = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed is given back, by glibc
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(number), *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **at_once, "JAX_NUM_CPU_DEVICES": "1"},
        )
        for number in (0, 1)
    ]
    found = []
    for process in both:
        out, err = process.communicate(timeout=4 * WITHIN)
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
    for mine in of_both(PROGRAM, str(small), str(model), quantize, mesh):
        assert mine["devices"] < 0.51 * mine["all"]
        # Made small by the way, what is split by columns is read whole, a matrix at a time: of
        # columns alone the numbers would have other scales.
        assert mine["read"] < (0.75 if quantize else 0.51) * total
        assert mine["anonymous"] < mine["devices"] + (0.3 if quantize else 0.15) * total


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data=2", "stage=2"])
def test_no_process_needs_room_for_a_whole_state(tmp_path: Path, mesh: str) -> None:
    """A state, three times the weights, is kept and read, and the model written, a few arrays at a
    time. What a process takes for its own share of what it reads is not counted.
    """
    small, model = tmp_path / "small", tmp_path / "model"
    save_random(small, "llama", num_hidden_layers=2)
    save_random(model, "llama", **SIZES)
    for mine in of_both(KEEPING, str(small), str(model), mesh, str(tmp_path / "out")):
        print(mesh, mine)
        assert mine["again"] and mine["mine"] < 0.55 * mine["state"]
        for what, own in (("keep", 0), ("read", mine["mine"]), ("save", 0)):
            assert mine[what] < own + 0.2 * mine["state"], (what, mine)
