"""`jaxllm serve`: an HTTP server with OpenAI's interface."""

import dataclasses
import os
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import msgspec
import typer
from msgspec import Meta

from jaxllm.cli.console import log
from jaxllm.cli.option_groups import LoadingOptions
from jaxllm.cli.options import check_paths, load_model, with_chat_template
from jaxllm.errors import ConfigError, requires_extra, suggest_name
from jaxllm.files.memory_limit import machine_memory

if TYPE_CHECKING:
    from jaxllm.server.model_client import ModelClient

EXAMPLE = """
Examples:

  jaxllm serve demo:llama --port 8000

  jaxllm serve demo:llama demo:gpt2 --idle 300

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModelOptions(LoadingOptions):
    """Options of one served model. A table of a file of models has them under these names.

    Attributes:
        rows: Requests that run at once.
        capacity: Tokens per row, prompt and answer [default: the context, at most 4096].
        slots: Tokens of all rows together. Requests wait for room, and the latest one pauses if
            texts outgrow it [default: rows * capacity, or what half the memory holds].
        max_waiting: Requests that may wait; more get status 429.
        max_waiting_tokens: Prompt tokens of the requests that wait; more get status 429.
        prefix_cache: Memory for prompts, so that later ones with the same beginning run only the
            rest. Answers have the same bits with and without; 0 keeps nothing.
        public_prefix: File with a system message or a text that runs once, for all API keys: their
            requests read it in place. Otherwise keys share nothing. Repeatable.
        threads: Threads of XLA and the kernels [default: JAXLLM_THREADS, or all cores].
        chat_template: Jinja file to use instead of the checkpoint's chat template.
        pooling: Pooling of embeddings: mean, last or cls [default: the checkpoint's, else mean].
        steer: Steering vector that requests may name, GGUF or safetensors; repeatable.
        draft: Draft model for speculative decoding, smaller, with the same vocabulary; or lookup,
            to repeat what followed the same words before. Answers have the same bits with and
            without.
        draft_tokens: Tokens that it proposes per pass of the model.
    """

    rows: Annotated[int, Meta(ge=1)] = 8
    capacity: Annotated[int | None, Meta(ge=1)] = None
    slots: Annotated[int | None, Meta(ge=1)] = None
    max_waiting: Annotated[int, Meta(ge=0)] = 64
    max_waiting_tokens: Annotated[int, Meta(ge=1)] = 262_144
    prefix_cache: Annotated[str, typer.Option(metavar="BYTES")] = "256MiB"
    public_prefix: list[Path] | None = None
    threads: Annotated[int | None, Meta(ge=1)] = None
    chat_template: Path | None = None
    pooling: str | None = None
    steer: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE")] = None
    draft: Annotated[str | None, typer.Option(metavar="MODEL")] = None
    draft_tokens: Annotated[int, Meta(ge=1)] = 4

    def make_client(self, model: str) -> "ModelClient":
        """Return a model that is not started. Raises ConfigError for unusable options."""
        from jaxllm.server.model_client import ModelClient
        from jaxllm.server.model_process import ModelSettings

        loading = LoadingOptions(**{x.name: getattr(self, x.name) for x in _LOADING})
        settings = ModelSettings(
            self.rows, self.capacity or 0, self.max_waiting, self.max_waiting_tokens,
            self.threads or 0, parse_bytes("--prefix-cache", self.prefix_cache),
            tuple(x.read_text("utf-8").rstrip("\n") for x in self.public_prefix or ()),
            vectors=read_names("--steer", self.steer or []),
            load_draft=partial(load_draft, loading, self.draft) if self.draft else None,
            draft_tokens=self.draft_tokens,
            slots=self.slots or 0,
        )  # fmt: skip
        load = partial(load_served, loading, model, self.chat_template, self.pooling)
        return ModelClient(load, settings, log=lambda line: log(f"jaxllm: {line}"))


_LOADING = dataclasses.fields(LoadingOptions)
# Options that belong to one model, and not to each of several.
_OF_ONE = ("adapter", "precision", "public_prefix", "chat_template", "steer", "draft")


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Checkpoint directory, GGUF file, demo (demo:llama, demo:gpt2) or hf:owner/name;"
            " several: each request names one. Or a file of models, such as models.toml.",
        ),
    ] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    unix: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    name: list[str] | None = None,
    api_key_file: Path | None = None,
    cors: Annotated[list[str] | None, typer.Option(metavar="ORIGIN")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    max_body: Annotated[str, typer.Option(metavar="BYTES")] = "4MiB",
    grace: Annotated[float, typer.Option(min=0, metavar="SECONDS")] = 30.0,
    rerank: Annotated[str | None, typer.Option(metavar="METHOD")] = None,
    memory: Annotated[str | None, typer.Option(metavar="BYTES")] = None,
    idle: Annotated[float | None, typer.Option(min=0, metavar="SECONDS")] = None,
    *,
    served: ServedModelOptions,
) -> None:
    """Serve models over HTTP with OpenAI's interface: completions, chat, embeddings, streams.

    A request's tokens are those of LM.generate with the same options and seed, whatever else runs.
    http://HOST:PORT/ is a page to try it; /metrics is for Prometheus. SIGTERM lets running requests
    finish. A model runs in a separate process, which is started again if it dies. The first of
    several models is loaded at the start, the others when a request names them.

    Args:
        host: Address to listen on; 0.0.0.0 lets other machines ask.
        port: Port; 0 takes a free one.
        unix: Unix socket to listen on instead, which only you can open.
        name: Name of the model for clients; repeatable, one for each of several models [default:
            the file's name].
        api_key_file: File with the keys that clients must send, one a line.
        cors: Allowed CORS origin, such as https://example.org; * for all; repeatable.
        allow_host: Name under which clients reach a server without keys, besides localhost,
            addresses and --host: a page of another site could give itself this machine's address; *
            for all; repeatable.
        max_body: Largest body of a request.
        grace: Time for running requests to finish after SIGTERM.
        rerank: Method of /rerank: yes-no, score or cosine [default: score if the model has such a
            head, else cosine].
        memory: Memory of all loaded models: the one that was used longest ago gives way [default:
            80 % of the machine's].
        idle: A model without a request for so long is unloaded [default: 600 of several models, and
            never the only one].
    """
    with requires_extra("serve", "jaxllm serve"):
        from jaxllm.server.app import build_app
        from jaxllm.server.backend import ServerSettings
        from jaxllm.server.listen import Address, run
        from jaxllm.server.model_router import ModelRouter, ServedModel
    from jaxllm.server.limits import read_keys

    chosen = choose_models(models or ["demo:llama"], name or [], served)
    keys = tuple(read_keys(api_key_file)) if api_key_file else ()
    settings = ServerSettings(
        names=chosen[0].names, keys=keys, origins=tuple(cors or ()),
        hosts=(*(allow_host or ()), host) if unix is None else ("*",),
        max_waiting=served.max_waiting, body_bytes=parse_bytes("--max-body", max_body),
        rerank=rerank,
    )  # fmt: skip
    if host not in ("127.0.0.1", "localhost", "::1") and unix is None and not keys:
        log(f"jaxllm: warning: other machines reach {host} without a key (--api-key-file)")
    address = Address(host, port, unix)
    if len(chosen) == 1 and idle is None:
        client = chosen[0].options.make_client(chosen[0].model)
        run(build_app(client, settings), client, address, grace=grace, log=log)
        return
    # Each process takes of a GPU's memory what it needs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    limit = machine_memory()
    router = ModelRouter(
        [ServedModel(one.options.make_client(one.model), one.names,
                     tuple(read_names("--adapter", one.options.adapter or [])),
                     count_bytes(one.model)) for one in chosen],
        settings,
        parse_bytes("--memory", memory) if memory else None if limit is None else limit * 4 // 5,
        600.0 if idle is None else idle,
        log=lambda line: log(f"jaxllm: {line}"),
    )  # fmt: skip
    run(router.app, router, address, grace=grace, log=log)


class ChosenModel(NamedTuple):
    """A model of the command line or of a file, its names for clients, and its options."""

    model: str
    names: tuple[str, ...]
    options: ServedModelOptions


def choose_models(
    models: list[str], names: list[str], options: ServedModelOptions
) -> list[ChosenModel]:
    """Return the models of a command line.

    Args:
        models: Models, or one file of models: a table for each, under its name, with `model` and
            options that differ from those of the command line.
        names: Of --name.

    Raises:
        ConfigError: For options that cannot belong to several models, and names that are not
            there or not unique.
    """
    if len(models) == 1 and models[0].endswith(".toml"):
        if names:
            raise ConfigError(f"--name: the names are those of the tables in {models[0]}")
        return read_models(Path(models[0]), options)
    if len(models) == 1:
        return [ChosenModel(models[0], tuple(names or [default_name(models[0])]), options)]
    for field in _OF_ONE:
        if getattr(options, field):
            flag = f"--{field.replace('_', '-')}"
            raise ConfigError(f"{flag} is of one model: give it in a file of models (models.toml)")
    if names and len(names) != len(models):
        raise ConfigError(f"expected a --name for each of {len(models)} models, got {len(names)}")
    names = names or list(map(default_name, models))
    if len(set(names)) < len(names):
        raise ConfigError(f"models need different names (--name), got {', '.join(names)}")
    return [ChosenModel(m, (n,), options) for m, n in zip(models, names, strict=True)]


def read_models(file: Path, usual: ServedModelOptions) -> list[ChosenModel]:
    """Return the models of a TOML file. Raises ConfigError, which names the table and field."""
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not tables:
        raise ConfigError(f'{file} has no models: expected tables such as [small], model = "DIR"')
    hints, chosen = get_type_hints(ServedModelOptions, include_extras=True), []
    for name, table in tables.items():
        if not isinstance(table, dict) or not isinstance(table.get("model"), str):
            raise ConfigError(f'{file}: [{name}] must be a table with model = "DIR"')
        given = {field: value for field, value in table.items() if field != "model"}
        for field, value in given.items():
            if field not in hints:
                raise ConfigError(f"{file}: [{name}] has {field}{suggest_name(field, hints)}")
            try:
                given[field] = msgspec.convert(value, hints[field], dec_hook=_read_path)
            except (msgspec.ValidationError, TypeError) as error:
                raise ConfigError(f"{file}: [{name}] {field}: {error}") from None
        options = dataclasses.replace(usual, **given)
        check_paths({"model": table["model"], "adapter": options.adapter})
        chosen.append(ChosenModel(table["model"], (name,), options))
    return chosen


def _read_path(kind: type, value: Any) -> Any:
    return kind(value)


def count_bytes(model: str) -> int:
    """Return the size of a model's files, 0 for one that is not a local path."""
    path = Path(model)
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(x.stat().st_size for x in files if x.is_file())


def default_name(model: str) -> str:
    """Return a model's name for clients: the last part of its path."""
    return model if ":" in model else Path(model).resolve().name


def read_names(flag: str, values: list[str]) -> dict[str, str]:
    """Return the files of a flag by name. Raises ConfigError for values without one."""
    named = dict[str, str]()
    for value in values:
        name, _, file = value.partition("=")
        if not name or not file or name in named:
            raise ConfigError(f"{flag} must be NAME=FILE, each name once, got {value!r:.60}")
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
