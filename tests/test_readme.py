"""README.md and the pages of docs/: their commands and snippets run in order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.checkpoints.resolve import resolve_path
from tests.conftest import ROOT, Run

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Other test files cover the other pages. The slow ones run in `make test-more`.
PAGES = (
    *("batch", "cache", "cli", "evaluation", "generation", "glossary", "grammar", "index"),
    *("quantization", "tutorial"),
)
SLOW_PAGES = (
    *("all_of_it", "compress", "heads", "lens", "long_context", "rl", "steering", "training"),
    "trees",
)
SHALLOW = ("docs/lens.md", "docs/training.md")  # with two layers of the demo models
EACH_PAGE = [
    "README.md",
    *(f"docs/{name}.md" for name in PAGES),
    *(pytest.param(f"docs/{name}.md", marks=pytest.mark.more) for name in SLOW_PAGES),
]
OUTPUTS = {  # files that the commands of a page write
    "README.md": ("story.gguf", "story-int4/config.json"),
    "docs/batch.md": ("answers.jsonl", "vectors.jsonl"),
    "docs/cache.md": ("loop/brightness.png",),
    "docs/cli.md": ("story-model-hf/config.json", "story.cache"),
    "docs/compress.md": ("story-gptq-hf/model.safetensors", "story-packed/config.json"),
    "docs/evaluation.md": ("story-vectors/vectors.safetensors", "story.npy"),
    "docs/heads.md": ("mood/config.json",),
    "docs/lens.md": ("lens.png", "tuned.safetensors"),
    "docs/quantization.md": ("story-int4/config.json",),
    "docs/rl.md": ("tuned/config.json", "rl.png"),
    "docs/steering.md": ("boy.gguf",),
    "docs/training.md": ("pirate/adapter_config.json", "story-half/config.json"),
}
COMMAND = re.compile(r"(echo .*\| |[A-Z_]+=\S+ |for .* do )?(jaxllm|python|sed|printf) ")


def run_in_shell(command: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PATH": path, "JAXLLM_COMPILE_CACHE": str(folder / "compiled")},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("page", EACH_PAGE)
def test_page_runs_in_order(
    page: str,
    request: pytest.FixtureRequest,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Snippets share one namespace and have at most 22 lines. Commands with a pipe, and scripts,
    run in a shell; all other commands run in this process. What is downloaded is `demo:llama`.
    """
    import huggingface_hub

    demo = str(resolve_path("demo:llama"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: demo)
    if page in SHALLOW:
        request.getfixturevalue("demo_names")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, page, "exec"), names)
            printed = capsys.readouterr().out
            code = [line for line in block.splitlines() if line.strip() and line[0] != "#"]
            assert len(code) <= 22
        elif language == "text" and page == "README.md":
            assert printed.endswith(block), "the output that README shows"
        for command in block.splitlines() if language == "sh" else ():
            if not COMMAND.match(command):
                assert re.match(r"make |pip install |python3 -m venv|\.venv/bin/", command), command
                continue
            program, *arguments = shlex.split(command.removesuffix(" < /dev/null"))
            if program == "jaxllm":
                status, _, err = run(*arguments)
                assert status == 0, f"{command}\n{err}"
            else:
                run_in_shell(command, tmp_path)
    for name in OUTPUTS.get(page, ()):
        assert (tmp_path / name).exists(), name


def test_readme_install_commands_match_makefile() -> None:
    for line in re.findall(r"\.venv/bin/\S+ .*", TEXT):
        words = shlex.split(line.split("#")[0])
        assert Path(words[0]).name in ("pip", "pytest", "jaxllm"), line
    assert "pip install --quiet --no-compile --constraint constraints.txt --editable" in MAKEFILE
    for target in ("demo", "test", "test-more", "test-full"):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_relative_links_resolve_and_pages_are_linked() -> None:
    """Relative links of README, CONTRIBUTING and pages resolve; the first page links to every page,
    and that of the reference to every page of it.
    """
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([\w./-]+\.\w+)[)#]", file.read_text(encoding="utf-8")):
            assert (file.parent / link).exists(), f"{file.name}: {link}"
    for folder in (ROOT / "docs", ROOT / "docs" / "reference"):
        links = re.findall(r"\]\(([\w/]+\.md)\)", (folder / "index.md").read_text(encoding="utf-8"))
        assert {page.name for page in folder.glob("*.md")} - {*links} == {"index.md"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_readme_and_contributing_lines_are_short(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120] == []
    assert name != "README.md" or len(lines) <= 120


def test_table_of_checkpoints_names_every_family() -> None:
    from jaxllm.models import FAMILIES

    page = (ROOT / "docs/families.md").read_text(encoding="utf-8").lower()
    table = page[: page.index("## what is tested")]
    for family in FAMILIES:
        assert re.sub(r"(?<=[a-z])(?=\d)|_", ".?", family.split("_text")[0]).split(".?")[0] in table
