"""What is finished survives an interrupt: parameters in files beside the result.

A part is a safetensors file of leaves' pieces, of any kind of leaf. Its header says whose it is
(`digest`, of all that it depends on) and has a SHA-256 of every bit. What is another's, or is not
what was written there, is made again.
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

from jaxllm.errors import CheckpointError
from jaxllm.files import as_schema, is_there, locked, parse_json, sweep
from jaxllm.weights.files import digest, open_tensors, read_header, write_tensors
from jaxllm.weights.formats import as_leaf, parse
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves.leaf import Leaf
from jaxllm.weights.paths import Params

_PART = re.compile(r"[\w.-]+\.part")
_LOCK = "lock"


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """What a part's header says. digest: whose it is. leaves: format and shape of each, by its
    names from the outermost with slashes between them (a name may have dots). facts: what else was
    to be kept. bits: of the pieces.
    """

    digest: str
    leaves: dict[str, tuple[str, list[int]]]
    facts: dict[str, Any]
    bits: str


@dataclasses.dataclass(frozen=True)
class Journal:
    """Parts in a directory, each a nested dict of leaves under a key.

    directory: None keeps nothing. digest: of all that the parts depend on: the model, the recipe
    so far, the calibration. prefix: before each key. say: told of what is not believed.
    """

    directory: Path | None = None
    digest: str = ""
    prefix: str = ""
    say: Callable[[str], None] = lambda _: None

    def within(self, prefix: str, *depends: str) -> "Journal":
        """The journal of a step: parts with a prefix of their own, which depend on more."""
        further = hashlib.sha256("\n".join([self.digest, prefix, *depends]).encode()).hexdigest()
        return dataclasses.replace(self, digest=further, prefix=f"{self.prefix}{prefix}.")

    def get(self, key: str) -> Params | None:
        """The parameters that `put` kept under `key`, bit for bit; None where they are to be made.

        A damaged part, or one of another run, is as none, and said.
        """
        found = self.get_with(key)
        return None if found is None else found[0]

    def get_with(self, key: str) -> tuple[Params, dict[str, Any]] | None:
        """The same with the facts that were kept beside them."""
        if self.directory is None or not is_there(path := self._path(key)):
            return None
        try:
            return _read(path, self.digest)
        except CheckpointError as error:
            self.say(f"{error}: made again")
            return None

    def put(self, key: str, params: Params, facts: Mapping[str, Any] | None = None) -> None:
        """Keep parameters, and facts that JSON can hold. Raises CheckpointError where they cannot
        be written.
        """
        if self.directory is not None:
            _write(self._path(key), params, self.digest, dict(facts or {}))

    def forget(self, *but: str) -> None:
        """Remove the parts under this prefix. but: beginnings of the keys that stay."""
        kept = tuple(f"{self.prefix}{key}" for key in but)
        for path in self.parts():
            if not path.name.startswith(kept):
                path.unlink(missing_ok=True)

    def parts(self) -> list[Path]:
        """The files of the parts under this prefix."""
        if self.directory is None or not self.directory.is_dir():
            return []
        names = sorted(path.name for path in self.directory.iterdir())
        ours = [n for n in names if n.startswith(self.prefix) and _PART.fullmatch(n)]
        return [self.directory / name for name in ours]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the directory to this process while the block runs; it is made if need be, and goes
        when it is empty at the end.

        Raises CheckpointError where that cannot be, or another process has it.
        """
        if self.directory is None:
            yield
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.directory}: {error.strerror}") from None
        try:
            with locked(self.directory / _LOCK):
                sweep(self.directory)
                yield
        finally:
            if not self.parts():
                with contextlib.suppress(OSError):  # what is not ours stays
                    (self.directory / _LOCK).unlink(missing_ok=True)
                    self.directory.rmdir()

    def _path(self, key: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{self.prefix}{key}.part"


def _write(path: Path, params: Params, owner: str, facts: dict[str, Any]) -> None:
    leaves = dict(_named(params))
    pieces = {
        f"{name}{key}": np.asarray(piece)
        for name, leaf in leaves.items()
        for key, piece in leaf.pieces().items()
    }
    formats = {name: (leaf.format, list(leaf.shape)) for name, leaf in leaves.items()}
    about = _About(owner, formats, facts, "")
    about.bits = _bits(about, pieces)
    write_tensors(
        path,
        {name: LazyTensor.of(piece) for name, piece in pieces.items()},
        metadata={"part": msgspec.json.encode(about).decode()},
    )


def _read(path: Path, owner: str) -> tuple[Params, dict[str, Any]]:
    """What a part holds. Raises CheckpointError where it is not what `_write` left for `owner`."""
    text = read_header(path).metadata.get("part", "")
    about: _About = as_schema(parse_json(text, str(path)), _About, str(path))
    if about.digest != owner:
        raise CheckpointError(f"{path} belongs to another model, recipe or calibration")
    tensors = {name: tensor.read() for name, tensor in open_tensors(path).items()}
    bits, about.bits = about.bits, ""
    if _bits(about, tensors) != bits:
        raise CheckpointError(f"{path} is not what was written there")
    params: Params = {}
    for name, (format_name, sizes) in about.leaves.items():
        shape, format = tuple(sizes), parse(format_name)
        pieces = {key: tensors[f"{name}{key}"] for key in format.expected(shape)}
        *outer, last = name.split("/")
        inside = functools.reduce(lambda node, key: node.setdefault(key, {}), outer, params)
        inside[last] = format.assemble(name, shape, pieces)
    return params, about.facts


def _named(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from _named(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", as_leaf(value)


def _bits(about: _About, pieces: Mapping[str, np.ndarray]) -> str:
    """A SHA-256 of the header, without this itself, and of every bit."""
    return digest(pieces, msgspec.json.encode(about).decode())
