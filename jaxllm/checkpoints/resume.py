"""Resumable storage: finished parameters survive an interrupt, in files beside the result.

A part is a safetensors file with the arrays of some weights, in any format. Its header has a
`digest` of everything that it depends on. Its last tensor is a SHA-256 of every bit before it, so
reading and writing both hold one array in memory at a time. A part that is damaged or belongs to
another run is computed again. With several processes, all of them call `put`; process 0 has the
files.
"""

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxllm.errors import CheckpointError, NewerFileError
from jaxllm.files import lock_file, parse_json, path_exists, remove_partials
from jaxllm.files.versions import PART
from jaxllm.runtime import signals
from jaxllm.runtime.schema import as_schema
from jaxllm.weights import safetensors
from jaxllm.weights.formats import parse_format
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.lazy_gather import peek_weight, to_lazy_tensors
from jaxllm.weights.paths import Params
from jaxllm.weights.safetensors import iter_bytes, read_header, write_tensors

_PART = re.compile(r"[\w.-]+\.part")
_LOCK = "lock"
_CHECKSUM = "__bits__"  # name of the last tensor; with its 32 bytes `write_tensors` puts it last


class PartHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The header of a part.

    digest: identifies what the part depends on. leaves: format and shape of each weight, by its
    path joined with slashes (names may contain dots). facts: other values that were saved.
    """

    digest: str
    leaves: dict[str, tuple[str, list[int]]]
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TensorStore:
    """Parts in a directory, each a nested dict of weights, or named tensors, under a key.

    directory: None saves nothing. digest: of all that the parts depend on: the model, the recipe
    so far, the calibration. prefix: put before each key. log: called with a line about each part
    that is rejected. shared: all processes read the files, not process 0 alone.
    """

    directory: Path | None = None
    digest: str = ""
    prefix: str = ""
    log: Callable[[str], None] = lambda _: None
    shared: bool = False

    def child(self, prefix: str, *depends: str) -> "TensorStore":
        """Return a store for one step: a longer prefix, and a digest that includes `depends`."""
        further = hashlib.sha256("\n".join([self.digest, prefix, *depends]).encode()).hexdigest()
        return dataclasses.replace(self, digest=further, prefix=f"{self.prefix}{prefix}.")

    def get(self, key: str) -> Params | None:
        """Return the parameters that `put` saved under `key`, bit for bit, or None.

        A part that is damaged or belongs to another run counts as missing, and is logged. Raises
        NewerFileError for a part of a newer version, which is not overwritten.
        """
        part = self.get_with_facts(key)
        return None if part is None else part[0]

    def get_with_facts(self, key: str) -> tuple[Params, dict[str, Any]] | None:
        """Return the parameters and the facts under `key`, or None as `get` does."""
        part = self.open_tensors(key)
        if part is None:
            return None
        tensors, header = part
        params: Params = {}
        for name, (format_name, sizes) in header.leaves.items():
            shape, format = tuple(sizes), parse_format(format_name)
            arrays = {x: tensors[f"{name}{x}"].read() for x in format.array_specs(shape)}
            *outer, last = name.split("/")
            parent = functools.reduce(lambda node, key: node.setdefault(key, {}), outer, params)
            parent[last] = format.from_file(name, shape, arrays)
        return params, header.facts

    def open_tensors(
        self, key: str, *, mapped: bool = False
    ) -> tuple[dict[str, LazyTensor], "PartHeader"] | None:
        """Return the tensors under `key`, unread, and the header; or None as `get` does.

        mapped: memory-map the file.
        """
        if not (self.shared or self._local_directory) or not self.has(key):
            return None
        try:
            return _open(self.path(key), self.digest, mapped)
        except NewerFileError:
            raise
        except CheckpointError as error:
            self.log(f"{error}: computing it again")
            return None

    def read_facts(self, key: str) -> dict[str, Any]:
        """Return the facts under `key`, whichever run wrote them. Raises CheckpointError if they
        are unreadable.
        """
        return _read_header(self.path(key))[0].facts

    def has(self, key: str) -> bool:
        """Return whether there is a file for `key`."""
        return self.directory is not None and path_exists(self.path(key))

    def put(self, key: str, params: Params, facts: Mapping[str, Any] | None = None) -> None:
        """Save parameters (a `LazyWeight` is read while it is written) and JSON-able facts.

        Raises CheckpointError if they cannot be written.
        """
        if self.directory is None:
            return
        weights, tensors = dict(_named_leaves(params)), dict[str, LazyTensor]()
        for name, weight in weights.items():
            tensors |= {f"{name}{x}": tensor for x, tensor in to_lazy_tensors(weight).items()}
        leaves = {name: peek_weight(weight) for name, weight in weights.items()}
        formats = {name: (leaf.format, list(leaf.shape)) for name, leaf in leaves.items()}
        _write(self.path(key), tensors, PartHeader(self.digest, formats, dict(facts or {})))

    def put_arrays(self, key: str, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Save arrays of any dtype or lazy tensors, which `open_tensors` returns, as `put` saves
        parameters.
        """
        if self.directory is not None:
            tensors = {
                name: x if isinstance(x, LazyTensor) else LazyTensor.from_array(np.asarray(x))
                for name, x in arrays.items()
            }
            _write(self.path(key), tensors, PartHeader(self.digest, {}, dict(facts)))

    def move(self, key: str, new_key: str) -> bool:
        """Rename a part, replacing any at the new key. Returns whether the part existed."""
        if self._local_directory is None or not self.has(key):
            return False
        self.path(key).replace(self.path(new_key))
        return True

    def remove(self, key: str) -> None:
        """Remove a part if it exists."""
        if self._local_directory is not None:
            self.path(key).unlink(missing_ok=True)

    def clear(self, *keep: str) -> None:
        """Remove the parts under this prefix, except keys that start with one of `keep`."""
        kept = tuple(f"{self.prefix}{key}" for key in keep)
        for path in self.part_paths():
            if not path.name.startswith(kept):
                path.unlink(missing_ok=True)

    def part_paths(self) -> list[Path]:
        """Return the files of the parts under this prefix."""
        if (directory := self._local_directory) is None or not directory.is_dir():
            return []
        names = sorted(path.name for path in directory.iterdir())
        parts = [n for n in names if n.startswith(self.prefix) and _PART.fullmatch(n)]
        return [directory / name for name in parts]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory for this process while the block runs.

        The directory is created if necessary, and removed at the end if it is empty. Raises
        CheckpointError if it cannot be created or another process holds the lock.
        """
        if (directory := self._local_directory) is None:
            yield
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write {directory}: {error.strerror}") from None
        try:
            with lock_file(directory / _LOCK):
                remove_partials(directory)
                yield
        finally:
            if not self.part_paths():
                with contextlib.suppress(OSError):  # other files stay
                    (directory / _LOCK).unlink(missing_ok=True)
                    directory.rmdir()

    @property
    def _local_directory(self) -> Path | None:
        """The directory; None if nothing is saved, or another process has the files."""
        return self.directory if signals.is_leader() else None

    def path(self, key: str) -> Path:
        """Return the file for `key`."""
        assert self.directory is not None
        return self.directory / f"{self.prefix}{key}.part"


def _write(path: Path, tensors: Mapping[str, LazyTensor], header: PartHeader) -> None:
    text = msgspec.json.encode(header).decode()
    write_tensors(path, _with_checksum(tensors, text), metadata={**PART.text_mark, "part": text})


def _read_header(path: Path) -> tuple[PartHeader, str]:
    """Return a part's header, and its text."""
    metadata = read_header(path).metadata
    PART.check(metadata, path)
    text = metadata.get("part", "")
    header: PartHeader = as_schema(parse_json(text, str(path)), PartHeader, str(path))
    return header, text


