"""Packages of the extras: models run without them, and what needs one names its extra."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.tiny_models import cut_demo

MANDATORY = {
    "jax", "jaxlib", "ml_dtypes", "flax", "numpy", "scipy", "msgspec", "re2", "tokenizers",
    "jinja2", "lazy_loader",
}  # fmt: skip
EXTRAS = {  # what each extra adds to imports
    "adapters": ["regex"],
    "cli": ["typer", "prompt_toolkit"],
    "data": ["pyarrow"],
    "grammar": ["llguidance"],
    "hub": ["huggingface_hub"],
    "sentencepiece": ["sentencepiece", "google.protobuf"],
    "serve": ["starlette", "uvicorn", "prometheus_client"],
    "train": ["optax"],
}
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""
WITHOUT_EXTRAS = """
from functools import partial
from pathlib import Path
import jax, jaxllm, numpy as np
from jaxllm.data.wikitext import read_wikitext
from jaxllm.errors import JaxllmError
from jaxllm.files import match_names
from jaxllm.inside.lens import fit_tuned_lens
from jaxllm.text import Tokenizer
from jaxllm.train.optimizer import import_optax

folder = Path(sys.argv[1])
lm = jaxllm.load(folder / "model", dtype="float32")
made = lm.generate("Once upon a time", max_new_tokens=4)
ids = [*lm.encode("Once upon a time"), *made.tokens]
forward = jax.jit(partial(jaxllm.forward, lm.model))
logits = forward(lm.params, lm.init_cache(1, 64), np.array([ids])).logits
assert logits[0, -5:-1].argmax(-1).tolist() == [*made.tokens]
assert made.text == lm.tokenizer.decode(made.tokens)

for extra, use in (
    ("adapters", lambda: match_names("(?!x)y", ["y"], "target_modules")),
    ("data", lambda: read_wikitext(Path("wiki.parquet"))),
    ("grammar", lambda: lm.generate("x", json_schema={})),
    ("hub", lambda: jaxllm.load("hf:owner/name")),
    ("sentencepiece", lambda: Tokenizer.from_directory(folder)),
    ("train", import_optax),
    ("train", lambda: fit_tuned_lens(lm.model, lm.params, [ids])),
):
    try:
        use()
    except JaxllmError as error:
        assert str(error).endswith(f": pip install 'jaxllm[{extra}]'"), error
    else:
        raise AssertionError(extra)
"""


def run_without(names: list[str], code: str, *arguments: object) -> tuple[int, str]:
    """Run code in a process that cannot import some packages; return its status and stderr."""
    command = [sys.executable, "-c", REFUSE.format(names=names) + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_models_run_without_extras(tmp_path: Path) -> None:
    """Greedy text of a checkpoint folder is the argmax of `forward`; each extra is named."""
    cut_demo("llama", tmp_path / "model", layers=1)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    names = ["safetensors", "torch", "transformers"]
    names += [name for row in EXTRAS.values() for name in row]
    assert run_without(names, WITHOUT_EXTRAS, tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("package", "command", "what"),
    [("typer", "info", "the command line"), ("starlette", "serve", "jaxllm serve")],
)
def test_commands_name_extra_in_one_line(package: str, command: str, what: str) -> None:
    extra = {"typer": "cli", "starlette": "serve"}[package]
    main = "from jaxllm.__main__ import main\nmain()"
    line = f"jaxllm: {what} needs {package}: pip install 'jaxllm[{extra}]'\n"
    assert run_without([package], main, command) == (1, line)


def test_modules_import_extras_where_they_are_used() -> None:
    """At import, only the command line and the server need one; `all` has each extra."""
    for file in [*(ROOT / "jaxllm").rglob("*.py"), *(ROOT / "convert").rglob("*.py")]:
        if file.parent.name in ("cli", "server") or file.name in ("command.py", "ray_serve.py"):
            continue  # research/*/command.py: commands of their own
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names} - {"jaxllm", *sys.stdlib_module_names}
            assert roots <= MANDATORY, file
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert table["optional-dependencies"]["all"] == [f"jaxllm[{','.join(EXTRAS)}]"]
