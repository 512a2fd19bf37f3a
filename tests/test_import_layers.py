"""Import layers: a subpackage imports only from lower layers, and the build maps the converter."""

import ast
from pathlib import Path

import pytest

from jaxllm.convert import hf
from tests.conftest import ROOT

# From the lowest layer up; subpackages in one layer do not import each other.
LAYERS = """
    errors
    runtime
    files config
    ops text
    weights data
    cache
    models
    checkpoints steps sharding grammar
    convert export generation
    inside adapters
    lm
    server
    batch_inference
    evaluate
    compress train
    cli
    research
"""
# The same within subpackages; None: the inner packages do not import each other.
INNER = {"generation": ["sampling", "loops", "batching", "options"], "evaluate": None}
LAYER_OF = {name: n for n, row in enumerate(LAYERS.strip().splitlines()) for name in row.split()}


def _imported_modules(tree: ast.AST) -> list[list[str]]:
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            path = node.module.split(".")
            names = [a.name for a in node.names if a.name != "__version__"]
            modules += [[*path, name] for name in names] if path == ["jaxllm"] else [path]
        elif isinstance(node, ast.Import):
            modules += [alias.name.split(".") for alias in node.names]
    return [module for module in modules if module[0] == "jaxllm" and len(module) > 1]


@pytest.mark.parametrize(
    "file",
    sorted([*(ROOT / "jaxllm").rglob("*.py"), *(ROOT / "convert").rglob("*.py")]),
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_modules_import_only_from_lower_layers(file: Path) -> None:
    """No package imports from its own layer or a higher one, but `__init__` and `__main__`."""
    parts = file.relative_to(ROOT).parts
    parts = parts[1:] if parts[0] == "jaxllm" else parts
    package = Path(parts[0]).stem
    if package in ("__init__", "__main__", "demo") or parts[-1] == "__main__.py":
        return
    for module in _imported_modules(ast.parse(file.read_text(encoding="utf-8"))):
        there = module[1]
        assert there == package or LAYER_OF[there] < LAYER_OF[package], ".".join(module)
        if there == package and package in INNER and len(parts) > 2 and len(module) > 2:
            order, mine, theirs = INNER[package], parts[1], module[2]
            if mine != theirs and (order is None or {mine, theirs} <= {*order}):
                assert order and order.index(theirs) < order.index(mine), ".".join(module)


def test_only_research_names_research() -> None:
    """What few people need leaves no import, name or branch in the rest."""
    found = [
        path
        for path in [*(ROOT / "jaxllm").rglob("*.py"), *(ROOT / "convert").rglob("*.py")]
        if "jaxllm.research" in path.read_text(encoding="utf-8")
    ]
    assert all((ROOT / "jaxllm/research") in path.parents for path in found), found


def test_package_root_has_five_modules() -> None:
    """Everything else is in a subpackage."""
    names = {path.name for path in (ROOT / "jaxllm").glob("*.py")}
    assert names == {"__init__.py", "__main__.py", "errors.py", "lm.py", "steps.py"}


def test_converter_is_mapped_and_repository_has_no_links() -> None:
    """An editable install finds `jaxllm.convert` in `convert/`; links break on Windows."""
    assert hf.__file__ is not None and Path(hf.__file__) == ROOT / "convert" / "hf.py"
    assert not [path for path in (ROOT / "jaxllm").rglob("*") if path.is_symlink()]
