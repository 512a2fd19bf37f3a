"""An append-only journal of finished groups, one line each.

The first line has all that the answers depend on. Each line starts with a checksum of the rest:
truncated or changed lines are ignored, and their groups are answered again. One process writes; if
a group has several intact lines, the first counts.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxllm.batch_inference.worker import GroupResult
from jaxllm.errors import CheckpointError
from jaxllm.files import open_regular, parse_json

_CHECKSUM_BYTES = 9  # bytes of the checksum and a space


class LineSpan(NamedTuple):
    """The place of a line: its first byte and its size in bytes."""

    start: int
    size: int


class AnswerJournal:
    """A journal that is open for appending."""

    def __init__(
        self, path: Path, facts: Mapping[str, Any], log: Callable[[str], None] = lambda _: None
    ) -> None:
        """Open or create the journal.

        Args:
          facts: what the answers depend on, by name.
          log: takes a message about damaged lines.

        Raises CheckpointError for another run's journal, with the differences, and if it cannot be
        read or written.
        """
        self.path, self.model = path, ""
        self.places: dict[int, LineSpan] = {}
        end = self._scan(facts, log) if path.exists() else 0
        try:
            self._file: BinaryIO = open(path, "r+b" if path.exists() else "x+b", buffering=0)  # noqa: SIM115
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
        if not end:
            self._append({"facts": facts})

    def put(self, answered: GroupResult) -> None:
        """Append a group's answers, unless they are there. Returns after they are on the disk.

        Raises CheckpointError if they are from another model than the answers before.
        """
        if self.model and answered.model != self.model:
            raise CheckpointError(
                f"{self.path} has answers from another model, version or kernels: use the same"
                " ones, or remove it"
            )
        self.model = answered.model
        if answered.group not in self.places:
            self.places[answered.group] = self._append(answered._asdict())

    def rows(self, group: int) -> list[dict[str, Any]]:
        """Read a group's answers. Raises CheckpointError if they were changed."""
        place = self.places[group]
        with open_regular(self.path) as file:
            file.seek(place.start)
            found = _parse_line(file.read(place.size))
        if found is None:
            raise CheckpointError(f"{self.path} was changed while it was read")
        rows: list[dict[str, Any]] = found["rows"]
        return rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, value: Mapping[str, Any]) -> LineSpan:
        text = json.dumps(value, ensure_ascii=False).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        place = LineSpan(self._file.tell(), len(line))
        try:
            left = line
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from None
        return place

    def _scan(self, facts: Mapping[str, Any], log: Callable[[str], None]) -> int:
        """Index the groups in the file, and return the end of its last complete line."""
        end = damaged = 0
        with open_regular(self.path) as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # a kill has cut it off
                found = _parse_line(line)
                if number == 0:
                    if found is None:
                        raise CheckpointError(f"{self.path} is not a journal: remove it")
                    self._check_facts(found.get("facts"), facts)
                elif found is None:
                    damaged += 1
                else:
                    self.model = self.model or found["model"]
                    self.places.setdefault(found["group"], LineSpan(end, len(line)))
                end += len(line)
        if damaged:
            log(f"{self.path}: {damaged} lines are damaged; their rows run again")
        return end

    def _check_facts(self, old: Any, new: Mapping[str, Any]) -> None:
        if old == new:
            return
        old = old if isinstance(old, dict) else {}
        names = [n for n in dict.fromkeys([*old, *new]) if old.get(n) != new.get(n)]
        told = "; ".join(f"{n} was {old.get(n)!r:.60}, is {new.get(n)!r:.60}" for n in names)
        raise CheckpointError(
            f"{self.path} belongs to another run: {told}. Use the same settings, or another --out"
        )


def _parse_line(line: bytes) -> Any:
    """Parse a line; None if its checksum is wrong."""
    text = line[_CHECKSUM_BYTES:-1]
    if line[:_CHECKSUM_BYTES] != b"%08x " % zlib.crc32(text):
        return None
    return parse_json(text, "a journal's line")
