"""`jaxllm chat`: commands, files, long conversations and line editing."""

import json
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import jaxllm
from jaxllm import cache
from jaxllm.cli import terminal
from jaxllm.errors import ConfigError
from jaxllm.generation import completion
from jaxllm.ops.recurrent import CHUNK
from tests.conftest import ROOT, Run, assert_refused, succeed
from tests.talking_model import write_talker
from tests.tiny_models import save_random

DEMO = "demo:llama"
CHAT = ("chat", DEMO, "-n", 8, "--seed", 3)


def answers(run: Run, *lines: str, options: tuple[object, ...] = ()) -> list[str]:
    out, _ = succeed(run, *CHAT, *options, stdin="\n".join(lines))
    return out.splitlines()


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the number of uncached tokens of each prompt."""
    found = []

    def reuse(*args: Any) -> Any:
        reused, rest = cache.prefix_reuse.reuse_prefix(*args)
        found.append(len(rest))
        return reused, rest

    monkeypatch.setattr(completion, "reuse_prefix", reuse)
    return found


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hi.",
        ),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Hi."),
    ],
)
def test_answer_in_channels_shows_thought_and_keeps_content(
    run: Run, tmp_path: Path, style: str, said: str
) -> None:
    """Of gpt-oss' and Gemma 4's, the thought is shown before the answer, and only that is kept."""
    question = [{"role": "user", "content": "Hello"}]
    write_talker(tmp_path / "m", style, "", 1)
    prompt = jaxllm.load(tmp_path / "m").chat_prompt(question)
    write_talker(tmp_path / "m", style, said, len(prompt))
    command = ("chat", tmp_path / "m", "-n", 200, "--temperature", 0)
    out, _ = succeed(run, *command, stdin=f"Hello\n/save {tmp_path / 'chat.json'}\n")
    assert out.startswith("Hm.\n\nHi.\n")
    kept = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert kept == [*question, {"role": "assistant", "content": "Hi."}]


def test_undo_removes_last_turn(run: Run, rests: list[int]) -> None:
    """/undo removes a message and its reply, and the cached rest is not run again."""
    expected = answers(run, "Tom had a red ball.", "He")
    found = answers(run, "Tom had a red ball.", "One day", "/undo", "He")
    assert [found[0], found[2]] == expected
    assert rests[-1] < 5


def test_regenerate_draws_with_next_seed(run: Run, rests: list[int]) -> None:
    """The reply equals LM.generate with seed + 1, and only one prompt token is run again."""
    found = answers(run, "Tom", "/regenerate", options=("--temperature", 0.9))
    lm = jaxllm.load(DEMO)
    prompt = lm.chat_prompt([{"role": "user", "content": "Tom"}])
    for number, text in enumerate(found):
        options: Any = {"max_new_tokens": 8, "temperature": 0.9, "seed": 3 + number}
        assert lm.generate(prompt, **options).text == text
    assert found[0] != found[1]
    assert rests == [1]


def test_regenerate_after_a_chunk_of_a_recurrent_layer_runs_one_token(
    run: Run, rests: list[int], tmp_path: Path
) -> None:
    """The newest state cannot go back to before the answer; the chat keeps the one from then."""
    demo = ROOT / "jaxllm" / "demo" / "llama"
    size = json.loads((demo / "config.json").read_text())["vocab_size"]
    save_random(tmp_path, "lfm2", vocab_size=size, eos_token_id=size - 1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    lm = jaxllm.load(tmp_path)
    prompt = lm.chat_prompt([{"role": "user", "content": "Tom"}])
    options: Any = {"max_new_tokens": CHUNK, "temperature": 0.9}
    expected = [lm.generate(prompt, seed=seed, **options).text for seed in (3, 4)]
    command = ("chat", tmp_path, "-n", CHUNK, "--temperature", 0.9, "--seed", 3)
    out, _ = succeed(run, *command, stdin="Tom\n/regenerate\n")
    assert out == "\n".join([*expected, ""])
    assert rests == [1]


def test_regenerate_reports_equal_reply(run: Run) -> None:
    """Without a temperature, /regenerate reports that the reply is the same."""
    _, out, err = run(*CHAT, stdin="Tom\n/regenerate\n")
    assert len(set(out.splitlines())) == 1
    assert "the same answer" in err


def test_set_changes_generation_options(run: Run) -> None:
    """Values are validated, null restores the default, /set without arguments lists all."""
    sampled = answers(run, "Tom", options=("--temperature", 0.9))
    assert answers(run, "/set temperature 0.9", "Tom") == sampled
    assert answers(run, "/set temperature 0.9", "/set temperature null", "Tom") != sampled
    assert answers(run, "/set seed 5", "Tom", options=("--temperature", 0.9)) != sampled
    lines = ["/set top_p 0.5", "/set max_new_tokens 2", "/set seed random", "/set", "Tom"]
    _, _, err = run(*CHAT, stdin="\n".join(lines))
    assert {"top_p = 0.5", "do_sample = true", "max_new_tokens = 2"} <= {*err.splitlines()}
    assert "seed = 3\n" not in err
    for wrong, message in {
        "temperatur 1": "no option temperatur: did you mean temperature?",
        "temperature": "/set temperature needs a value",
        "temperature -1": "temperature must be",
        "num_beams 2": "stream",
        "adapter other": "other",
        "seed [1, 2]": "seed must be one number",
        "stop_strings [1": "/set stop_strings is not valid JSON",
    }.items():
        status, out, err = run(*CHAT, stdin=f"/set {wrong}\nTom\n")
        assert (status, err.count("\n")) == (1, 1), err
        assert message in err
        assert out == run(*CHAT, stdin="Tom\n")[1]


def test_system_sets_or_removes_message(run: Run) -> None:
    with_system = answers(run, "Tom", options=("--system", "A sad story."))
    plain = answers(run, "Tom")
    assert answers(run, "/system A sad story.", "Tom") == with_system != plain
    assert answers(run, "/system A sad story.", "/system", "Tom") == plain
    assert answers(run, "One", "/system A sad story.", "/reset", "Tom")[1:] == with_system


def test_saved_messages_load_in_another_chat(run: Run, tmp_path: Path) -> None:
    """/save writes OpenAI's messages and replaces an earlier save; /load goes on from it."""
    file = tmp_path / "talk.json"
    answers(run, "One", f"/save {file}")
    options = ("--system", "A story.")
    found = answers(run, "Tom had a red ball.", f"/save {file}", "He", options=options)
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][2]["content"] == found[0]
    assert answers(run, f"/load {file}", "He") == found[1:]
    assert answers(run, f"/load {file}", "/regenerate") == found[:1]


