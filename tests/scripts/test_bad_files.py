"""Invalid files on the commands: the short form of scripts/tools/bad_files.py."""

from pathlib import Path

import pytest

from scripts.tools.bad_files import READS, run_with_file

QUICK = [c for c in READS if " demo:" not in c and "-n 2" not in c]  # these load no model


@pytest.mark.parametrize("kind", ["missing", "empty", "junk", "directory"])
def test_commands_refuse_bad_files_in_one_line(kind: str, tmp_path: Path) -> None:
    """Every file option refuses a missing, empty, binary or directory path with one line."""
    bad = tmp_path / kind
    if kind == "directory":
        bad.mkdir()
    elif kind != "missing":
        bad.write_bytes(b"" if kind == "empty" else bytes(range(256)))
    for command in QUICK:
        outcome = run_with_file(kind, command, bad, tmp_path)
        assert outcome.passes, outcome.row()
