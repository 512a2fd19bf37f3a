"""Invalid files on the commands: the short form of scripts/tools/bad_files.py."""

from pathlib import Path

import pytest

from scripts.tools.bad_files import READS, run_with_file

QUICK = [c for c in READS if " demo:" not in c and "-n 2" not in c]  # nothing is loaded


@pytest.mark.parametrize("kind", ["missing", "empty", "junk", "directory"])
def test_whatever_is_read_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    bad = tmp_path / kind
    if kind == "directory":
        bad.mkdir()
    elif kind != "missing":
        bad.write_bytes(b"" if kind == "empty" else bytes(range(256)))
    for command in QUICK:
        outcome = run_with_file(kind, command, bad, tmp_path)
        assert outcome.passes, outcome.row()
