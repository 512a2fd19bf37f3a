"""The pages in docs/: their commands and snippets run, and what they name and link to exists."""

import ast
import builtins
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import jaxllm
from jaxllm import cli
from jaxllm.cli.chat import COMMANDS
from jaxllm.generation.options import OPTIONS
from jaxllm.sharding import ShardedModel
from tests.conftest import ROOT, Run, succeed
from tests.convert.flax_twin import as_flax
from tests.test_import_layers import LAYER_OF
from tests.tiny_models import cut_demo

FAMILY = "docs/add_a_family.md"
MIGRATION = "docs/migration.md"
EXPORT = "docs/export.md"
CHAT = "docs/chat.md"
SLOW = "docs/slow_or_out_of_memory.md"


class Snippet(NamedTuple):
    """A code block at `line` of a page, quoted from `file`, or to be run if `file` is None."""

    language: str
    text: str
    file: str | None
    line: int


def snippets(page: str) -> Iterator[Snippet]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"(?:^`([^`\n]+)`:\n\n)?^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        line = text[: found.start()].count("\n") + 1
        yield Snippet(found[2], found[3], found[1], line)


def test_family_page_quotes_match_files() -> None:
    quoted = [s for s in snippets(FAMILY) if s.file]
    assert len(quoted) >= 9
    for snippet in quoted:
        assert snippet.file is not None
        source = (ROOT / snippet.file).read_text(encoding="utf-8")
        assert snippet.text in source, f"{FAMILY}:{snippet.line} is not in {snippet.file}"


