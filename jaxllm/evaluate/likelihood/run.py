"""Resumable evaluation loop over a loader, with a journal of numbers per scored token.

The journal is a JSON-lines file: first a record that identifies data and models, then each batch's
numbers with the loader state after it. It is append-only, so an interrupt loses only the current
batch. Each line has a checksum of itself and of the line before it, and one process at a time locks
the file.
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

from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.files import as_schema, lock_file, parse_json, read_bytes
from jaxllm.runtime import signals
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.paths import Params

Columns = dict[str, np.ndarray]  # by name, one number per scored token, `[N]`
Models = Mapping[str, tuple[nn.Module, Params]]

_MAX_BYTES = 1 << 31


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a journal. digest: SHA-256 of the previous line's digest and of `record`."""

    record: str
    digest: str


class _Owner(msgspec.Struct, forbid_unknown_fields=True):
    """The first record: digests of the data and the models, which must match."""

    owner: dict[str, str]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """Every other record: the state after a batch, and its numbers by name with their dtype."""

    state: dict[str, int | str]
    columns: dict[str, tuple[Literal["float32", "float64", "bool"], list[float | bool]]]


def run_batches(
    loader: Loader,
    evaluate: Callable[[Batch], Columns],
    *,
    models: Models,
    journal: Path | None = None,
    description: str = "evaluating",
    summary: Callable[[Columns], str] = lambda _: "",
    show_progress: bool | None = None,
) -> Columns:
    """Run `evaluate` on every batch of an epoch, and concatenate the results in the loader's order.

    Args:
        models: By role; with the data they identify a journal.
        journal: File to resume from; created if missing.
        summary: Returns a text about the results so far, for the message after an interrupt.

    Raises:
        ConfigError: For a journal of other models, other data or another order.
        CheckpointError: If the journal is damaged, in use by another process, or not writable.
    """
    parts: list[Columns] = []

    def describe_progress() -> str:
        known = summary(_concatenate(parts[:])) if parts else ""
        on = f"the same command resumes from {journal}" if journal else "--journal FILE saves them"
        return f"{len(parts)} of {len(loader)} batches done{known and f', {known}'}; {on}"

    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.exit_message(describe_progress))
        kept: Iterator[Columns] = iter(())
        if journal is not None:
            stack.enter_context(lock_file(journal))
            written = _Journal(journal, _owner(loader, models))
            kept = written.read(loader)
        done = stack.enter_context(steps_bar(description, len(loader), show_progress))
        for batch, after in loader.batches():
            found = next(kept, None)
            if found is None:
                found = evaluate(batch)
                if journal is not None:
                    written.append({"state": after, "columns": _to_lists(found)})
            parts.append(found)
            done()
    return _concatenate(parts)


def _concatenate(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _owner(loader: Loader, models: Models) -> dict[str, str]:
    """Return digests of the data, and of the weights and formats of every model."""
    weights = {
        name: f"{fingerprint(params)[:16]} {model.precision!r} {model.config!r}"
        for name, (model, params) in models.items()
    }
    return {"data": loader.digest, **weights}


class _Journal:
    """A journal that this process has locked; call `read` first, then `append`."""

    def __init__(self, path: Path, owner: dict[str, str]) -> None:
        self.path, self.owner, self.digest = path, owner, ""

    def read(self, loader: Loader) -> Iterator[Columns]:
        """Return the numbers of the finished batches; a new journal gets its first line.

        Removes an incomplete last line, even if it is the first one.
        """
        content = read_bytes(self.path, _MAX_BYTES)
        whole, newline, rest = content.rpartition(b"\n")
        first = _encode_line({"owner": self.owner}, "")
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
                    f"{self.path} belongs to an evaluation with different {name}: use another file,"
                    " or remove it"
                )
        self._truncate(len(whole + newline))
        return iter(self._columns(lines, loader))

    def append(self, record: Mapping[str, Any]) -> None:
        line = _encode_line(record, self.digest)
        try:
            with open(self.path, "ab") as file:
                file.write(line)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error
        self.digest = json.loads(line)["digest"]

    def _record(self, line: bytes, number: int) -> Any:
        where = f"{self.path}, line {number}"
        if number == 1:
            where += " (not an evaluation journal, or one of an earlier version?)"
        held: _Line = as_schema(parse_json(line, where), _Line, where)
        if held.digest != _chain_digest(held.record, self.digest):
            raise CheckpointError(
                f"{where} is damaged: its checksum does not match. Remove the file, or use another"
            )
        self.digest = held.digest
        return parse_json(held.record, where)

    def _columns(self, records: list[Any], loader: Loader) -> list[Columns]:
        """Return the numbers of each record, after checking them against the loader's batches."""
        if len(records) > len(loader):
            raise CheckpointError(
                f"{self.path} has too many lines: got {len(records)}, expected {len(loader)}"
            )
        parts = []
        batches = loader.batches()
        for number, record in enumerate(records, 2):
            where, (batch, after) = f"{self.path}, line {number}", next(batches)
            held: _Record = as_schema(record, _Record, where)
            columns = {n: np.array(x, dtype) for n, (dtype, x) in held.columns.items()}
            count = int(batch.scored_BT.sum())
            if held.state != after or any(len(x) != count for x in columns.values()):
                raise CheckpointError(f"{where} does not match its batch")
            parts.append(columns)
        if any(part.keys() != parts[0].keys() for part in parts):
            raise CheckpointError(f"{self.path} is damaged: its lines have different columns")
        return parts

    def _truncate(self, size: int) -> None:
        try:
            with open(self.path, "r+b") as file:
                file.truncate(size)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error


def _encode_line(record: Mapping[str, Any], previous: str) -> bytes:
    """Encode a record as a line. before: digest of the previous line."""
    text = json.dumps(record)
    return json.dumps({"record": text, "digest": _chain_digest(text, previous)}).encode() + b"\n"


def _chain_digest(record: str, previous: str) -> str:
    return hashlib.sha256(f"{previous}{record}".encode()).hexdigest()


def _to_lists(columns: Columns) -> dict[str, Any]:
    return {name: [str(x.dtype), x.tolist()] for name, x in columns.items()}
