"""`jaxllm serve`: an HTTP server with OpenAI's interface."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import log
from jaxllm.cli.option_groups import LoadingOptions
from jaxllm.cli.options import Model, load_model, with_chat_template
from jaxllm.errors import ConfigError

EXAMPLE = """
Examples:

  jaxllm serve demo:llama --port 8000

  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 40}'
"""
UNITS = {
    "": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def serve(
    model: Model = "demo:llama",
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    unix: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    name: list[str] | None = None,
    api_key_file: Path | None = None,
    cors: Annotated[list[str] | None, typer.Option(metavar="ORIGIN")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    rows: Annotated[int, typer.Option(min=1)] = 8,
    capacity: Annotated[int | None, typer.Option(min=1)] = None,
    max_waiting: Annotated[int, typer.Option(min=0)] = 64,
    max_waiting_tokens: Annotated[int, typer.Option(min=1)] = 262_144,
    prefix_cache: Annotated[str, typer.Option(metavar="BYTES")] = "256MiB",
    public_prefix: list[Path] | None = None,
    max_body: Annotated[str, typer.Option(metavar="BYTES")] = "4MiB",
    grace: Annotated[float, typer.Option(min=0, metavar="SECONDS")] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    chat_template: Path | None = None,
    pooling: str | None = None,
    rerank: Annotated[str | None, typer.Option(metavar="METHOD")] = None,
    steer: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE")] = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL")] = None,
    draft_tokens: Annotated[int, typer.Option(min=1)] = 4,
    *,
    loading: LoadingOptions,
) -> None:
    """Serve a model over HTTP with OpenAI's interface: completions, chat, embeddings, streams.

    A request's tokens are those of LM.generate with the same options and seed, whatever else runs.
    http://HOST:PORT/ is a page to try it; /metrics is for Prometheus. SIGTERM lets running requests
    finish. The model runs in a separate process, which is started again if it dies.

    Args:
        host: Address to listen on; 0.0.0.0 lets other machines ask.
        port: Port; 0 takes a free one.
        unix: Unix socket to listen on instead, which only you can open.
        name: Name of the model for clients; repeatable [default: the file's name].
        api_key_file: File with the keys that clients must send, one a line.
        cors: Allowed CORS origin, such as https://example.org; * for all; repeatable.
        allow_host: Name under which clients reach a server without keys, besides localhost,
            addresses and --host: a page of another site could give itself this machine's address; *
            for all; repeatable.
        rows: Requests that run at once.
        capacity: Tokens per row, prompt and answer [default: the context, at most 4096].
        max_waiting: Requests that may wait; more get status 429.
        max_waiting_tokens: Prompt tokens of the requests that wait; more get status 429.
        prefix_cache: Memory for prompts, so that later ones with the same beginning run only the
            rest. Answers have the same bits with and without; 0 keeps nothing.
        public_prefix: File with a system message or a text that runs once, for all API keys: their
            requests read it in place. Otherwise keys share nothing. Repeatable.
        max_body: Largest body of a request.
        grace: Time for running requests to finish after SIGTERM.
        threads: Threads of XLA and the kernels [default: JAXLLM_THREADS, or all cores].
        chat_template: Jinja file to use instead of the checkpoint's chat template.
        pooling: Pooling of embeddings: mean, last or cls [default: the checkpoint's, else mean].
        rerank: Method of /rerank: yes-no, score or cosine [default: score if the model has such a
            head, else cosine].
        steer: Steering vector that requests may name, GGUF or safetensors; repeatable.
        draft: Draft model for speculative decoding, smaller, with the same vocabulary; or lookup,
            to repeat what followed the same words before. Answers have the same bits with and
            without.
        draft_tokens: Tokens that it proposes per pass of the model.
    """
    try:
        from jaxllm.server.app import build_app
        from jaxllm.server.backend import ServerSettings
        from jaxllm.server.listen import Address, run
    except ImportError as error:
        message = f"serve needs more packages ({error}): pip install 'jaxllm[serve]'"
        raise ConfigError(message) from None
    from jaxllm.server.limits import read_keys
    from jaxllm.server.model_client import ModelClient
    from jaxllm.server.model_process import ModelSettings

    keys = tuple(read_keys(api_key_file)) if api_key_file else ()
    settings = ServerSettings(
        names=tuple(name or [default_name(model)]), keys=keys, origins=tuple(cors or ()),
        hosts=(*(allow_host or ()), host) if unix is None else ("*",),
        max_waiting=max_waiting, body_bytes=parse_bytes("--max-body", max_body), rerank=rerank,
    )  # fmt: skip
    if host not in ("127.0.0.1", "localhost", "::1") and unix is None and not keys:
        log(f"jaxllm: warning: other machines reach {host} without a key (--api-key-file)")
    client = ModelClient(
        partial(load_served, loading, model, chat_template, pooling),
        ModelSettings(
            rows,
            capacity or 0,
            max_waiting,
            max_waiting_tokens,
            threads or 0,
            parse_bytes("--prefix-cache", prefix_cache),
            tuple(file.read_text("utf-8").rstrip("\n") for file in public_prefix or ()),
            vectors=read_names(steer or []),
            load_draft=partial(load_draft, loading, draft) if draft else None,
            draft_tokens=draft_tokens,
        ),
        log=lambda line: log(f"jaxllm: {line}"),
    )
    run(build_app(client, settings), client, Address(host, port, unix), grace=grace, log=log)


def default_name(model: str) -> str:
    """Return a model's name for clients: the last part of its path."""
    return model if ":" in model else Path(model).resolve().name


def read_names(values: list[str]) -> dict[str, str]:
    """Return the files of --steer by name. Raises ConfigError for values without one."""
    named = dict[str, str]()
    for value in values:
        name, _, file = value.partition("=")
        if not name or not file or name in named:
            raise ConfigError(f"--steer must be NAME=FILE, each name once, got {value!r:.60}")
        named[name] = file
    return named


def load_served(
    loading: LoadingOptions, model: str, chat_template: Path | None, pooling: str | None
) -> Any:
    """Load the model, in its process."""
    lm = with_chat_template(loading.load(model, show_progress=False), chat_template)
    if pooling is not None:
        from jaxllm.text.embedding_settings import EmbeddingSettings

        known = lm.embedding if isinstance(lm.embedding, EmbeddingSettings) else EmbeddingSettings()
        lm = dataclasses.replace(lm, embedding=dataclasses.replace(known, pooling=pooling))
    return lm


def load_draft(loading: LoadingOptions, draft: str) -> Any:
    """Load the draft model, in the model's process; "lookup" needs none."""
    from jaxllm.generation.loops.draft import PromptLookup

    if draft == "lookup":
        return PromptLookup()
    return load_model(draft, loading.dtype, loading.cache_dtype, show_progress=False)


def parse_bytes(flag: str, text: str) -> int:
    """Return a number of bytes such as 4MiB. Raises ConfigError."""
    match = re.fullmatch(r"(\d+\.?\d*) *([a-zA-Z]*)", text)
    if not match or match[2] not in UNITS:
        raise ConfigError(f"{flag} must be a size such as 512MiB or 1GiB, got {text!r:.40}")
    return int(float(match[1]) * UNITS[match[2]])
