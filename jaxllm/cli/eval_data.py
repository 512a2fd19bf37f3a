"""Evaluation text: its options, and the loader built from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import read_stdin
from jaxllm.errors import ConfigError, TokenError
from jaxllm.runtime import multihost

if TYPE_CHECKING:
    from jaxllm.evaluate.likelihood.data import Loader
    from jaxllm.lm import LM

Text = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE|-", help="Text, @FILE to read a file, or - for stdin; one document."
    ),
]

Corpus = list[str] | list[list[int]]
BOS = ("auto", "first", "each", "none")


def read_corpus(text: str | None, documents: Path | None, separate: bool) -> Corpus:
    """Return the documents of one of the two options: texts, or lists of token ids.

    They are joined to one document unless `separate`.
    """
    if (text is None) == (documents is None):
        raise ConfigError("give either --text (TEXT, @FILE or -) or --documents FILE")
    corpus: Corpus = [read_text_option(text)] if text is not None else []
    if documents is not None:
        from jaxllm.evaluate.likelihood.data import read_documents

        corpus = read_documents(documents)
        corpus = corpus if separate else [join_documents(corpus)]
    multihost.check_processes_agree({"texts": multihost.digest(map(str, corpus))})
    return corpus


def read_text_option(value: str, max_bytes: int | None = None) -> str:
    """Return the text of `--text`: the value itself, a file for @FILE, or stdin for -.

    Args:
        max_bytes: the maximum file size in bytes.

    Raises CheckpointError if a file cannot be read, ConfigError for a file name without @.
    """
    from jaxllm.files import path_exists, read_text
    from jaxllm.files.reading import MAX_BYTES

    if value == "-":
        return read_stdin()
    if value.startswith("@"):
        return read_text(Path(value[1:]), MAX_BYTES if max_bytes is None else max_bytes)
    if path_exists(value):
        raise ConfigError(f"--text {value} names a file: write @{value} to read it")
    return value


def join_documents(documents: Any) -> Any:
    """Return documents as one: texts with blank lines between them, or lists of token ids."""
    if isinstance(documents[0], str):
        return "\n\n".join(documents)
    return [token for document in documents for token in document]


def make_loader(
    lm: "LM",
    corpus: Corpus,
    *,
    window: int | None,
    stride: int | None = None,
    protocol: str = "strided",
    bos: str = "auto",
    batch: int | None = None,
    limit: int | None = None,
) -> "tuple[Loader, dict[str, Any]]":
    """Return the loader over a corpus, and facts about it for reports."""
    from jaxllm.evaluate.likelihood.data import loader
    from jaxllm.evaluate.likelihood.score import default_batch

    if bos == "auto":
        bos = "none" if not adds_bos(lm) else "first" if protocol == "rolling" else "each"
    begin = [] if bos == "none" else [bos_id(lm)]
    documents = [ids if ids[:1] == begin else begin + ids for ids in encode_corpus(lm, corpus)]
    if window is None:
        window = max(2, min(512, lm.config.context_length, max(map(len, documents))))
    stride = window if stride is None else stride
    batches = loader(
        documents,
        window=window,
        stride=stride,
        protocol=protocol,
        bos=begin[0] if bos == "each" else None,
        batch=default_batch(lm.config.vocab_size, window) if batch is None else batch,
        limit=limit,
    )
    return batches, {
        "documents": len(corpus),
        "text_tokens": sum(map(len, batches.documents)),
        "protocol": protocol,
        "window": window,
        "stride": stride if protocol == "strided" else None,
        "bos": bos,
        "windows": len(batches.spans),
    }


def describe_text(facts: dict[str, Any]) -> str:
    """Return one line that describes the text and its windows."""
    stride = "" if facts["stride"] is None else f", stride {facts['stride']}"
    return (
        f"{facts['text_tokens']:,} tokens in {facts['documents']} piece(s); {facts['windows']}"
        f" windows of {facts['window']}{stride}, {facts['protocol']}; begin of text: {facts['bos']}"
    )


def encode_corpus(lm: "LM", corpus: Corpus) -> list[list[int]]:
    """Encode each document; special tokens spelled out in a text stay text."""
    tokenizer = lm.tokenizer
    if tokenizer is None and any(isinstance(document, str) for document in corpus):
        raise TokenError(f'{lm.path} has no tokenizer: give --documents with "tokens"')
    return [
        d if isinstance(d, list) else tokenizer.encode(d) if tokenizer is not None else []
        for d in corpus
    ]


def adds_bos(lm: "LM") -> bool:
    """Return whether the tokenizer begins texts with a begin-of-text token."""
    return lm.tokenizer is not None and lm.tokenizer.adds_bos


def bos_id(lm: "LM") -> int:
    """Return the begin-of-text id of the tokenizer, or else of generation_config.json."""
    token = lm.tokenizer.bos_id if lm.tokenizer else None
    token = lm.generation.get("bos_token_id") if token is None else token
    if not isinstance(token, int):
        raise TokenError(f"{lm.path} has no begin-of-text token: give --bos none")
    return token
