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
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError, TokenError
from jaxllm.evaluate.parity.activations import LOGITS, Backend, JaxBackend, ParityCase, pad_case
from jaxllm.evaluate.parity.compare import Report, Tolerance, make_report
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
GENERATED, GENERATED_LOGITS = "generated", "generated_logits"


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Text = Annotated[list[_Id], msgspec.Meta(min_length=2)]


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
    cases: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Vectors:
    """The content of a directory: the header, and the tensors by name."""

    header: _Header
    tensors: Mapping[str, np.ndarray]


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
    directory: Path, backend: JaxBackend, texts: Sequence[Sequence[int]], *, new_tokens: int = 4,
    source: Backend | None = None,
) -> None:  # fmt: skip
    """Write vectors of a model for texts of at least two tokens each.

    The write is atomic. source: backend that computes the values, with the same weights; by default
    `backend`. Raises CheckpointError if the directory already holds vectors or cannot be written,
    TokenError for texts that do not fit the model.
    """
    if min(map(len, texts), default=0) < 2 or new_tokens < 1:
        raise TokenError(
            "test vectors need texts of at least two tokens, and at least one new token"
        )
    case, _ = _cases(texts)["left"]  # without padding its rows are the texts, one after the other
    case.check(backend.model.config, new_tokens)
    check_vacant(directory, JSON, "vectors")
    source = source or backend
    with steps_bar("making vectors", 2) as advance:
        tensors = {name: x[case.real_BT] for name, x in source.activations(case).items()}
        advance()
        decoded = source.decode(case, new_tokens)
        advance()
    tensors[GENERATED] = decoded[LOGITS].argmax(axis=2).astype(np.int32)
    tensors[GENERATED_LOGITS] = decoded[LOGITS]
    header = {
        **VECTORS.mark,
        "made_by": source.name,
        "dtype": source.dtype,
        **_identity(backend),
        "stages": list(tensors)[:-2],
        "contents": digest(tensors),
        "texts": [list(map(int, text)) for text in texts],
        "cases": _case_records(texts),
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
    if header.cases != _case_records(header.texts):
        raise CheckpointError(f"{where} is invalid: its cases do not match its texts")
    _check_shapes(header, tensors, where)
    return Vectors(header, tensors)


def _check_shapes(header: _Header, tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Check that activations cover all tokens, and generated tokens and logits all texts."""
    count = sum(map(len, header.texts))
    complaints = [
        f"activation {name} does not have the {count} tokens of the texts"
        for name in header.stages
        if name not in tensors or tensors[name].shape[:1] != (count,)
    ]
    absent = np.zeros(0)
    tokens, logits = (tensors.get(name, absent) for name in (GENERATED, GENERATED_LOGITS))
    if (
        (tokens.ndim, logits.ndim, tokens.dtype) != (2, 3, np.int32)
        or tokens.shape != logits.shape[:2]
        or len(tokens) != len(header.texts)
        or not logits.size
    ):
        complaints.append(
            f"{GENERATED} and {GENERATED_LOGITS} do not match {len(header.texts)} texts"
        )
    if complaints:
        raise CheckpointError(f"{where}: {'; '.join(complaints[:5])}")


def check(vectors: Vectors, side: JaxBackend, *, tolerance: Tolerance | None = None) -> CheckResult:
    """Run every case and compare all activations, even if the weights differ.

    tolerance: by default that of the coarser of the two dtypes. Raises ConfigError if the model's
    shapes differ, TokenError for ids outside its vocabulary.
    """
    header, tensors, identity = vectors.header, vectors.tensors, _identity(side)
    differs = tuple(n for n, x in identity.items() if _drop_defaults(getattr(header, n)) != x)
    starts, reports = np.cumsum([0, *map(len, header.texts)]), {}
    source = SimpleNamespace(name=f"vectors by {header.made_by}", dtype=header.dtype)
    cases = _cases(header.texts)
    with steps_bar("checking", len(cases)) as advance:
        for name, (case, rows) in cases.items():
            text_BN = tensors[GENERATED][rows]
            case.check(side.model.config, text_BN.shape[1])
            row_BT = np.maximum(case.position_BT + starts[rows][:, None], 0)[:, case.num_cached :]
            expected = {stage: tensors[stage][row_BT] for stage in header.stages}
            stages = side.activations(case)
            logits = side.decode(case, text_BN.shape[1], text_BN)[LOGITS]
            decoded = [{LOGITS: tensors[GENERATED_LOGITS][rows]}, {LOGITS: logits}]
            reports[name] = make_report(side, source, case, [expected, stages], decoded, tolerance)
            advance()
    return CheckResult(differs, reports)


def _cases(texts: Sequence[Sequence[int]]) -> dict[str, tuple[ParityCase, list[int]]]:
    """Return the cases by name, each with the indices of its texts."""
    rows = list(range(len(texts)))
    left = pad_case(texts)
    # The cut leaves the shortest text exactly one token before it.
    cached = left.token_BT.shape[1] - min(map(len, texts)) + 1
    return {
        "text 0": (pad_case(texts[:1]), rows[:1]),
        "left": (left, rows),
        "right": (pad_case(texts, "right"), rows),
        "cached": (dataclasses.replace(left, num_cached=cached), rows),
    }


def _case_records(texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the cases as vectors.json has them, for readers without this library."""
    return {
        name: {
            "texts": rows,
            "tokens": case.token_BT.tolist(),
            "positions": case.position_BT.tolist(),
            "cached": case.num_cached,
        }
        for name, (case, rows) in _cases(texts).items()
    }


def _identity(side: JaxBackend) -> dict[str, Any]:
    """Return config, precision and fingerprint as JSON values, without options that are off."""
    identity = {
        "config": side.model.config.to_dict(),
        "precision": dataclasses.asdict(side.model.precision),
        "weights": fingerprint(side.model.gather_lazy(side.params)),
    }
    plain: dict[str, Any] = _drop_defaults(json.loads(json.dumps(identity)))
    return plain


def _drop_defaults(options: Any) -> Any:
    """Drop options that are off, so that options added later do not make old files differ."""
    if not isinstance(options, dict):
        return options
    values = {name: _drop_defaults(value) for name, value in options.items()}
    return {name: value for name, value in values.items() if value not in (None, False, (), [])}
