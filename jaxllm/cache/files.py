"""Caches on disk: one safetensors file that records its model, precision and weights.

A digest covers header and tensors. The numbers are validated as well, since anyone who edits a file
can update its digest.
"""

import dataclasses
import functools
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxllm.cache.kv import (
    EMPTY,
    MAX_SLOTS,
    KVCache,
    Segment,
    check_usable,
    init_cache,
    reshard_cache,
)
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError, CheckpointError
from jaxllm.files import as_path, check_memory, parse_json
from jaxllm.files.versions import CACHE
from jaxllm.ops import Int8Entries
from jaxllm.runtime.multihost import is_multiprocess, to_host
from jaxllm.runtime.schema import as_schema
from jaxllm.runtime.validation import as_token_array, check_int, check_token_ids
from jaxllm.weights import safetensors
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.lazy_gather import load_weight
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, check_params
from jaxllm.weights.safetensors import open_tensors, read_header, write_tensors
from jaxllm.weights.types.block_weight import BlockWeight
from jaxllm.weights.types.int_weight import IntWeight
from jaxllm.weights.types.lora import keep_chosen_adapter

_HASH_THREADS = 4  # arrays hashed concurrently

_Slots = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """The file's metadata: what the cache belongs to, and the size of its tail.

    digest: of the tensors and all other fields.
    """

    version: int
    config: dict[str, Any]
    precision: dict[str, Any]
    weights: str
    cache_dtype: str
    capacity: _Slots
    cursor: _Slots
    segments: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    digest: str


def fingerprint(params: Params) -> str:
    """Return a SHA-256 of the weights: paths, formats, shapes and every bit.

    Reads all weights once, a few at a time; each of several processes reads all. Of several
    adapters only the selected one counts. A `LazyWeight` counts as the weight that it returns.
    """

    def hash_array(name: str, array: Any) -> bytes:
        return bytes.fromhex(safetensors.digest({name: np.asarray(array)}))

    check_params(params)
    total, hashes = hashlib.sha256(), deque[Future[bytes]]()
    with ThreadPoolExecutor(_HASH_THREADS) as threads:  # hashing releases the GIL
        for name, array in _iter_arrays(params):
            hashes.append(
                threads.submit(hash_array, name, to_host(array) if is_multiprocess() else array)
            )
            if len(hashes) > _HASH_THREADS:
                total.update(hashes.popleft().result())
        for one in hashes:
            total.update(one.result())
    return total.hexdigest()


