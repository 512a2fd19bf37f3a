"""The text that an evaluation runs over: its options, and the loader made of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm import distributed
from jaxllm.cli.console import read_stdin
from jaxllm.errors import ConfigError, TokenError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.evaluate.likelihood.data import Loader

Text = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE|-", help="A text, @FILE for a file's, - for stdin's; in one piece."
    ),
]
Documents = Annotated[
    Path | None,
    typer.Option(
        help='JSON lines with "text" (joined by blank lines) or "tokens" (ids, joined by nothing).'
    ),
]
Separate = Annotated[
    bool, typer.Option("--separate", help="Each of --documents by itself, none seeing another.")
]
Window = Annotated[
    int | None,
    typer.Option(
        help="Tokens that are run together; by default 512, or fewer where the context or"
        " the text is shorter."
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(help="From one window to the next; by default the window: no overlap."),
]
Protocol = Annotated[
    str,
    typer.Option(
        help="strided: tokens not seen before count (Hugging Face's guide); second-half: of each"
        " window the second half (llama-perplexity); rolling: the last window reaches back"
        " (lm-evaluation-harness)."
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        help="The begin-of-text token: first (once, before a text), each (also in place of every"
        " window's first token), none; auto: none where the tokenizer adds none, each for"
        " second-half, else first."
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--batch-size", "--batch", help="Windows run at once; by default as 256 MB allow."
    ),
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many windows.")]

Corpus = list[str] | list[list[int]]
BOS = ("auto", "first", "each", "none")


def read_corpus(text: str | None, documents: Path | None, separate: bool) -> Corpus:
    """The documents of one of the two options: texts, or lists of token ids.

    What is not to be separate is one document.
    """
    if (text is None) == (documents is None):
        raise ConfigError("give --text (TEXT, @FILE or -) or --documents FILE, one of them")
    corpus = _read(text, documents, separate)
    distributed.agree({"texts": distributed.digest(map(str, corpus))})
    return corpus


def read_text_option(given: str, most: int | None = None) -> str:
    """Return the text that `--text` gives: itself, a file's with @FILE, or stdin's with -.

    most: the largest file that is read, in bytes. Raises CheckpointError for a file that cannot be
    read, ConfigError for the name of a file without its @.
    """
    from jaxllm.files import is_there, read_text
    from jaxllm.files.reading import MAX_BYTES

    if given == "-":
        return read_stdin()
    if given.startswith("@"):
        return read_text(Path(given[1:]), MAX_BYTES if most is None else most)
    if is_there(given):
        raise ConfigError(f"--text {given} is the name of a file: write @{given} to read the file")
    return given


def _read(text: str | None, documents: Path | None, separate: bool) -> Corpus:
    from jaxllm.evaluate.likelihood.data import read_documents

    if text is not None:
        return [read_text_option(text)]
    assert documents is not None
    found: Any = read_documents(documents)
    if separate:
        return found
    if isinstance(found[0], str):
        return ["\n\n".join(found)]
    return [[token for document in found for token in document]]


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
    """The loader over a corpus, and what to say about it."""
    from jaxllm.evaluate.likelihood.data import loader
    from jaxllm.evaluate.likelihood.score import default_batch

    if bos not in BOS:
        raise ConfigError(f"--bos must be one of {', '.join(BOS)}, got {bos!r}")
    if bos == "auto":
        adds = lm.tokenizer is not None and lm.tokenizer.adds_bos
        bos = "none" if not adds else "each" if protocol == "second-half" else "first"
    begin = [] if bos == "none" else [bos_id(lm)]
    documents = [begin + ids for ids in encode(lm, corpus)]
    if window is None:
        window = max(2, min(512, lm.config.context_length, max(map(len, documents))))
    stride = window if stride is None else stride
    made = loader(
        documents,
        window=window,
        stride=stride,
        protocol=protocol,
        bos=begin[0] if bos == "each" else None,
        batch=default_batch(lm.config.vocab_size, window) if batch is None else batch,
        limit=limit,
    )
    return made, {
        "documents": len(corpus),
        "text_tokens": sum(map(len, made.documents)),
        "protocol": protocol,
        "window": window,
        "stride": stride if protocol == "strided" else None,
        "bos": bos,
        "windows": len(made.spans),
    }


def described(facts: dict[str, Any]) -> str:
    """How the text was run, in words."""
    stride = "" if facts["stride"] is None else f", stride {facts['stride']}"
    return (
        f"{facts['text_tokens']:,} tokens in {facts['documents']} piece(s); {facts['windows']}"
        f" windows of {facts['window']}{stride}, {facts['protocol']}; begin of text: {facts['bos']}"
    )


def encode(lm: "LM", corpus: Corpus) -> list[list[int]]:
    """Token ids of each document; special tokens that a text spells out stay text."""
    tokenizer = lm.tokenizer
    if tokenizer is None and any(isinstance(document, str) for document in corpus):
        raise TokenError(f'{lm.path} has no tokenizer: give --documents with "tokens"')
    return [
        d if isinstance(d, list) else tokenizer.encode(d) if tokenizer is not None else []
        for d in corpus
    ]


def bos_id(lm: "LM") -> int:
    """The begin-of-text token, of the tokenizer or else of generation_config.json."""
    found = lm.tokenizer.bos_id if lm.tokenizer else None
    found = lm.generation.get("bos_token_id") if found is None else found
    if not isinstance(found, int):
        raise TokenError(f"{lm.path} names no begin-of-text token: --bos none")
    return found
