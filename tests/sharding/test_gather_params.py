"""Gathering sharded parameters restores the original weights in their formats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.adapters import LoraConfig
from jaxllm.research.qat.job import qat
from jaxllm.sharding.shard_list import ShardList
from jaxllm.train import jobs
from jaxllm.train.checkpointing import collect_settings, open_store
from jaxllm.train.frozen_prefix import prompt_tuning
from jaxllm.train.loop import TrainPlan
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup
from jaxllm.weights.formats import as_weight, parse_format
from jaxllm.weights.paths import Params, flatten, map_leaves
from tests.sharding.tiny_models import make_model, shard_model
from tests.tiny_models import save_random, tokens

pytestmark = pytest.mark.devices
FULL = pytest.mark.full
# Each of four devices holds whole groups of 64 columns, also in fused matrices.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gpt2": {"n_embd": 256, "n_inner": 256},
}
JOBS: dict[str, Callable[[jaxllm.LM], jobs.TrainJob]] = {
    "full": jobs.full_finetune,
    "lora": lambda lm: jobs.lora(lm, LoraConfig(r=2, target_modules="all-linear")),
    "qat": lambda lm: qat(lm, "int4-g32", start_step=1),
    "prompt": lambda lm: prompt_tuning(lm, [5, 6, 7]),
}
OFTEN = ("int4", "nf4-f32", "bfloat16-2:4")
FORMATS = (
    "bf16-packed", "int8", "int8-g64", "int4-g32-zp", "int3-g64-f16", "int2-g32", "int8-2:4",
    "bfloat16-bitmap",
)  # fmt: skip


def quantize_leaf(name: str, leaf: Any) -> Any:
    """Return a matrix in a format, pruned first if the format is sparse."""
    if leaf.ndim != 2:
        return leaf
    array = np.array(leaf)
    if "2:4" in name:
        array.reshape(-1, 4)[:, 1:3] = 0
    if "bitmap" in name:
        array[np.abs(array) < np.quantile(np.abs(array), 0.5)] = 0
    exact = "bfloat16" if name.startswith("b") else "float32"
    return parse_format(name).quantize(jax.numpy.asarray(array, exact))


def assert_same(found: Params, expected: Params) -> None:
    theirs = dict(flatten(expected))
    for path, leaf in flatten(found):
        mine, other = as_weight(leaf), as_weight(theirs[path])
        assert mine.format == other.format, path
        assert mine.arrays().keys() == other.arrays().keys(), path
        for name, piece in mine.arrays().items():
            np.testing.assert_array_equal(piece, other.arrays()[name], err_msg=f"{path}{name}")


@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(x, marks=FULL) for x in FORMATS)])
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "tensor=4"),
        pytest.param("llama", "data=2,stage=2,tensor=2", marks=FULL),
        pytest.param("gpt2", "tensor=2", marks=FULL),
        pytest.param("gpt2", "stage=2,tensor=4", marks=FULL),
    ],
)
def test_gather_restores_weights_of_every_format(family: str, mesh: str, name: str) -> None:
    """Gathering the shards of a weight gives its original arrays, bit for bit, in every format."""
    model, params = make_model(family, **SIZES[family])
    quantized = map_leaves(lambda _, leaf: quantize_leaf(name, leaf), params)
    over, shares = shard_model(model, quantized, mesh)
    assert any(isinstance(x, ShardList) for _, x in flatten(shares))
    assert_same(over.gather(shares), quantized)


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_model_quantized_on_mesh_saves_for_single_device(name: str, tmp_path: Path) -> None:
    """A model quantized on a mesh saves as unsharded weights with the logits of one quantized on
    one device.
    """
    save_random(tmp_path / "floats", "gpt2", **SIZES["gpt2"])
    given = {"dtype": "float32", "quantize": name}
    lm = jaxllm.load(tmp_path / "floats", mesh="data=2,tensor=2", **given)
    lm.save(tmp_path / "written")
    found = jaxllm.load(tmp_path / "written")
    assert_same(found.params, lm.model.gather(lm.params))
    whole = jaxllm.load(tmp_path / "floats", **given)
    # Sharding stores the absmax of nf4 in float32, of which XLA may round a product first.
    if name == "int8":
        assert_same(found.params, whole.params)
    prompt = tokens(2, 5)
    logits = [jaxllm.forward(m.model, m.params, None, prompt).logits for m in (found, whole)]
    np.testing.assert_allclose(*logits, rtol=0, atol=0 if name == "int8" else 1e-4)


@pytest.mark.parametrize(
    "kind", ["lora", "full", *(pytest.param(x, marks=FULL) for x in ("qat", "prompt"))]
)
def test_training_digest_is_equal_on_every_mesh(kind: str, tmp_path: Path) -> None:
    """The digest of a training run depends on the unsharded weights, so that it can resume on
    another mesh.
    """
    found, floats = set(), kind in ("qat", "full")
    for mesh in (None, "data=2", "tensor=2", *(["data=2,stage=2,tensor=2"] if floats else [])):
        given: Any = {"mesh": mesh, "fsdp": kind == "full" and mesh == "data=2"}
        given |= {"quantize": None if floats else "int8"}
        lm = jaxllm.load("demo:gpt2", dtype="float32", **given)
        job = JOBS[kind](lm)
        setup = Setup(job.model, job.objective, Optimizer(steps=1))
        params = job.model.gather(job.params)
        settings = collect_settings(setup, TrainPlan(steps=1))
        found.add(open_store(params, job.extra_inputs, settings, tmp_path).digest)
    assert len(found) == 1
