"""Answers in OpenAI's JSON: whole completions, chunks of a stream, log-probabilities."""

import codecs
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm import __version__
from jaxllm.server.errors import ApiError
from jaxllm.server.openai_requests import GenerationCall
from jaxllm.server.text_reader import Part, TextReader

IMPOSSIBLE = -9999.0  # stands for minus infinity, which JSON has not
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
Json = dict[str, Any]


# Some clients end a line of a stream at these characters too (Python's `str.splitlines`).
_LINE_ENDS = str.maketrans({c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})


def encode_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8, in one line by any client's rules."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_LINE_ENDS).encode(errors="replace")


class Writer:
    """Writes an answer while it grows: its events, or at the end all of it.

    call: the request. choices: its texts while they grow. ends: their `done` frames, by index.
    """

    ping = b": ping\n\n"
    last_event = b"data: [DONE]\n\n"

    def __init__(self, call: GenerationCall, choices: "Sequence[Choice]", model: str) -> None:
        self.call, self.choices, self.model = call, choices, model
        self.ends: dict[int, Json] = {}
        self._begun = False

    def read(self, index: int, frame: Mapping[str, Any]) -> Iterable[Json]:
        """Read a choice's frame; yield the events that it makes."""
        choice = self.choices[index]
        if not self._begun:
            self._begun = True
            yield from self.begin(frame)
        if "started" in frame:
            choice.start(frame.get("opened", ""))
        elif "chunk" in frame:
            yield from self.push(choice, choice.read(frame["chunk"]))
        elif "done" in frame:
            choice.end(frame["done"]["finish_reason"])
            self.ends[index] = frame["done"]
            yield from self.end(choice)

    def begin(self, frame: Mapping[str, Any]) -> Iterable[Json]:
        """Yield the first events. frame: the first one."""
        return ()

    def push(self, choice: "Choice", parts: Sequence[Part]) -> Iterable[Json]:
        """Yield the events of new parts."""
        raise NotImplementedError

    def end(self, choice: "Choice") -> Iterable[Json]:
        """Yield the events of a choice's end."""
        return ()

    def finish(self) -> Iterable[Json]:
        """Yield the last events."""
        return ()

    def fail(self, error: ApiError) -> Json:
        """Return the event of an error."""
        return error.body

    def format_answer(self) -> Json:
        """Return the answer."""
        raise NotImplementedError


class Answer(Writer):
    """Writes completions, or a chat's answer."""

    def __init__(
        self, call: GenerationCall, choices: "Sequence[Choice]", model: str, *, chat: bool
    ) -> None:
        super().__init__(call, choices, model)
        self._chat = chat
        self._shows_usage = call.fields.stream_options.include_usage
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"jaxllm-{__version__}",
        }

    def begin(self, frame: Mapping[str, Any]) -> Iterable[Json]:
        for choice in self.choices:
            if self._chat:
                yield self._chunk(choice.chat_chunk({"role": "assistant", "content": None}))
            elif self.call.fields.echo:
                yield self._chunk(choice.echo_chunk())

    def push(self, choice: "Choice", parts: Sequence[Part]) -> Iterable[Json]:
        return map(self._chunk, choice.chunks(parts))

    def end(self, choice: "Choice") -> Iterable[Json]:
        if self._chat:
            yield self._chunk(choice.chat_chunk({}, choice.finish_reason))

    def finish(self) -> Iterable[Json]:
        if self._shows_usage:
            yield {**self._chunk(), **self._statistics()}

    def format_answer(self) -> Json:
        choices = [choice.format_choice() for choice in self.choices]
        return {**self._head, "choices": choices, **self._statistics()}

    def _chunk(self, *choices: Json) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        used = {"usage": None} if self._shows_usage else {}
        return {**self._head, "object": kind, "choices": choices, **used}

    def _statistics(self) -> Json:
        """Return the tokens of all choices, and the times of an answer with one choice.

        Each prompt counts once. The times have llama.cpp's names, for clients that show them.
        """
        ends = [self.ends[index] for index in range(len(self.choices))]
        prompts = len({str(frame.get("prompt")) for frame in self.call.frames})
        first = ends[:: len(ends) // prompts]
        prompt = sum(end["prompt_tokens"] for end in first)
        new = sum(end["completion_tokens"] for end in ends)
        thought = sum(choice.thought_tokens for choice in self.choices)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "seed": ends[0]["seed"],
            "prompt_tokens_details": {"cached_tokens": sum(end["cached_tokens"] for end in first)},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }
        timed = len(ends) == 1 and "timings" in ends[0]
        return {"usage": usage, **({"timings": ends[0]["timings"]} if timed else {})}


