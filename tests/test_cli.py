"""The command line, as a newcomer uses it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm import cli
from tests.conftest import ROOT
from tests.twins import save_random

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `jaxllm ARGS` in this process: (exit status, stdout, stderr)."""

    def command(*args: object, stdin: str = "") -> tuple[int, str, str]:
        import io

        monkeypatch.setattr(sys, "argv", ["jaxllm", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return command


def test_greedy_from_bos_prints_the_published_story(run: Run, data: Any) -> None:
    directory = data("stories260K")
    status, out, err = run("generate", "--model", directory, "-n", 200)
    assert status == 0
    assert out == (directory / "greedy_200.txt").read_text(encoding="utf-8")
    assert "200 tokens (length)" in err
    assert "tokens/s" in err


@pytest.mark.parametrize("model", ["demo:llama", "demo:gpt2"])
def test_the_demo_tells_a_story_from_stdin(run: Run, model: str) -> None:
    status, out, _ = run("generate", "-m", model, "-p", "-", "-n", 30, stdin="Once upon a time\n")
    assert status == 0
    assert len(out.split()) > 10
    assert "�" not in out
    again = run("generate", "-m", model, "-p", "Once upon a time", "-n", 30)
    assert again[1] == out


def test_a_seed_repeats_and_another_differs(run: Run) -> None:
    def story(seed: int) -> str:
        return run("generate", "-p", "One day", "-n", 25, "--temperature", 1.0, "--seed", seed)[1]

    assert story(1) == story(1)
    assert story(1) != story(2)


def test_json_holds_what_was_printed(run: Run) -> None:
    arguments = ("generate", "-p", "One day", "-n", 12)
    _, text, _ = run(*arguments)
    _, out, _ = run(*arguments, "--json")
    report = json.loads(out)
    assert report["text"] == text
    assert len(report["tokens"]) == len(report["logprobs"]) == 12
    assert report["finish_reason"] == "length"
    _, echoed, _ = run(*arguments, "--echo")
    assert echoed == "One day" + text


def test_a_prompt_cache_is_used_and_extended(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "story.cache"
    text = "Once upon a time there was"

    def story(prompt: str, *options: object) -> tuple[int, str, str]:
        return run("generate", "-p", prompt, "-n", 12, *options)

    _, plain, _ = story(text)
    _, out, err = story(text, "--prompt-cache", file)
    assert out == plain
    assert f"{file}: " in err
    assert "tokens written" in err
    held = int(err.split(f"{file}: ")[1].split()[0])
    _, out, err = story(text + plain, "--prompt-cache", file)
    assert out == story(text + plain)[1]
    assert f"{held} of the prompt's {held + 1} tokens are there, of {held} in all" in err
    assert f"{held + 12} tokens written" in err
    whole = file.read_bytes()
    for refused, options in {
        "holds another text": ("-p", "One day"),
        "model_type": ("-p", text, "-m", "demo:gpt2"),
        "has weights 'float16', the model's 'float32'": ("-p", text, "--dtype", "float32"),
    }.items():
        status, out, err = run("generate", *options, "--prompt-cache", file)
        assert (status, out) == (1, "")
        assert refused in err
    assert file.read_bytes() == whole


def test_any_option_can_be_given(run: Run) -> None:
    base = ("generate", "-p", "Once upon a time", "-n", 16)
    _, plain, _ = run(*base)
    stop = plain[6:10]
    _, out, err = run(*base, "--stop", stop, "--stop", "never")
    assert out == plain.split(stop)[0]
    assert "(stop)" in err
    status, out, err = run(*base, "-o", "num_beams=3", "-o", "num_return_sequences=2")
    assert status == 0
    assert len(out.splitlines()) == 2
    assert "--- 1 (score -" in err
    _, out, _ = run(*base, "-o", "num-beams=3", "--json")
    assert json.loads(out)["score"] < 0
    _, out, _ = run(*base, "-o", "repetition_penalty=9.0", "-o", "stop_strings=zzz")
    assert out != plain
    for options, message in {
        ("-o", "num_beams"): "NAME=VALUE",
        ("-o", "beams=3"): "no option beams",
        ("--overflow", "wrap"): "overflow must be one of",
        ("-o", "min_p=7"): "min_p must be",
    }.items():
        status, _, err = run(*base, *options)
        assert status == 1
        assert message in err


def test_a_file_of_prompts_is_answered_line_by_line(run: Run, tmp_path: Path) -> None:
    lines = [
        '"Once upon a time"',
        '{"prompt": "One day", "id": "b", "max_new_tokens": 5, "temperature": 1.0, "seed": 3}',
        "",
        '{"prompt": "Once", "stop_strings": ["."], "max_new_tokens": 60}',
        "{broken",
        '{"text": "no prompt"}',
        '{"prompt": [1, 999999], "id": "outside"}',
        '{"prompt": "x", "temperature": -1}',
        '{"prompt": "x", "num_beams": 2}',
    ]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    status, _, err = run(
        "generate", "--batch", file, "--out", out, "-n", 12, "--rows", 2, "--dtype", "float32"
    )
    assert status == 1
    assert "8 answers" in err
    assert "5 of them errors" in err
    answers = {a["id"]: a for a in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert (
        answers[0]["text"]
        == run("generate", "-p", "Once upon a time", "-n", 12, "--dtype", "float32")[1]
    )
    alone = (
        "generate",
        "-p",
        "One day",
        "-n",
        5,
        "--temperature",
        1.0,
        "--seed",
        3,
        "--dtype",
        "float32",
    )
    assert answers["b"]["text"] == run(*alone)[1]
    assert answers[3]["finish_reason"] == "stop"
    assert "." not in answers[3]["text"]
    assert "line 5 is no JSON" in answers[4]["error"]
    assert "line 6 has no prompt" in answers[5]["error"]
    assert "vocabulary" in answers["outside"]["error"]
    assert "temperature must be" in answers[7]["error"]
    assert "takes no num_beams" in answers[8]["error"]
    status, _, err = run("generate", "--batch", file, "--out", out)
    assert status == 1
    assert "exists" in err
    answers = run("generate", "--batch", "-", "--dtype", "float32", "-n", 12, stdin='"One day"')
    assert answers[0] == 0
    assert json.loads(answers[1])["finish_reason"] == "length"


def test_keys_and_values_can_be_int8(run: Run) -> None:
    status, out, _ = run("generate", "-p", "Once upon a time", "-n", 20, "--cache-dtype", "int8")
    assert status == 0
    assert len(out.split()) > 8
    status, _, err = run("generate", "--cache-dtype", "int3")
    assert status == 1
    assert "cache must be one of" in err


def test_chat_answers_each_line(run: Run) -> None:
    status, out, _ = run("chat", "-n", 12, stdin="Once upon a time\n\nThe end?\n/quit\nnever\n")
    assert status == 0
    assert out.count("\n") == 2


def test_info_reads_shapes_not_weights(run: Run, tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    _, out, _ = run("info", tmp_path, "--json")
    facts = json.loads(out)
    heads = 3 * 40 * (2 * 8 * 6 + 2 * 2 * 6)  # q, o and k, v
    expected = 2 * 131 * 40 + heads + 3 * (3 * 40 * 56 + 2 * 40) + 40
    assert facts["parameters"] == expected
    assert facts["bytes"] == 4 * expected
    assert facts["cache_bytes_per_token"] == 2 * 3 * 2 * 6 * 4
    _, table, _ = run("info", tmp_path)
    assert "parameters" in table
    assert f"{expected:,}" in table


def test_convert_there_and_back(run: Run, tmp_path: Path) -> None:
    save_random(tmp_path / "hf", "gpt2")
    status, _, err = run("convert", tmp_path / "hf", tmp_path / "native", "--dtype", "bfloat16")
    assert status == 0
    assert "bfloat16" in err
    assert json.loads(run("info", tmp_path / "native", "--json")[1])["form"] == "jaxllm"
    command = [sys.executable, "-m", "convert", tmp_path / "native", tmp_path / "back", "--to-hf"]
    subprocess.run(command, check=True, cwd=ROOT)
    assert json.loads(run("info", tmp_path / "back", "--json")[1])["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate", "-m", "nowhere"], "nowhere is not a directory"),
        (["generate", "-m", "owner/name"], "write hf:owner/name"),
        (["generate", "-m", "demo:bert"], "demo:bert is not a directory"),
        (["generate", "-n", "0"], "max_new_tokens"),
        (["generate", "-n", "100000"], "exceed the model's context"),
        (["generate", "--temperature", "-1"], "temperature must be"),
        (["generate", "--top-p", "2"], "top_p must be"),
        (["generate", "--seed", "-1"], "seed must be"),
        (["generate", "--dtype", "int3"], "must be one of"),
        (["info", "/dev/null"], "is not a directory"),
        (["convert", "nowhere", "elsewhere"], "nowhere is not a directory"),
    ],
)
def test_bad_input_is_one_line_and_a_non_zero_exit(
    run: Run, arguments: list[str], reason: str
) -> None:
    status, out, err = run(*arguments)
    assert status == 1
    assert out == ""
    assert err.startswith("jaxllm: ")
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "chat", "info", "convert"])
def test_help_has_an_example(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "Example" in out
    assert f"jaxllm {command}" in out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['jaxllm', '--help']\n"
        "from jaxllm.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'jax', 'flax', 'numpy', 'torch', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m jaxllm generate -n 60 | head -c 5"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, cwd=ROOT)
    assert done.returncode == 0
    assert len(done.stdout) == 5
    assert b"Traceback" not in done.stderr
