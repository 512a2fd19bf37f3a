"""Test vectors: what a model computes for some texts, frozen, to check another implementation by.

A directory of two files. `vectors.safetensors` holds every stage (`stages.stage_names`) at every
token of the texts, one text after the other, `[tokens, ...]`; `generated`, int32 `[texts, N]`, the
greedy tokens after each text; and `generated_logits`, `[texts, N, V]`, that they were chosen by.
`vectors.json` holds the model's configuration, precision and fingerprint, and the cases: ids and
absolute positions (-1 is padding) of the texts alone, padded on either side, and through a cache.
The cases have no numbers of their own, because all of them must give the same.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError, TokenError
from jaxllm.evaluate.difference import TOLERANCES, Tolerance, coarser, measure
from jaxllm.evaluate.equivalence import Report, compare_stages, compare_text
from jaxllm.evaluate.sides import Case, Ours, Side, padded
from jaxllm.files import read_json, write_json
from jaxllm.progress import steps_bar
from jaxllm.weights.files import LazyTensor, open_tensors, write_tensors

FORMAT = "jaxllm-vectors"
VERSION = 1
JSON, TENSORS = "vectors.json", "vectors.safetensors"
GENERATED, LOGITS = "generated", "generated_logits"


@dataclasses.dataclass(frozen=True)
class Vectors:
    """What a directory holds. identity: of the model; cases: name to the case and its texts."""

    made_by: str
    dtype: str
    identity: Mapping[str, Any]
    texts: list[list[int]]
    cases: Mapping[str, tuple[Case, list[int]]]
    stages: Mapping[str, np.ndarray]
    generated_BN: np.ndarray
    logits_BNV: np.ndarray


@dataclasses.dataclass(frozen=True)
class Checked:
    """What `check` found. differs: what of the model is not what the vectors were made with."""

    differs: tuple[str, ...]
    reports: Mapping[str, Report]

    @property
    def numbers_hold(self) -> bool:
        """Whether every case gives the vectors' numbers."""
        return all(report.holds for report in self.reports.values())

    @property
    def holds(self) -> bool:
        """Whether the numbers hold, and the model is the one they were made with."""
        return self.numbers_hold and not self.differs


def make(
    directory: Path, ours: Ours, texts: Sequence[Sequence[int]], *, new_tokens: int = 4,
    source: Side | None = None,
) -> None:  # fmt: skip
    """Write vectors of a model for texts of at least two tokens each.

    source: whose numbers to write; another implementation of the same weights, or by default ours.
    The JSON comes last, when all else is there. Raises CheckpointError if the directory already
    holds vectors or cannot be written, TokenError for texts that do not fit the model.
    """
    if min(map(len, texts), default=0) < 2 or new_tokens < 1:
        raise TokenError("vectors need texts of at least two tokens, and one new token")
    cases = _cases(texts)
    cases["left"][0].check(ours.model.config, new_tokens)
    if (directory / JSON).exists():
        raise CheckpointError(f"{directory} already holds vectors; name an empty directory")
    source = source or ours
    case, _ = cases["left"]  # its real tokens, row by row, are the texts end to end
    with steps_bar("making vectors", 2) as advance:
        tensors = {name: x[case.real_BT] for name, x in source.stages(case).items()}
        advance()
        decoded = source.decode(case, new_tokens)
        advance()
    tensors[GENERATED] = decoded.token_BN.astype(np.int32)
    tensors[LOGITS] = decoded.logits_BNV
    header = {
        "format": FORMAT,
        "version": VERSION,
        "made_by": source.name,
        "dtype": source.dtype,
        **_identity(ours),
        "stages": list(tensors)[:-2],
        "contents": _digest(tensors),
        "texts": [list(map(int, text)) for text in texts],
        "cases": {
            name: {
                "texts": rows,
                "tokens": case.token_BT.tolist(),
                "positions": case.position_BT.tolist(),
                "cached": case.cached,
            }
            for name, (case, rows) in cases.items()
        },
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lazy = {name: LazyTensor.of(np.ascontiguousarray(x)) for name, x in tensors.items()}
        write_tensors(directory / TENSORS, lazy, aligned=False)
        write_json(directory / JSON, header)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror or error}") from None


