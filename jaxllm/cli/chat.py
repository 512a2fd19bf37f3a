"""`jaxllm chat`: a conversation in a model's chat template."""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm import process
from jaxllm.cli.console import decoded, note, waiting, write
from jaxllm.cli.options import Model, Overflow, read_options
from jaxllm.cli.shared import Loading, Sampling, with_options
from jaxllm.distributed import told
from jaxllm.errors import CapacityError, JaxllmError

if TYPE_CHECKING:
    from jaxllm.api import LM

EXAMPLE = "Example: jaxllm chat ~/models/TinyLlama-1.1B-Chat --temperature 0.7"
LEAST_ROOM = 16  # tokens of an answer for which a turn has its place in the context
STOPPING = "stopping the answer; Ctrl-C again ends the chat"
HELP = """\
/help   this
/reset  forget what was said, but for the system message
/quit   end (so does Ctrl-D); Ctrl-C stops an answer, with --distributed the chat"""

Messages = list[dict[str, str]]


@with_options
def chat(
    sampling: Sampling,
    loading: Loading,
    model: Model = "demo:llama",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    overflow: Overflow = None,
) -> None:
    """Talk with a model in its chat template, a line at a time; /help says what else there is.

    Ctrl-C stops an answer, not the chat (of several processes the chat: they would stop at
    different words). A talk that outgrows the context is refused a further
    line, and can go on after /reset; with --overflow slide its oldest turns are forgotten.
    """
    loading.begin(model)
    options = read_options(sampling.more, kind="stream", overflow=overflow, **sampling.named)
    lm = loading.load(model)
    opening = [{"role": "system", "content": system}] if system else []
    lm.chat_prompt([*opening, {"role": "user", "content": "?"}])  # refuse before the first line
    messages, failed, seed = opening, False, sampling.draw_seed()
    for turn, line in enumerate(_lines()):
        if line.startswith("/"):
            messages = _command(line, messages, opening)
            continue
        try:
            asked = [*messages, {"role": "user", "content": line}]
            asked, prompt = _fitting(lm, asked, len(opening), options)
            answer, options["cache"] = _answer(lm, prompt, {**options, "seed": seed + turn})
        except JaxllmError as error:  # the talk is as it was before this line
            note(f"jaxllm: {error}")
            failed = True
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]
    if failed and told(lambda: "" if sys.stdin.isatty() else "a pipe"):
        raise typer.Exit(1)


def _command(line: str, messages: Messages, opening: Messages) -> Messages:
    """What a line that begins with a slash does to the talk."""
    if line.strip() == "/reset":
        note("forgotten")
        return opening
    note(HELP if line.strip() == "/help" else f"there is no {line.split()[0]}\n{HELP}")
    return messages


def _fitting(
    lm: "LM", messages: Messages, fixed: int, options: dict[str, Any]
) -> tuple[Messages, list[int]]:
    """The messages, less the oldest turns where the talk may overflow, and their token ids.

    fixed: how many at the beginning stay. Raises CapacityError where there is no room for an
    answer.
    """
    room = min(options.get("max_new_tokens", LEAST_ROOM), lm.config.context_length // 2)
    overflows = options.get("overflow", "refuse") != "refuse"
    forgotten = 0
    while len(prompt := lm.chat_prompt(messages)) + room > lm.config.context_length:
        if not overflows or len(messages) <= fixed + 1:
            raise CapacityError(
                f"the talk and an answer of {room} tokens exceed the model's context of"
                f" {lm.config.context_length}: "
                + ("shorten the line" if overflows else "/reset, or chat with --overflow slide")
            )
        messages = messages[:fixed] + messages[fixed + 2 :]  # a line and its answer
        forgotten += 1
    if forgotten:
        note(f"(forgot the {forgotten} oldest turns)")
    return messages, prompt


def _answer(lm: "LM", prompt: list[int], options: dict[str, Any]) -> tuple[str, Any]:
    """Stream an answer until it or Ctrl-C ends it; its text, and the cache for the next turn."""
    answer, cache = "", options.get("cache")
    with process.deferred(STOPPING) as stopped, waiting("reading") as ready:
        for piece in lm.stream(prompt, **options):
            ready()
            write(piece.text)
            answer, cache = answer + piece.text, piece.cache
            if stopped():
                break
    write("\n")
    return answer, cache


def _lines() -> Iterator[str]:
    """What a person types, or what a pipe brings, until its end or /quit; of a group of processes
    what the first is given.
    """
    ask = _asker()
    while True:
        line: str | None = json.loads(told(lambda: json.dumps(ask())))
        if line is None or line.strip() == "/quit":
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _asker() -> Callable[[], str | None]:
    """How the next line is had; None is the end. On a terminal lines can be edited and recalled."""

    def piped() -> str | None:
        return decoded(sys.stdin.buffer.readline()) or None

    def typed() -> str | None:
        try:
            return input("> ") + "\n"
        except EOFError:
            write("\n")
            return None
        except UnicodeDecodeError:
            note("that line is not UTF-8 text")
            return "\n"

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return piped
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() uses it once it is there
    return typed
