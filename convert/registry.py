"""Registry of checkpoint formats: native, Hugging Face and GGUF, with their tokenizers.

To add a format, write a module that opens it as a `Checkpoint`, and add a row to
`CHECKPOINT_FORMATS`. Modules of formats are imported when they are used.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.checkpoints.native import (
    GGUF_FORMAT,
    HF_FORMAT,
    Checkpoint,
    open_native,
    read_model_json,
)
from jaxllm.checkpoints.resolve import resolve_path
from jaxllm.errors import CheckpointError, JaxllmError, UnusedSettingsWarning
from jaxllm.files import read_text
from jaxllm.files.versions import CHECKPOINT
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.embedding_settings import EmbeddingSettings, read_embedding_settings
from jaxllm.text.formats import read_special_tokens, tokenizer_files, write_tokenizer
from jaxllm.text.tokenizer import Tokenizer, has_tokenizer


class CheckpointSource(NamedTuple):
    """A path that may be a checkpoint. header: a directory's config.json, else {}. strict: raise
    for settings that jaxllm does not use.
    """

    path: Path
    header: Mapping[str, Any]
    strict: bool = False


class TextAssets(NamedTuple):
    """Tokenizer and chat template of a checkpoint.

    chat_template: the template, or the error to raise if one is needed. embedding: the settings of
    embeddings, likewise.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | JaxllmError
    embedding: EmbeddingSettings | JaxllmError = EmbeddingSettings()


class CheckpointFormat(NamedTuple):
    """A checkpoint format. The first format that recognizes a source opens it.

    open: reads no tensor; raises CheckpointError or ConfigError with all complaints.
    read_text_assets: raises CheckpointError for a malformed tokenizer.
    """

    name: str
    matches: Callable[[CheckpointSource], bool]
    open: Callable[[CheckpointSource], Checkpoint]
    read_text_assets: Callable[[Checkpoint], TextAssets]


def assets_from_directory(directory: Path) -> TextAssets:
    """Read the tokenizer and the chat template from Hugging Face files."""
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer(directory) else None
    return TextAssets(
        tokenizer,
        _value_or_error(ChatTemplate.from_directory, directory),
        _value_or_error(read_embedding_settings, directory),
    )


def _value_or_error(read: Callable[..., Any], *args: Any) -> Any:
    try:
        return read(*args)
    except JaxllmError as error:
        return error.with_traceback(None)  # its frames would keep the file's contents in memory


def assets_from_gguf(path: Path, settings: Mapping[str, Any] | None = None) -> TextAssets:
    """Read the tokenizer and the chat template from the first part of a GGUF file.

    settings: those in its header, if it has been read.
    """
    from jaxllm.convert.gguf import reader, tokenizer_read

    settings = settings or reader.read_parts(path)[0].settings
    tree = tokenizer_read.read_tokenizer(settings, path)
    tokenizer = None if tree is None else Tokenizer.from_tree(path, tree)
    roles = {} if tree is None else tree.roles
    template = _value_or_error(tokenizer_read.read_template, settings, roles, path)
    return TextAssets(tokenizer, template)


def _open_hf(source: CheckpointSource) -> Checkpoint:
    from jaxllm.convert.hf import open_hf

    return open_hf(source.path, source.header, strict=source.strict)


def _open_gguf(source: CheckpointSource) -> Checkpoint:
    from jaxllm.convert.gguf.reader import open_gguf

    return open_gguf(source.path, strict=source.strict)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    from jaxllm.convert.gguf.reader import recognizes

    return recognizes(path)


