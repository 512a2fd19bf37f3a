"""`jaxllm chat`: a conversation in a model's chat template."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from jaxllm.cli import terminal
from jaxllm.cli.console import note
from jaxllm.cli.options import Model, Overflow, read_more, read_options
from jaxllm.cli.shared import Loading, Sampling, with_options
from jaxllm.distributed import told
from jaxllm.errors import ConfigError, JaxllmError, TokenError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.cli.conversation import Conversation

EXAMPLE = "Example: jaxllm chat ~/models/TinyLlama-1.1B-Chat --temperature 0.7"
KEYS = """\
Ctrl-C stops an answer (with --distributed: the chat), clears a line, and leaves if pressed twice
on an empty one; so does Ctrl-D. A paste is one turn; Alt-Enter begins another line of it."""


class Command(NamedTuple):
    """A line that begins with a slash. argument: "FILE" is required, "[TEXT]" is not, "" is none.

    run: returns what to note; None leaves the chat.
    """

    argument: str
    help: str
    run: "Callable[[Conversation, str], str | None]"


def _set(talk: "Conversation", text: str) -> str:
    name, _, value = text.partition(" ")
    if not name:
        return talk.list_options()
    if not value.strip():
        raise ConfigError(f"/set {name} has no value. Give one as JSON; null is the default")
    return talk.set_option(name, value.strip())


COMMANDS = {
    "/help": Command("", "list the commands", lambda talk, _: _help()),
    "/system": Command(
        "[TEXT]", "set the system message, or remove it", lambda talk, text: talk.set_system(text)
    ),
    "/undo": Command("", "drop the last line and its answer", lambda talk, _: talk.undo()),
    "/regenerate": Command(
        "", "draw another answer to the last line", lambda talk, _: talk.regenerate()
    ),
    "/reset": Command("", "drop all but the system message", lambda talk, _: talk.reset()),
    "/set": Command(
        "[NAME VALUE]", "set an option of generation, as temperature 0.9; alone: list them", _set
    ),
    "/save": Command(
        "FILE", "write the messages as JSON, over an earlier save", lambda talk, f: talk.save(f)
    ),
    "/load": Command("FILE", "go on from saved messages", lambda talk, file: talk.load(file)),
    "/quit": Command("", "leave; so do /exit and Ctrl-D", lambda talk, _: None),
    "/exit": Command("", "leave", lambda talk, _: None),
}


@with_options
def chat(
    sampling: Sampling,
    loading: Loading,
    model: Model = "demo:llama",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file in place of the checkpoint's chat template.")
    ] = None,
    overflow: Overflow = None,
) -> None:
    """Talk with a model in its chat template; /help lists the commands.

    Ctrl-C stops an answer and clears a line; pressed twice on an empty line it leaves, as Ctrl-D
    does (of several processes it ends the chat: they would stop at different words). A paste is one
    turn. Lines are kept in ~/.local/state/jaxllm/chat_history, which only you can read;
    JAXLLM_CHAT_HISTORY names another file, 0 keeps none. A conversation that outgrows the context
    is refused a further line; with --overflow slide its oldest turns are forgotten.
    """
    with terminal.hold_keys():
        loading.begin(model)
        named = {**sampling.named, "seed": sampling.given_seed("random"), "overflow": overflow}
        asked = named | read_more(sampling.more)
        read_options(None, kind="stream", **asked)  # refused before the model is loaded
        talk = _begin(loading.load(model), asked, system, chat_template)
        if terminal.on_terminal():
            note(f"{_describe(talk)}\n/help lists the commands, Ctrl-D leaves")
        failed, status = False, terminal.LEFT
        for line in _lines():
            if isinstance(line, int):
                status = line
                break
            try:
                if not line.startswith("/"):
                    talk.answer(line)
                elif (said := _run(talk, line)) is None:
                    break
                elif said:
                    note(said)
            except JaxllmError as error:  # the conversation is as it was
                note(f"jaxllm: {error}")
                failed = True
    if failed and told(lambda: "" if sys.stdin.isatty() else "a pipe"):
        status = 1
    if status:
        raise typer.Exit(status)


def _begin(
    lm: "LM", asked: dict[str, Any], system: str | None, chat_template: Path | None
) -> "Conversation":
    """The conversation before its first line. Raises what its first line would."""
    from jaxllm.cli.conversation import Conversation
    from jaxllm.forms import read_chat_template

    if lm.tokenizer is None:
        raise TokenError(f"{lm.path} has no tokenizer, and a chat is text. Put its files there")
    if chat_template is not None:
        template = read_chat_template(chat_template, lm.path)
        lm = dataclasses.replace(lm, chat_template=template)
    return Conversation(lm, asked, system)


def _describe(talk: "Conversation") -> str:
    """A line about the model and the seed."""
    about = repr(talk.lm).removeprefix("LM(").removesuffix(")")
    return f"{about}, seed {talk.seed}"


def _help() -> str:
    names = {name: f"{name} {command.argument}".strip() for name, command in COMMANDS.items()}
    width = max(map(len, names.values()))
    rows = [f"{names[name]:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*rows, KEYS])


def _run(talk: "Conversation", line: str) -> str | None:
    """Run a line that begins with a slash: what it notes, None if it leaves the chat."""
    name, _, text = line.strip().partition(" ")
    if (command := COMMANDS.get(name)) is None:
        raise ConfigError(
            f"there is no command {name!r:.40}. /help lists them; a space before the"
            " slash sends the line to the model"
        )
    if text and not command.argument:
        raise ConfigError(f"{name} takes nothing, got {text!r:.40}")
    if not text and command.argument == "FILE":
        raise ConfigError(f"{name} names no file. Give one: {name} talk.json")
    return command.run(talk, text.strip())


def _lines() -> Iterator[str | int]:
    """What a person types or a pipe brings, and at last the status to leave with; of a group of
    processes what the first one reads.
    """
    read = terminal.line_reader()
    while True:
        line: str | int = json.loads(told(lambda: json.dumps(read())))
        if isinstance(line, int):
            yield line
            return
        if line.strip():
            yield line.rstrip("\r\n")
