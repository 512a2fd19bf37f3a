"""A teacher's outputs on disk: top-k tokens with log-probabilities, row by row.

A row is found by a hash of its tokens, positions and documents, so the order of later epochs does
not matter. A record belongs to one teacher, one data set, k and temperature; any other is rejected.
Shards are written atomically, one after the other; a killed run resumes after the last one. With
several processes the first one writes them, and all read them.

On disk a token takes 4k + 2 bytes if ids fit in 16 bits, so 130 for k = 32.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

import jax
import msgspec
import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.research.distill.losses import DistillRows, TopKLogprobs, ids_dtype, topk_logprobs
from jaxllm.runtime.multihost import all_gather_objects, broadcast_from_zero, to_host
from jaxllm.runtime.progress import status_bar
from jaxllm.runtime.schema import as_schema
from jaxllm.train.data.rows import IGNORED, Data, Rows
from jaxllm.train.objective import forward
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

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


class _ShardFacts(msgspec.Struct, forbid_unknown_fields=True):
    """A shard's header without its digest. batches: their number in the shard."""

    key: RecordKey
    batches: _Count


@dataclasses.dataclass(frozen=True)
class RecordedTeacher:
    """Batches of `data` with the teacher's outputs: a `Data` of `DistillRows` rows.

    `record_teacher` makes and opens it.
    """

    data: Data
    directory: Path
    key: RecordKey
    shards: int

    @property
    def digest(self) -> str:
        key = msgspec.json.encode(self.key)
        return hashlib.sha256(self.data.digest.encode() + key).hexdigest()[:16]

    @property
    def tokens(self) -> int:
        return self.data.tokens

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, number: int) -> DistillRows:
        return self.look_up(self.data.batch(number))

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
            tensors, index = place
            token[row], logprob[row] = tensors["token"][index], tensors["logprob"][index]
        return DistillRows(**vars(rows), teacher=TopKLogprobs(token, logprob))

    @cached_property
    def _row_places(self) -> dict[bytes, tuple[dict[str, np.ndarray], int]]:
        """The shard's tensors and the index of each row, by its key."""
        store = _open_store(self.directory, self.key)
        places = dict[bytes, tuple[dict[str, np.ndarray], int]]()
        for name in map(_shard_name, range(self.shards)):
            if (part := store.open_tensors(name, mapped=True)) is None:
                raise CheckpointError(
                    f"{store.path(name)} is damaged: remove it to record it again"
                )
            tensors = {name: tensor.read() for name, tensor in part[0].items()}
            places |= {key.tobytes(): (tensors, row) for row, key in enumerate(tensors["key"])}
        return places


def record_teacher(
    directory: Path,
    teacher: Model,
    params: Params,
    data: Data,
    *,
    k: int,
    temperature: float,
    size: int,
    show_progress: bool | None = None,
) -> RecordedTeacher:
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
    key = RecordKey(who, data.digest, k, float(temperature), size, width)
    store = _open_store(directory, key)
    with store.lock():
        written = json.loads(broadcast_from_zero(lambda: json.dumps([*_count_batches(store, key)])))
        count, done, number = len(data), sum(written), len(written)
        if done > count:
            raise CheckpointError(
                f"{directory} has {done} batches, the data only {count}: remove it"
            )
        with status_bar("teacher outputs", count, show_progress, done) as update:
            row_bytes = width * (k * np.dtype(ids_dtype(size)).itemsize + 2 * (k + 1))
            shard_batches = max(1, SHARD_BYTES // (row_bytes * data.batch(0).token_BT.shape[0]))
            while done < count:
                batches = range(done, min(done + shard_batches, count))
                parts = []
                for at in batches:
                    parts.append(_record_batch(teacher, params, data.batch(at), key))
                    update(at + 1, "")
                arrays = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
                facts = msgspec.to_builtins(_ShardFacts(key, len(batches)))
                store.put_arrays(_shard_name(number), arrays, facts)
                number, done = number + 1, batches.stop
    broadcast_from_zero(lambda: "written")
    blind = all_gather_objects(not all(store.has(_shard_name(n)) for n in range(number)))
    if any(blind):
        others = ", ".join(map(str, np.flatnonzero(blind)))
        raise ConfigError(
            f"the teacher outputs in {directory} are visible to process 0, but not to processes"
            f" {others}: use a directory that all share"
        )
    return RecordedTeacher(data, directory, key, number)


def _record_batch(
    teacher: Model, params: Params, rows: Rows, record: RecordKey
) -> Mapping[str, np.ndarray]:
    """Return a batch's part of a shard: keys uint8 `[B, 32]` and buckets of rows with a label."""
    top = _run_teacher(teacher, params, rows, record.size, record.temperature, record.k)
    labelled_B = (np.asarray(rows.label_BT) != IGNORED).any(axis=1)
    key = np.frombuffer(b"".join(_row_keys(rows)), np.uint8).reshape(-1, 32)
    arrays = {"key": key, "token": to_host(top.token_BTk), "logprob": to_host(top.logprob_BTL)}
    arrays = {name: x[labelled_B] for name, x in arrays.items()}
    if np.isnan(arrays["logprob"]).any():
        raise ConfigError("the teacher's outputs contain NaN: it cannot be used")
    return arrays


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _run_teacher(
    teacher: Model, params: Params, rows: Rows, size: int, temperature: float, k: int
) -> TopKLogprobs:
    logits_BTV = forward(teacher, params, rows, gather_logits=True).logits
    return topk_logprobs(logits_BTV, size, temperature, k)


def _row_keys(rows: Rows) -> Iterator[bytes]:
    """Yield 32 bytes for each row: a hash of the teacher's inputs."""
    arrays = [np.asarray(x, "<i4") for x in (rows.token_BT, rows.position_BT, rows.document_BT)]
    for row in zip(*arrays, strict=True):
        yield hashlib.sha256(b"".join(x.tobytes() for x in row)).digest()


def _open_store(directory: Path, key: RecordKey) -> TensorStore:
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()
    return TensorStore(directory, digest, "teacher-", shared=True)


def _shard_name(number: int) -> str:
    return f"{number:05}"


def _count_batches(store: TensorStore, key: RecordKey) -> Iterator[int]:
    """Yield the number of batches of each existing shard."""
    number = 0
    while store.has(name := _shard_name(number)):
        path = store.path(name)
        facts: _ShardFacts = as_schema(store.read_facts(name), _ShardFacts, str(path))
        for field in RecordKey.__struct_fields__:
            if (old := getattr(facts.key, field)) != (new := getattr(key, field)):
                values = f" ({old}, not {new})" if field not in ("teacher", "data") else ""
                raise ConfigError(
                    f"{path} was recorded with another {field}{values}: name another directory, or"
                    " remove it"
                )
        yield facts.batches
        number += 1
