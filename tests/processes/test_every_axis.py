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
def asked(lm):
    one, four = [5, 9, 3, 7, 11, 2, 8, 4, 6], [[7, 3, 9], [4], [8, 6, 2, 1], [11, 12]]
    greedy = {"eos_token_id": [], "max_new_tokens": 7}
    drawn = {**greedy, "do_sample": True, "temperature": 0.8, "seed": 3}
    return {
        "one": lm.generate(one, **greedy).tokens,
        "several": [found.tokens for found in lm.generate(four, **greedy)],
        "drawn": [found.tokens for found in lm.generate(four, **drawn)],
        "streamed": [piece.token for piece in lm.stream(one, **greedy)],
        "beams": lm.generate(one, num_beams=2, **greedy).tokens,
        "likelihood": lm.log_probs(one).tolist(),
        "vectors": lm.embed(four).tolist(),
    }
"""
PROGRAM = f"""
import json, sys
from jaxllm.distributed import Group, join
{ASKED}
address, number, model, options, *meshes = sys.argv[1:]
join(Group(address, 2, int(number)))
import jax, jaxllm
from jaxllm.mesh.placing import per_device
found = {{}}
for mesh in meshes:
    lm = jaxllm.load(model, dtype="float32", mesh=mesh, **json.loads(options))
    held, total = per_device(lm.params), sum(x.nbytes for x in jax.tree.leaves(lm.params))
    found[mesh] = {{"share": sum(held.values()) / total / len(held), **asked(lm)}}
print(json.dumps(found), file=sys.__stdout__, flush=True)  # of all but the first join takes stdout
jax.distributed.shutdown()
"""
EXACT = ("one", "several", "drawn", "streamed", "beams")  # ids, where numbers differ by rounding


def both(model: Path, devices: int, meshes: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """What each of two processes is told on each mesh, with so many devices each."""
    address = f"127.0.0.1:{free_port()}"
    given = str(model), json.dumps(options), *meshes
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


def expected(model: Path, **options: Any) -> Any:
    scope: dict[str, Callable[[Any], Any]] = {}
    exec(ASKED, scope)
    return scope["asked"](jaxllm.load(model, dtype="float32", **options))


@pytest.mark.parametrize(
    ("family", "changes", "devices", "meshes", "options"),
    [
        ("llama", {}, 1, ["stage=2"], {}),
        pytest.param(
            "llama", {}, 1, ["sequence=2", "sequence=2:heads"], {}, marks=pytest.mark.full
        ),
        pytest.param(
            "gpt2",
            {},
            2,
            ["data=2,stage=2", "sequence=2,tensor=2"],
            {},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "mixtral", {"num_local_experts": 4}, 1, ["expert=2"], {}, marks=pytest.mark.full
        ),
        pytest.param(
            "mixtral",
            {"num_local_experts": 4},
            2,
            ["data=2,expert=2", "stage=2,expert=2"],
            {"quantize": "int8"},
            marks=pytest.mark.full,
        ),
    ],
)
def test_every_axis_goes_over_processes(
    family: str,
    changes: dict[str, Any],
    devices: int,
    meshes: list[str],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    save_random(tmp_path, family, **{layers: 2}, **changes)
    alone = expected(tmp_path, **options)
    for mine in both(tmp_path, devices, meshes, **options):
        for mesh in meshes:
            found = mine[mesh]
            assert {name: found[name] for name in EXACT} == {n: alone[n] for n in EXACT}, mesh
            for name in ("likelihood", "vectors"):
                np.testing.assert_allclose(found[name], alone[name], rtol=1e-4, atol=2e-4)
            if "data" not in mesh and "sequence" not in mesh:  # which have weights whole
                assert found["share"] < 0.8, mesh
