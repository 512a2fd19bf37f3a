"""What logits that are divided over the vocabulary save in a training step: nothing is run.

    python scripts/logits_memory.py some-model/config.json --meshes tensor=2 tensor=4

Of a model's first two layers. Temporary: what XLA says that a step's compiled program takes beside
what it is given. Each mesh has a process of its own, in which one processor passes for its devices.
"""

import argparse

from on_devices import said_on  # its folder is the script's own

CHILD = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from jaxllm.mesh.axes import parse
from jaxllm.mesh import Meshed, meshed
from jaxllm.models import build, param_shapes
from jaxllm.plan.opening import opened_for
from jaxllm.train.data.rows import Rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup, start, train_step
from jaxllm.train.trained import ALL, split
from jaxllm.weights.paths import map_leaves
from jaxllm.weights.precision import Precision

path, mesh, rows, length = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
config = opened_for(Path(path) if path.endswith('.json') else path).config
config = config.with_layers(range(max(2, parse(mesh).stage)))
whole = map_leaves(lambda _, x: jnp.zeros(x.shape, jnp.float32), param_shapes(build(config)))
found = []
divided = Meshed.with_parallel_logits
for way in (lambda model: model, divided):
    Meshed.with_parallel_logits = way  # which objectives ask for
    jax.clear_caches()
    model = meshed(config, Precision(), parse(mesh))
    trained, rest = split(model.shared(whole), ALL, None, model.names)
    setup = Setup(model, NextToken(), Optimizer(steps=3))
    state, ids = start(trained, setup), np.ones((1, rows, length), np.int32)
    place = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    given = Rows(ids, ids, place, np.zeros_like(ids))
    lowered = train_step.lower(state, rest, None, given, jax.random.key(0), setup=setup)
    found.append(lowered.compile().memory_analysis().temp_size_in_bytes)
print(json.dumps([config.vocab_size, *found]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "model", help="a checkpoint or its config.json, of which the sizes are taken"
    )
    parser.add_argument("--meshes", nargs="+", default=["tensor=2", "tensor=4"])
    parser.add_argument("--rows", type=int, default=8, help="of a batch (8)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (512)")
    asked = parser.parse_args()
    print("| mesh | vocabulary | whole logits: temporary, MB | divided |\n|---|---|---|---|")
    for mesh in asked.meshes:
        size, *held = said_on(mesh, CHILD, asked.model, mesh, asked.rows, asked.length)
        cells = " | ".join(f"{x / 1e6:.0f}" for x in held)
        print(f"| {mesh} | {size} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
