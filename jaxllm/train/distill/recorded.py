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

from jaxllm import process
from jaxllm.cache.files import fingerprint
from jaxllm.distributed import each, fetched, told
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import as_schema, is_there, locked, parse_json, sweep
from jaxllm.progress import noted_bar
from jaxllm.train.data.rows import IGNORED, Data, Rows
from jaxllm.train.distill.buckets import Buckets, buckets, ids_dtype
from jaxllm.train.distill.objectives import Taught
from jaxllm.train.objective import run
from jaxllm.weights import files
from jaxllm.weights.files import open_tensors, read_header, write_tensors
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params, later

FORMAT = "jaxllm-teacher"
SHARD = 16 << 20  # bytes of a shard, about

_Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """The header of a shard. bits: a SHA-256 of its tensors."""

    asked: Asked
    number: Annotated[int, msgspec.Meta(ge=0)]
    batches: _Count
    bits: str


class _Place(NamedTuple):
    shard: int
    row: int


@dataclasses.dataclass(frozen=True)
class Record:
    """A complete record; `record` makes and opens it."""

    directory: Path
    asked: Asked
    shards: int

    def look_up(self, rows: Rows) -> Taught:
        """Return the rows with the teacher's outputs, as numpy arrays.

        Rows without labels have zeros.
        Raises CheckpointError for rows that are not in the record, and for a damaged shard.
        """
        k, (B, T) = self.asked.k, np.shape(rows.token_BT)
        token = np.zeros((B, T, k), ids_dtype(self.asked.size))
        logprob = np.zeros((B, T, k + 1), np.float16)
        for row, key in enumerate(_keys(rows)):
            if not (np.asarray(rows.label_BT)[row] != IGNORED).any():
                continue
            if (place := self._places.get(key)) is None:
                raise CheckpointError(
                    f"{self.directory} has no teacher outputs for a row of this batch: it was"
                    " recorded with other data"
                )
            tensors = self._tensors[place.shard]
            token[row] = tensors["token"][place.row]
            logprob[row] = tensors["logprob"][place.row]
        told = Buckets(token, logprob)
        return Taught(rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT, told=told)

    @cached_property
    def _places(self) -> dict[bytes, _Place]:
        return {
            key.tobytes(): _Place(number, row)
            for number, tensors in enumerate(self._tensors)
            for row, key in enumerate(tensors["key"])
        }

    @cached_property
    def _tensors(self) -> list[dict[str, np.ndarray]]:
        return [_read(_path(self.directory, number)) for number in range(self.shards)]


@dataclasses.dataclass(frozen=True)
class TaughtData:
    """Batches of `data` with the teacher's outputs: a `Data` of `Taught` rows."""

    data: Data
    record: Record

    @property
    def digest(self) -> str:
        said = msgspec.json.encode(self.record.asked)
        return hashlib.sha256(self.data.digest.encode() + said).hexdigest()[:16]

    @property
    def tokens(self) -> int:
        return self.data.tokens

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, number: int) -> Taught:
        return self.record.look_up(self.data.batch(number))


def record(
    directory: Path,
    teacher: nn.Module,
    params: Params,
    data: Data,
    *,
    k: int,
    temperature: float,
    size: int,
    show_progress: bool | None = None,
) -> Record:
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
    who = hashlib.sha256(
        f"{fingerprint(later(teacher, params))} {teacher.config!r} {teacher.precision!r}".encode()
    ).hexdigest()
    asked = Asked(who, data.digest, k, float(temperature), size, width)
    with _kept(directory):
        written = json.loads(
            told(lambda: json.dumps([about.batches for about in _written(directory, asked)]))
        )
        count, done, number = len(data), sum(written), len(written)
        if done > count:
            raise CheckpointError(
                f"{directory} has {done} batches, the data only {count}: remove it"
            )
        with noted_bar("teacher outputs", count, show_progress, done) as said:
            row_bytes = width * (k * np.dtype(ids_dtype(size)).itemsize + 2 * (k + 1))
            a_shard = max(1, SHARD // (row_bytes * data.batch(0).token_BT.shape[0]))
            while done < count:
                some = range(done, min(done + a_shard, count))
                parts = []
                for at in some:
                    parts.append(_said(teacher, params, data.batch(at), asked))
                    said(at + 1, "")
                _write(directory, _About(asked, number, len(some), ""), parts)
                number, done = number + 1, some.stop
    _check_seen(directory, number)
    return Record(directory, asked, number)


@contextlib.contextmanager
def _kept(directory: Path) -> Iterator[None]:
    """Create and lock the directory, on the first process only."""
    if not process.leads():
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror}") from None
    with locked(directory / "lock"):
        sweep(directory)
        yield