def test_family_page_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (s for s in snippets(FAMILY) if s.language == "python" and s.file is None)
    exec(compile(code.text, FAMILY, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "layers.5.attention.q_proj.weight (512, 512)" in printed
    for command in (s for s in snippets(FAMILY) if s.language == "text"):
        for line in command.text.splitlines():
            assert (ROOT / line.split()[1]).exists(), line


def test_family_page_line_counts_are_correct() -> None:
    text = (ROOT / FAMILY).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert {name for name, *_ in rows} == {"gpt_neox", "qwen2", "seed_oss", "granitemoehybrid"}
    for name, *lines in rows:
        assert list(map(int, lines)) == count_lines(name), name


@pytest.mark.more
def test_table_of_families_is_that_of_the_collected_tests() -> None:
    command = [sys.executable, "-m", "scripts.tools.family_features", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-300:]


def count_lines(family: str) -> list[int]:
    """Count the lines of a family's module, its table and its tests.

    The tests are its row in `KINDS` of tests/tiny_models.py and its own file in tests/models, if
    any.
    """
    (kinds,) = (
        node.value
        for node in ast.parse((ROOT / "tests" / "tiny_models.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "KINDS"
    )
    assert isinstance(kinds, ast.Dict)
    (row,) = (
        value
        for key, value in zip(kinds.keys, kinds.values, strict=True)
        if key is not None and ast.literal_eval(key) == family
    )
    files = (f"jaxllm/models/{family}.py", f"convert/{family}.py", f"tests/models/test_{family}.py")
    module, table, tests = (
        len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
        for path in map(ROOT.joinpath, files)
    )
    return [module, table, tests + (row.end_lineno or row.lineno) - row.lineno + 1]


@pytest.mark.more
def test_migration_page_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_flax(cut_demo("gpt2", tmp_path / "my-gpt2"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in snippets(MIGRATION):
        if snippet.language == "python":
            exec(compile(snippet.text, MIGRATION, "exec"), names)
            continue
        for command in snippet.text.splitlines():
            succeed(run, *shlex.split(command)[1:])
    assert "KVCache(" in repr(names["cache"])
    assert (tmp_path / "my-gpt2-jaxllm" / "config.json").exists()
    assert (tmp_path / "my-gpt2-hf" / "model.safetensors").exists()


def test_export_page_runs_and_equals_generate(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands and code of the export page run and give the tokens of `LM.generate`."""
    monkeypatch.chdir(tmp_path)
    command, code = snippets(EXPORT)
    assert run(*shlex.split(command.text)[1:])[0] == 0
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code.text, EXPORT, "exec"), names)
    lm = jaxllm.load("demo:llama", dtype="float32")
    prompt = lm.encode("Once upon a time there was a girl. She")
    expected = lm.generate(prompt, max_new_tokens=60 - len(prompt)).tokens
    assert names["ids"] == [*prompt, *expected]
    assert "there was a girl" in capsys.readouterr().out


def test_chat_page_lists_all_commands() -> None:
    """The page lists every chat command with its help; its recording uses existing ones only."""
    text = (ROOT / CHAT).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(/[^`]+)` \| (.+) \|$", text, re.M)
    assert rows == [
        (f"{name} {argument}".strip(), help) for name, (argument, help) in COMMANDS.items()
    ]
    (recording,) = (s.text for s in snippets(CHAT) if s.language == "text")
    typed = re.findall(r"^> (/\w+)", recording, re.M)
    assert typed and {*typed} <= COMMANDS.keys()


@pytest.mark.more
def test_troubleshooting_page_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands of slow_or_out_of_memory.md succeed, or fail with the line that the page quotes."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets(SLOW):
        if snippet.language == "python":
            exec(compile(snippet.text, SLOW, "exec"), names)
            assert capsys.readouterr().out
        for command in re.findall(r"^\$ jaxllm (.*)$", snippet.text, re.M):
            status, _, err = run(*shlex.split(command))
            errors = re.findall(r"^jaxllm: .*$", snippet.text, re.M)
            assert status == bool(errors), err
            assert all(line.removesuffix(" ...") in err for line in errors)


@pytest.mark.parametrize("page", [FAMILY, MIGRATION, EXPORT, CHAT, SLOW])
def test_page_file_references_exist(page: str) -> None:
    """Every file that a page names exists, and no line of a page is longer than 160 characters."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:jaxllm|convert|tests|docs|scripts)/[\w/]+\.\w+)`", text):
        assert "NAME" in name or (ROOT / name).exists(), name
    assert [line for line in text.splitlines() if len(line) > 160] == []


PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "BENCHMARKS.md", ROOT / "CONTRIBUTING.md"])


def reference() -> dict[str, set[str]]:
    """Return the names of each module in docs/reference; all names of `__all__` for "members"."""
    names: dict[str, set[str]] = {}
    for page in sorted(ROOT.glob("docs/reference/*.md")):
        module = ""
        text = page.read_text(encoding="utf-8")
        for kind, name, option, members in re.findall(
            r"^\.\. (automodule|autoclass|autofunction|py:data):: (\S+)\n(   :members:(.*)\n)?",
            text,
            re.M,
        ):
            if kind == "automodule":
                module = name
                public = getattr(importlib.import_module(module), "__all__", None)
                listed = set(members.replace(",", " ").split())
                names[module] = listed or set(vars(importlib.import_module(module)))
                if public is not None and not listed:
                    names[module] = {x for x in public if option and is_described(module, x)}
            else:
                home, _, last = name.rpartition(".")
                names.setdefault(home or module, set()).add(last)
    return names


def is_described(module: str, name: str) -> bool:
    """Return whether Sphinx shows a member: it has a docstring of its own."""
    thing = getattr(importlib.import_module(module), name)
    return (inspect.isroutine(thing) or inspect.isclass(thing)) and bool(thing.__doc__)


def test_reference_has_every_public_name() -> None:
    """Each package with `__all__` has a page, which describes its names, or `jaxllm` does."""
    names, seen = reference(), 0
    for path in sorted((ROOT / "jaxllm").rglob("__init__.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        here = importlib.import_module(package)
        public = getattr(here, "__all__", None)
        if public is not None:
            seen += len(public)
            top = {*jaxllm.__all__} - {x for x in public if here is jaxllm}
            top = {x for x in top if getattr(jaxllm, x) is getattr(here, x, None)}
            assert names[package] - top == {*public} - top - {"errors"}, package
    assert "jaxllm.errors" in names and seen > 200


def test_pages_import_only_names_of_reference() -> None:
    names = reference()
    sources = [s.text for page in PAGES for s in snippets(str(page)) if s.language == "python"]
    sources += [p.read_text(encoding="utf-8") for p in ROOT.glob("notebooks/*.py")]
    found = set()
    for source in sources:
        if source.startswith(" "):
            continue  # a quoted piece of a file
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxllm"):
                found |= {(node.module, name.name) for name in node.names}
    public = {(module, name) for module in names for name in names[module]}
    modules = {tuple(module.rpartition(".")[::2]) for module in names}
    # A quoted file imports what it needs; a name may be imported from where it is defined.
    quoted = {s.text for s in snippets(FAMILY) if s.file}
    missing = {
        (module, name)
        for module, name in found - public - modules
        if not any(f"from {module} import" in text for text in quoted)
        and not any(
            getattr(importlib.import_module(module), name)
            is getattr(importlib.import_module(home), last, None)
            for home, last in public
            if last == name
        )
    }
    assert missing == set() and len(found) > 40


def test_one_page_uses_every_name() -> None:
    code = "".join(s.text for s in snippets("docs/all_of_it.md") if s.language == "python")
    used = {*re.findall(r"\bjaxllm\.(\w+)", code)}
    assert {*jaxllm.__all__} - used == set()


def sections(page: Path) -> dict[str, str]:
    """Return the text under each heading, up to the next, by GitHub's anchor of the heading."""
    text = re.sub(r"^```.*?^```$", code_kept, page.read_text(encoding="utf-8"), flags=re.M | re.S)
    parts = re.split(r"^#+ (.*)\n", text, flags=re.M)[1:]
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): body
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }


def code_kept(found: re.Match[str]) -> str:
    """Indent a code block, so that its comments are not headings."""
    return found[0].replace("\n#", "\n #")


def test_anchors_of_links_exist() -> None:
    checked = 0
    for page in [*PAGES, ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        for file, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", text):
            checked += 1
            assert anchor in sections(page.parent / file if file else page), (page, file, anchor)
    assert checked > 60


def test_each_task_leads_to_something_to_paste() -> None:
    """The section behind each link of "How do I ...?" has a snippet or a command."""
    text = (ROOT / "docs" / "how_do_i.md").read_text(encoding="utf-8")
    tasks = re.findall(r"\]\((\w+\.md)#([\w-]+)\)", text)
    assert len(tasks) >= 20 and text.count("\n| ") - 2 <= len(tasks)
    for file, anchor in tasks:
        body = sections(ROOT / "docs" / file)[anchor]
        assert re.search(r"^```(python|sh|bash)$|^\$ jaxllm", body, re.M), (file, anchor)


def test_pasted_sections_need_no_other(tmp_path: Path) -> None:
    """The code behind each link of "How do I ...?" uses no name of an earlier section."""
    text = (ROOT / "docs" / "how_do_i.md").read_text(encoding="utf-8")
    tasks = re.findall(r"\]\((\w+\.md)#([\w-]+)\)", text)
    for file, anchor in {*tasks} - {(Path(FAMILY).name, "2-the-module-15-minutes")}:
        body = sections(ROOT / "docs" / file)[anchor]
        blocks = re.findall(r"^```python\n(.*?)^```$", body, re.M | re.S)
        (tmp_path / f"{anchor}.py").write_text("".join(blocks))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", str(tmp_path)]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_llama_cpp_table_names_options_that_exist() -> None:
    group = typer.main.get_command(cli.make_app())
    assert isinstance(group, typer.core.TyperGroup)
    text = sections(ROOT / "docs" / "migration.md")["options-of-llamacpp"]
    cells = [row.split("|")[2] for row in re.findall(r"^\| .*\|$", text, re.M)[1:]]
    for cell in cells:
        for code in re.findall(r"`([^`]+)`", cell):
            words = code.split()
            command = group.commands[words[1] if words[0] == "jaxllm" else "generate"]
            flags = {flag for p in command.params for flag in [*p.opts, *p.secondary_opts]}
            assert {w for w in words if w.startswith("-")} <= flags, code
            given = [b.split("=")[0] for a, b in pairwise(words) if a == "-o"]
            assert {*given} <= OPTIONS.keys(), code
    assert len(cells) > 20


def test_architecture_page_has_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.M)
    assert {name: int(layer) - 1 for layer, name in rows} == LAYER_OF


def test_page_of_options_has_each_once() -> None:
    text = (ROOT / "docs" / "generation_options.md").read_text(encoding="utf-8")
    cells = [row.split("|")[2] for row in re.findall(r"^\| .*\|$", text, re.M)[1:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(OPTIONS)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = ("id", "attr", "arg", "name")  # fields of syntax nodes
# Names in docstrings and errors that other programs, libraries and files define.
FOREIGN = {
    "llama_decode", "simple_evaluate", "pp128", "tg32", "auto_map", "memory_analysis", "blocks",
    "SITE", "L", "LAYER", "distill", "convert_lora_to_gguf", "peft", "to_bytes", "serialization",
    "QuantLinear", "pack", "WQLinear_GEMM", "LlamaModel", "permute", "traceback",
    "print_last", "sys", "last_value",
    "_fake_quantize_learnable_per_channel_affine", "concurrent", "futures", "lm_eval", "quant",
    "save_pretrained", "merge_and_unload", "ssm_a", "gguf_convert_endian", "model_args",
}  # fmt: skip


def test_names_in_docstrings_and_errors_exist() -> None:
    """Each name in backticks in a docstring, and each name with an underscore and each attribute of
    a model in an error, is a name in the package, or one of another program.
    """
    docs, errors, known = (
        list[tuple[str, str]](),
        list[tuple[str, str]](),
        {*dir(builtins), *FOREIGN, *"0123456789"},
    )
    for file in sorted(ROOT.glob("jaxllm/**/*.py")) + sorted(ROOT.glob("convert/**/*.py")):
        known |= {*file.relative_to(ROOT).with_suffix("").parts}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            known |= {
                name for f in NAMED for name in [getattr(node, f, None)] if isinstance(name, str)
            }
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known |= {*node.value.split(".")} if re.fullmatch(r"[\w.]+", node.value) else set()
            elif isinstance(node, ast.alias):
                known |= {*node.name.split(".")}
            elif isinstance(node, DOCUMENTED):
                found = re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*\))?`", ast.get_docstring(node) or "")
                docs += [(f"{file.name}:{getattr(node, 'lineno', 1)}", name) for name in found]
            elif isinstance(node, ast.Raise) and node.exc is not None:
                texts = (n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant))
                text = " ".join(filter(lambda text: isinstance(text, str), texts))
                found = re.findall(
                    r"(?<![\w/.-])(?:[A-Za-z]\w*_[\w.]*\w|(?:LM|lm|model)\.\w+)", text
                )
                errors += [(f"{file.name}:{node.lineno}", name) for name in found]
    missing = [
        (place, name)
        for place, name in docs + errors
        if not {*name.removesuffix(".py").removesuffix(".pyi").split(".")} <= known
    ]
    assert len(docs) > 2000 and len(errors) > 150
    assert missing == []
    owners = {"LM": jaxllm.LM, "lm": jaxllm.LM, "model": ShardedModel}
    dotted = [name.split(".") for _, name in errors if re.match(r"(LM|lm|model)\.", name)]
    wrong = [name for owner, name, *_ in dotted if not hasattr(owners[owner], name)]
    assert [name for name in wrong if name not in jaxllm.LM.__dataclass_fields__] == []
