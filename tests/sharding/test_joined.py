"""What was cut for a mesh is written as it was before: whole weights, each in its format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.adapters import LoraConfig
from jaxllm.sharding.shard_list import ShardList
from jaxllm.train import jobs
from jaxllm.train.checkpointing import collect_settings, open_journal
from jaxllm.train.loop import TrainPlan
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.prompt_jobs import prompt_tuning
from jaxllm.train.qat.job import qat
from jaxllm.train.step import Setup
from jaxllm.weights.formats import as_weight, parse_format
from jaxllm.weights.paths import Params, flatten, map_leaves
from tests.sharding.made import one, spread
from tests.twins import save_random, tokens

pytestmark = pytest.mark.devices
FULL = pytest.mark.full
# Of which four devices have whole groups of 64 columns each, in three runs too.
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
BEGUN: dict[str, Callable[[jaxllm.LM], jobs.TrainJob]] = {
    "lora": lambda lm: jobs.lora(lm, LoraConfig(r=2, target_modules="all-linear")),
    "qat": lambda lm: qat(lm, "int4-g32", start_step=1),
    "prompt": lambda lm: prompt_tuning(lm, [5, 6, 7]),
}
OFTEN = ("int4", "nf4-f32", "bfloat16-2:4")
FORMATS = (
    "bf16-packed", "int8", "int8-g64", "int4-g32-zp", "int3-g64-f16", "int2-g32", "int8-2:4",
    "bfloat16-bitmap",
)  # fmt: skip


def kept_as(name: str, leaf: Any) -> Any:
    """A matrix in a format, of which as much is zero as it wants."""
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
def test_shares_of_every_format_are_the_weight_again(family: str, mesh: str, name: str) -> None:
    model, params = one(family, **SIZES[family])
    kept = map_leaves(lambda _, leaf: kept_as(name, leaf), params)
    over, shares = spread(model, kept, mesh)
    assert any(isinstance(x, ShardList) for _, x in flatten(shares))
    assert_same(over.gather(shares), kept)


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_a_model_that_was_quantized_on_a_mesh_is_saved_for_one_device(
    name: str, tmp_path: Path
) -> None:
    save_random(tmp_path / "floats", "gpt2", **SIZES["gpt2"])
    given = {"dtype": "float32", "quantize": name}
    lm = jaxllm.load(tmp_path / "floats", mesh="data=2,tensor=2", **given)
    lm.save(tmp_path / "written")
    found = jaxllm.load(tmp_path / "written")
    assert_same(found.params, lm.model.gather(lm.params))
    whole = jaxllm.load(tmp_path / "floats", **given)
    if name == "int8":  # the absmax of nf4 have float32 once they are cut
        assert_same(found.params, whole.params)
    prompt = tokens(2, 5)
    logits = [jaxllm.forward(m.model, m.params, None, prompt).logits for m in (found, whole)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(x, marks=FULL) for x in ("qat", "prompt"))]
)
def test_what_is_trained_goes_on_on_another_mesh(kind: str, tmp_path: Path) -> None:
    """The digest of a run that is kept is of whole weights, whatever mesh has shares of them."""
    found = set()
    for mesh in (None, "data=2", "tensor=2"):
        base = None if kind == "qat" else "int8"
        lm = jaxllm.load("demo:gpt2", dtype="float32", quantize=base, mesh=mesh)
        job = BEGUN[kind](lm)
        setup = Setup(job.model, job.objective, Optimizer(steps=1))
        params = job.model.gather(job.params)
        settings = collect_settings(setup, TrainPlan(steps=1))
        found.add(open_journal(params, job.extra_inputs, settings, tmp_path).digest)
    assert len(found) == 1