def read(directory: Path) -> Vectors:
    """Read what `make` wrote. Raises CheckpointError for a directory that is none or is damaged."""
    if not (directory / JSON).exists():
        raise CheckpointError(f"{directory} has no {JSON}: not a directory of test vectors")
    header = read_json(directory / JSON)
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise CheckpointError(
            f"{directory / JSON}: {header.get('format')!r} version {header.get('version')!r} is not"
            f" {FORMAT} version {VERSION}"
        )
    tensors = {name: x.read() for name, x in open_tensors(directory / TENSORS).items()}
    if _digest(tensors) != header.get("contents"):
        raise CheckpointError(f"{directory / TENSORS}: damaged, not what {JSON} was written with")
    try:
        texts = header["texts"]
        cases = {
            name: (
                Case(
                    np.asarray(case["tokens"], np.int32),
                    np.asarray(case["positions"], np.int32),
                    int(case["cached"]),
                ),
                [int(row) for row in case["texts"]],
            )
            for name, case in header["cases"].items()
        }
        for name, (case, rows) in cases.items():
            if not _is_of(case, [texts[row] for row in rows]):
                raise ValueError(f"case {name} does not run its texts")
        return Vectors(
            made_by=header["made_by"],
            dtype=header["dtype"],
            identity={name: header[name] for name in ("config", "precision", "weights")},
            texts=texts,
            cases=cases,
            stages={name: tensors[name] for name in header["stages"]},
            generated_BN=tensors[GENERATED],
            logits_BNV=tensors[LOGITS],
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{directory / JSON}: malformed: {error!r:.100}") from None


def check(vectors: Vectors, ours: Ours, *, tolerance: Tolerance | None = None) -> Checked:
    """Run every case and compare with the vectors, at every stage, whatever the weights are.

    tolerance: by default that of the coarser of the two formats.

    Raises ConfigError for a model of another form, TokenError for ids that it does not have.
    """
    identity = _identity(ours)
    differs = tuple(name for name, value in vectors.identity.items() if identity[name] != value)
    with steps_bar("checking", len(vectors.cases)) as advance:
        reports = {}
        for name, (case, rows) in vectors.cases.items():
            reports[name] = _check(vectors, case, rows, ours, tolerance)
            advance()
    return Checked(differs, reports)


def _check(
    vectors: Vectors, case: Case, rows: list[int], ours: Ours, tolerance: Tolerance | None
) -> Report:
    text_BN, logits_BNV = vectors.generated_BN[rows], vectors.logits_BNV[rows]
    case.check(ours.model.config, text_BN.shape[1])
    found = ours.stages(case)
    start = np.cumsum([0, *map(len, vectors.texts)])[rows]
    token_BT = np.maximum(case.position_BT + start[:, None], 0)[:, case.cached :]
    theirs = {name: x[token_BT] for name, x in vectors.stages.items()}
    answer = ours.decode(case, text_BN.shape[1], text_BN)
    dtype = coarser(np.dtype(ours.dtype), np.dtype(vectors.dtype)).name
    tolerance = tolerance or TOLERANCES[dtype]
    return Report(
        ours=ours.name,
        reference=f"vectors by {vectors.made_by}",
        dtype=dtype,
        tolerance=tolerance,
        stages=compare_stages(case, found, theirs, tolerance),
        decoding=(measure("decoded logits", answer.logits_BNV, logits_BNV, tolerance),),
        greedy=compare_text(answer.logits_BNV, logits_BNV, tolerance),
    )


def _cases(texts: Sequence[Sequence[int]]) -> dict[str, tuple[Case, list[int]]]:
    """Every way of running the texts, and which of them it runs."""
    rows = list(range(len(texts)))
    left = padded(texts)
    # As many columns as leave the shortest text one token on either side of the cut.
    cached = left.token_BT.shape[1] - min(map(len, texts)) + 1
    return {
        **{f"text {row}": (padded([texts[row]]), [row]) for row in rows[:1]},
        "left": (left, rows),
        "right": (padded(texts, "right"), rows),
        "cached": (dataclasses.replace(left, cached=cached), rows),
    }


def _identity(ours: Ours) -> dict[str, Any]:
    """Which model this is, as JSON has it, without the options that are off.

    An option that a later version adds is off in what an earlier one wrote.
    """

    def said(options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if value not in (None, False, ())}

    identity = {
        "config": said(ours.model.config.to_dict()),
        "precision": said(dataclasses.asdict(ours.model.precision)),
        "weights": fingerprint(ours.params),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))
    return plain


def _is_of(case: Case, texts: list[list[int]]) -> bool:
    """Whether the case's rows are these texts, wherever their tokens stand."""
    rows = zip(case.token_BT, case.position_BT, texts, strict=True)
    return all(
        dict(zip(position[position >= 0].tolist(), token[position >= 0].tolist(), strict=True))
        == dict(enumerate(text))
        for token, position, text in rows
    )


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