def _check_seen(directory: Path, shards: int) -> None:
    """Raise ConfigError, in all processes, if one does not see what the first has written."""
    told(lambda: "written")
    blind = each(not all(is_there(_path(directory, number)) for number in range(shards)))
    if any(blind):
        raise ConfigError(
            f"the teacher outputs in {directory} are visible to process 0, but not to processes"
            f" {', '.join(map(str, np.flatnonzero(blind)))}: use a directory that all share"
        )


def _said(teacher: nn.Module, params: Params, rows: Rows, asked: Asked) -> Mapping[str, np.ndarray]:
    """Return a batch's part of a shard: keys uint8 `[B, 32]` and buckets of rows with a label."""
    found = _ask(teacher, params, rows, asked.size, asked.temperature, asked.k)
    kept_B = (np.asarray(rows.label_BT) != IGNORED).any(axis=1)
    key = np.frombuffer(b"".join(_keys(rows)), np.uint8).reshape(-1, 32)
    all_rows = {
        "key": key,
        "token": fetched(found.token_BTk),
        "logprob": fetched(found.logprob_BTL),
    }
    if np.isnan(all_rows["logprob"][kept_B]).any():
        raise ConfigError("the teacher's outputs contain NaN: it cannot be used")
    return {name: x[kept_B] for name, x in all_rows.items()}


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _ask(
    teacher: nn.Module, params: Params, rows: Rows, size: int, temperature: float, k: int
) -> Buckets:
    logits_BTV = run(teacher, params, rows, whole=True).logits
    return buckets(logits_BTV, size, temperature, k)


def _keys(rows: Rows) -> Iterator[bytes]:
    """Yield 32 bytes for each row: a hash of the teacher's inputs."""
    arrays = [np.asarray(x, "<i4") for x in (rows.token_BT, rows.position_BT, rows.document_BT)]
    for row in zip(*arrays, strict=True):
        yield hashlib.sha256(b"".join(x.tobytes() for x in row)).digest()


def _path(directory: Path, number: int) -> Path:
    return directory / f"teacher-{number:05}.safetensors"


def _write(directory: Path, about: _About, parts: list[Mapping[str, np.ndarray]]) -> None:
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    about.bits = files.digest(joined)
    write_tensors(
        _path(directory, about.number),
        {name: LazyTensor.of(x) for name, x in joined.items()},
        metadata={"format": FORMAT, "about": msgspec.json.encode(about).decode()},
    )


def _written(directory: Path, asked: Asked) -> Iterator[_About]:
    """Yield the headers of the existing shards."""
    number = 0
    while is_there(path := _path(directory, number)):
        about = _about(path)
        for name in Asked.__struct_fields__:
            if (theirs := getattr(about.asked, name)) != (ours := getattr(asked, name)):
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


def _about(path: Path) -> _About:
    metadata = read_header(path).metadata
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a record of teacher outputs")
    where = f"{path}: its header"
    about: _About = as_schema(parse_json(metadata.get("about", ""), where), _About, where)
    return about


def _read(path: Path) -> dict[str, np.ndarray]:
    """Return a shard's tensors, memory-mapped. Raises CheckpointError if the hash differs."""
    tensors = {name: x.read() for name, x in open_tensors(path, mapped=True).items()}
    if files.digest(tensors) != _about(path).bits:
        raise CheckpointError(f"{path} is damaged: remove it to record it again")
    return tensors
