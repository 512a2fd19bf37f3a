"""Count what the package is made of: lines, records, errors, uses of Any, small modules.

    python scripts/tools/count_lines.py
    python scripts/tools/count_lines.py --rooms jaxllm convert tests

A line of code is neither blank nor a comment nor a docstring. A record is a class of fields: a
dataclass, or one that derives from NamedTuple, PyTreeNode, Struct or TypedDict.
"""

import argparse
import ast
import dataclasses
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD_BASES = {"NamedTuple", "PyTreeNode", "Struct", "TypedDict"}
IGNORED_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclasses.dataclass
class Counts:
    """Counts of a folder; `any_lines` are lines that name Any."""

    files: int = 0
    lines: int = 0
    code: int = 0
    classes: int = 0
    records: int = 0
    raises: int = 0
    any_lines: int = 0

    def add(self, other: "Counts") -> None:
        for field in dataclasses.fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


def count_source(source: str) -> Counts:
    """Count one module."""
    tree = ast.parse(source)
    docs = {line for node in ast.walk(tree) for line in _docstring_lines(node)}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in IGNORED_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "Any"]
    return Counts(
        files=1,
        lines=len(source.splitlines()),
        code=len(code - docs),
        classes=len(classes),
        records=sum(map(_is_record, classes)),
        raises=sum(isinstance(node, ast.Raise) for node in ast.walk(tree)),
        any_lines=len({node.lineno for node in names}),
    )


def _docstring_lines(node: ast.AST) -> Iterable[int]:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(node, owners) or ast.get_docstring(node, clean=False) is None:
        return ()
    first = node.body[0]
    return range(first.lineno, (first.end_lineno or first.lineno) + 1)


def _is_record(node: ast.ClassDef) -> bool:
    made = {_last_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
    return "dataclass" in made or bool(RECORD_BASES & {_last_name(base) for base in node.bases})


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def find_single_importers(sources: dict[str, str]) -> dict[str, str]:
    """Return the modules, by dotted name, that exactly one other module imports, and that module.

    Args:
        sources: The source of each module by its dotted name; packages have their folder's.
    """
    importers: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for imported in _imported_names(ast.parse(source)):
            if imported in importers and imported != name:
                importers[imported].add(name)
    return {name: next(iter(by)) for name, by in importers.items() if len(by) == 1}


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_sources(folder: Path) -> dict[str, str]:
    """Return the sources of a folder by dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(
            encoding="utf-8"
        )
    return found


def main() -> None:
    """Print a row for each room, the largest first, and the sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=["jaxllm", "convert"], help="folders")
    rooms: dict[str, Counts] = defaultdict(Counts)
    sources: dict[str, str] = {}
    for folder in parser.parse_args().rooms:
        if not (ROOT / folder).is_dir():
            sys.exit(f"{folder} is not a folder of the repository")
        for name, source in read_sources(ROOT / folder).items():
            sources[f"jaxllm.{name}" if folder == "convert" else name] = source
            room = ".".join(name.split(".")[:2])
            is_folder = (ROOT / room.replace(".", "/")).is_dir()
            for key in (room if is_folder else folder, "sum"):
                rooms[key].add(count_source(source))
    total = rooms.pop("sum", Counts())
    print(f"{'room':22}" + "".join(f"{field.name:>11}" for field in dataclasses.fields(Counts)))
    for room, counts in [*sorted(rooms.items(), key=lambda row: -row[1].lines), ("sum", total)]:
        print(f"{room:22}" + "".join(f"{count:>11,}" for count in dataclasses.astuple(counts)))
    print(f"modules with one importer: {len(find_single_importers(sources))}")


if __name__ == "__main__":
    main()
