"""The README tells the truth: its snippets and commands run, its file map is complete."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Run

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [
    line
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if re.match(r"(echo .*\| |[A-Z_]+=\S+ |for .* do )?(jaxllm|python|sed) ", line)
]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_python_examples_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Each goes on with the names of those before it, and none is longer than 22 lines."""
    names = {"__name__": "__main__"}
    codes = [block for language, block in BLOCKS if language == "python"]
    for code in codes:
        exec(compile(code, "README.md", "exec"), names)
        assert len([line for line in code.splitlines() if line.strip() and line[0] != "#"]) <= 22
    printed = capsys.readouterr().out
    assert printed.count("->") == 3
    assert printed.count("KVCache(") == 1
    assert printed.endswith("(3, 2, 1) (1, 64, 2, 64)\n"), "words, and a gradient of keys"


def run_in_shell(command: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PATH": path, "JAXLLM_COMPILE_CACHE": str(folder / "compiled")},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_commands_run_in_order(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that read a pipe, and scripts, as processes of a shell; the others share this one."""
    assert {"generate", "chat", "quantize", "export"} <= {
        word for c in COMMANDS for word in c.split()
    }
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        program, *arguments = shlex.split(command.removesuffix(" < /dev/null"))
        if program == "jaxllm":
            status, _, err = run(*arguments)
            assert status == 0, f"{command}\n{err}"
        else:
            run_in_shell(command, tmp_path)
    assert (tmp_path / "story-model-hf" / "config.json").exists()
    assert (tmp_path / "story.cache").exists()
    assert (tmp_path / "loop" / "brightness.png").exists()
    assert (tmp_path / "story-int4" / "config.json").exists()
    assert (tmp_path / "story-vectors" / "vectors.safetensors").exists()
    assert (tmp_path / "story-graph" / "weights.safetensors").exists()
    assert (tmp_path / "story.npy").exists()
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "vectors.parquet").exists()


def test_make_and_pip_do_the_same() -> None:
    """The pip lines are the Makefile's, word for word; `make test` itself is what runs this."""
    for line in re.findall(r"\.venv/bin/\S+ .*", TEXT):
        words = shlex.split(line.split("#")[0])
        assert Path(words[0]).name in ("pip", "pytest", "jaxllm", "jupyter"), line
    assert 'pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not full"' in MAKEFILE
    assert "pip install --quiet --no-compile --constraint constraints.txt --editable" in MAKEFILE
    for target in ("demo", "test", "test-full"):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_the_file_map_is_complete() -> None:
    """README has a row for each folder, a folder's docstring a word on each of its files."""
    rows = re.findall(r"^\| `([^`]+)`", TEXT[TEXT.index("## Where things are") :], re.MULTILINE)
    for name in rows:
        assert (ROOT / name).exists(), name
    for file in [*(ROOT / "jaxllm").rglob("*.py"), *(ROOT / "convert").rglob("*.py")]:
        folder = file.parent
        assert f"{folder.relative_to(ROOT)}/" in rows, folder
        if not file.name.startswith("__"):
            said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            assert re.search(rf"\b{file.stem}\b", said), file


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_no_line_is_long(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120] == []


# From the ground up; what stands on one floor does not import its neighbours.
STOREYS = """
    errors process progress shapes moved
    distributed
    whole files guard
    longer
    config
    ops
    weights programs
    cache
    models inputs
    steps
    decode repair checkpoint text mesh
    convert fixed embed evaluate options prompts
    settings forms located adapters
    complete
    serving
    api
    loading
    bench harness fleet verifying plan
    compress
    train
    cli
    __main__
"""
# The same within a folder of rooms; None: rooms that do not know each other.
ROOMS = {"decode": ["sampling", "loops", "batching"], "evaluate": None}
FLOORS = {name: n for n, row in enumerate(STOREYS.strip().splitlines()) for name in row.split()}


@pytest.mark.parametrize(
    "file",
    sorted([*(ROOT / "jaxllm").rglob("*.py"), *(ROOT / "convert").glob("*.py")]),
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_each_floor_imports_only_from_floors_below(file: Path) -> None:
    parts = file.relative_to(ROOT).parts
    parts = parts[1:] if parts[0] == "jaxllm" else parts
    name = Path(parts[0]).stem
    if name in ("__init__", "demo") or parts[-1] == "__main__.py":
        return
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        module = node.module.split(".")
        if module == ["jaxllm"]:
            for alias in node.names:
                if alias.name == "__version__":
                    continue
                assert FLOORS[alias.name] <= FLOORS[name], alias.name
        elif module[0] == "jaxllm":
            assert FLOORS[module[1]] < FLOORS[name] or module[1] == name, node.module
            if module[1] == name and name in ROOMS and len(parts) > 2:
                order, here, there = ROOMS[name], parts[1], module[2]
                assert here == there or (order and order.index(there) < order.index(here))
