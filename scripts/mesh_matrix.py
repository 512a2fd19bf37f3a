"""Families x meshes x kinds of numbers: what a mesh changes beside one device, as a table.

    python scripts/mesh_matrix.py --out build/mesh_matrix.md
    python scripts/mesh_matrix.py --families llama gpt2 --precisions float32 --out build/few.md

Tiny random models on eight devices, for which one processor passes. Cells are kept beside the table
as they are found, one a line: who is interrupted goes on.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
from family_lines import ROOT  # its folder is the script's own

from jaxllm.errors import JaxllmError
from jaxllm.progress import steps_bar

sys.path.insert(
    0, str(ROOT)
)  # the tests' tiny models stand beside, in no package that is installed
from tests.mesh.made import FAMILIES
from tests.mesh.matrix import CLOSE, MESHES, PRECISIONS, TRAINED, cell, left_out

SAME = ("generated", "drawn", "served")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES, metavar="NAME")
    parser.add_argument("--precisions", nargs="+", default=[*PRECISIONS], choices=PRECISIONS)
    parser.add_argument("--meshes", nargs="+", default=MESHES, metavar="MESH")
    parser.add_argument("--out", type=Path, required=True, help="the table, Markdown")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # before they are looked for
    kept = given.out.with_suffix(".jsonl")
    found = {}
    if kept.exists():
        lines = map(json.loads, kept.read_text().splitlines())
        found = {tuple(key): what for key, what in lines}
    wanted = [
        (family, mesh, precision)
        for family in given.families
        for precision in given.precisions
        for mesh in given.meshes
    ]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a") as out, steps_bar("cells", len(wanted)) as done:
        for family, mesh, precision in wanted:
            key = (family, mesh, precision)
            if key not in found and not left_out(*key):
                found[key] = made(*key)
                out.write(json.dumps([key, found[key]]) + "\n")
                out.flush()
                jax.clear_caches()
            done()
    given.out.write_text(table(given, found), "utf-8")
    print(f"{given.out}: {len(found)} cells")


def made(family: str, mesh: str, precision: str) -> dict[str, object]:
    try:
        return dataclasses.asdict(cell(family, mesh, precision))
    except (JaxllmError, AssertionError) as error:
        return {"error": str(error)}


def table(given: argparse.Namespace, found: dict[tuple[str, str, str], dict[str, object]]) -> str:
    """The largest differences of logits and after a training step, and what is not the same."""
    lines = [
        "# What a mesh changes",
        "",
        "Tiny random models on eight devices, for which one processor passes, beside one device:",
        "`python scripts/mesh_matrix.py --out build/mesh_matrix.md`. Each cell has the largest",
        "difference of logits, of the largest one, and that of a parameter after a training step",
        "of 0.01 (all weights in float32, an adapter beside integers), of its largest number or 1.",
        "Where nothing else is said, greedy, drawn and served texts are the same tokens.",
        "",
        "In stages, Gemma 2 and 3, SmolLM3 and Qwen2 have one layer more than there are stages, in",
        "patterns that stages cut: windows, rotary settings of their own, layers without rotation.",
        "",
    ]
    for precision in given.precisions:
        lines += [f"## {precision}", "", "| family |" + "".join(f" {m} |" for m in given.meshes)]
        lines += ["|---|" + "---|" * len(given.meshes)]
        for family in given.families:
            row = [shown(found.get((family, mesh, precision))) for mesh in given.meshes]
            lines.append(f"| {family} |" + "".join(f" {x} |" for x in row))
        lines.append("")
    return "\n".join(lines)


def shown(one: dict[str, object] | None) -> str:
    if one is None:
        return "-"
    if "error" in one:
        return str(one["error"])[:60]
    wrong = [name for name in SAME if not one[name]]
    said = f"{one['logits']:.0e} / {one['trained']:.0e}"
    far = one["logits"] >= CLOSE or one["trained"] >= TRAINED  # type: ignore[operator]
    return said + ("".join(f", not {name}" for name in wrong)) + (", too far" if far else "")


if __name__ == "__main__":
    main()