def _iter_arrays(node: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Iterate over the parameters' arrays and their names, in JAX's order."""
    if isinstance(node, Mapping):
        for key in sorted(node):
            yield from _iter_arrays(node[key], (*keys, key))
        return
    inside = functools.reduce(lambda x, key: {key: x}, reversed(keys), load_weight(node))
    leaves = jax.tree_util.tree_leaves_with_path(
        keep_chosen_adapter(inside), is_leaf=lambda x: isinstance(x, IntWeight | BlockWeight)
    )
    for path, leaf in leaves:
        arrays = leaf.arrays() if isinstance(leaf, IntWeight | BlockWeight) else {"": leaf}
        for name, array in arrays.items():  # the names in files, whatever the fields' names
            yield f"{jax.tree_util.keystr(path)}{name}", array


def save_cache(path: str | Path, cache: KVCache, model: Model, params: Params) -> None:
    """Write a cache with its keys, values, token ids, positions and model identity, bit for bit.

    Shared segments are written once; of free slots at the tail's end only the number is written. An
    older file of this name is replaced once the new one is complete.

    Raises:
        CacheMismatchError: The cache belongs to another model.
        CheckpointError: The file cannot be written.
    """
    path = as_path(path)
    check_usable(cache)
    _check_config(cache.config, model.config, "the cache")
    used = max(int(cache.cursor), 1)
    tail = jax.tree.map(lambda x: x[:, :used], cache.tail)
    tensors = {
        f"{i}.{name}": np.asarray(array)
        for i, segment in enumerate((*cache.frozen, tail))
        for name, array in _segment_arrays(segment)
    }
    tensors["next_position_B"] = np.asarray(cache.next_position_B)
    if cache.edits_B is not None:
        tensors["edits_B"] = np.asarray(cache.edits_B)
    for i, array in enumerate(jax.tree.leaves(cache.state)):
        tensors[f"memory.{i}"] = np.asarray(array)
    header = {
        **_identity(model, params),
        "cache_dtype": cache.dtype,
        "capacity": cache.capacity,
        "cursor": int(cache.cursor),
        "segments": len(cache.segments),
    }
    header["digest"] = digest(header, tensors)
    write_tensors(
        path,
        {name: LazyTensor.from_array(array) for name, array in tensors.items()},
        metadata={"format": CACHE.format, "header": json.dumps(header)},
    )


def load_cache(
    path: str | Path,
    model: Model,
    params: Params,
    *,
    prefix: Sequence[int] | None = None,
    capacity: int | None = None,
) -> KVCache:
    """Read a cache that `save_cache` wrote with this model, these weights and this precision.

    Args:
        prefix: Token ids with which every row's text must begin.
        capacity: Slots of the tail; default: as saved.

    Raises:
        CacheMismatchError: Model, weights, precision or text differ; the message names the
            difference.
        CapacityError: The cache does not fit.
        CheckpointError: The file is not a cache, or is damaged.
    """
    path = as_path(path)
    if capacity is not None:
        capacity = check_int("a cache's capacity", capacity, 1, MAX_SLOTS, CapacityError)
    if prefix is not None:
        prefix = as_token_array("prefix", prefix).tolist()
    header, fields = _read_header(path)
    for name, current in _identity(model, params).items():
        if _drop_nulls(fields[name]) != _drop_nulls(current):
            raise CacheMismatchError(f"{path}: {_describe_difference(name, fields[name], current)}")
    tensors = {name: tensor.read() for name, tensor in open_tensors(path).items()}
    if digest(fields, tensors) != header.digest:
        raise CheckpointError(f"{path}: damaged, its contents do not match its digest")
    capacity = header.capacity if capacity is None else capacity
    if header.cursor > capacity:
        raise CapacityError(f"{path}: {header.cursor} slots are used, more than {capacity}")
    empty = init_cache(model, 1, 1, dtype=header.cache_dtype)
    next_B = tensors.pop("next_position_B", np.empty((0, 0)))
    rows = next_B.shape[0]
    if next_B.ndim != 1 or next_B.dtype != np.int32 or rows == 0:
        raise CheckpointError(f"{path}: next_position_B is missing or not int32 [rows]")
    edits_B = tensors.pop("edits_B", None)
    if edits_B is not None and (edits_B.shape, edits_B.dtype) != ((rows,), np.uint32):
        raise CheckpointError(f"{path}: edits_B is not uint32 [{rows}]")
    check_memory(empty.nbytes * rows * capacity, f"{path}: {rows} rows of {capacity:,} slots")
    *frozen, tail = (
        _take_segment(tensors, i, empty.tail, rows, str(path)) for i in range(header.segments)
    )
    state = _take_state(tensors, empty.state, rows, str(path))
    if tensors:
        raise CheckpointError(f"{path}: {next(iter(tensors))} is not part of this cache")
    _check_tail(tail, header.cursor, rows, str(path))
    _check_numbers((*frozen, tail), next_B, model.config, str(path))
    room = capacity - tail.position_BS.shape[1]
    cache = empty.replace(
        frozen=tuple(frozen),
        tail=jax.tree.map(lambda x: _resize_slots(x, room), tail).replace(
            position_BS=_resize_slots(tail.position_BS, room, EMPTY)
        ),
        cursor=jnp.asarray(header.cursor, jnp.int32),
        next_position_B=jax.device_put(next_B),
        state=state,
        edits_B=None if edits_B is None else jax.device_put(edits_B),
    )
    if prefix is not None:
        _check_prefix(cache, list(prefix), str(path))
    return reshard_cache(cache, model)


def _identity(model: Model, params: Params) -> dict[str, Any]:
    """Return the version, model and weights that a cache belongs to, as JSON values."""
    identity = {
        "version": CACHE.version,
        "config": model.config.to_dict(),
        "precision": dataclasses.asdict(model.precision),
        "weights": fingerprint(params),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))
    return plain


def _drop_nulls(value: Any) -> Any:
    """Return a JSON value without fields that are not set, which other versions may lack."""
    if not isinstance(value, dict):
        return value
    return {name: _drop_nulls(field) for name, field in value.items() if field is not None}


def _describe_difference(name: str, saved: Any, current: Any) -> str:
    if name == "weights":
        return "the cache was made with other weights"
    if isinstance(saved, dict):
        saved, current = _drop_nulls(saved), _drop_nulls(current)
        unlike = (f for f in {**current, **saved} if current.get(f) != saved.get(f))
        field = next(unlike)
        stored, wanted = saved.get(field), current.get(field)
        return f"the cache's {name} has {field} {stored!r:.200}, the model's {wanted!r}"
    return f"the cache's {name} is {saved!r}, this is {current!r}"


def _check_config(saved: ModelConfig, current: ModelConfig, what: str) -> None:
    if saved != current:
        raise CacheMismatchError(
            f"{what}: {_describe_difference('config', saved.to_dict(), current.to_dict())}"
        )


def _read_header(path: Path) -> tuple[_Header, dict[str, Any]]:
    """Return the checked header, and its fields as they stand in the file."""
    metadata = read_header(path).metadata
    if metadata.get("format") != CACHE.format:
        raise CheckpointError(f"{path}: not written by save_cache")
    where = f"{path}: its header"
    fields = as_schema(parse_json(metadata.get("header", ""), where), dict[str, Any], where)
    CACHE.check({**fields, "format": CACHE.format}, path)
    return as_schema(fields, _Header, where), fields


def _check_prefix(cache: KVCache, prefix: list[int], where: str) -> None:
    for row in range(cache.batch):
        text = cache.tokens(row)
        if text[: len(prefix)] != prefix:
            same = next(
                (i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b),
                min(len(text), len(prefix)),
            )
            raise CacheMismatchError(
                f"{where}: the text of row {row} does not begin with this prefix: only {same} of"
                f" its {len(prefix)} tokens match"
            )


def _check_tail(tail: Segment, cursor: int, rows: int, where: str) -> None:
    """Check that the tail's slots are those below the cursor, and not shared by rows."""
    slots = tail.position_BS.shape[1]
    if slots != max(cursor, 1):
        raise CheckpointError(f"{where}: cursor is {cursor}, but the tail has {slots} slots")
    if any(x.shape[0] != rows for x in jax.tree.leaves(tail)):
        raise CheckpointError(f"{where}: the tail does not have the {rows} rows of next_position_B")


def _check_numbers(
    segments: Sequence[Segment], next_B: np.ndarray, config: ModelConfig, where: str
) -> None:
    """Check token ids against the vocabulary, and positions against the model's limit."""
    for segment in segments:
        position_BS, token_BS = np.asarray(segment.position_BS), np.asarray(segment.token_BS)
        if (position_BS >= next_B[:, None]).any() or (next_B > config.position_limit).any():
            raise CheckpointError(
                f"{where}: a position is not below next_position_B, or next_position_B is above"
                f" {config.position_limit}"
            )
        held_BS = position_BS != EMPTY
        check_token_ids(
            token_BS, config.vocab_size, f"{where}: ", real_X=held_BS, error=CheckpointError
        )


def _segment_arrays(segment: Segment) -> Iterator[tuple[str, jax.Array]]:
    """Iterate over a segment's arrays by name."""
    for name in ("k", "v"):
        for layer, entries in enumerate(getattr(segment, name)):
            if isinstance(entries, Int8Entries):
                yield f"{name}.{layer}.value", entries.value
                yield f"{name}.{layer}.scale", entries.scale
            else:
                yield f"{name}.{layer}", entries
    for name in ("position_BS", "token_BS", "patched_BS"):
        yield name, getattr(segment, name)


def _take_segment(
    tensors: dict[str, np.ndarray], index: int, template: Segment, rows: int, where: str
) -> Segment:
    """Take one segment from the tensors, laid out as `template`, with consistent rows and slots."""
    arrays = []
    position = tensors.get(f"{index}.position_BS")
    slots = position.shape[1] if position is not None and position.ndim == 2 else 0
    for name, expected in _segment_arrays(template):
        array = tensors.pop(f"{index}.{name}", np.empty(0))
        shapes = [(n, slots, *expected.shape[2:]) for n in (1, rows)]
        if array.shape not in shapes or array.dtype != expected.dtype:
            raise CheckpointError(
                f"{where}: {index}.{name} is {array.dtype} {array.shape}, expected"
                f" {expected.dtype} {shapes[-1]}"
            )
        arrays.append(jax.device_put(array))
    segment: Segment = jax.tree.unflatten(jax.tree.structure(template), arrays)
    return segment


def _take_state(
    tensors: dict[str, np.ndarray], template: tuple[Any, ...], rows: int, where: str
) -> tuple[Any, ...]:
    """Take the memories from the tensors, laid out as `template`, for these rows."""
    leaves, tree = jax.tree.flatten(template)
    arrays = [tensors.pop(f"memory.{i}", np.empty(0)) for i in range(len(leaves))]
    for i, (array, expected) in enumerate(zip(arrays, leaves, strict=True)):
        if array.shape != (rows, *expected.shape[1:]) or array.dtype != expected.dtype:
            raise CheckpointError(f"{where}: memory.{i} is {array.dtype} {array.shape}")
    memory: tuple[Any, ...] = jax.tree.unflatten(tree, [jax.device_put(x) for x in arrays])
    return memory


def digest(header: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    """Return a hash of a cache file without its digest field."""
    said = {name: value for name, value in header.items() if name != "digest"}
    return safetensors.digest(tensors, json.dumps(said, sort_keys=True))


def _resize_slots(x: jax.Array, room: int, value: int = 0) -> jax.Array:
    padding = ((0, 0), (0, max(room, 0)), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x, padding, constant_values=value)[:, : x.shape[1] + room]
