"""`jaxllm chat`: a conversation in a model's chat template."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from jaxllm.cli import terminal
from jaxllm.cli.console import log
from jaxllm.cli.option_groups import LoadingOptions, SamplingOptions
from jaxllm.cli.options import (
    Model,
    Overflow,
    Steer,
    read_extra_options,
    read_options,
    read_steering,
    steering_options,
)
from jaxllm.errors import ConfigError, JaxllmError, TokenError
from jaxllm.runtime.multihost import broadcast_from_zero

if TYPE_CHECKING:
    from jaxllm.cli.conversation import Conversation
    from jaxllm.lm import LM

EXAMPLE = "Example: jaxllm chat ~/models/TinyLlama-1.1B-Chat --temperature 0.7"
KEYS = """\
Ctrl-C stops an answer (with --distributed: the chat) or clears the line; twice on an empty line, or
Ctrl-D, leaves. A paste is one turn; Alt-Enter starts a new line within a turn."""


class Command(NamedTuple):
    """A slash command. argument: "FILE" is required, "[TEXT]" optional, "" means none.

    run: returns the text to log; None leaves the chat.
    """

    argument: str
    help: str
    run: "Callable[[Conversation, str], str | None]"


def _set_option(talk: "Conversation", text: str) -> str:
    name, _, value = text.partition(" ")
    if not name:
        return talk.list_options()
    if not value.strip():
        raise ConfigError(f"/set {name} needs a value. Give it as JSON; null restores the default")
    return talk.set_option(name, value.strip())


COMMANDS = {
    "/help": Command("", "list the commands", lambda talk, _: _format_help()),
    "/system": Command(
        "[TEXT]",
        "set the system message; without TEXT, remove it",
        lambda talk, text: talk.set_system(text),
    ),
    "/undo": Command("", "remove the last line and its answer", lambda talk, _: talk.undo()),
    "/regenerate": Command(
        "", "generate another answer to the last line", lambda talk, _: talk.regenerate()
    ),
    "/reset": Command(
        "", "remove all messages but the system message", lambda talk, _: talk.reset()
    ),
    "/set": Command(
        "[NAME VALUE]",
        "set a generation option, as in temperature 0.9; alone: list them",
        _set_option,
    ),
    "/save": Command(
        "FILE", "write the messages as JSON; replaces an earlier save", lambda talk, f: talk.save(f)
    ),
    "/load": Command("FILE", "continue from saved messages", lambda talk, file: talk.load(file)),
    "/quit": Command("", "leave; same as /exit and Ctrl-D", lambda talk, _: None),
    "/exit": Command("", "leave", lambda talk, _: None),
}


def chat(
    model: Model = "demo:llama",
    system: str | None = None,
    chat_template: Path | None = None,
    overflow: Overflow = None,
    steer: Steer = None,
    *,
    sampling: SamplingOptions,
    loading: LoadingOptions,
) -> None:
    """Chat with a model through its chat template; /help lists the commands.

    Ctrl-C stops an answer or clears the line; pressed twice on an empty line it leaves, as does
    Ctrl-D (with --distributed, Ctrl-C ends the chat: processes would stop at different words). A
    paste is one turn. Lines are saved in ~/.local/state/jaxllm/chat_history, readable by you only;
    JAXLLM_CHAT_HISTORY names another file, 0 saves nothing. If a conversation outgrows the context,
    further lines are an error; with --overflow slide the oldest turns are dropped instead.

    Args:
      system: System message.
      chat_template: Jinja file to use instead of the checkpoint's chat template.
    """
    with terminal.buffer_keys():
        named = {**sampling.options, "seed": sampling.parse_seed("random"), "overflow": overflow}
        options = named | read_extra_options(sampling.more)
        read_options(None, kind="stream", **options)  # raises before the model is loaded
        vector = read_steering(steer)
        lm = loading.load(model)
        options |= steering_options(vector, lm)
        talk = _start_conversation(lm, options, system, chat_template)
        if terminal.is_interactive():
            about = repr(talk.lm).removeprefix("LM(").removesuffix(")")
            log(f"{about}, seed {talk.seed}\n/help lists the commands, Ctrl-D leaves")
        failed, status = False, terminal.EXIT_OK
        for line in _read_lines():
            if isinstance(line, int):
                status = line
                break
            try:
                if not line.startswith("/"):
                    talk.answer(line)
                elif (message := _run_command(talk, line)) is None:
                    break
                elif message:
                    log(message)
            except JaxllmError as error:  # the conversation is unchanged
                log(f"jaxllm: {error}")
                failed = True
    if failed and broadcast_from_zero(lambda: "" if sys.stdin.isatty() else "a pipe"):
        status = 1
    if status:
        raise typer.Exit(status)


def _start_conversation(
    lm: "LM", options: dict[str, Any], system: str | None, chat_template: Path | None
) -> "Conversation":
    """Return the conversation before its first line. Raises any error that line would raise."""
    from jaxllm.cli.conversation import Conversation
    from jaxllm.convert.registry import read_chat_template

    if lm.tokenizer is None:
        raise TokenError(f"{lm.path} has no tokenizer, which chat requires. Add its files there")
    if chat_template is not None:
        template = read_chat_template(chat_template, lm.path)
        lm = dataclasses.replace(lm, chat_template=template)
    return Conversation(lm, options, system)


def _format_help() -> str:
    names = {name: f"{name} {command.argument}".strip() for name, command in COMMANDS.items()}
    width = max(map(len, names.values()))
    rows = [f"{names[name]:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*rows, KEYS])


def _run_command(talk: "Conversation", line: str) -> str | None:
    """Run a slash command; returns the text to log, or None to leave the chat."""
    name, _, text = line.strip().partition(" ")
    if (command := COMMANDS.get(name)) is None:
        raise ConfigError(
            f"no such command: {name!r:.40}. /help lists the commands; a space before the"
            " slash sends the line to the model"
        )
    if text and not command.argument:
        raise ConfigError(f"{name} takes no argument: got {text!r:.40}")
    if not text and command.argument == "FILE":
        raise ConfigError(f"{name} needs a file: for example {name} talk.json")
    return command.run(talk, text.strip())


def _read_lines() -> Iterator[str | int]:
    """Yield lines from the terminal or a pipe, and at the end the exit status. In a group of
    processes the first one reads.
    """
    read = terminal.make_line_reader()
    while True:
        line: str | int = json.loads(broadcast_from_zero(lambda: json.dumps(read())))
        if isinstance(line, int):
            yield line
            return
        if line.strip():
            yield line.rstrip("\r\n")
