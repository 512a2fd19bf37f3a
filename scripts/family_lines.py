"""Count what a family of models takes: lines of its module, its table and its tests.

python scripts/family_lines.py [NAME ...]

Lines are those of the files, docstrings and blank ones too. Tests: the row in tests/twins.py, which
puts the family through the gate of tests/models/test_families.py, and tests/models/test_NAME.py
where the family has tests of its own.
"""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Lines(NamedTuple):
    """Of one family."""

    module: int
    table: int
    tests: int


def count(name: str) -> Lines:
    """What a family takes, by the name of its files."""
    own = ROOT / "tests" / "models" / f"test_{name}.py"
    tests = _lines(own) if own.exists() else 0
    return Lines(
        module=_lines(ROOT / "jaxllm" / "models" / f"{name}.py"),
        table=_lines(ROOT / "convert" / f"{name}.py"),
        tests=tests + _row(name),
    )


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _row(name: str) -> int:
    """Lines of the family's row in `KINDS`."""
    tree = ast.parse((ROOT / "tests" / "twins.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "KINDS":
            assert isinstance(node.value, ast.Dict)
            for key, row in zip(node.value.keys, node.value.values, strict=True):
                if key is not None and ast.literal_eval(key) == name:
                    return (row.end_lineno or row.lineno) - row.lineno + 1
    raise SystemExit(f"tests/twins.py has no row {name!r} in KINDS")


def main(names: list[str]) -> None:
    """Print a table of the families, all of them where none is named."""
    if not names:
        from jaxllm.models import FAMILIES

        names = list(FAMILIES)
    print("| family | module | table | tests |\n|---|---|---|---|")
    for name in names:
        print(f"| {name} | {' | '.join(map(str, count(name)))} |")


if __name__ == "__main__":
    main(sys.argv[1:])
