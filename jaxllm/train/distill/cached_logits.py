"""A teacher's outputs on disk: top-k tokens with log-probabilities, row by row.

A row is found by a hash of its tokens, positions and documents, so the order of later epochs does
not matter. A record belongs to one teacher, one data set, k and temperature; any other is rejected.
Shards are written atomically, one after the other; a killed run resumes after the last one. With
several processes the first one writes them, and all read them.

On disk a token takes 4k + 2 bytes if ids fit in 16 bits, so 130 for k = 32.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, NamedTuple

import flax.linen as nn
import jax
import msgspec
import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import as_schema, lock_file, parse_json, path_exists, remove_partials
from jaxllm.runtime import signals
from jaxllm.runtime.multihost import all_gather_objects, broadcast_from_zero, to_host
from jaxllm.runtime.progress import status_bar
from jaxllm.train.data.rows import IGNORED, Data, Rows
from jaxllm.train.distill.objectives import DistillRows
from jaxllm.train.distill.topk_logits import TopKLogprobs, ids_dtype, topk_logprobs
from jaxllm.train.objective import forward
from jaxllm.weights import safetensors
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params
from jaxllm.weights.safetensors import open_tensors, read_header, write_tensors

FORMAT = "jaxllm-teacher"
SHARD_BYTES = 16 << 20  # bytes of a shard, about

_Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class RecordKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key of a record.

    Attributes:
      teacher: hash of its weights, configuration and precision.
      data: digest of the rows.
      k: number of top tokens.
      size: of the common vocabulary.
      width: columns of a row.
    """

    teacher: str
    data: str
    k: _Count
    temperature: Annotated[float, msgspec.Meta(gt=0)]
    size: _Count
    width: _Count


class _ShardHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The header of a shard. bits: a SHA-256 of its tensors."""

    asked: RecordKey
    number: Annotated[int, msgspec.Meta(ge=0)]
    batches: _Count
    bits: str


class _RowPlace(NamedTuple):
    shard: int
    row: int


@dataclasses.dataclass(frozen=True)
class TeacherRecord:
    """A complete record; `record_teacher` makes and opens it."""

    directory: Path
    key: RecordKey
    shards: int

    def look_up(self, rows: Rows) -> DistillRows:
        """Return the rows with the teacher's outputs, as numpy arrays.

        Rows without labels have zeros.
        Raises CheckpointError for rows that are not in the record, and for a damaged shard.
        """
        k, (B, T) = self.key.k, np.shape(rows.token_BT)
        token = np.zeros((B, T, k), ids_dtype(self.key.size))
        logprob = np.zeros((B, T, k + 1), np.float16)
        for row, key in enumerate(_row_keys(rows)):
            if not (np.asarray(rows.label_BT)[row] != IGNORED).any():
                continue
            if (place := self._row_places.get(key)) is None:
                raise CheckpointError(
                    f"{self.directory} has no teacher outputs for a row of this batch: it was"
                    " recorded with other data"
                )
            tensors = self._tensors[place.shard]
            token[row] = tensors["token"][place.row]
            logprob[row] = tensors["logprob"][place.row]
        told = TopKLogprobs(token, logprob)
        return DistillRows(
            rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT, teacher=told
        )

    @cached_property
    def _row_places(self) -> dict[bytes, _RowPlace]:
        return {
            key.tobytes(): _RowPlace(number, row)
            for number, tensors in enumerate(self._tensors)
            for row, key in enumerate(tensors["key"])
        }

    @cached_property
    def _tensors(self) -> list[dict[str, np.ndarray]]:
        return [_read_shard(_shard_path(self.directory, number)) for number in range(self.shards)]


@dataclasses.dataclass(frozen=True)
class RecordedData:
    """Batches of `data` with the teacher's outputs: a `Data` of `DistillRows` rows."""

    data: Data
    record: TeacherRecord

    @property
    def digest(self) -> str:
        said = msgspec.json.encode(self.record.key)
        return hashlib.sha256(self.data.digest.encode() + said).hexdigest()[:16]

    @property
    def tokens(self) -> int:
        return self.data.tokens

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, number: int) -> DistillRows:
        return self.record.look_up(self.data.batch(number))


