"""A conversation with a model: its messages, options, seed and cache, and the chat commands.

A method that raises leaves the conversation unchanged. All processes of a group hold the same one.
"""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import msgspec
import numpy as np

from jaxllm.cache.prefix_reuse import reuse_prefix
from jaxllm.cli.console import log, spinner, write
from jaxllm.cli.option_groups import draw_seed
from jaxllm.cli.options import read_extra_options, read_options
from jaxllm.errors import CapacityError, CheckpointError, ConfigError, JaxllmError
from jaxllm.files import path_exists, read_json, write_json
from jaxllm.files.versions import CHAT
from jaxllm.runtime import signals
from jaxllm.runtime.multihost import broadcast_from_zero, run_on_process_zero
from jaxllm.runtime.schema import as_schema

if TYPE_CHECKING:
    from jaxllm.cache import KVCache
    from jaxllm.lm import LM
    from jaxllm.server.text_reader import Part, TextReader

MIN_ANSWER_TOKENS = 16  # tokens reserved for an answer if max_new_tokens is not set
STOP_MESSAGE = "stopping the answer; press Ctrl-C again to end the chat"

Messages = list[dict[str, str]]


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _SavedChat(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["jaxllm-chat"]
    version: int
    messages: list[_Message]


class Conversation:
    """An optional system message, then alternating lines and answers.

    user_options: options of `LM.stream` as the user gave them; options: the same, checked and
        completed.
    seed: the seed of the first of `answers` answers, each next one uses the next number; random by
    default. cache: the cache of the newest answer, reused for the prefix shared with the next
    prompt. read: in models with a state, which rewinds only so far, the cache before that answer.
    """

    def __init__(self, lm: "LM", user_options: dict[str, Any], system: str | None) -> None:
        self.lm = lm
        self.user_options: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.seed = self.answers = 0
        self.cache: KVCache | None = None
        self.read: KVCache | None = None
        self.messages: Messages = []
        self._apply_options({"seed": None, **user_options})
        self.system(system or "")

    @property
    def system_message(self) -> Messages:
        """The system message as a list, empty if there is none."""
        return [m for m in self.messages[:1] if m["role"] == "system"]

    def answer(self, line: str) -> None:
        """Stream an answer to a line. Raises CapacityError if the context has no room for both."""
        try:
            self._generate_answer([*self.messages, {"role": "user", "content": line}])
        except CapacityError as error:
            kept = "The line is dropped; the conversation is unchanged."
            raise CapacityError(f"{error} {kept}") from None

    def regenerate(self) -> str:
        """Stream another answer, with the next seed, to replace the last one."""
        self._check_turn()
        *asked, last = self.messages
        self._generate_answer(asked)
        same = "(the same answer: without a temperature, decoding is greedy)"
        return same if self.messages[-1] == last else ""

    def undo(self) -> str:
        """Remove the last line and its answer."""
        self._check_turn()
        line = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        return f"removed: {line}"

    def reset(self) -> str:
        """Remove all lines and answers."""
        self.messages = self.system_message
        return "all messages removed"

    def system(self, text: str) -> str:
        """Set the system message, or remove it; the lines and answers stay."""
        before = self.system_message
        changed: Messages = [{"role": "system", "content": text}] if text else []
        self._set_messages([*changed, *self.messages[len(before) :]])
        if text:
            return "system message set"
        return f"system message removed (it was: {before[0]['content']})" if before else ""

    def set(self, text: str) -> str:
        """Set the option of "NAME VALUE", JSON, null for the default; list all without a name."""
        from jaxllm.generation.option_table import OPTIONS

        name, _, value = text.partition(" ")
        if name and not value.strip():
            raise ConfigError(
                f"/set {name} needs a value. Give it as JSON; null restores the default"
            )
        if name:
            changed = read_extra_options([f"{name}={value.strip()}"], "/set")
            self._apply_options(self.user_options | changed)
            return ""
        lines = [f"seed = {self.seed}"]
        for name, setting in self.options.items():
            lines += [f"{name} = {', '.join(setting) if name == 'edits' else json.dumps(setting)}"]
        for name, setting in self.lm.generation.items():
            if name in OPTIONS and OPTIONS[name].from_file and name not in self.options:
                lines += [f"{name} = {json.dumps(setting)} (generation_config.json)"]
        return "\n".join(lines)

    def save(self, name: str) -> str:
        """Write the messages to a new file, or over an earlier conversation."""
        path = Path(name).expanduser()
        run_on_process_zero(lambda: _write_messages(path, self.messages))
        return f"{path}: {self._count_turns()} written"

    def load(self, name: str) -> str:
        """Replace the messages, system message included, by those of a file.

        Raises CheckpointError if the file cannot be read.
        """
        path = Path(name).expanduser()
        content = broadcast_from_zero(lambda: json.dumps(_read_messages(path)))
        self._set_messages(json.loads(content))
        return f"{path}: {self._count_turns()} read"

    def _count_turns(self) -> str:
        turns = len(self.messages) // 2
        system = " and a system message" * len(self.system_message)
        return f"{turns} turn{'s' * (turns != 1)}{system}"

    def _check_turn(self) -> None:
        if len(self.messages) - len(self.system_message) < 2:
            raise ConfigError("the conversation has no answer yet. Type a line first")

    def _apply_options(self, user_options: dict[str, Any]) -> None:
        """Check and set the options; a seed among them restarts the count of answers."""
        options = read_options(None, kind="stream", **user_options)
        self.lm.with_adapter(options.get("adapter"))  # raises if there is no such adapter
        if isinstance(seed := options.pop("seed", None), list):
            raise ConfigError(f"seed must be one number: got {seed!r:.40}")
        if "seed" in user_options:
            self.seed, self.answers = draw_seed() if seed in (None, "random") else seed, 0
        if self.cache is not None and options.get("adapter") != self.options.get("adapter"):
            self.cache = self.read = None
        self.user_options = {name: value for name, value in user_options.items() if name != "seed"}
        self.options = options

    def _set_messages(self, messages: Messages) -> None:
        """Set the messages if the chat template accepts them."""
        self.lm.chat_prompt([*messages, {"role": "user", "content": "?"}])
        self.messages = messages

    def _generate_answer(self, messages: Messages) -> None:
        """Stream an answer to the last message until it ends or Ctrl-C stops it, and store both."""
        messages, prompt = self._fit_context(messages)
        text, cache, reused, read = "", None, self._reuse_prefix(prompt), None
        reader, marks = self._channel_reader()
        seed = (self.seed + self.answers) % 2**64
        options = {**self.options, "cache": reused, "seed": seed}
        with signals.defer_interrupt(STOP_MESSAGE) as stopped, spinner("reading") as ready:
            for piece in self.lm.stream(prompt, **options):
                ready()
                if read is None and self.lm.config.has_state:
                    # The next step overwrites the piece's.
                    read = jax.tree.map(lambda x: x.copy(), piece.cache)
                content = piece.text
                if reader is not None:
                    parts = reader.push(piece.text + marks.get(piece.token, ""))
                    content = _write_thought(parts)
                    write("\n\n" * bool(content and not text))  # after the thought
                write(content)
                text, cache = text + content, piece.cache
                if stopped():
                    break
        if reader is not None:
            rest = _write_thought(reader.finish())
            write(rest)
            text += rest
        write("\n")
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self.cache, self.read, self.answers = cache, read, self.answers + 1

    def _reuse_prefix(self, prompt: list[int]) -> "KVCache | None":
        """Return the cache that has most of a prompt's prefix, rewound to it."""
        best: KVCache | None = None
        for cache in (self.cache, self.read):
            with contextlib.suppress(JaxllmError):  # its overflow policy has dropped tokens
                found = None if cache is None else reuse_prefix(cache, prompt, 1)[0]
                if best is None or (found and found.next_position_B[0] > best.next_position_B[0]):
                    best = found
        return best

    def _channel_reader(self) -> "tuple[TextReader | None, dict[int, str]]":
        """Return what reads an answer in channels and the marks of its tokens, if it has them."""
        from jaxllm.server.gemma4 import Gemma4Text
        from jaxllm.server.harmony import HarmonyText
        from jaxllm.server.tools import find_marks, find_style

        template = self.lm.chat_template
        if isinstance(template, JaxllmError):
            return None, {}
        readers: dict[str, type[TextReader]] = {"harmony": HarmonyText, "gemma4": Gemma4Text}
        reader = readers.get(find_style(template.select_source([])))
        if reader is None:
            return None, {}
        marks = find_marks(self.lm.tokenizer)
        return reader(), {token: mark for mark, token in marks.items()}

    def _fit_context(self, messages: Messages) -> tuple[Messages, list[int]]:
        """Return the messages and their ids, without the oldest turns if overflow drops them.

        Raises CapacityError if there is no room for an answer.
        """
        lm, fixed = self.lm, len(self.system_message)
        context = lm.config.context_length
        room = min(int(np.max(self.options.get("max_new_tokens", MIN_ANSWER_TOKENS))), context // 2)
        overflows = self.options.get("overflow", "refuse") != "refuse"
        forgotten = 0
        while len(prompt := lm.chat_prompt(messages)) + room > context:
            if not overflows or len(messages) <= fixed + 1:
                assert lm.tokenizer is not None
                line = len(lm.tokenizer.encode(messages[-1]["content"]))
                alone = len(lm.chat_prompt([*self.system_message, messages[-1]])) + room <= context
                remedy = "Use /undo, /reset or /set overflow slide." if alone else "Shorten it."
                raise CapacityError(
                    f"the line exceeds the model's context: got {line:,} tokens after"
                    f" {max(len(prompt) - line, 0):,} of the conversation, plus {room} for an"
                    f" answer; expected at most {context:,} in total. {remedy}"
                )
            messages = messages[:fixed] + messages[fixed + 2 :]  # a line and its answer
            forgotten += 1
        if forgotten:
            log(f"(dropped the {forgotten} oldest turns)")
        return messages, prompt


def _write_thought(parts: "list[Part]") -> str:
    """Write the thought among the parts of an answer, and return the content."""
    write("".join(text for kind, text in parts if kind == "thought"))
    return "".join(text for kind, text in parts if kind == "content")


def _write_messages(path: Path, messages: Messages) -> None:
    if path_exists(path):
        try:
            _read_messages(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} exists and is not a saved conversation ({error}). Name another file"
            ) from None
    write_json(path, {**CHAT.mark, "messages": messages})


def _read_messages(path: Path) -> Messages:
    """Read messages from a file. Raises CheckpointError if they are not turns of a conversation."""
    data = read_json(path)
    CHAT.check(data, path)
    saved: _SavedChat = as_schema(data, _SavedChat, str(path))
    messages: Messages = msgspec.to_builtins(saved.messages)
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    roles = [m["role"] for m in turns]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise CheckpointError(
            f"{path}: messages do not alternate: got {', '.join(roles):.80}, expected user,"
            " assistant, ... after an optional system message"
        )
    return messages
