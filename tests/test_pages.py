"""The pages in docs/ tell the truth: what they quote stands in the files, what they run runs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.family_lines import count
from tests.conftest import ROOT, Run
from tests.convert.flax_twin import as_flax
from tests.twins import cut_demo

FAMILY = "docs/add_a_family.md"
FLAX = "docs/from_flax.md"


class Snippet(NamedTuple):
    """A block of a page. file: that it is quoted from, None: it is to be run. line: of the page."""

    language: str
    text: str
    file: str | None
    line: int


def snippets(page: str) -> Iterator[Snippet]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"(?:^`([^`\n]+)`:\n\n)?^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        line = text[: found.start()].count("\n") + 1
        yield Snippet(found[2], found[3], found[1], line)


def test_what_the_page_quotes_stands_in_the_files() -> None:
    quoted = [s for s in snippets(FAMILY) if s.file]
    assert len(quoted) >= 9
    for snippet in quoted:
        assert snippet.file is not None
        held = (ROOT / snippet.file).read_text(encoding="utf-8")
        assert snippet.text in held, f"{FAMILY}:{snippet.line} is not in {snippet.file}"


def test_what_the_page_runs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (s for s in snippets(FAMILY) if s.language == "python" and s.file is None)
    exec(compile(code.text, FAMILY, "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "layers.5.attention.q_proj.weight (512, 512)" in said
    for command in (s for s in snippets(FAMILY) if s.language == "sh"):
        for line in command.text.splitlines():
            assert (ROOT / line.split()[1]).exists(), line


def test_the_page_counts_lines_rightly() -> None:
    text = (ROOT / FAMILY).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert {name for name, *_ in rows} == {"gpt_neox", "qwen2"}
    for name, *lines in rows:
        assert tuple(map(int, lines)) == count(name), f"python scripts/family_lines.py {name}"


def test_who_comes_from_flax_can_run_the_page(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_flax(cut_demo("gpt2", tmp_path / "my-gpt2"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in snippets(FLAX):
        if snippet.language == "python":
            exec(compile(snippet.text, FLAX, "exec"), names)
            continue
        for command in snippet.text.splitlines():
            status, _, err = run(*shlex.split(command)[1:])
            assert status == 0, err
    assert "KVCache(" in repr(names["cache"])
    assert (tmp_path / "my-gpt2-jaxllm" / "config.json").exists()
    assert (tmp_path / "my-gpt2-hf" / "model.safetensors").exists()


@pytest.mark.parametrize("page", [FAMILY, FLAX])
def test_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:jaxllm|convert|tests|docs|scripts)/[\w/]+\.\w+)`", text):
        assert "NAME" in name or (ROOT / name).exists(), name
    assert [line for line in text.splitlines() if len(line) > 160] == []
