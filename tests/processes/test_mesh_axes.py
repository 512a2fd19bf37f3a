"""A model over two processes, on every mesh axis, gives the results of a single process."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from tests.processes.conftest import run_both
from tests.tiny_models import save_random

# Runs on each mesh, and in a single process.
RUN = """
def run(lm, names):
    one, four = [5, 9, 3, 7, 11, 2, 8, 4, 6], [[7, 3, 9], [4], [8, 6, 2, 1], [11, 12]]
    greedy = {"eos_token_id": [], "max_new_tokens": 7}
    sampled = {**greedy, "do_sample": True, "temperature": 0.8, "seed": 3}
    runs = {
        "one": lambda: lm.generate(one, **greedy).tokens,
        "several": lambda: [x.tokens for x in lm.generate(four, **greedy)],
        "sampled": lambda: [x.tokens for x in lm.generate(four, **sampled)],
        "streamed": lambda: [piece.token for piece in lm.stream(one, **greedy)],
        "beams": lambda: lm.generate(one, num_beams=2, **greedy).tokens,
        "likelihood": lambda: lm.log_probs(one).tolist(),
        "vectors": lambda: lm.embed(four).tolist(),
    }
    return {name: runs[name]() for name in names}
"""
PROGRAM = f"""
import json, sys
from jaxllm.runtime.multihost import Group, join_group
{RUN}
address, number, model, options, names, *meshes = sys.argv[1:]
join_group(Group(address, 2, int(number)))
import jax, jaxllm
from jaxllm.sharding.shard_params import bytes_per_device
found = {{}}
for mesh in meshes:
    lm = jaxllm.load(model, dtype="float32", mesh=mesh, **json.loads(options))
    held, total = bytes_per_device(lm.params), sum(x.nbytes for x in jax.tree.leaves(lm.params))
    found[mesh] = {{"share": sum(held.values()) / total / len(held), **run(lm, names.split(","))}}
print(json.dumps(found), file=sys.__stdout__, flush=True)  # `join_group` redirects stdout
jax.distributed.shutdown()
"""
TEXTS = ("one", "several", "sampled", "streamed", "beams")  # token ids; the rest differ by rounding
ALL = (*TEXTS, "likelihood", "vectors")


def expected(model: Path, names: Sequence[str], **options: Any) -> Any:
    scope: dict[str, Callable[..., Any]] = {}
    exec(RUN, scope)
    return scope["run"](jaxllm.load(model, dtype="float32", **options), names)


FULL = pytest.mark.full
FOUR = {"num_local_experts": 4}


@pytest.mark.parametrize(
    ("family", "changes", "devices", "meshes", "names", "options"),
    [
        ("llama", {}, 1, ["stage=2"], ("several", "likelihood"), {}),
        pytest.param("llama", {}, 1, ["stage=2"], ALL, {}, marks=FULL),
        pytest.param("llama", {}, 1, ["sequence=2", "sequence=2:heads"], ALL, {}, marks=FULL),
        pytest.param("gpt2", {}, 2, ["data=2,stage=2", "sequence=2,tensor=2"], ALL, {}, marks=FULL),
        pytest.param("mixtral", FOUR, 1, ["expert=2"], ALL, {}, marks=FULL),
        pytest.param(
            "mixtral",
            FOUR,
            2,
            ["data=2,expert=2", "stage=2,expert=2"],
            ALL,
            {"quantize": "int8"},
            marks=FULL,
        ),
    ],
)
def test_every_mesh_axis_equals_single_process(
    family: str,
    changes: dict[str, Any],
    devices: int,
    meshes: list[str],
    names: Sequence[str],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """On every mesh axis, two processes generate, stream and score like one process, and each holds
    a share of the weights.
    """
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    save_random(tmp_path, family, **{layers: 2}, **changes)
    single = expected(tmp_path, names, **options)
    given = str(tmp_path), json.dumps(options), ",".join(names), *meshes
    for results in run_both(["-c", PROGRAM], *given, devices=devices):
        for mesh in meshes:
            found = results[mesh]
            for name in names:
                if name in TEXTS:
                    assert found[name] == single[name], (mesh, name)
                else:
                    np.testing.assert_allclose(found[name], single[name], rtol=1e-4, atol=2e-4)
            if "data" not in mesh and "sequence" not in mesh:  # these axes replicate the weights
                assert found["share"] < 0.8, mesh