class ItemWriter(Writer):
    """Writes the only choice as items, each for a piece of content, a thought or a call."""

    def __init__(self, call: GenerationCall, choices: "Sequence[Choice]", model: str) -> None:
        super().__init__(call, choices, model)
        self._kind, self._num_calls = "", 0  # of the open item; of the calls that have one

    def push(self, choice: "Choice", parts: Sequence[Part]) -> Iterable[Json]:
        for kind, text in parts:
            if text and kind != "arguments" and (kind != self._kind or kind == "call"):
                yield from self.close(complete=True)
                call = choice.calls[self._num_calls] if kind == "call" else None
                self._num_calls += kind == "call"
                self._kind = kind
                yield from self.open_item(kind, call)
            if text and kind != "call":
                yield from self.extend_item(text)

    def close(self, *, complete: bool) -> Iterable[Json]:
        """Yield the events of the open item's end, if there is one."""
        if self._kind:
            self._kind = ""
            yield from self.close_item(complete=complete)

    def open_item(self, kind: str, call: Json | None) -> Iterable[Json]:
        """Yield the events of a new item. kind: of its parts. call: of `Choice.calls`."""
        raise NotImplementedError

    def extend_item(self, text: str) -> Iterable[Json]:
        """Yield the events of more text of the open item; of a call, of its arguments."""
        raise NotImplementedError

    def close_item(self, *, complete: bool) -> Iterable[Json]:
        """Yield the events of the open item's end."""
        raise NotImplementedError


class Choice:
    """One choice while it grows: content, thought, calls of tools, log-probabilities.

    reader: of the model's text. logprobs: the number of likeliest tokens to show, None for no
    log-probabilities. shows_ids: whether it has the ids of its tokens. thought_tokens: their
    number.
    """

    def __init__(
        self,
        index: int,
        reader: TextReader | None = None,
        *,
        chat: bool,
        logprobs: int | None,
        shows_ids: bool = False,
    ) -> None:
        self.index, self._chat, self._logprobs = index, chat, logprobs
        self._reader = reader or TextReader()
        self.text = self.thought = ""
        self.calls: list[Json] = []
        self.thought_tokens = 0
        self.finish_reason: str | None = None
        self._shown: list[tuple[bytes, float, list[Any]]] = []
        self._offsets = TextOffsets()  # of the tokens in `_shown`
        self._first_shown = 0
        self._shows_ids = shows_ids
        self._ids: list[int] = []
        self._first_id = 0

    def prefix(self, text: str, scored: Mapping[str, Any] | None) -> None:
        """Put an echoed prompt in front. scored: the answer of `ModelProcess` to "score"."""
        self.text = text
        if scored is None:
            return
        for token, is_text in zip(scored["tokens"], scored["is_text"], strict=True):
            self._offsets.push(token if is_text else b"")
        self._shown += [(scored["tokens"][0], float("nan"), [])]
        rows = zip(scored["tokens"][1:], scored["logprobs"], scored["top"], strict=True)
        self._shown += [(token, logprob, top) for token, logprob, top in rows]

    def start(self, opened: str) -> None:
        """Begin. opened: the mark of a thought that the prompt ends in."""
        if opened:
            self._reader.open_thought()

    def read(self, chunk: Sequence[Any]) -> list[Part]:
        """Add a `chunk` frame; return the parts of the answer that are new."""
        piece, token, finish, *shown = chunk
        self._ids.append(token)
        if shown:
            self._shown.append((shown[1], shown[0], shown[2]))
            self._offsets.push(shown[1] if shown[3] else b"")
        parts = self._reader.push(piece)
        self.thought_tokens += self._reader.is_thinking
        if finish is not None:
            parts += self._reader.finish()
        for kind, text in parts:
            if kind == "content":
                self.text += text
            elif kind == "thought":
                self.thought += text
            elif kind == "call":
                self.calls.append(_make_call(text, len(self.calls)))
            else:
                self.calls[-1]["function"]["arguments"] += text
        if finish is not None:
            self.end(finish)
        if not parts and (shown or finish is not None):
            return [Part("content", "")]  # has the log-probabilities, ids or the reason
        return parts

    def end(self, reason: str) -> None:
        """Set why it ended. A call that the limit of tokens may have cut off ends by that."""
        said = "tool_calls" if self.calls and reason != "length" else FINISH_REASONS[reason]
        self.finish_reason = self.finish_reason or said

    def echo_chunk(self) -> Json:
        """Return the choice of a stream's chunk with the echoed prompt."""
        return self._text_chunk(self.text)

    def chunks(self, parts: Sequence[Part]) -> Iterable[Json]:
        """Return the choices of a stream's chunks for parts that `read` returned.

        A call's name comes before its arguments, and both before the reason: OpenAI's client
        reports a call as complete only where something follows it.
        """
        index = len(self.calls) - sum(kind == "call" for kind, _ in parts) - 1
        for kind, text in parts:
            if not self._chat:
                yield self._text_chunk(text)
            elif kind in ("content", "thought"):
                yield self.chat_chunk(
                    {"content" if kind == "content" else "reasoning_content": text}
                )
            elif kind == "call":
                index += 1
                begun = {**self.calls[index], "function": {"name": text, "arguments": ""}}
                yield self.chat_chunk({"tool_calls": [begun]})
            else:
                rest = {"index": index, "function": {"arguments": text}}
                yield self.chat_chunk({"tool_calls": [rest]})

    def chat_chunk(self, delta: Json, reason: str | None = None) -> Json:
        """Return a choice of a chat's stream."""
        return {"index": self.index, "delta": delta, "logprobs": self._take_logprobs(),
                "finish_reason": reason, **self._take_ids()}  # fmt: skip

    def format_choice(self) -> Json:
        """Return the finished choice."""
        self._first_shown = self._first_id = 0
        if not self._chat:
            return self._text_chunk(self.text)
        content = None if self.calls and not self.text else self.text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {k: v for k, v in call.items() if k != "index"} for call in self.calls
            ]
        return {"index": self.index, "message": message, "logprobs": self._take_logprobs(),
                "finish_reason": self.finish_reason, **self._take_ids()}  # fmt: skip

    def _text_chunk(self, piece: str) -> Json:
        return {"index": self.index, "text": piece, "logprobs": self._take_logprobs(),
                "finish_reason": self.finish_reason, **self._take_ids()}  # fmt: skip

    def _take_ids(self) -> Json:
        """Return the token ids that were not returned before, as a choice's field."""
        if not self._shows_ids:
            return {}
        new, self._first_id = self._ids[self._first_id :], len(self._ids)
        return {"token_ids": new}

    def _take_logprobs(self) -> Json | None:
        """Return the log-probabilities that were not returned before."""
        if self._logprobs is None:
            return None
        first, self._first_shown = self._first_shown, len(self._shown)
        new = self._shown[first:]
        if self._chat:
            return {
                "content": [_chat_token(*item, self._logprobs) for item in new],
                "refusal": None,
            }
        texts = [_text(token) for token, _, _ in new]
        return {
            "tokens": texts,
            "token_logprobs": [None if lp != lp else _number(lp) for _, lp, _ in new],
            "top_logprobs": [_top(*item, self._logprobs) for item in new],
            "text_offset": self._offsets.within(self.text, first),
        }


