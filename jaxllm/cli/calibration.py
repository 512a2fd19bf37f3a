"""Calibration data of a recipe and evaluation data of its result, which never overlap.

A text is split in two; samples from the model are drawn twice, with two seeds.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.cli.eval_data import adds_bos, bos_id, join_documents, read_text_option
from jaxllm.errors import ConfigError, TokenError

if TYPE_CHECKING:
    from jaxllm.compress.calibration import Calibration
    from jaxllm.lm import LM

SOURCES = "--text @FILE, --documents FILE, --wikitext FILE or --samples N"
EVAL_ONE_IN = 10  # one part in 10 of a text is held out for evaluation

Document = str | list[int]


class CalibrationSource(NamedTuple):
    """Source of the calibration data.

    file: option and path or text, or None. samples: number of rows sampled from the model, or None.
    If both are None there is no calibration. rows, length: number of rows and tokens per row.
    """

    file: tuple[str, str | Path] | None
    samples: int | None
    rows: int
    length: int | None
    seed: int

    def row_length(self, lm: "LM") -> int:
        """Return the number of tokens per row."""
        return min(512, lm.config.context_length) if self.length is None else self.length


def choose_source(
    files: Mapping[str, str | Path | None],
    samples: int | None,
    rows: int,
    length: int | None,
    seed: int,
) -> CalibrationSource:
    """Return the source that is given, if any. Raises ConfigError for more than one."""
    sources = [(option, path) for option, path in files.items() if path is not None]
    if len(sources) + (samples is not None) > 1:
        raise ConfigError(f"more than one source of calibration data: give one of {SOURCES}")
    return CalibrationSource(sources[0] if sources else None, samples, rows, length, seed)


def read_source(
    source: CalibrationSource, eval_data: Path | None
) -> tuple[Document | None, Document | None]:
    """Return the calibration text and the evaluation text, each None if no file has it.

    Without `eval_data`, the last tenth of the calibration text is held out for evaluation. Raises
    CheckpointError if a file cannot be read, TokenError if the text is too short to split.
    """
    document = None if source.file is None else _read_document(*source.file)
    if eval_data is not None:
        kind, value = "--text", f"@{eval_data}"
        if eval_data.suffix == ".parquet":
            kind, value = "--wikitext", str(eval_data)
        return document, _read_document(kind, value)
    if document is None:
        return None, None
    begin = len(document) * (EVAL_ONE_IN - 1) // EVAL_ONE_IN
    if isinstance(document, str):  # cut after a newline, else after a space
        begin = next((at + 1 for c in "\n " if (at := document.rfind(c, 0, begin)) >= 0), begin)
    if not begin:
        raise TokenError(
            f"{' '.join(map(str, source.file))} is too short to split" if source.file else ""
        )
    return document[:begin], document[begin:]


def calibrate(lm: "LM", source: CalibrationSource, document: Document | None) -> "Calibration":
    """Return the calibration rows of a recipe, checked against the model's config.

    Args:
      document: the calibration text from `read_source`; None for samples.
    """
    from jaxllm.compress.calibration import chunk_rows_after, from_texts, from_tokens
    from jaxllm.data.chunking import ChunkSpec

    length = source.row_length(lm)
    if source.samples is not None:
        return _sample_rows(lm, source, source.samples, source.seed, adds_bos(lm))
    cut = ChunkSpec(width=length, rows=source.rows, seed=source.seed)
    assert document is not None and source.file is not None
    option, value = source.file
    about: dict[str, Any] = {"kind": option.lstrip("-"), "file": _file_name(option, value)}
    if isinstance(document, str):
        calibration = from_texts(document, lm.tokenizer, cut)
    else:
        import numpy as np

        begin = [bos_id(lm)] if adds_bos(lm) else []
        text = document[1:] if document[:1] == begin else document  # begins with it once
        pieces = [np.array(text, np.int32)]
        calibration = from_tokens(chunk_rows_after(begin, pieces, cut))
    calibration = dataclasses.replace(
        calibration, source={**calibration.source, **about, "seed": source.seed}
    )
    calibration.check(lm.config)
    return calibration


def sample_eval_rows(lm: "LM", source: CalibrationSource, maximum: int) -> list[list[int]]:
    """Sample evaluation rows from the model: as many as a recipe is calibrated on, at most
    `maximum`.

    They begin with the begin-of-text token, and are as long as the calibration rows.
    """
    assert source.samples is not None
    rows = min(source.samples, max(1, maximum))
    seed = source.seed ^ 1  # another than calibration's
    samples: list[list[int]] = _sample_rows(lm, source, rows, seed, True).token_NT.tolist()
    return samples


def _sample_rows(
    lm: "LM", source: CalibrationSource, rows: int, seed: int, bos: bool
) -> "Calibration":
    """Sample rows from the model."""
    from jaxllm.compress.calibration import from_samples

    width = source.row_length(lm)
    calibration = from_samples(
        lm.model, lm.params, bos_id=bos_id(lm), rows=rows, width=width, seed=seed, bos=bos
    )
    calibration.check(lm.config)
    return calibration


def _file_name(option: str, value: str | Path) -> str | None:
    """Return the name of an option's file, without its folders; None if the value is a text."""
    is_file = option != "--text" or str(value).startswith("@")
    return Path(str(value).removeprefix("@")).name if is_file else None


def _read_document(option: str, value: str | Path) -> Document:
    """Return the value of an option as one document."""
    from jaxllm.compress.calibration import SEPARATOR
    from jaxllm.data.wikitext import MAX_BYTES, read_wikitext
    from jaxllm.evaluate.likelihood.data import read_documents

    path = Path(value)
    if option == "--wikitext":
        return SEPARATOR.join(read_wikitext(path))
    if option == "--text":
        return read_text_option(str(value), MAX_BYTES)
    document: Document = join_documents(read_documents(path))
    return document
