"""A conversation with a model: messages, options, seed and cache, and what changes them.

Whatever raises leaves a conversation as it was. Of several processes each has the same one.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from jaxllm import process
from jaxllm.cache.prefix import reuse
from jaxllm.cli.console import note, waiting, write
from jaxllm.cli.options import read_more, read_options
from jaxllm.cli.shared import draw_seed
from jaxllm.distributed import once, told
from jaxllm.errors import CapacityError, CheckpointError, ConfigError, JaxllmError
from jaxllm.files import as_schema, is_there, read_json, write_json

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.cache import KVCache

FORMAT, VERSION = "jaxllm-chat", 1
LEAST_ROOM = 16  # tokens of an answer for which a turn has its place in the context
STOPPING = "stopping the answer; Ctrl-C again ends the chat"

Messages = list[dict[str, str]]


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["jaxllm-chat"]
    version: Literal[1]
    messages: list[_Message]


class Conversation:
    """A system message if there is one, then lines and answers in turns.

    asked: options of `LM.stream` as a user gave them; options: the same, checked and completed.
    seed: with which the first of `answers` was drawn, the next ones with the numbers after it; by
    default a random one. cache: of the newest answer, for what the next prompt shares with it.
    """

    def __init__(self, lm: "LM", asked: dict[str, Any], system: str | None) -> None:
        self.lm = lm
        self.asked: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.seed = self.answers = 0
        self.cache: KVCache | None = None
        self.messages: Messages = []
        self._choose({"seed": None, **asked})
        self.set_system(system or "")

    @property
    def system(self) -> Messages:
        """The system message, or nothing."""
        return [m for m in self.messages[:1] if m["role"] == "system"]

    def answer(self, line: str) -> None:
        """Stream an answer to a line. Raises CapacityError if the context has no room for both."""
        try:
            self._draw([*self.messages, {"role": "user", "content": line}])
        except CapacityError as error:
            kept = "The line is dropped, the conversation is as before."
            raise CapacityError(f"{error} {kept}") from None

    def regenerate(self) -> str:
        """Stream another answer, with the next seed, in place of the last one."""
        self._check_turn()
        *asked, last = self.messages
        self._draw(asked)
        same = "(the same answer: without a temperature the best token is always taken)"
        return same if self.messages[-1] == last else ""

    def undo(self) -> str:
        """Drop the last line and its answer."""
        self._check_turn()
        line = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        return f"dropped: {line}"

    def reset(self) -> str:
        """Drop all lines and answers."""
        self.messages = self.system
        return "forgotten"

    def set_system(self, text: str) -> str:
        """Set the system message, or remove it; the lines and answers stay."""
        before = self.system
        changed: Messages = [{"role": "system", "content": text}] if text else []
        self._take([*changed, *self.messages[len(before) :]])
        if text:
            return "the system message is set"
        return f"no system message (it was: {before[0]['content']})" if before else ""

    def set_option(self, name: str, value: str) -> str:
        """Set an option of generation, its value as JSON; null is the default."""
        self._choose(self.asked | read_more([f"{name}={value}"], "/set"))
        return ""

    def list_options(self) -> str:
        """The options that are set, by the user or by the checkpoint, a line each."""
        from jaxllm.options import OPTIONS

        lines = [f"seed = {self.seed}"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in self.options.items()]
        for name, value in self.lm.generation.items():
            if name in OPTIONS and OPTIONS[name].from_file and name not in self.options:
                lines.append(f"{name} = {json.dumps(value)} (generation_config.json)")
        return "\n".join(lines)

    def save(self, name: str) -> str:
        """Write the messages to a file, which may hold an earlier conversation and nothing else."""
        path = Path(name).expanduser()
        once(lambda: _save(path, self.messages))
        return f"{path}: {self._count()} written"

    def load(self, name: str) -> str:
        """Go on from the messages of a file, the system message too. Raises CheckpointError."""
        path = Path(name).expanduser()
        self._take(json.loads(told(lambda: json.dumps(_read(path)))))
        return f"{path}: {self._count()} read"

    def _count(self) -> str:
        turns = len(self.messages) // 2
        return (
            f"{turns} turn{'' if turns == 1 else 's'}{' and a system message' * len(self.system)}"
        )

    def _check_turn(self) -> None:
        if len(self.messages) - len(self.system) < 2:
            raise ConfigError("there is no line and answer yet. Type a line first")

    def _choose(self, asked: dict[str, Any]) -> None:
        """Take these options; a seed among them begins to count anew."""
        options = read_options(None, kind="stream", **asked)
        self.lm.using(options.get("adapter"))  # raises if there is no such one
        if isinstance(seed := options.pop("seed", None), list):
            raise ConfigError(f"a conversation takes one seed, got {seed!r:.40}")
        if "seed" in asked:
            self.seed, self.answers = draw_seed() if seed in (None, "random") else seed, 0
        if self.cache is not None and options.get("adapter") != self.options.get("adapter"):
            self.cache = None
        self.asked = {name: value for name, value in asked.items() if name != "seed"}
        self.options = options

    def _take(self, messages: Messages) -> None:
        """Take these messages, if the chat template does."""
        self.lm.chat_prompt([*messages, {"role": "user", "content": "?"}])
        self.messages = messages

    def _draw(self, messages: Messages) -> None:
        """Stream an answer to the last message until it or Ctrl-C ends it, and keep both."""
        messages, prompt = self._fit(messages)
        text, cache = "", None
        seed = (self.seed + self.answers) % 2**64
        options = {**self.options, "cache": _shared(self.cache, prompt), "seed": seed}
        with process.deferred(STOPPING) as stopped, waiting("reading") as ready:
            for piece in self.lm.stream(prompt, **options):
                ready()
                write(piece.text)
                text, cache = text + piece.text, piece.cache
                if stopped():
                    break
        write("\n")
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self.cache, self.answers = cache, self.answers + 1

    def _fit(self, messages: Messages) -> tuple[Messages, list[int]]:
        """The messages, less the oldest turns if the conversation may overflow, and their ids.

        Raises CapacityError if there is no room for an answer.
        """
        lm, fixed = self.lm, len(self.system)
        context = lm.config.context_length
        room = min(int(np.max(self.options.get("max_new_tokens", LEAST_ROOM))), context // 2)
        overflows = self.options.get("overflow", "refuse") != "refuse"
        forgotten = 0
        while len(prompt := lm.chat_prompt(messages)) + room > context:
            if not overflows or len(messages) <= fixed + 1:
                raise self._too_long(messages, len(prompt), room)
            messages = messages[:fixed] + messages[fixed + 2 :]  # a line and its answer
            forgotten += 1
        if forgotten:
            note(f"(forgot the {forgotten} oldest turns)")
        return messages, prompt

    def _too_long(self, messages: Messages, tokens: int, room: int) -> CapacityError:
        lm, context = self.lm, self.lm.config.context_length
        assert lm.tokenizer is not None
        line = len(lm.tokenizer.encode(messages[-1]["content"]))
        alone = len(lm.chat_prompt([*self.system, messages[-1]])) + room <= context
        remedy = "/undo, /reset or /set overflow slide makes room." if alone else "Shorten it."
        return CapacityError(
            f"the line exceeds the model's context: got {line:,} tokens after"
            f" {max(tokens - line, 0):,} of the conversation, and an answer needs {room};"
            f" expected at most {context:,} in all. {remedy}"
        )


def _shared(cache: "KVCache | None", prompt: list[int]) -> "KVCache | None":
    """What a prompt shares with a cache; None if its policy has forgotten parts of the text."""
    if cache is None:
        return None
    try:
        return reuse(cache, prompt, 1)[0]
    except JaxllmError:
        return None


def _save(path: Path, messages: Messages) -> None:
    if is_there(path):
        try:
            _read(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is there and is not a saved conversation ({error}). Name another file"
            ) from None
    write_json(path, {"format": FORMAT, "version": VERSION, "messages": messages})


def _read(path: Path) -> Messages:
    """The messages of a file. Raises CheckpointError if they are not turns of a conversation."""
    saved: _Saved = as_schema(read_json(path), _Saved, str(path))
    messages = [{"role": m.role, "content": m.content} for m in saved.messages]
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    roles = [m["role"] for m in turns]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise CheckpointError(
            f"{path}: messages must alternate: got {', '.join(roles):.80}, expected user,"
            " assistant, ... after an optional system message"
        )
    return messages