CHECKPOINT_FORMATS = (
    CheckpointFormat(
        CHECKPOINT.format,
        lambda source: source.header.get("format") == CHECKPOINT.format,
        lambda source: open_native(source.path, source.header),
        lambda opened: assets_from_directory(opened.directory),
    ),
    CheckpointFormat(
        HF_FORMAT,
        lambda source: source.path.is_dir() and "format" not in source.header,
        _open_hf,
        lambda opened: assets_from_directory(opened.directory),
    ),
    CheckpointFormat(
        GGUF_FORMAT,
        lambda source: _is_gguf(source.path),
        _open_gguf,
        lambda opened: assets_from_gguf(opened.directory, opened.settings),
    ),
)


def open_path(path: Path, *, strict: bool = False) -> Checkpoint:
    """Open the checkpoint in a directory or a file, in any format.

    strict: raise for settings that jaxllm does not use; the native format always does. Raises
    CheckpointError if no format matches, and what `CheckpointFormat.open` raises.
    """
    source = CheckpointSource(path, read_model_json(path) if path.is_dir() else {}, strict)
    for form in CHECKPOINT_FORMATS:
        if form.matches(source):
            return form.open(source)
    if not source.header:
        raise CheckpointError(f"{path!s:.200} is not a checkpoint directory or file")
    raise CheckpointError(
        f"{path}: config.json has format {source.header['format']!r:.40}, expected"
        f" {CHECKPOINT.format!r}, or no format for a Hugging Face checkpoint"
    )


def read_text_assets(opened: Checkpoint) -> TextAssets:
    """Read the tokenizer and the chat template of an opened checkpoint."""
    form = next(form for form in CHECKPOINT_FORMATS if form.name == opened.file_format)
    return form.read_text_assets(opened)


def stores_tokenizer(opened: Checkpoint) -> bool:
    """Return whether an opened checkpoint has a tokenizer, without reading it."""
    if opened.file_format != GGUF_FORMAT:
        return has_tokenizer(opened.directory)
    from jaxllm.convert.gguf import tokenizer_read

    return tokenizer_read.stores_tokenizer(opened.settings)


def read_chat_template(file: Path, path: Path) -> ChatTemplate:
    """Read a chat template from a file, with the special tokens of the checkpoint at `path`.

    Raises CheckpointError if the file cannot be read, TemplateError if it is malformed.
    """
    if _is_gguf(path):
        from jaxllm.convert.gguf import reader, tokenizer_read

        tree = tokenizer_read.read_tokenizer(reader.read_parts(path)[0].settings, path)
        tokens = tokenizer_read.special_tokens({} if tree is None else tree.roles)
    else:
        tokens = tuple(read_special_tokens(path).items())
    return ChatTemplate(read_text(file), tokens)


@contextlib.contextmanager
def open_tokenizer_files(path: Path) -> Iterator[list[Path]]:
    """Yield a checkpoint's tokenizer files in Hugging Face's format.

    For a GGUF file they are temporary, and exist only within the block. Raises CheckpointError for
    a malformed tokenizer.
    """
    if not _is_gguf(path):
        yield tokenizer_files(path)
        return
    from jaxllm.convert.gguf import reader, tokenizer_read

    settings = reader.read_parts(path)[0].settings
    tree = tokenizer_read.read_tokenizer(settings, path)
    templates = tokenizer_read.find_templates(settings)
    with tempfile.TemporaryDirectory() as scratch:
        yield [] if tree is None else write_tokenizer(tree, templates, Path(scratch))


def open_checkpoint(path: str | Path, *, strict: bool = False) -> Checkpoint:
    """Open a checkpoint in any format and check all but its values; arguments as for `load`.

    Warns once (`UnusedSettingsWarning`) of settings that jaxllm does not use.
    """
    opened = open_path(resolve_path(path), strict=strict)
    warn_ignored(opened)
    return opened


def warn_ignored(opened: Checkpoint) -> None:
    """Warn, in one line, of the settings that jaxllm does not use."""
    if opened.ignored:
        warnings.warn(
            f"{opened.directory}: ignored settings that jaxllm does not use:"
            f" {', '.join(opened.ignored)}",
            UnusedSettingsWarning,
            stacklevel=3,
        )
