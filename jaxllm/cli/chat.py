"""`jaxllm chat`: a conversation in a model's chat template."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
    with_chat_template,
)
from jaxllm.errors import ConfigError, JaxllmError, TokenError
from jaxllm.runtime.multihost import broadcast_from_zero

if TYPE_CHECKING:
    from jaxllm.cli.conversation import Conversation

EXAMPLE = "Example: jaxllm chat ~/models/TinyLlama-1.1B-Chat --temperature 0.7"
KEYS = """\
Ctrl-C stops an answer (with --distributed: the chat) or clears the line; twice on an empty line, or
Ctrl-D, leaves. A paste is one turn; Alt-Enter starts a new line within a turn."""
# Slash command -> its argument (FILE is required, [TEXT] optional) and help. Those that neither
# leave nor list are methods of `Conversation`.
COMMANDS = {
    "/help": ("", "list the commands"),
    "/system": ("[TEXT]", "set the system message; without TEXT, remove it"),
    "/undo": ("", "remove the last line and its answer"),
    "/regenerate": ("", "generate another answer to the last line"),
    "/reset": ("", "remove all messages but the system message"),
    "/set": ("[NAME VALUE]", "set a generation option, as in temperature 0.9; alone: list them"),
    "/save": ("FILE", "write the messages as JSON; replaces an earlier save"),
    "/load": ("FILE", "continue from saved messages"),
    "/quit": ("", "leave; same as /exit and Ctrl-D"),
    "/exit": ("", "leave"),
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
        if lm.tokenizer is None:
            raise TokenError(f"{lm.path} has no tokenizer, which chat requires. Add its files")
        from jaxllm.cli.conversation import Conversation

        options |= steering_options(vector, lm)
        talk = Conversation(with_chat_template(lm, chat_template), options, system)
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


def _run_command(talk: "Conversation", line: str) -> str | None:
    """Run a slash command; returns the text to log, or None to leave the chat."""
    name, _, text = line.strip().partition(" ")
    if name not in COMMANDS:
        raise ConfigError(
            f"no such command: {name!r:.40}. /help lists the commands; a space before the"
            " slash sends the line to the model"
        )
    argument, _ = COMMANDS[name]
    if text and not argument:
        raise ConfigError(f"{name} takes no argument: got {text!r:.40}")
    if not text and argument == "FILE":
        raise ConfigError(f"{name} needs a file: for example {name} talk.json")
    if name in ("/quit", "/exit"):
        return None
    if name == "/help":
        rows = {f"{name} {what}".strip(): help for name, (what, help) in COMMANDS.items()}
        width = max(map(len, rows))
        return "\n".join([*(f"{row:<{width}}  {help}" for row, help in rows.items()), KEYS])
    reply: str = getattr(talk, name[1:])(*[text.strip()] * bool(argument))
    return reply


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
