"""The forms in which checkpoints lie on disk: a row each, and whatever a checkpoint brings.

A further form is a file that opens it as a `Checkpoint`, and a row here.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.checkpoint import FORMAT, Checkpoint, open_native, read_model_json
from jaxllm.convert.engine import FORM, open_hf
from jaxllm.convert.gguf import opening as gguf
from jaxllm.convert.gguf import vocabulary
from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.files import read_text
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.formats import read_special_tokens, tokenizer_files
from jaxllm.text.tokenizer import Tokenizer, has_tokenizer
from jaxllm.text.written import write_tokenizer


class Source(NamedTuple):
    """A path that may be a checkpoint. header: a directory's config.json, read once; else {}.
    strict: whether settings that nothing here reads are refused.
    """

    path: Path
    header: Mapping[str, Any]
    strict: bool = False


class Texts(NamedTuple):
    """How a checkpoint speaks.

    chat_template: itself, or the reason why there is none, which is told when it is needed.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | JaxllmError


class Form(NamedTuple):
    """A form of checkpoints. Only the first that recognises a source opens it.

    open: raises CheckpointError or ConfigError with all that is wrong; reads no tensor.
    texts: raises CheckpointError for a tokenizer that is malformed.
    """

    name: str
    recognises: Callable[[Source], bool]
    open: Callable[[Source], Checkpoint]
    texts: Callable[[Path], Texts]


def texts_of_directory(directory: Path) -> Texts:
    """The tokenizer's files and the chat template, as Hugging Face names them."""
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer(directory) else None
    try:
        return Texts(tokenizer, ChatTemplate.from_directory(directory))
    except JaxllmError as error:
        return Texts(tokenizer, error)


def texts_of_gguf(path: Path) -> Texts:
    """What the first part of a GGUF file says of them."""
    settings = gguf.read_parts(path)[0].settings
    tree = vocabulary.read_tokenizer(settings, path)
    tokenizer = None if tree is None else Tokenizer.from_tree(path, tree)
    try:
        roles = {} if tree is None else tree.roles
        return Texts(tokenizer, vocabulary.read_template(settings, roles, path))
    except JaxllmError as error:
        return Texts(tokenizer, error)


FORMS = (
    Form(
        FORMAT,
        lambda source: source.header.get("format") == FORMAT,
        lambda source: open_native(source.path, source.header),
        texts_of_directory,
    ),
    Form(
        FORM,
        lambda source: source.path.is_dir() and "format" not in source.header,
        lambda source: open_hf(source.path, source.header, strict=source.strict),
        texts_of_directory,
    ),
    Form(
        gguf.FORM,
        lambda source: gguf.recognises(source.path),
        lambda source: gguf.open_gguf(source.path, strict=source.strict),
        texts_of_gguf,
    ),
)


def open_path(path: Path, *, strict: bool = False) -> Checkpoint:
    """The checkpoint in a directory or a file, in whatever form it is.

    strict: refuse settings of the files that nothing here reads; our own form always does. Raises
    CheckpointError where it is in none, and what the form raises.
    """
    source = Source(path, read_model_json(path) if path.is_dir() else {}, strict)
    for form in FORMS:
        if form.recognises(source):
            return form.open(source)
    if not source.header:
        raise CheckpointError(f"{path!s:.200} is not a directory, nor a checkpoint in one file")
    raise CheckpointError(
        f"{path}: config.json says format {source.header['format']!r:.40}, known are"
        f" {FORMAT!r} and Hugging Face's, which says none"
    )


def read_texts(opened: Checkpoint) -> Texts:
    """The tokenizer and the chat template that go with a checkpoint, as its form keeps them."""
    form = next(form for form in FORMS if form.name == opened.form)
    return form.texts(opened.directory)


def read_chat_template(file: Path, path: Path) -> ChatTemplate:
    """The chat template in a file, with the special tokens of the checkpoint at a path.

    Raises CheckpointError for a file that cannot be read, TemplateError for a malformed one.
    """
    if gguf.recognises(path):
        tree = vocabulary.read_tokenizer(gguf.read_parts(path)[0].settings, path)
        tokens = vocabulary.special_tokens({} if tree is None else tree.roles)
    else:
        tokens = tuple(read_special_tokens(path).items())
    return ChatTemplate(read_text(file), tokens)


@contextlib.contextmanager
def texts_files(path: Path) -> Iterator[list[Path]]:
    """The files of the tokenizer that goes with the checkpoint at a path, as Hugging Face names
    them, while the block runs: those of a GGUF file are made for it.

    Raises CheckpointError for a tokenizer that is malformed.
    """
    if not gguf.recognises(path):
        yield tokenizer_files(path)
        return
    settings = gguf.read_parts(path)[0].settings
    tree, template = vocabulary.read_tokenizer(settings, path), vocabulary.template_in(settings)
    with tempfile.TemporaryDirectory() as scratch:
        yield [] if tree is None else write_tokenizer(tree, template, Path(scratch))