def test_invalid_conversation_files_are_refused(run: Run, tmp_path: Path) -> None:
    """A file that is no conversation is refused and stays unchanged, and the chat goes on."""
    head: dict[str, Any] = {"format": "jaxllm-chat", "version": 1}
    user = {"role": "user", "content": "Tom"}
    for content, message in {
        "text": "is not valid JSON",
        "[]": "must hold a JSON object",
        json.dumps({**head, "version": 2, "messages": []}): "version",
        json.dumps({**head, "messages": [user]}): "messages do not alternate: got user",
        json.dumps({**head, "messages": [user | {"role": "tool"}]}): "role",
        json.dumps({**head, "messages": [user | {"content": 5}]}): "content must be a string",
    }.items():
        file = tmp_path / "file"
        file.write_text(content)
        for command in ("/save", "/load"):
            status, out, err = run(*CHAT, stdin=f"One\n{command} {file}\n")
            assert (status, out.count("\n"), err.count("\n")) == (1, 1, 1)
            assert message in err
            assert file.read_text() == content
    missing = tmp_path / "missing"
    assert f"cannot read {missing}: " in run(*CHAT, stdin=f"/load {missing}\n")[2]


def test_commands_refuse_wrong_arguments(run: Run) -> None:
    for line, message in {
        "/nope": "no such command: '/nope'. /help lists the commands",
        "/undo 3": "/undo takes no argument",
        "/save": "/save needs a file",
        "/undo": "the conversation has no answer yet",
        "/regenerate": "the conversation has no answer yet",
    }.items():
        assert_refused(run, message, *CHAT, stdin=f"{line}\n")


def test_overlong_line_is_dropped_with_its_length(run: Run) -> None:
    """A line beyond the context is dropped with its tokens and a remedy; the chat is unchanged."""
    lm = jaxllm.load(DEMO)
    assert lm.tokenizer is not None
    line = "Once upon a time there was a girl. " * 90
    _, out, err = run(*CHAT, stdin=f"Tom\n{line}\n/undo\nTom\n")
    assert len(set(out.splitlines())) == 1, "the dropped line must not affect the conversation"
    tokens = len(lm.tokenizer.encode(line))
    assert f"got {tokens:,} tokens" in err
    assert "512 in total. Shorten it. The line is dropped" in err


