"""What is tested of each family: writes the table of docs/families.md.

    python -m scripts.tools.family_features [--check]

One decision: a cell is a test that pytest collects with the family's name among its parameters, so
the table cannot claim what no test shows. --check fails if the page differs.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.models import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
GATE = "tests/models/test_families.py::"
WAYS = "tests/test_invariance.py::test_every_way_of_running_a_text_has_the_same_bits"
STATE = "tests/cache/test_recurrent.py::"
GGUF = "tests/convert/gguf/test_families.py::"
RECURRENT = "tests/convert/gguf/test_recurrent.py::"
# Each column's heading, and the tests of which one is in the cell.
COLUMNS = {
    "stages": (f"{GATE}test_every_stage_equals_transformers",),
    "long": (f"{GATE}test_long_text_equals_transformers",),
    "steps": (f"{GATE}test_chunked_prefill_and_decode_equal_forward",),
    "half": (f"{GATE}test_half_precision_error_is_near_transformers",),
    "files": (f"{GATE}test_checkpoint_files_round_trip",),
    "GGUF in": (
        f"{GGUF}test_gguf_family_logits_equal_transformers",
        f"{RECURRENT}test_tiled_value_heads_equal_transformers",
        f"{RECURRENT}test_mamba2_files_have_llama_cpp_layout",
    ),
    "GGUF out": (
        f"{GGUF}test_written_gguf_equals_llama_cpp_converter",
        f"{RECURRENT}test_written_files_tile_value_heads",
        f"{RECURRENT}test_mamba2_files_have_llama_cpp_layout",
    ),
    "LoRA": ("tests/adapters/test_peft.py::test_adapters_of_each_family_equal_peft",),
    "int": (f"{GATE}test_quantized_logits_equal_dequantized_logits",),
    "train": (f"{GATE}test_gradients_reach_every_parameter",),
    "drafts": (WAYS, f"{STATE}test_generation_serving_and_drafts_agree"),
    "prefix": (WAYS, f"{STATE}test_prefix_hits_have_the_bits_of_misses"),
    "rewind": (WAYS, f"{STATE}test_random_operations_leave_the_bits_of_a_plain_run"),
    "trees": (
        "tests/test_trees.py::test_node_has_bits_of_its_chain",
        f"{STATE}test_nodes_of_a_tree_equal_their_chains",
    ),
    "bits": (WAYS,),
    "mesh": ("tests/sharding/test_mesh_matrix.py::test_mesh_matrix_cell_equals_single_device",),
}
SUITES = {"test": "t", "more": "m", "full": "f"}


class Collector:
    """A pytest plugin that keeps the collected tests."""

    items: list[Any]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def collect_cells() -> dict[tuple[str, str], str]:
    """Return the suite in which each family's test of each column runs, by family and column."""
    plugin = Collector()
    files = sorted({test.split("::")[0] for tests in COLUMNS.values() for test in tests})
    quiet = ["--collect-only", "-qqq", "-p", "no:xdist", "-o", "addopts=", "-m", ""]
    if (status := pytest.main([*quiet, *(str(ROOT / file) for file in files)], [plugin])) != 0:
        sys.exit(f"pytest could not collect the tests: status {status}")
    cells: dict[tuple[str, str], str] = {}
    for item in plugin.items:
        test, _, parameters = item.nodeid.partition("[")
        marks = {mark.name for mark in item.iter_markers()}
        suite = next((name for name in ("full", "more") if name in marks), "test")
        for column, tests in COLUMNS.items():
            if test not in tests:
                continue
            for family in set(re.split(r"[-\]]", parameters)) & set(FAMILIES):
                known = cells.get((family, column), "full")
                cells[family, column] = min(suite, known, key=list(SUITES).index)
    return cells


def make_table() -> str:
    """Return the lines of the table."""
    cells = collect_cells()
    lines = [f"| family | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for family in FAMILIES:
        marks = [SUITES.get(cells.get((family, column), ""), "-") for column in COLUMNS]
        lines.append(f"| {family} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if the page differs")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    table = re.compile(r"^\| family \| stages.*?\n(?!\|)", re.M | re.S)
    after = table.sub(lambda _: make_table(), before)
    if check and after != before:
        sys.exit(f"{PAGE.name} differs: run python -m scripts.tools.family_features")
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
