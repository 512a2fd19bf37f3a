"""Bytes that training needs on each device, with and without FSDP: counted, nothing is run.

    python scripts/fsdp_memory.py demo:llama --meshes data=2 data=8 data=2,tensor=4

State: weights in float32, and Adam's two moments. Temporary: what XLA says that a step's compiled
program takes beside what it is given, gradients above all. Each mesh has a process of its own, in
which one processor passes for its devices.
"""

import argparse

from passing_for import said

CHILD = """
import json, sys
import jax, jaxllm, numpy as np
from jaxllm.mesh.placing import per_device
from jaxllm.train import jobs
from jaxllm.train.data.rows import Rows
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup, start, train_step
from jaxllm.train.trained import ALL, split

path, mesh, rows, length = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
found = []
for fsdp in (False, True):
    lm = jaxllm.load(path, dtype="float32", mesh=mesh, fsdp=fsdp, show_progress=False)
    trained, rest = split(lm.params, ALL, None, lm.model.names)
    setup = Setup(lm.model, jobs.NextToken(), Optimizer(steps=3))
    state, ids = start(trained, setup), np.ones((1, rows, length), np.int32)
    place = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    given = Rows(ids, ids, place, np.zeros_like(ids))
    lowered = train_step.lower(state, rest, None, given, jax.random.key(0), setup=setup)
    took = lowered.compile().memory_analysis().temp_size_in_bytes
    found += [max(per_device(state).values()), took]
print(json.dumps(found))
"""


def measured(model: str, mesh: str, rows: int, length: int) -> list[int]:
    """Of a device, bytes of the state and of what is temporary, without and then with FSDP."""
    return said(CHILD, mesh, model, mesh, rows, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="as jaxllm.load takes it")
    parser.add_argument("--meshes", nargs="+", default=["data=2", "data=4", "data=8"])
    parser.add_argument("--rows", type=int, default=8, help="of a batch (8)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (128)")
    asked = parser.parse_args()
    print("| mesh | state, MB | with --fsdp | temporary, MB | with --fsdp |\n|---|---|---|---|---|")
    for mesh in asked.meshes:
        found = [x / 1e6 for x in measured(asked.model, mesh, asked.rows, asked.length)]
        kept, took, part_kept, part_took = found
        cells = [f"{x:.2f}" for x in (kept, part_kept, took, part_took)]
        print(f"| {mesh} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
