"""A few fuzz cases of each kind, and earlier findings."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.kinds import KINDS
from tests.fuzz.run import make_bases, run_cases, table

CASES = 5  # per kind; `make fuzz` runs thousands
FOUND = json.loads((Path(__file__).parent / "found.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with valid files of each kind."""
    directory = tmp_path_factory.mktemp("bases")
    make_bases(directory, KINDS)
    return directory


def test_mutated_files_load_or_raise_jaxllm_errors(bases: Path) -> None:
    """Each mutated file, including earlier findings, loads or raises a JaxllmError, and most are
    refused.
    """
    found = [(kind, seed) for kind, seeds in FOUND.items() for seed in seeds]
    cases = [(kind, seed) for kind in KINDS for seed in range(CASES)]
    results = list(run_cases(bases, [*cases, *found]))
    assert len(results) == len(cases) + len(found)
    shown = table(results)
    assert {result.outcome for result in results} <= {"loaded", "refused"}, shown
    assert sum(result.outcome == "refused" for result in results) > len(cases) / 2, shown


def test_runner_survives_worker_crash(bases: Path) -> None:
    """A case that ends the worker process is reported as `other`, and the remaining cases run in a
    new process.
    """
    cases: list[Any] = [("nothing", 1), ("documents", 0), ("nothing", 2)]
    results = list(run_cases(bases, cases))
    assert [(r.kind, r.outcome) for r in results] == [
        ("nothing", "other"), ("documents", results[1].outcome), ("nothing", "other"),
    ]  # fmt: skip
    assert results[1].outcome in ("loaded", "refused")
    assert "nothing 2: ended its process: status 1" in table(results)
