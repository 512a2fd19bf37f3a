"""What a teacher says, on disk: its likeliest tokens with log-probabilities, row by row.

A row is known by its own tokens, positions and documents, so that it is found in whatever order
later epochs have it. A record belongs to one teacher, one set of rows and one way of asking
(k, temperature): anything else is refused. Shards are written one after the other, whole or not at
all; a run that was killed goes on after the last one. Of several processes the first writes them,
and all read them.

On disk a token takes 4k + 2 bytes where ids fit in 16 bits, so 130 for k = 32.
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
    """What a record belongs to. teacher: the fingerprint of its weights, and how it computes. data:
    the rows' digest. k: likeliest tokens. size: of the vocabulary that they are among. width: of a
    row.
    """

    teacher: str
    data: str
    k: _Count
    temperature: Annotated[float, msgspec.Meta(gt=0)]
    size: _Count
    width: _Count


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """A shard's header. bits: a SHA-256 of its tensors."""

    asked: Asked
    number: Annotated[int, msgspec.Meta(ge=0)]
    batches: _Count
    bits: str


class _Place(NamedTuple):
    shard: int
    row: int


@dataclasses.dataclass(frozen=True)
class Record:
    """A complete record: see `record`, which makes and opens it."""

    directory: Path
    asked: Asked
    shards: int

    def look_up(self, rows: Rows) -> Taught:
        """The rows with what the teacher said of them, numpy arrays.

        Rows of padding alone need no teacher. Raises CheckpointError for other rows than those of
        the record, and for a shard that is damaged.
        """
        k, (B, T) = self.asked.k, np.shape(rows.token_BT)
        token = np.zeros((B, T, k), ids_dtype(self.asked.size))
        logprob = np.zeros((B, T, k + 1), np.float16)
        for row, key in enumerate(_keys(rows)):
            if not (np.asarray(rows.label_BT)[row] != IGNORED).any():
                continue
            if (place := self._places.get(key)) is None:
                raise CheckpointError(
                    f"{self.directory} holds nothing for a row of this batch: the data is not what"
                    " the teacher was asked about"
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
    """Batches of `data`, each with what the teacher said: a `Data` of `Taught` rows."""

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
    """Let a teacher speak of every row of an epoch of `data`; what is there already is kept.

    size: of the vocabulary that it shares with the student. Raises ConfigError for a directory with
    a record of another teacher, other data or another question, a k that cannot be, or where not
    all processes see what the first has written; CheckpointError where it cannot be written or is
    damaged, or another process writes it.
    """
    if not 1 <= k <= size:
        raise ConfigError(f"of {size} tokens the likeliest 1 to {size} can be kept, got {k}")
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
            raise CheckpointError(f"{directory} holds more batches than the data has: {done}")
        with noted_bar("the teacher speaks", count, show_progress, done) as said:
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
    """The directory, made if need be, is the first process's while the block runs."""
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
    """Raise ConfigError, in all processes, where one does not see what the first has written."""
    told(lambda: "written")
    blind = each(not all(is_there(_path(directory, number)) for number in range(shards)))
    if any(blind):
        raise ConfigError(
            f"what the teacher said is in {directory} of process 0, and not in that of processes"
            f" {', '.join(map(str, np.flatnonzero(blind)))}: name a directory that all share"
        )


def _said(teacher: nn.Module, params: Params, rows: Rows, asked: Asked) -> Mapping[str, np.ndarray]:
    """What a shard has of a batch: keys uint8 `[B, 32]`, and buckets, of rows with a label."""
    found = _ask(teacher, params, rows, asked.size, asked.temperature, asked.k)
    kept_B = (np.asarray(rows.label_BT) != IGNORED).any(axis=1)
    key = np.frombuffer(b"".join(_keys(rows)), np.uint8).reshape(-1, 32)
    all_rows = {
        "key": key,
        "token": fetched(found.token_BTk),
        "logprob": fetched(found.logprob_BTL),
    }
    if np.isnan(all_rows["logprob"][kept_B]).any():
        raise ConfigError("the teacher says NaN of these rows: it cannot teach")
    return {name: x[kept_B] for name, x in all_rows.items()}


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _ask(
    teacher: nn.Module, params: Params, rows: Rows, size: int, temperature: float, k: int
) -> Buckets:
    logits_BTV = run(teacher, params, rows, whole=True).logits
    return buckets(logits_BTV, size, temperature, k)


def _keys(rows: Rows) -> Iterator[bytes]:
    """32 bytes for each row: what the teacher sees of it."""
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
    """The headers of the shards that are there, one after the other."""
    number = 0
    while is_there(path := _path(directory, number)):
        about = _about(path)
        for name in Asked.__struct_fields__:
            if (theirs := getattr(about.asked, name)) != (ours := getattr(asked, name)):
                shown = f": {theirs}, not {ours}" if name not in ("teacher", "data") else ""
                raise ConfigError(
                    f"{path} was recorded with another {name}{shown}; name another directory, or"
                    " remove it"
                )
        if about.number != number:
            raise CheckpointError(f"{path} is shard {about.number} of its record, not {number}")
        yield about
        number += 1


def _about(path: Path) -> _About:
    metadata = read_header(path).metadata
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not what a teacher said")
    where = f"{path}: its header"
    about: _About = as_schema(parse_json(metadata.get("about", ""), where), _About, where)
    return about


def _read(path: Path) -> dict[str, np.ndarray]:
    """A shard's tensors, mapped into memory. Raises CheckpointError where its bits are not those
    that were written.
    """
    tensors = {name: x.read() for name, x in open_tensors(path, mapped=True).items()}
    if files.digest(tensors) != _about(path).bits:
        raise CheckpointError(f"{path} is damaged: remove it, and the teacher is asked again")
    return tensors
