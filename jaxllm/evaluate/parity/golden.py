"""Golden test vectors: saved activations of a model, to check another implementation against.

A directory of two files. `vectors.safetensors` holds every activation
(`activations.activation_names`) at every token of the texts, one text after the other, `[tokens,
...]`; the greedy tokens after each text, `generated`, int32 `[texts, N]`; and their logits,
`generated_logits`, `[texts, N, V]`. `vectors.json` holds the model's configuration, precision and
fingerprint, and the cases: ids and absolute positions (-1 is padding) of a single text, of all
padded on either side, and with a cache. There is one set of values because all cases must reproduce
it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError, TokenError
from jaxllm.evaluate.parity.backends import Backend, JaxBackend, ParityCase, pad_case
from jaxllm.evaluate.parity.compare import Report, compare_activations, compare_greedy
from jaxllm.evaluate.parity.tolerance import TOLERANCES, Tolerance, coarser_dtype, measure
from jaxllm.files import (
    atomic_directory,
    check_vacant,
    path_exists,
    path_inside,
    read_json,
    write_json,
)
from jaxllm.files.versions import VECTORS
from jaxllm.runtime import multihost
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.schema import as_schema
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import digest, open_tensors, write_tensors

JSON, TENSORS = "vectors.json", "vectors.safetensors"
GENERATED_NAME, LOGITS_NAME = "generated", "generated_logits"


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Position = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
_Text = Annotated[list[_Id], msgspec.Meta(min_length=2)]


class _Case(msgspec.Struct, forbid_unknown_fields=True):
    """A case in vectors.json: indices of texts, and their padded tokens and positions `[B, T]`."""

    texts: list[_Id]
    tokens: list[list[_Id]]
    positions: list[list[_Position]]
    cached: _Id


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """The content of vectors.json. contents: digest of the tensors."""

    format: str
    version: int
    made_by: str
    dtype: Literal["float32", "bfloat16", "float16"]
    config: dict[str, Any]
    precision: dict[str, Any]
    weights: str
    stages: list[str]
    contents: str
    texts: Annotated[list[_Text], msgspec.Meta(min_length=1)]
    cases: dict[str, _Case]


@dataclasses.dataclass(frozen=True)
class Vectors:
    """The content of a directory.

    identity: config, precision and fingerprint of the model. cases: name to the case and the
    indices of its texts.
    """

    made_by: str
    dtype: str
    identity: Mapping[str, Any]
    texts: list[list[int]]
    cases: Mapping[str, tuple[ParityCase, list[int]]]
    activations: Mapping[str, np.ndarray]
    generated_BN: np.ndarray
    logits_BNV: np.ndarray


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of `check`. differs: which parts of the model's identity do not match."""

    model_mismatches: tuple[str, ...]
    reports: Mapping[str, Report]

    @property
    def numbers_hold(self) -> bool:
        """Whether every case reproduces the vectors."""
        return all(report.holds for report in self.reports.values())

    @property
    def holds(self) -> bool:
        """Whether the values match, and the model is the one that made the vectors."""
        return self.numbers_hold and not self.model_mismatches


