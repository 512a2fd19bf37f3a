"""Each process reads, holds and writes only its own share of the weights."""

from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import run_both
from tests.tiny_models import save_random

# The vocabulary divides into two stages, so that the state has no padding, which is not saved.
SIZES = {"vocab_size": 132, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc returns freed memory immediately
PROGRAM = """
import json, re, sys
from pathlib import Path
from jaxllm.runtime.multihost import Group, join_group
from jaxllm.sharding.shard_params import ParamSharder, bytes_per_device

def anonymous():  # resident bytes of this process without mapped files
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) << 10

read_bytes = [0]  # bytes read from the checkpoint's tensors
tensor = ParamSharder.load_tensor

def counted(self, path, lazy, read, exact):
    def count(part):
        read_bytes[0] += part.nbytes
        return read(part)

    return tensor(self, path, lazy, count, exact)

ParamSharder.load_tensor = counted
address, number, small, model, quantize, mesh = sys.argv[1:]
join_group(Group(address, 2, int(number)))
import jax, jaxllm
jaxllm.load(small, mesh=mesh, quantize=quantize or None)  # code and threads are not counted
read_bytes[0], before = 0, anonymous()
lm = jaxllm.load(model, mesh=mesh, quantize=quantize or None)
print(json.dumps({
    "devices": sum(bytes_per_device(lm.params).values()),
    "all": sum(x.nbytes for x in jax.tree.leaves(lm.params)),
    "anonymous": anonymous() - before,
    "read": read_bytes[0],
}), file=sys.__stdout__, flush=True)  # `join_group` redirects stdout
jax.distributed.shutdown()
"""


STATE_PROGRAM = """
import json, re, sys
from pathlib import Path
from jaxllm.runtime.multihost import Group, join_group

def status_bytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def peak_growth(work):  # growth of the peak resident size during `work`
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current size
    before = status_bytes("VmRSS")
    found = work()
    return found, status_bytes("VmHWM") - before

address, number, small, model, mesh, out = sys.argv[1:]
join_group(Group(address, 2, int(number)))
import jax, jaxllm
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.train import jobs
from jaxllm.train.checkpointing import StateStore
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.checkpointing import StateLayout
from jaxllm.train.step import Setup, init_state
from jaxllm.train.partition import partition

def measured(path, out):
    lm = jaxllm.load(path, mesh=mesh, fsdp=mesh.startswith("data"), dtype="float32")
    trained, rest = partition(lm.params, names=lm.model.unsharded_paths)
    layout = StateLayout.from_model(lm.model, rest)
    setup = Setup(lm.model, NextToken(), Optimizer(steps=2))
    state, store = init_state(trained, setup), TensorStore(out)
    states = StateStore(store, layout, {})
    with store.lock():
        save_growth = peak_growth(lambda: states.save(state, {}))[1]
        found, load_growth = peak_growth(lambda: states.load(state))
        again = [bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (found[0], state)))]
        del found
    export_growth = peak_growth(lambda: lm.save(out / "model"))[1]
    arrays = [x for x in jax.tree.leaves(state) if x.ndim]
    total, mine = (sum(size(x) for x in arrays) for size in (lambda x: x.nbytes, here))
    largest = max(x.nbytes for x in arrays)
    return {"state": total, "mine": mine, "largest": largest, "keep": save_growth,
            "read": load_growth, "save": export_growth, "again": all(again)}

def here(x):
    return sum(shard.data.nbytes for shard in x.addressable_shards)

measured(small, Path(out) / "small")  # code and programs are not counted
print(json.dumps(measured(model, Path(out) / "model")), file=sys.__stdout__, flush=True)
jax.distributed.shutdown()
"""


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    """The directories of a small and a large model."""
    save_random(tmp_path / "small", "llama", num_hidden_layers=2)
    save_random(tmp_path / "model", "llama", **SIZES)
    return str(tmp_path / "small"), str(tmp_path / "model")


@pytest.mark.full
@pytest.mark.parametrize(
    ("quantize", "mesh"), [("", "tensor=2"), ("int8", "tensor=2"), ("", "stage=2")]
)
def test_process_loads_its_share_of_weights(models: Any, quantize: str, mesh: str) -> None:
    """Each of two processes holds about half of the weight bytes, and reads and allocates little
    more.
    """
    total = Path(models[1], "model.safetensors").stat().st_size
    for mine in run_both(["-c", PROGRAM], *models, quantize, mesh, **RETURN_MEMORY):
        assert mine["devices"] < 0.51 * mine["all"]
        # If quantized while loading, column-split matrices are read in full, one at a time: the
        # scales depend on all columns.
        assert mine["read"] < (0.75 if quantize else 0.51) * total
        assert mine["anonymous"] < mine["devices"] + (0.3 if quantize else 0.15) * total


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data=2", "stage=2"])
def test_train_state_io_needs_no_full_copy(models: Any, tmp_path: Path, mesh: str) -> None:
    """Saving and loading a train state, and saving the model, allocate beyond a process's own share
    less than 20% of the state.
    """
    out = str(tmp_path / "out")
    for mine in run_both(["-c", STATE_PROGRAM], *models, mesh, out, **RETURN_MEMORY):
        print(mesh, mine)
        assert mine["again"] and mine["mine"] < 0.55 * mine["state"]
        for what, own in (("keep", 0), ("read", mine["mine"]), ("save", 0)):
            assert mine[what] < own + 0.2 * mine["state"], (what, mine)
