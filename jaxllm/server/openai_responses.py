"""Answers in OpenAI's JSON: whole completions, chunks of a stream, log-probabilities."""

import codecs
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.server.gemma4 import Gemma4Text
from jaxllm.server.harmony import HarmonyText
from jaxllm.server.tools import ToolText

IMPOSSIBLE = -9999.0  # stands for minus infinity, which JSON has not
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
Json = dict[str, Any]


# Some clients end a line of a stream at these characters too (Python's `str.splitlines`).
_LINE_ENDS = str.maketrans({c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})


def encode_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8, in one line by any client's rules."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_LINE_ENDS).encode(errors="replace")


class Answer:
    """The frame around an answer's choices: id, object, time, model.

    chat: whether it answers a conversation.
    """

    def __init__(self, model: str, fingerprint: str, *, chat: bool) -> None:
        self.chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    @property
    def id(self) -> str:
        """The answer's id."""
        return str(self._head["id"])

    def format_answer(self, choices: Sequence[Json], usage: Json) -> Json:
        """Return an answer that is not streamed."""
        return {**self._head, "choices": list(choices), "usage": usage}

    def chunk(self, choices: Sequence[Json], usage: Json | None = None, **more: Any) -> Json:
        """Return a chunk of a stream. more: `usage=None` where usage comes at the end."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        used = {} if usage is None else {"usage": usage}
        return {**self._head, "object": kind, "choices": list(choices), **more, **used}


def usage(ends: Iterable[Mapping[str, Any]], prompts: int) -> Json:
    """Return the tokens of all choices, from their `done` frames; each prompt counts once.

    prompts: how many different prompts there are, each with the same number of choices.
    """
    ends = list(ends)
    choices = max(1, len(ends) // max(1, prompts))
    first = ends[::choices]
    prompt = sum(end["prompt_tokens"] for end in first)
    new = sum(end["completion_tokens"] for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "seed": ends[0]["seed"] if ends else None,
        "prompt_tokens_details": {"cached_tokens": sum(end["cached_tokens"] for end in first)},
    }


class Choice:
    """One choice while it grows: text, log-probabilities, tool calls.

    logprobs: the number of likeliest tokens to show, None for no log-probabilities. tools:
    see `GenerationCall`. style, hidden: as in `ToolText`. shows_ids: whether it has the ids of its
    tokens.
    """

    def __init__(
        self,
        index: int,
        *,
        chat: bool,
        logprobs: int | None,
        tools: Mapping[str, Any] | None = None,
        style: str = "",
        hidden: Sequence[str] = (),
        shows_ids: bool = False,
    ) -> None:
        self.index, self._chat, self._logprobs = index, chat, logprobs
        self._reader: HarmonyText | ToolText | None = None
        if chat and style == "harmony":
            self._reader = HarmonyText(tools)
        elif chat and style == "gemma4" and (tools is None or tools["choice"] != "required"):
            self._reader = Gemma4Text(tools)
        elif tools is not None:
            self._reader = ToolText(tools, style, hidden)
        self._text = self._thought = ""
        self._calls: list[Json] = []
        self._finish: str | None = None
        self._shown: list[tuple[bytes, float, list[Any]]] = []
        self._offsets = TextOffsets()  # of the tokens in `_shown`
        self._first_shown = 0
        self._begun = False
        self._shows_ids = shows_ids
        self._ids: list[int] = []
        self._first_id = 0

    def prefix(self, text: str, scored: Mapping[str, Any] | None) -> None:
        """Put an echoed prompt in front. scored: the answer of `ModelProcess` to "score"."""
        self._text = text
        if scored is None:
            return
        for token, is_text in zip(scored["tokens"], scored["is_text"], strict=True):
            self._offsets.push(token if is_text else b"")
        self._shown += [(scored["tokens"][0], float("nan"), [])]
        rows = zip(scored["tokens"][1:], scored["logprobs"], scored["top"], strict=True)
        self._shown += [(token, logprob, top) for token, logprob, top in rows]

    def push(self, chunk: Sequence[Any]) -> Json | None:
        """Add a `chunk` frame; return the choice of a stream's chunk, None if nothing is new."""
        piece, token, finish, *shown = chunk
        self._ids.append(token)
        if shown:
            self._shown.append((shown[1], shown[0], shown[2]))
            self._offsets.push(shown[1] if shown[3] else b"")
        thought = ""
        if self._reader is not None:
            piece = self._reader.push(piece)
        if finish is not None:
            self._finish = FINISH_REASONS[finish]
            if self._reader is not None:
                rest, calls = self._reader.finish()
                piece += rest
                self._calls = [_make_call(call, i) for i, call in enumerate(calls)]
                self._finish = "tool_calls" if calls else self._finish
        if self._reader is not None:
            thought = self._reader.take_thought()
        self._text += piece
        self._thought += thought
        if not (piece or thought or shown) and finish is None:
            return None
        if self._reader is not None and not (piece or thought) and finish is None:
            return None
        return self._stream_choice(piece, thought)

    def end(self, reason: str) -> None:
        """Set why it ended, for an end without a chunk (a cancelled request)."""
        self._finish = self._finish or FINISH_REASONS[reason]

    def echo_chunk(self) -> Json:
        """Return the choice of a stream's chunk with the echoed prompt."""
        return self._stream_choice(self._text)

    def end_chunks(self) -> list[Json]:
        """Return the last choices of a chat's stream: calls of tools, then the reason of its end.

        A call's name comes before its arguments, and both before the reason: OpenAI's client
        reports a call as complete only where something follows it.
        """
        deltas: list[Json] = []
        for call in self._calls:
            function = call["function"]
            begun = {**call, "function": {**function, "arguments": ""}}
            rest = {"index": call["index"], "function": {"arguments": function["arguments"]}}
            deltas += [{"tool_calls": [begun]}, {"tool_calls": [rest]}]
        return [
            {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason}
            for delta, reason in [*((delta, None) for delta in deltas), ({}, self._finish)]
        ]

    def role_chunk(self) -> Json:
        """Return the first choice of a chat's stream."""
        return {"index": self.index, "delta": {"role": "assistant", "content": None},
                "logprobs": None, "finish_reason": None}  # fmt: skip

    def format_choice(self) -> Json:
        """Return the finished choice."""
        self._first_shown = self._first_id = 0
        logprobs, ids = self._take_logprobs(), self._take_ids()
        if not self._chat:
            return {"index": self.index, "text": self._text, "logprobs": logprobs,
                    "finish_reason": self._finish, **ids}  # fmt: skip
        content = None if self._calls and not self._text else self._text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._thought:
            message["reasoning_content"] = self._thought
        if self._calls:
            message["tool_calls"] = [
                {k: v for k, v in c.items() if k != "index"} for c in self._calls
            ]
        return {"index": self.index, "message": message, "logprobs": logprobs,
                "finish_reason": self._finish, **ids}  # fmt: skip

    def _stream_choice(self, piece: str, thought: str = "") -> Json:
        logprobs, ids = self._take_logprobs(), self._take_ids()
        if not self._chat:
            return {"index": self.index, "text": piece, "logprobs": logprobs,
                    "finish_reason": self._finish, **ids}  # fmt: skip
        delta = {"content": piece} if piece or not thought else {}
        delta |= {"reasoning_content": thought} if thought else {}
        return {"index": self.index, "delta": delta, "logprobs": logprobs,
                "finish_reason": None, **ids}  # fmt: skip

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
            "text_offset": self._offsets.within(self._text, first),
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


def _make_call(call: Json, index: int) -> Json:
    """Return a call with an id that every template accepts: Mistral's want nine characters."""
    return {"index": index, "id": secrets.token_hex(5)[:9], "type": "function", "function": call}


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