def test_conversation_continues_after_cache_slides(run: Run) -> None:
    """A reply that exceeds the context drops the beginning of the cache, and the next message is
    still answered.
    """
    options = ("--overflow", "slide", "-n", 500)
    out, _ = succeed(run, "chat", *options, stdin="Once upon a time\nTom\n")
    assert out.count("\n") >= 2


def test_missing_template_error_names_remedy(run: Run, tmp_path: Path) -> None:
    """The error suggests --chat-template, which gives the checkpoint's own replies."""
    model, template = tmp_path / "model", tmp_path / "template"
    shutil.copytree(ROOT / "jaxllm" / "demo" / "llama", model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    template.write_text(config.pop("chat_template"))
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    command = ("chat", model, "-n", 8)
    assert_refused(run, "jaxllm chat --chat-template FILE", *command, stdin="Tom\n")
    assert (
        run(*command, "--chat-template", template, stdin="Tom\n")[1] == run(*CHAT, stdin="Tom\n")[1]
    )
    (model / "tokenizer.json").unlink()
    assert_refused(run, "has no tokenizer, which chat requires", *command, stdin="Tom\n")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that reads lines from terminal key sequences."""
    monkeypatch.setenv(terminal.HISTORY_VARIABLE, str(tmp_path / "state" / "history"))
    with create_pipe_input() as keys:

        def read(text: str, count: int = 1) -> list[str | int]:
            keys.send_text(text)
            reader = terminal.make_line_reader(input=keys, output=DummyOutput())
            return [reader() for _ in range(count)]

        yield read


def test_pasted_lines_form_one_message(typed: Any) -> None:
    assert typed("\x1b[200~one\r\ntwo\rthree\n\x1b[201~\rfour\r", 2) == [
        "one\ntwo\nthree\n",
        "four\n",
    ]
    assert typed("one\x1b\rtwo\r") == ["one\ntwo\n"]


def test_control_c_clears_line_or_exits(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C clears a line, exits if pressed twice; Ctrl-D exits on an empty line only."""
    assert typed("half\x03one\r") == ["one\n"]
    assert typed("\x03one\r") == ["one\n"]
    assert capsys.readouterr().err == "press Ctrl-C again or Ctrl-D to leave\n"
    assert typed("\x03\x03") == [terminal.EXIT_INTERRUPTED]
    assert typed("\x04") == [terminal.EXIT_OK]
    assert typed("half\x04\x03\x04") == [terminal.EXIT_OK]


def test_history_is_recalled_from_private_file(typed: Any, tmp_path: Path) -> None:
    """Lines are recalled across sessions; the file has mode 0600, its directory 0700."""
    typed("first\r\x1b[200~two\nlines\x1b[201~\r", 2)
    assert typed("\x1b[A\r") == ["two\nlines\n"]
    file = tmp_path / "state" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_unusable_history_path_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The value 0 disables history silently; an unusable path disables it with an error."""
    monkeypatch.setenv(terminal.HISTORY_VARIABLE, "0")
    assert terminal.history_file() is None
    assert capsys.readouterr().err == ""
    for wrong in (tmp_path, tmp_path / "file" / "history"):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(terminal.HISTORY_VARIABLE, str(wrong))
        assert terminal.history_file() is None
        assert f"cannot save lines in {wrong}: " in capsys.readouterr().err


def test_long_history_drops_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "history"
    monkeypatch.setenv(terminal.HISTORY_VARIABLE, str(file))
    entries = [f"\n# then\n+line {n}\n" for n in range(100_000)]
    file.write_text("".join(entries))
    assert terminal.history_file() == file
    remaining = file.read_text()
    assert len(remaining) <= terminal.MAX_HISTORY_BYTES // 2
    assert remaining == "".join(entries[-remaining.count("+") :])


def test_chat_over_pipe_needs_no_prompt_toolkit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "prompt_toolkit"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    assert len(answers(run, "Tom")) == 1
    with pytest.raises(ConfigError, match=r"prompt_toolkit.*: pip install 'jaxllm\[cli\]'"):
        terminal.make_line_reader(input=None)
