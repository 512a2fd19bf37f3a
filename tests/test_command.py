"""How every command is called: MODEL in two spellings, and refusals in plain words."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from jaxllm import cli
from tests.conftest import ROOT, Run


def commands() -> Iterator[typer.core.TyperCommand]:
    """Every command, those of `train` too."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    for command in group.commands.values():
        kinds = getattr(command, "commands", {"": command})
        yield from kinds.values()


@pytest.mark.parametrize("command", list(commands()), ids=lambda command: str(command.name))
def test_model_is_an_argument_or_an_option(command: typer.core.TyperCommand) -> None:
    """-m X, --model X and --model=X, anywhere on the line, are X as the argument MODEL."""
    arguments = [p for p in command.params if isinstance(p, typer.core.TyperArgument)]
    place = [p.name for p in arguments].index("model")
    needed = ["--data", "x", "--begin", "x", "--adapter", "x"]
    options = [w for n in (0, 2, 4) for w in needed[n : n + 2] if needed[n] in flags(command)]
    words = ["make" if p.name == "action" else f"a{n}" for n, p in enumerate(arguments)]
    others = [*words[:place], *words[place + 1 :]]

    def given(*line: str) -> dict[str, object]:
        parsed = command.make_parser(typer.Context(command)).parse_args([*line, *options])
        assert parsed[1] == []
        return {name: parsed[0][name] for name in (p.name for p in arguments)}

    expected = given(*words)
    assert expected["model"] == words[place]
    assert given("-m", words[place], *others) == expected
    assert given(*others, "--model", words[place]) == expected
    assert given(*others, f"--model={words[place]}") == expected


def flags(command: typer.core.TyperCommand) -> set[str]:
    return {name for p in command.params for name in p.opts}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "-m", "demo:llama", "x"], "unexpected extra argument(s) (x)"),
        (["generate", "Once upon a time"], "A prompt goes after the model, or with -p"),
        (["generate", "-m", ""], "the model's name is empty"),
        (["generate", "demo:llama", "One", "-p", "One"], "give one prompt"),
        (["train", "lora", "nowhere", "out", "--data", "x"], "nowhere is not a directory"),
        (["generate", "--num-beams", "3"], "--num-beams: write -o num_beams=VALUE"),
        (["generate", "--repeat-penalty", "1.1"], "repetition"),
        (["generate", "--max-tokens", "5"], "--max-new-tokens"),
        (["generate", "--temperature", "hot"], "--temperature must be a number, got 'hot'"),
        (["upcycle", "demo:llama", "x", "--experts", "0"], "--experts must be 1 or more, got '0'"),
    ],
)
def test_refusals_name_what_to_write(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert status in (1, 2)
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_prompts_come_from_three_places(run: Run, tmp_path: Path) -> None:
    """An argument, -p and -f FILE, whose last line break is not of the prompt."""
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon\n")
    last = ("-n", 2, "--json")
    found = [
        json.loads(run("generate", *words, *last)[1])
        for words in (("demo:llama", "Once upon"), ("-p", "Once upon"), ("-f", file))
    ]
    assert [report["prompt"] for report in found] == ["Once upon"] * 3
    assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]


# Each names a path that is not there.
AWAY = [
    "generate nowhere -p x",
    "chat nowhere",
    "batch nowhere nowhere.jsonl",
    "info nowhere",
    "convert nowhere out",
    "train lora nowhere out --data x",
]


def test_paths_are_refused_before_jax_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from jaxllm.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n        main(line.split())\n"
        "    except SystemExit as end:\n        assert end.code == 1, line\n"
        "    assert 'jax' not in sys.modules, line\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *AWAY], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(AWAY)
    assert list(tmp_path.iterdir()) == []


def test_text_is_a_text_a_file_or_stdin(
    run: Run, shallow: Callable[[str], Path], tmp_path: Path
) -> None:
    """The three spellings of --text score the same; a file's name without @ is not a text."""
    text = "Once upon a time there was a girl."
    file = tmp_path / "story.txt"
    file.write_text(text)
    command = ("perplexity", shallow("llama"), "--window", 8, "--json", "--text")
    found = [run(*command, text), run(*command, f"@{file}"), run(*command, "-", stdin=text)]
    assert [status for status, _, _ in found] == [0, 0, 0]
    assert found[0][1] == found[1][1] == found[2][1]
    status, out, err = run(*command, file)
    assert (status, out) == (1, "")
    assert f"write @{file} to read the file" in err


def test_stop_is_understood_as_an_option_too(run: Run) -> None:
    """-o stop=X is --stop X."""
    command = ("generate", "-p", "Once upon", "-n", 12)
    stopped = run(*command, "--stop", "a")
    assert "a" not in stopped[1]
    assert run(*command, "-o", "stop=a")[1] == stopped[1]