def make(
    directory: Path, ours: JaxBackend, texts: Sequence[Sequence[int]], *, new_tokens: int = 4,
    source: Backend | None = None,
) -> None:  # fmt: skip
    """Write vectors of a model for texts of at least two tokens each.

    The write is atomic. source: backend that computes the values, with the same weights; by default
    `ours`. Raises CheckpointError if the directory already holds vectors or cannot be written,
    TokenError for texts that do not fit the model.
    """
    if min(map(len, texts), default=0) < 2 or new_tokens < 1:
        raise TokenError(
            "test vectors need texts of at least two tokens, and at least one new token"
        )
    cases = _cases(texts)
    cases["left"][0].check(ours.model.config, new_tokens)
    check_vacant(directory, JSON, "vectors")
    source = source or ours
    case, _ = cases["left"]  # without padding its rows are the texts, one after the other
    with steps_bar("making vectors", 2) as advance:
        tensors = {name: x[case.real_BT] for name, x in source.activations(case).items()}
        advance()
        decoded = source.decode(case, new_tokens)
        advance()
    tensors[GENERATED_NAME] = decoded.token_BN.astype(np.int32)
    tensors[LOGITS_NAME] = decoded.logits_BNV
    header = {
        **VECTORS.mark,
        "made_by": source.name,
        "dtype": source.dtype,
        **_identity(ours),
        "stages": list(tensors)[:-2],
        "contents": digest(tensors),
        "texts": [list(map(int, text)) for text in texts],
        "cases": {
            name: {
                "texts": rows,
                "tokens": case.token_BT.tolist(),
                "positions": case.position_BT.tolist(),
                "cached": case.num_cached,
            }
            for name, (case, rows) in cases.items()
        },
    }
    lazy = {name: LazyTensor.from_array(np.ascontiguousarray(x)) for name, x in tensors.items()}
    with atomic_directory(directory, JSON) as folder:
        write_tensors(folder / TENSORS, lazy, aligned=False)
        write_json(folder / JSON, header)


def read(directory: Path) -> Vectors:
    """Read test vectors. Raises CheckpointError if they are invalid or damaged, ConfigError if
    processes read different ones.
    """
    if not path_exists(directory / JSON):
        raise CheckpointError(f"{directory} is not a directory of test vectors: it has no {JSON}")
    where = str(directory / JSON)
    data = read_json(path_inside(directory, JSON))
    VECTORS.check(data, directory)
    header: _Header = as_schema(data, _Header, where)
    multihost.check_processes_agree(
        {"vectors": multihost.digest([msgspec.json.encode(header).decode()])}
    )
    lazy = open_tensors(path_inside(directory, TENSORS))
    tensors = {name: x.read() for name, x in lazy.items()}
    if digest(tensors) != header.contents:
        raise CheckpointError(f"{directory / TENSORS} is damaged: its digest does not match {JSON}")
    _check_shapes(header, tensors, where)
    cases = {
        name: _read_case(name, said, header.texts, where) for name, said in header.cases.items()
    }
    return Vectors(
        made_by=header.made_by,
        dtype=header.dtype,
        identity={name: getattr(header, name) for name in ("config", "precision", "weights")},
        texts=header.texts,
        cases=cases,
        activations={name: tensors[name] for name in header.stages},
        generated_BN=tensors[GENERATED_NAME],
        logits_BNV=tensors[LOGITS_NAME],
    )


def _read_case(
    name: str, record: _Case, texts: list[list[int]], where: str
) -> tuple[ParityCase, list[int]]:
    """Return a case and its rows, after checking that without padding they are its texts."""
    shapes = {len(row) for row in (*record.tokens, *record.positions)}
    width = shapes.pop() if len(shapes) == 1 else 0
    sound = (
        len(record.tokens) == len(record.positions) == len(record.texts) > 0
        and 0 <= record.cached < width
        and max(record.texts) < len(texts)
    )
    if sound:
        case = ParityCase(
            np.array(record.tokens, np.int32), np.array(record.positions, np.int32), record.cached
        )
        if _matches_texts(case, [texts[row] for row in record.texts]):
            return case, record.texts
    raise CheckpointError(f"{where} is invalid: case {name!r} does not match its texts")


