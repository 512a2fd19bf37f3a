"""What the package is made of, counted."""

import subprocess
import sys
from pathlib import Path

from scripts.tools.count_lines import Counts, count_source, find_single_importers, read_sources

SOURCE = '''"""A module.

Two lines of docstring.
"""

from typing import Any, NamedTuple


class Point(NamedTuple):  # a record
    """A point."""

    x: int  # code, with a comment
    y: Any

    def check(self) -> Any:
        text = """
        code
        """
        raise ValueError(text)


class Plain:
    pass
'''


def test_counts_of_a_module() -> None:
    """Comments, blank lines and docstrings are no code; the lines of other strings are."""
    assert count_source(SOURCE) == Counts(
        files=1, lines=23, code=11, classes=2, records=1, raises=1, any_lines=2
    )
    assert count_source("") == Counts(files=1)


def test_modules_with_one_importer() -> None:
    """Names that are imported from a package count as its modules, if they are."""
    sources = {
        "a": "from a import one\nimport a.two",
        "a.one": "from a.two import f",
        "a.two": "",
        "b": "from a.one import g as one",
        "c": "import b",
    }
    assert find_single_importers(sources) == {"b": "c"}


def test_rooms_of_this_package_add_up() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, root / "scripts/tools/count_lines.py", "--rooms", "convert"]
    table = subprocess.check_output(command, text=True).splitlines()
    files = len(read_sources(root / "convert"))
    (total,) = (line.split() for line in table if line.startswith("sum "))
    assert int(total[1]) == files > 20
    rooms = {line.split()[0] for line in table[1:-2]}
    assert rooms == {"convert", "convert.gguf"}
