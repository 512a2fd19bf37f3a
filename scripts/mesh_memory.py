"""Bytes of a checkpoint's weights on each device of a mesh, and what loading them so takes.

    python scripts/make_checkpoint.py tinyllama some-model --dtype bfloat16
    python scripts/mesh_memory.py some-model --meshes tensor=2 tensor=4 data=2,tensor=4

Each mesh has a process of its own, in which one processor passes for its devices: what the process
grew by is then that of all of them together. Planned: what `jaxllm plan` says a device holds.
"""

import argparse

from passing_for import said

NONE = "none"
CHILD = """
import json, resource, sys
import jax, jaxllm
from jaxllm.forms import open_checkpoint
from jaxllm.mesh.axes import Axes, parse
from jaxllm.mesh.placing import per_device
from jaxllm.mesh.rules import fitted
from jaxllm.plan import sizes

path, mesh, quantize = (None if x == "none" else x for x in sys.argv[1:])
jax.devices()

def grown():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = grown()
lm = jaxllm.load(path, mesh=mesh, quantize=quantize, show_progress=False)
after, opened = grown(), open_checkpoint(path)
axes = fitted(parse(mesh), lm.config) if mesh else Axes()
planned = sizes.weights(opened, lm.model.precision, axes, False, 1).held
held = per_device(lm.params)
print(json.dumps([max(held.values()), sum(held.values()), planned, after - before]))
"""


def measured(path: str, mesh: str, quantize: str) -> list[int]:
    """Of a mesh: bytes on its fullest device, on all, planned, and the most the process grew by."""
    return said(CHILD, None if mesh == NONE else mesh, path, mesh, quantize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="as jaxllm.load takes it")
    parser.add_argument("--meshes", nargs="+", default=[NONE, "tensor=2", "tensor=4"])
    parser.add_argument("--quantize", nargs="+", default=[NONE], help="none, int8, int4, ...")
    asked = parser.parse_args()
    print("| mesh | weights | MB on a device | planned | on all | the process grew by, MB |")
    print("|---|---|---|---|---|---|")
    for quantize in asked.quantize:
        for mesh in asked.meshes:
            held, total, planned, grew = (x / 1e6 for x in measured(asked.model, mesh, quantize))
            format = "as they are" if quantize == NONE else quantize
            print(
                f"| {mesh} | {format} | {held:.1f} | {planned:.1f} | {total:.1f} | {grew:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