def _check_shapes(header: _Header, tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Check that activations cover all tokens, and generated tokens and logits all texts."""
    count = sum(map(len, header.texts))
    complaints = [
        f"activation {name} does not have the {count} tokens of the texts"
        for name in header.stages
        if name not in tensors or tensors[name].shape[:1] != (count,)
    ]
    generated, logits = tensors.get(GENERATED_NAME), tensors.get(LOGITS_NAME)
    if (
        generated is None
        or logits is None
        or (generated.ndim, logits.ndim, generated.dtype) != (2, 3, np.int32)
        or generated.shape != logits.shape[:2]
        or generated.shape[0] != len(header.texts)
        or not generated.size
        or not logits.size
    ):
        complaints.append(
            f"{GENERATED_NAME} and {LOGITS_NAME} do not match {len(header.texts)} texts"
        )
    if complaints:
        raise CheckpointError(f"{where}: {'; '.join(complaints[:5])}")


def check(vectors: Vectors, ours: JaxBackend, *, tolerance: Tolerance | None = None) -> CheckResult:
    """Run every case and compare all activations, even if the weights differ.

    tolerance: by default that of the coarser of the two dtypes. Raises ConfigError if the model's
    shapes differ, TokenError for ids outside its vocabulary.
    """
    identity = _identity(ours)
    expected = {name: _drop_defaults(value) for name, value in vectors.identity.items()}
    differs = tuple(name for name, value in expected.items() if identity[name] != value)
    with steps_bar("checking", len(vectors.cases)) as advance:
        reports = {}
        for name, (case, rows) in vectors.cases.items():
            reports[name] = _check_case(vectors, case, rows, ours, tolerance)
            advance()
    return CheckResult(differs, reports)


def _check_case(
    vectors: Vectors,
    case: ParityCase,
    rows: list[int],
    ours: JaxBackend,
    tolerance: Tolerance | None,
) -> Report:
    text_BN, logits_BNV = vectors.generated_BN[rows], vectors.logits_BNV[rows]
    case.check(ours.model.config, text_BN.shape[1])
    found = ours.activations(case)
    start = np.cumsum([0, *map(len, vectors.texts)])[rows]
    token_BT = np.maximum(case.position_BT + start[:, None], 0)[:, case.num_cached :]
    theirs = {name: x[token_BT] for name, x in vectors.activations.items()}
    answer = ours.decode(case, text_BN.shape[1], text_BN)
    dtype = coarser_dtype(np.dtype(ours.dtype), np.dtype(vectors.dtype)).name
    tolerance = tolerance or TOLERANCES[dtype]
    return Report(
        ours=ours.name,
        reference=f"vectors by {vectors.made_by}",
        dtype=dtype,
        tolerance=tolerance,
        stages=compare_activations(case, found, theirs, tolerance),
        decoding=(measure("decoded logits", answer.logits_BNV, logits_BNV, tolerance),),
        greedy=compare_greedy(answer.logits_BNV, logits_BNV, tolerance),
    )


def _cases(texts: Sequence[Sequence[int]]) -> dict[str, tuple[ParityCase, list[int]]]:
    """Return the cases by name, each with the indices of its texts."""
    rows = list(range(len(texts)))
    left = pad_case(texts)
    # The cut leaves the shortest text exactly one token before it.
    cached = left.token_BT.shape[1] - min(map(len, texts)) + 1
    return {
        **{f"text {row}": (pad_case([texts[row]]), [row]) for row in rows[:1]},
        "left": (left, rows),
        "right": (pad_case(texts, "right"), rows),
        "cached": (dataclasses.replace(left, num_cached=cached), rows),
    }


def _identity(ours: JaxBackend) -> dict[str, Any]:
    """Return config, precision and fingerprint as JSON values, without options that are off."""
    identity = {
        "config": ours.model.config.to_dict(),
        "precision": dataclasses.asdict(ours.model.precision),
        "weights": fingerprint(ours.model.gather_lazy(ours.params)),
    }
    plain: dict[str, Any] = _drop_defaults(json.loads(json.dumps(identity)))
    return plain


def _drop_defaults(options: Any) -> Any:
    """Drop options that are off, so that options added later do not make old files differ."""
    if not isinstance(options, dict):
        return options
    values = {name: _drop_defaults(value) for name, value in options.items()}
    return {name: value for name, value in values.items() if value not in (None, False, (), [])}


def _matches_texts(case: ParityCase, texts: list[list[int]]) -> bool:
    """Return whether the case's rows are these texts, wherever the padding is."""
    rows = zip(case.token_BT, case.position_BT, texts, strict=True)
    return all(
        position[position >= 0].tolist() == list(range(len(text)))
        and token[position >= 0].tolist() == text
        for token, position, text in rows
    )