class TextOffsets:
    """Where each token begins in a text: at the character that it begins or is a part of."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offsets: list[int] = []
        self._length, self._begins_with_space = 0, False

    def push(self, token: bytes) -> None:
        """Add a token's part of the text."""
        self._offsets.append(self._length)
        text = self._decoder.decode(token)
        self._begins_with_space |= not self._length and text.startswith(" ")
        self._length += len(text)

    def within(self, text: str, first: int) -> list[int]:
        """Return the offsets of the tokens from `first` on. Some tokenizers drop a first space."""
        dropped = self._begins_with_space and not text.startswith(" ")
        return [max(0, min(at - dropped, len(text))) for at in self._offsets[first:]]


def _make_call(name: str, index: int) -> Json:
    """Return a call with an id that every template accepts: Mistral's want nine characters."""
    function = {"name": name, "arguments": ""}
    return {
        "index": index,
        "id": secrets.token_hex(5)[:9],
        "type": "function",
        "function": function,
    }


def _chat_token(token: bytes, logprob: float, top: Sequence[Any], count: int) -> Json:
    def describe(token: bytes, logprob: float) -> Json:
        return {"token": _text(token), "bytes": list(token), "logprob": _number(logprob)}

    return {**describe(token, logprob), "top_logprobs": [describe(*t) for t in top[:count]]}


def _top(token: bytes, logprob: float, top: Sequence[Any], count: int) -> Json | None:
    """Return a token's alternatives by text, with the token itself; None for the first token."""
    if logprob != logprob:
        return None
    best: Json = {}
    for other, value in [*top[:count], (token, logprob)]:
        best.setdefault(_text(other), _number(value))
    return best


def _text(token: bytes) -> str:
    return token.decode(errors="replace")


def _number(logprob: float) -> float:
    """Return a log-probability with the digits that identify the float32, or IMPOSSIBLE."""
    return max(float(logprob), IMPOSSIBLE)