def record_teacher(
    directory: Path,
    teacher: nn.Module,
    params: Params,
    data: Data,
    *,
    k: int,
    temperature: float,
    size: int,
    show_progress: bool | None = None,
) -> TeacherRecord:
    """Record the teacher's outputs for an epoch of `data`, except shards that are there already.

    Args:
      k: number of top tokens to keep.
      size: of the vocabulary that it shares with the student.

    Raises:
      ConfigError: if the directory has a record with another key, k is out of range, or not all
        processes see what the first one has written.
      CheckpointError: if the record cannot be written, is damaged, or is locked by another run.
    """
    if not 1 <= k <= size:
        raise ConfigError(f"top_k must be 1 to {size}, the vocabulary size: got {k}")
    width = int(data.batch(0).token_BT.shape[1])
    weights = fingerprint(teacher.gather_lazy(params))
    who = hashlib.sha256(f"{weights} {teacher.config!r} {teacher.precision!r}".encode()).hexdigest()
    asked = RecordKey(who, data.digest, k, float(temperature), size, width)
    with _lock_directory(directory):
        written = json.loads(
            broadcast_from_zero(
                lambda: json.dumps([about.batches for about in _read_headers(directory, asked)])
            )
        )
        count, done, number = len(data), sum(written), len(written)
        if done > count:
            raise CheckpointError(
                f"{directory} has {done} batches, the data only {count}: remove it"
            )
        with status_bar("teacher outputs", count, show_progress, done) as said:
            row_bytes = width * (k * np.dtype(ids_dtype(size)).itemsize + 2 * (k + 1))
            a_shard = max(1, SHARD_BYTES // (row_bytes * data.batch(0).token_BT.shape[0]))
            while done < count:
                some = range(done, min(done + a_shard, count))
                parts = []
                for at in some:
                    parts.append(_record_batch(teacher, params, data.batch(at), asked))
                    said(at + 1, "")
                _write_shard(directory, _ShardHeader(asked, number, len(some), ""), parts)
                number, done = number + 1, some.stop
    _check_visible(directory, number)
    return TeacherRecord(directory, asked, number)


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Create and lock the directory, on the first process only."""
    if not signals.is_leader():
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror}") from None
    with lock_file(directory / "lock"):
        remove_partials(directory)
        yield


def _check_visible(directory: Path, shards: int) -> None:
    """Raise ConfigError, in all processes, if one does not see what the first has written."""
    broadcast_from_zero(lambda: "written")
    blind = all_gather_objects(
        not all(path_exists(_shard_path(directory, number)) for number in range(shards))
    )
    if any(blind):
        raise ConfigError(
            f"the teacher outputs in {directory} are visible to process 0, but not to processes"
            f" {', '.join(map(str, np.flatnonzero(blind)))}: use a directory that all share"
        )


def _record_batch(
    teacher: nn.Module, params: Params, rows: Rows, record_key: RecordKey
) -> Mapping[str, np.ndarray]:
    """Return a batch's part of a shard: keys uint8 `[B, 32]` and buckets of rows with a label."""
    found = _run_teacher(
        teacher, params, rows, record_key.size, record_key.temperature, record_key.k
    )
    kept_B = (np.asarray(rows.label_BT) != IGNORED).any(axis=1)
    key = np.frombuffer(b"".join(_row_keys(rows)), np.uint8).reshape(-1, 32)
    all_rows = {
        "key": key,
        "token": to_host(found.token_BTk),
        "logprob": to_host(found.logprob_BTL),
    }
    if np.isnan(all_rows["logprob"][kept_B]).any():
        raise ConfigError("the teacher's outputs contain NaN: it cannot be used")
    return {name: x[kept_B] for name, x in all_rows.items()}


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _run_teacher(
    teacher: nn.Module, params: Params, rows: Rows, size: int, temperature: float, k: int
) -> TopKLogprobs:
    logits_BTV = forward(teacher, params, rows, gather_logits=True).logits
    return topk_logprobs(logits_BTV, size, temperature, k)


def _row_keys(rows: Rows) -> Iterator[bytes]:
    """Yield 32 bytes for each row: a hash of the teacher's inputs."""
    arrays = [np.asarray(x, "<i4") for x in (rows.token_BT, rows.position_BT, rows.document_BT)]
    for row in zip(*arrays, strict=True):
        yield hashlib.sha256(b"".join(x.tobytes() for x in row)).digest()


def _shard_path(directory: Path, number: int) -> Path:
    return directory / f"teacher-{number:05}.safetensors"


def _write_shard(
    directory: Path, header: _ShardHeader, parts: list[Mapping[str, np.ndarray]]
) -> None:
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    header.bits = safetensors.digest(joined)
    write_tensors(
        _shard_path(directory, header.number),
        {name: LazyTensor.from_array(x) for name, x in joined.items()},
        metadata={"format": FORMAT, "about": msgspec.json.encode(header).decode()},
    )


def _read_headers(directory: Path, record_key: RecordKey) -> Iterator[_ShardHeader]:
    """Yield the headers of the existing shards."""
    number = 0
    while path_exists(path := _shard_path(directory, number)):
        about = _parse_header(path)
        for name in RecordKey.__struct_fields__:
            if (theirs := getattr(about.asked, name)) != (ours := getattr(record_key, name)):
                shown = f" ({theirs}, not {ours})" if name not in ("teacher", "data") else ""
                raise ConfigError(
                    f"{path} was recorded with another {name}{shown}: name another directory, or"
                    " remove it"
                )
        if about.number != number:
            raise CheckpointError(
                f"{path} contains shard {about.number} of its record, not {number}"
            )
        yield about
        number += 1


def _parse_header(path: Path) -> _ShardHeader:
    metadata = read_header(path).metadata
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a record of teacher outputs")
    where = f"{path}: its header"
    about: _ShardHeader = as_schema(
        parse_json(metadata.get("about", ""), where), _ShardHeader, where
    )
    return about


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    """Return a shard's tensors, memory-mapped. Raises CheckpointError if the hash differs."""
    tensors = {name: x.read() for name, x in open_tensors(path, mapped=True).items()}
    if safetensors.digest(tensors) != _parse_header(path).bits:
        raise CheckpointError(f"{path} is damaged: remove it to record it again")
    return tensors
