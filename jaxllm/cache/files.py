"""Caches on disk: one safetensors file that knows which model, precision and text it belongs to.

Written under a temporary name and moved into place, so that a file is complete or is not there.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.cache.kv import EMPTY, KVCache, Segment, check_usable, init_cache
from jaxllm.config import ModelConfig
from jaxllm.errors import CacheMismatchError, CapacityError, CheckpointError
from jaxllm.ops import Int8Entries
from jaxllm.weights.files import LazyTensor, open_tensors, write_tensors
from jaxllm.weights.paths import Params

FORMAT = "jaxllm-cache"
VERSION = 1
_HEADER = {
    "version": int,
    "config": dict,
    "precision": dict,
    "weights": str,
    "cache_dtype": str,
    "capacity": int,
    "cursor": int,
    "segments": int,
    "tokens": list,
    "contents": str,
}


def fingerprint(params: Params) -> str:
    """A SHA-256 of the weights: paths, formats, shapes and every bit. Reads them all once."""
    leaves = jax.tree_util.tree_leaves_with_path(params)

    def digest(item: tuple[Any, jax.Array]) -> bytes:
        path, leaf = item
        array = np.ascontiguousarray(leaf)
        found = hashlib.sha256(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
        return found.digest()

    with ThreadPoolExecutor(4) as threads:  # hashing lets other threads run
        return hashlib.sha256(b"".join(threads.map(digest, leaves))).hexdigest()


def save_cache(path: str | Path, cache: KVCache, model: nn.Module, params: Params) -> None:
    """Write a cache: its keys and values bit for bit, token ids, positions, and whose they are.

    What rows share is written once; empty room at the tail's end is not written, only its size. An
    older file of this name is replaced when the new one is complete.

    Raises CacheMismatchError for a cache of another model, CheckpointError where the file cannot be
    written.
    """
    check_usable(cache)
    _check_config(cache.config, model.config, "the cache")
    used = max(int(cache.cursor), 1)
    tail = jax.tree.map(lambda x: x[:, :used], cache.tail)
    tensors = {
        f"{i}.{name}": np.asarray(array)
        for i, segment in enumerate((*cache.frozen, tail))
        for name, array in _arrays(segment)
    }
    tensors["next_position_B"] = np.asarray(cache.next_position_B)
    header = {
        **_identity(model, params),
        "cache_dtype": cache.dtype,
        "capacity": cache.capacity,
        "cursor": int(cache.cursor),
        "segments": len(cache.segments),
        "tokens": [cache.tokens(row) for row in range(cache.batch)],
        "contents": _digest(tensors),
    }
    try:
        write_tensors(
            Path(path),
            {name: LazyTensor.of(array) for name, array in tensors.items()},
            metadata={"format": FORMAT, "header": json.dumps(header)},
        )
    except OSError as error:
        raise CheckpointError(f"the cache cannot be written to {path}: {error.strerror}") from None


def load_cache(
    path: str | Path,
    model: nn.Module,
    params: Params,
    *,
    prefix: Sequence[int] | None = None,
    capacity: int | None = None,
) -> KVCache:
    """Read a cache that `save_cache` wrote with this model, these weights and this precision.

    prefix: token ids that every row's text must begin with. capacity: of the tail; by default what
    it was.

    Raises CacheMismatchError, naming what differs, for a cache of another model, precision or text;
    CapacityError where it does not fit; CheckpointError for a file that is none or is damaged.
    """
    header = _header(Path(path))
    for name, ours in _identity(model, params).items():
        if header.get(name) != ours:
            raise CacheMismatchError(f"{path}: {_difference(name, header.get(name), ours)}")
    for row, text in enumerate(header["tokens"]):
        if prefix is not None and text[: len(prefix)] != list(prefix):
            same = next(
                (i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b),
                min(len(text), len(prefix)),
            )
            raise CacheMismatchError(
                f"{path}: the text of row {row} is not this prefix: {same} of its {len(prefix)}"
                " tokens are the same"
            )
    tensors = {name: tensor.read() for name, tensor in open_tensors(Path(path)).items()}
    if _digest(tensors) != header["contents"]:
        raise CheckpointError(f"{path}: damaged, its contents are not what was written")
    capacity = header["capacity"] if capacity is None else capacity
    if header["cursor"] > capacity:
        raise CapacityError(f"{path}: {header['cursor']} slots are used, more than {capacity}")
    empty = init_cache(model.config, 1, 1, dtype=header["cache_dtype"])
    next_B = tensors.get("next_position_B", np.empty((0, 0)))
    if next_B.ndim != 1 or next_B.dtype != np.int32 or not header["segments"] > 0:
        raise CheckpointError(f"{path}: next_position_B or the segments are missing")
    rows = next_B.shape[0]
    *frozen, tail = (
        _segment(tensors, i, empty.tail, rows, str(path)) for i in range(header["segments"])
    )
    room = capacity - tail.position_BS.shape[1]
    return empty.replace(
        frozen=tuple(frozen),
        tail=jax.tree.map(lambda x: _with_room(x, room), tail).replace(
            position_BS=_with_room(tail.position_BS, room, EMPTY)
        ),
        cursor=jnp.asarray(header["cursor"], jnp.int32),
        next_position_B=jax.device_put(next_B),
    )


def _identity(model: nn.Module, params: Params) -> dict[str, Any]:
    """What a cache belongs to, as JSON has it."""
    identity = {
        "version": VERSION,
        "config": model.config.to_dict(),
        "precision": dataclasses.asdict(model.precision),
        "weights": fingerprint(params),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))
    return plain


def _difference(name: str, theirs: Any, ours: Any) -> str:
    if name == "weights":
        return "the cache was made with other weights"
    if isinstance(theirs, dict):
        field = next(f for f in ours if ours[f] != theirs.get(f))
        return f"the cache's {name} has {field} {theirs.get(field)!r}, the model's {ours[field]!r}"
    return f"the cache's {name} is {theirs!r}, this is {ours!r}"


def _check_config(theirs: ModelConfig, ours: ModelConfig, what: str) -> None:
    if theirs != ours:
        raise CacheMismatchError(
            f"{what}: {_difference('config', theirs.to_dict(), ours.to_dict())}"
        )


def _header(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{path}: not a file that save_cache wrote")
        header: dict[str, Any] = json.loads(metadata["header"])
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable cache file: {error}") from None
    wrong = [name for name, kind in _HEADER.items() if not isinstance(header.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path}: its header has no valid {', '.join(wrong)}")
    return header


def _arrays(segment: Segment) -> Iterator[tuple[str, jax.Array]]:
    """A segment's arrays by name."""
    for name in ("k", "v"):
        for layer, entries in enumerate(getattr(segment, name)):
            if isinstance(entries, Int8Entries):
                yield f"{name}.{layer}.value", entries.value
                yield f"{name}.{layer}.scale", entries.scale
            else:
                yield f"{name}.{layer}", entries
    for name in ("position_BS", "token_BS", "patched_BS"):
        yield name, getattr(segment, name)


def _segment(
    tensors: dict[str, np.ndarray], index: int, like: Segment, rows: int, where: str
) -> Segment:
    """One segment, its arrays of the same form as those of `like`, in rows and slots that agree."""
    arrays = []
    slots = tensors.get(f"{index}.position_BS", np.empty((0, 0))).shape[1]
    for name, expected in _arrays(like):
        array = tensors.get(f"{index}.{name}", np.empty(0))
        shapes = [(n, slots, *expected.shape[2:]) for n in (1, rows)]
        if array.shape not in shapes or array.dtype != expected.dtype:
            raise CheckpointError(
                f"{where}: {index}.{name} is {array.dtype} {array.shape}, expected"
                f" {expected.dtype} {shapes[-1]}"
            )
        arrays.append(jax.device_put(array))
    segment: Segment = jax.tree.unflatten(jax.tree.structure(like), arrays)
    return segment


def _digest(tensors: dict[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _with_room(x: jax.Array, room: int, value: int = 0) -> jax.Array:
    padding = ((0, 0), (0, max(room, 0)), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x, padding, constant_values=value)[:, : x.shape[1] + room]
