"""A model over two processes on every axis of a mesh: what it says is what one process says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from tests.processes.conftest import WITHIN, free_port
from tests.twins import save_random

# Asked of a model on each mesh, and of the same model in one process.
ASKED = """
def asked(lm, names):
    one, four = [5, 9, 3, 7, 11, 2, 8, 4, 6], [[7, 3, 9], [4], [8, 6, 2, 1], [11, 12]]
    greedy = {"eos_token_id": [], "max_new_tokens": 7}
    drawn = {**greedy, "do_sample": True, "temperature": 0.8, "seed": 3}
    known = {
        "one": lambda: lm.generate(one, **greedy).tokens,
        "several": lambda: [found.tokens for found in lm.generate(four, **greedy)],
        "drawn": lambda: [found.tokens for found in lm.generate(four, **drawn)],
        "streamed": lambda: [piece.token for piece in lm.stream(one, **greedy)],
        "beams": lambda: lm.generate(one, num_beams=2, **greedy).tokens,
        "likelihood": lambda: lm.log_probs(one).tolist(),
        "vectors": lambda: lm.embed(four).tolist(),
    }
    return {name: known[name]() for name in names}
"""
PROGRAM = f"""
import json, sys
from jaxllm.runtime.multihost import Group, join_group
{ASKED}
address, number, model, options, names, *meshes = sys.argv[1:]
join_group(Group(address, 2, int(number)))
import jax, jaxllm
from jaxllm.sharding.shard_params import bytes_per_device
found = {{}}
for mesh in meshes:
    lm = jaxllm.load(model, dtype="float32", mesh=mesh, **json.loads(options))
    held, total = bytes_per_device(lm.params), sum(x.nbytes for x in jax.tree.leaves(lm.params))
    found[mesh] = {{"share": sum(held.values()) / total / len(held), **asked(lm, names.split(","))}}
print(json.dumps(found), file=sys.__stdout__, flush=True)  # `join_group` takes the others'
jax.distributed.shutdown()
"""
TEXTS = ("one", "several", "drawn", "streamed", "beams")  # ids, where numbers differ by rounding
ALL = (*TEXTS, "likelihood", "vectors")


def both(
    model: Path, devices: int, names: Sequence[str], meshes: Sequence[str], **options: Any
) -> list[dict[str, Any]]:
    """What each of two processes is told on each mesh, with so many devices each."""
    address = f"127.0.0.1:{free_port()}"
    given = str(model), json.dumps(options), ",".join(names), *meshes
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(number), *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
        )
        for number in (0, 1)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=4 * WITHIN)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


def expected(model: Path, names: Sequence[str], **options: Any) -> Any:
    scope: dict[str, Callable[..., Any]] = {}
    exec(ASKED, scope)
    return scope["asked"](jaxllm.load(model, dtype="float32", **options), names)


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
def test_every_axis_goes_over_processes(
    family: str,
    changes: dict[str, Any],
    devices: int,
    meshes: list[str],
    names: Sequence[str],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    save_random(tmp_path, family, **{layers: 2}, **changes)
    alone = expected(tmp_path, names, **options)
    for mine in both(tmp_path, devices, names, meshes, **options):
        for mesh in meshes:
            found = mine[mesh]
            for name in names:
                if name in TEXTS:
                    assert found[name] == alone[name], (mesh, name)
                else:
                    np.testing.assert_allclose(found[name], alone[name], rtol=1e-4, atol=2e-4)
            if "data" not in mesh and "sequence" not in mesh:  # which have weights whole
                assert found["share"] < 0.8, mesh
