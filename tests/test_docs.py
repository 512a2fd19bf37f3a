"""The pages in docs/: quoted code is in the files, and their commands and snippets run."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxllm
from jaxllm.cli.chat import COMMANDS
from tests.conftest import ROOT, Run, succeed
from tests.convert.flax_twin import as_flax
from tests.tiny_models import cut_demo

FAMILY = "docs/add_a_family.md"
FLAX = "docs/migration.md"
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
    assert {name for name, *_ in rows} == {"gpt_neox", "qwen2"}
    for name, *lines in rows:
        assert list(map(int, lines)) == count_lines(name), name


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


def test_flax_page_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_flax(cut_demo("gpt2", tmp_path / "my-gpt2"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in snippets(FLAX):
        if snippet.language == "python":
            exec(compile(snippet.text, FLAX, "exec"), names)
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
    """The page lists every chat command with its help text, and its recording uses only existing
    commands.
    """
    text = (ROOT / CHAT).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(/[^`]+)` \| (.+) \|$", text, re.M)
    assert rows == [
        (f"{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()
    ]
    (recording,) = (s.text for s in snippets(CHAT) if s.language == "text")
    typed = re.findall(r"^> (/\w+)", recording, re.M)
    assert typed and {*typed} <= COMMANDS.keys()


def test_troubleshooting_page_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of slow_or_out_of_memory.md succeeds, or fails with the error line that the
    page quotes.
    """
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


@pytest.mark.parametrize("page", [FAMILY, FLAX, EXPORT, CHAT, SLOW])
def test_page_file_references_exist(page: str) -> None:
    """Every file that a page names exists, and no line of a page is longer than 160 characters."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:jaxllm|convert|tests|docs|scripts)/[\w/]+\.\w+)`", text):
        assert "NAME" in name or (ROOT / name).exists(), name
    assert [line for line in text.splitlines() if len(line) > 160] == []