def _open(path: Path, digest: str, mapped: bool) -> tuple[dict[str, LazyTensor], PartHeader]:
    """Return a part's content. Raises CheckpointError unless `_write` wrote it for `digest`."""
    header, text = _read_header(path)
    if header.digest != digest:
        raise CheckpointError(f"{path} was written for another model, recipe or calibration")
    tensors = safetensors.open_tensors(path, mapped=mapped)
    checksum = tensors.pop(_CHECKSUM, None)
    hashed = _with_checksum(tensors, text)
    for name in tensors:
        for _ in iter_bytes(hashed[name]):
            pass
    if checksum is None or checksum.read().tobytes() != hashed[_CHECKSUM].read().tobytes():
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return tensors, header


def _named_leaves(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from _named_leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _with_checksum(tensors: Mapping[str, LazyTensor], text: str) -> dict[str, LazyTensor]:
    """Return the tensors, followed by a SHA-256 that is computed while they are read.

    It covers the text, and each tensor's name, dtype, shape and every bit.
    """
    sha = hashlib.sha256(text.encode())

    def hash_tensor(name: str, tensor: LazyTensor) -> LazyTensor:
        def parts(rows: int) -> Iterator[np.ndarray]:
            sha.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            for block in tensor.blocks(rows):
                sha.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                yield block

        return dataclasses.replace(tensor, read_blocks=parts)

    last = LazyTensor(
        np.dtype(np.uint8), (sha.digest_size,), lambda: np.frombuffer(sha.digest(), np.uint8)
    )
    return {
        **{name: hash_tensor(name, tensor) for name, tensor in tensors.items()},
        _CHECKSUM: last,
    }
