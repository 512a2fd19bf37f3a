"""One pass over a loader: numbers for every token that counts, and a journal to go on from.

The journal is a file of JSON lines: first whose it is, then each batch's numbers with the loader's
state after it. Lines are only ever added, so an interrupt costs the batch that was running. Each
carries a checksum of itself and of the line before it, and one process at a time has the file.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import msgspec
import numpy as np

from jaxllm import process
from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.files import as_schema, locked, parse_json, read_bytes
from jaxllm.progress import steps_bar
from jaxllm.weights.paths import Params

Columns = dict[str, np.ndarray]  # by name, one number for each token that counts, `[N]`
Models = Mapping[str, tuple[nn.Module, Params]]

_MAX_BYTES = 1 << 31


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a journal. record: its text; digest: SHA-256 of the last line's, and of it."""

    record: str
    digest: str


class _Owner(msgspec.Struct, forbid_unknown_fields=True):
    """The first record: what must be the same."""

    owner: dict[str, str]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """Every other: the state after a batch, and its numbers by name with their dtype."""

    state: dict[str, int | str]
    columns: dict[str, tuple[Literal["float32", "float64", "bool"], list[float | bool]]]


def over(
    loader: Loader,
    each: Callable[[Batch], Columns],
    *,
    models: Models,
    journal: Path | None = None,
    description: str = "evaluating",
    summary: Callable[[Columns], str] = lambda _: "",
    show_progress: bool | None = None,
) -> Columns:
    """`each(batch)` for every batch of an epoch, joined in the loader's order.

    models: by the part they play; with the data they say whose a journal is. journal: what it has
    is not run again; it is made where there is none. summary: of what there is so far, for whoever
    interrupts a command.

    Raises ConfigError for a journal of other models, other data or another order, CheckpointError
    for one that is damaged, or in use by another process, or cannot be written.
    """
    parts: list[Columns] = []

    def so_far() -> str:
        known = summary(_joined(parts[:])) if parts else ""
        on = f"the same command goes on from {journal}" if journal else "--journal FILE keeps them"
        return f"{len(parts)} of {len(loader)} batches done{known and f', {known}'}; {on}"

    with contextlib.ExitStack() as stack:
        stack.enter_context(process.saying(so_far))
        kept: Iterator[Columns] = iter(())
        if journal is not None:
            stack.enter_context(locked(journal))
            written = _Journal(journal, _owner(loader, models))
            kept = written.read(loader)
        done = stack.enter_context(steps_bar(description, len(loader), show_progress))
        for batch, after in loader.batches():
            found = next(kept, None)
            if found is None:
                found = each(batch)
                if journal is not None:
                    written.append({"state": after, "columns": _lists(found)})
            parts.append(found)
            done()
    return _joined(parts)


def _joined(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _owner(loader: Loader, models: Models) -> dict[str, str]:
    """What must be the same: the data, and the weights and formats of every model."""
    weights = {
        name: f"{fingerprint(params)[:16]} {model.precision!r} {model.config!r}"
        for name, (model, params) in models.items()
    }
    return {"data": loader.digest, **weights}


class _Journal:
    """A journal that is ours alone while it is open: `read` first, then `append`."""

    def __init__(self, path: Path, owner: dict[str, str]) -> None:
        self.path, self.owner, self.digest = path, owner, ""

    def read(self, loader: Loader) -> Iterator[Columns]:
        """The numbers that it has, one batch after the other; a new journal gets its first line.

        What an interrupt cut off goes, be it of the first line.
        """
        content = read_bytes(self.path, _MAX_BYTES)
        whole, newline, rest = content.rpartition(b"\n")
        first = _encoded({"owner": self.owner}, "")
        if not newline and first.startswith(rest):
            self._truncate(0)
            self.append({"owner": self.owner})
            return iter(())
        head, *lines = [
            self._record(line, number) for number, line in enumerate(whole.splitlines(), 1)
        ] or [{}]
        found = as_schema(head, _Owner, f"{self.path}, line 1").owner
        for name in found.keys() | self.owner.keys():
            if found.get(name) != self.owner.get(name):
                raise ConfigError(
                    f"{self.path} belongs to an evaluation with another {name}: name another file,"
                    " or remove it"
                )
        self._truncate(len(whole + newline))
        return iter(self._columns(lines, loader))

    def append(self, record: Mapping[str, Any]) -> None:
        line = _encoded(record, self.digest)
        try:
            with open(self.path, "ab") as file:
                file.write(line)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error
        self.digest = json.loads(line)["digest"]

    def _record(self, line: bytes, number: int) -> Any:
        where = f"{self.path}, line {number}"
        if number == 1:
            where += " (is it no journal of an evaluation, or of an earlier version?)"
        held: _Line = as_schema(parse_json(line, where), _Line, where)
        if held.digest != _chained(held.record, self.digest):
            raise CheckpointError(
                f"{where} is not what was written there, or not after the line before it: remove"
                " the file, or name another"
            )
        self.digest = held.digest
        return parse_json(held.record, where)

    def _columns(self, records: list[Any], loader: Loader) -> list[Columns]:
        """The numbers of each record, which are those of the loader's batches in their order."""
        if len(records) > len(loader):
            raise CheckpointError(f"{self.path} has more lines than the evaluation has batches")
        parts = []
        batches = loader.batches()
        for number, record in enumerate(records, 2):
            where, (batch, after) = f"{self.path}, line {number}", next(batches)
            held: _Record = as_schema(record, _Record, where)
            columns = {n: np.array(x, dtype) for n, (dtype, x) in held.columns.items()}
            count = int(batch.scored_BT.sum())
            if held.state != after or any(len(x) != count for x in columns.values()):
                raise CheckpointError(f"{where} is not of the batch that it stands for")
            parts.append(columns)
        if any(part.keys() != parts[0].keys() for part in parts):
            raise CheckpointError(f"{self.path}: its lines hold different columns")
        return parts

    def _truncate(self, size: int) -> None:
        try:
            with open(self.path, "r+b") as file:
                file.truncate(size)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error


def _encoded(record: Mapping[str, Any], before: str) -> bytes:
    """A record as a line; before: the digest of the line before it."""
    text = json.dumps(record)
    return json.dumps({"record": text, "digest": _chained(text, before)}).encode() + b"\n"


def _chained(record: str, before: str) -> str:
    return hashlib.sha256(f"{before}{record}".encode()).hexdigest()


def _lists(columns: Columns) -> dict[str, Any]:
    return {name: [str(x.dtype), x.tolist()] for name, x in columns.items()}
