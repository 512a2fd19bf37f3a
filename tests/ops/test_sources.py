"""The C++ sources: each header compiles standalone, and all lists of instruction sets agree."""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from jaxllm.ops import native
from tests.conftest import ROOT

SOURCES = ROOT / "jaxllm" / "ops" / "native" / "csrc"
HEADERS = sorted(SOURCES.rglob("*.h"))
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq"
BF16 = f"{AVX512} -mavx512bf16"
NEEDS = {
    "avx2.h": "-mavx2 -mfma -mf16c", "avx512.h": AVX512, "amx.h": BF16,
    **dict.fromkeys(("matrix_unit.h", "gemm.h"), f'{BF16} -DJAXLLM_LAYER="layers/amx.h"'),
}  # fmt: skip


@pytest.mark.more
def test_header_compiles_standalone(tmp_path: Path) -> None:
    """Each C++ header compiles without any other include before it."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not available")
    machine = subprocess.run(["g++", "-dumpmachine"], capture_output=True, text=True).stdout

    def compile_errors(header: Path) -> str:
        if (header.name in NEEDS and "x86_64" not in machine) or (
            header.name == "neon.h" and "aarch64" not in machine
        ):
            return ""
        flags = [*NEEDS.get(header.name, "").split(), "-x", "c++", "-std=gnu++17", "-fsyntax-only"]
        includes = [f"-I{SOURCES}", "-isystem", jax.ffi.include_dir()]
        command = ["g++", *flags, "-w", *includes, str(header)]
        return subprocess.run(command, capture_output=True, text=True).stderr

    with ThreadPoolExecutor(2) as pool:
        assert not "".join(pool.map(compile_errors, HEADERS))


def test_source_file_names_are_unique() -> None:
    """No two C++ source files have the same name."""
    names = [path.name for path in SOURCES.rglob("*") if path.is_file()]
    assert len(names) == len(set(names))


def test_instruction_sets_agree_across_sources() -> None:
    """CMakeLists.txt, isa_table.cc and native.INSTRUCTION_SETS list the same sets in order."""
    built = re.findall(r"^add_set\((\S+)", (ROOT / "CMakeLists.txt").read_text(), re.M)
    queried = re.findall(r'\{"([a-z0-9-]+)",', (SOURCES / "isa_table.cc").read_text())
    assert built == queried == list(native.INSTRUCTION_SETS)


def test_paths_table_names_known_sets_and_kinds() -> None:
    """paths.json uses only known instruction sets, weight kinds and input types, and row counts
    that are null or at least 0.
    """
    table = json.loads((SOURCES.parent / "paths.json").read_text(encoding="utf-8"))
    assert set(table) <= set(native.INSTRUCTION_SETS)
    kinds = {kind.name.lower() for kind in native.Kind}
    for rows in table.values():
        for name, path in rows.items():
            kind, inputs = name.split()
            assert kind in kinds and inputs in ("float32", "bfloat16", "int8")
            assert path["rows"] is None or path["rows"] >= 0


def test_unmeasured_sets_have_default_paths(isa: str) -> None:
    """Without a row of the table, the kernel takes int8 inputs, and on AVX sets all weights that
    XLA would dequantize, whatever the number of rows; else up to 16 rows.
    """
    table = json.loads((SOURCES.parent / "paths.json").read_text(encoding="utf-8")).get(isa, {})
    for kind in (native.Kind.INT8, native.Kind.INT4, native.Kind.BFLOAT16):
        for inputs in ("int8", "bfloat16"):
            if f"{kind.name.lower()} {inputs}" not in table:
                avx = isa.startswith("avx") and kind != native.Kind.BFLOAT16
                limit = None if inputs == "int8" or avx else 16
                assert native.kernel_path(kind, inputs) == native.KernelPath(limit, "dequantize")
