"""`jaxllm generate --server`: text from a running server, with the standard library only.

Importing the command line takes longer than a resident model takes to its first token, so
`python -m jaxllm` comes here first and reads the common flags itself.
"""

import argparse
import contextlib
import http.client
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxllm.errors import ConfigError, JaxllmError

DEFAULT_TOKENS = 256
TIMEOUT_S = 600.0


def main(arguments: Sequence[str]) -> bool:
    """Run `jaxllm generate` with these arguments if they name a server and only known flags.

    Returns whether it ran; if not, the command line proper reads the arguments.
    """
    if not any(word.split("=")[0] == "--server" for word in arguments):
        return False
    try:
        given = _make_parser().parse_args(arguments)
    except _Unknown:
        return False
    options = {name: value for name, value in vars(given).items() if name not in _NOT_OPTIONS}
    words = given.words
    prompt = given.prompt
    if prompt is None and given.file is None and words:
        *words, prompt = words
    if len(words) > 1 or (prompt is None and given.file is None):
        return False
    if given.file is not None:
        prompt = Path(given.file).read_text("utf-8")
    if prompt == "-":
        prompt = sys.stdin.read().rstrip("\n")
    try:
        print_answer(
            given.server, prompt, options, chat=given.chat, echo=given.echo, as_json=given.json,
            model=words[0] if words else "", key=given.api_key,
        )  # fmt: skip
    except (JaxllmError, OSError) as error:
        sys.stdout.flush()
        sys.exit(f"jaxllm: {error}")
    return True


def print_answer(
    server: str,
    prompt: str,
    options: Mapping[str, Any],
    *,
    chat: bool = False,
    echo: bool = False,
    as_json: bool = False,
    model: str = "",
    key: str | None = None,
) -> None:
    """Print a server's continuation of a text as it comes; speed and seed go to stderr.

    server: a URL or a Unix socket. options: of `LM.generate`, and `stop`. Raises ConfigError if the
    server cannot be reached or refuses the request.
    """
    start = time.perf_counter()
    body = {name: value for name, value in options.items() if value is not None}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if "temperature" not in body and not body.keys() & {"top_k", "top_p", "min_p"}:
        body["do_sample"] = False  # as `jaxllm generate` without a server
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"model": model} if model else {}
    if "max_tokens" not in body:
        body |= {"max_tokens": DEFAULT_TOKENS}
    text, finish, first = "", None, None
    usage: dict[str, Any] = {}
    if echo and not as_json:
        sys.stdout.write(prompt)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    for event in _read_events(server, path, body, key):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") if chat else choice["text"]
            finish = choice["finish_reason"] or finish
            if piece:
                first = first or time.perf_counter()
                text += piece
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    end = time.perf_counter()
    first = first or end
    count = usage.get("completion_tokens", 0)
    rate = (count - 1) / (end - first) if end > first and count > 1 else 0.0
    seed = usage.get("seed")
    if as_json:
        report = {"prompt": prompt, "text": text, "finish_reason": finish, "seed": seed,
                  "first_token_s": round(first - start, 3), "tokens_per_second": round(rate, 2),
                  "usage": usage}  # fmt: skip
        sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
        return
    sys.stdout.write("\n" if sys.stdout.isatty() else "")
    sys.stdout.flush()
    drawn = "" if seed is None else f"; seed {seed}"
    sys.stderr.write(
        f"{count} tokens ({finish}), {rate:.1f} tokens/s{drawn}; first token after"
        f" {first - start:.3f} s\n"
    )


def _read_events(
    server: str, path: str, body: Mapping[str, Any], key: str | None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer. Raises ConfigError."""
    connection = _connect(server)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    with contextlib.closing(connection):
        try:
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"no server at {server} ({error}). Start one with jaxllm serve"
            ) from None
        if answer.status != 200:
            raise ConfigError(f"{server}: {_read_error(answer.read())}")
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if not line.startswith(b"data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ConfigError(f"{server}: {event['error']['message']}")
            yield event


def _read_error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return body[:200].decode(errors="replace")


def _connect(server: str) -> http.client.HTTPConnection:
    """Return a connection to a URL (http://HOST:PORT), HOST:PORT or a Unix socket."""
    if "://" not in server and (server.startswith("unix:") or "/" in server):
        return _UnixConnection(server.removeprefix("unix:"))
    parts = urlsplit(server if "://" in server else f"//{server}")
    if parts.scheme not in ("", "http", "https") or not parts.hostname:
        raise ConfigError(
            f"--server must be a URL or a Unix socket, got {server!r:.80}."
            " For example http://127.0.0.1:8000 or unix:jaxllm.sock"
        )
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port or None, timeout=TIMEOUT_S)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Unknown(Exception):
    """The arguments have a flag that only the command line proper reads."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise _Unknown(message)


_NOT_OPTIONS = ("words", "server", "prompt", "file", "chat", "echo", "json", "api_key", "option")


def _make_parser() -> _Parser:
    """Return a parser of the flags that `generate` shares with a server's options."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add: Callable[..., Any] = parser.add_argument
    add("words", nargs="*")
    add("--server", required=True)
    add("--api-key")
    add("--prompt", "-p")
    add("--file", "-f")
    add("--max-new-tokens", "-n", dest="max_tokens", type=int)
    add("--temperature", "--temp", "-t", type=float)
    for name in ("top-p", "min-p", "repetition-penalty"):
        add(f"--{name}", type=float)
    add("--top-k", type=int)
    add("--regex")
    add("--seed", type=_read_seed)
    add("--stop", action="append")
    for name in ("chat", "echo", "json"):
        add(f"--{name}", action="store_true")
    return parser


def _read_seed(text: str) -> int | None:
    if text == "random":
        return None
    if not re.fullmatch("[0-9]{1,20}", text):
        raise argparse.ArgumentTypeError(text)
    return int(text)
