"""Append-only logs of JSON lines, from which an interrupted run resumes.

The first line has the facts that the records depend on. Each line starts with a CRC-32 of the rest,
so a changed line is found out. A last line that a kill has cut off is removed; a record is on the
disk when `append` returns. One process writes.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxllm.errors import CheckpointError
from jaxllm.files.reading import open_regular, parse_json, path_exists
from jaxllm.files.versions import JOURNAL

_CHECKSUM_BYTES = 9  # bytes of the checksum and a space
_MAX_LINE_BYTES = 1 << 31


class JsonLog:
    """A log that is open for appending. `log[i]` is record i, or None if its line is damaged."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Open or create the log.

        Args:
            facts: what the records depend on, by name.

        Raises CheckpointError for a file that is not a log, for a log with other facts, which it
        names, for one of a newer version, and if the file cannot be read or written.
        """
        self.path = path
        self._ends: list[int] = []  # of the complete lines
        header = _encode_line({**JOURNAL.mark, "facts": facts})
        exists = path_exists(path)
        if exists:
            self._index_lines(facts, header)
        try:
            self._file: BinaryIO = open(path, "r+b" if exists else "x+b", buffering=0)  # noqa: SIM115
            self._file.truncate(self._ends[-1] if self._ends else 0)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
        if not self._ends:
            self._append_line(header)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        start, end = self._ends[number : number + 2]
        self._file.seek(start)
        return _parse_line(self._file.read(end - start))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record. Raises CheckpointError if it cannot be written."""
        self._append_line(_encode_line(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append_line(self, line: bytes) -> None:
        end = self._ends[-1] if self._ends else 0
        try:
            self._file.seek(end)
            rest = line
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from None
        self._ends.append(end + len(line))

    def _index_lines(self, facts: Mapping[str, Any], header: bytes) -> None:
        with open_regular(self.path) as file:
            first = file.readline(_MAX_LINE_BYTES)
            if header.startswith(first) and first != header:
                return  # empty, or a kill has cut off the header
            head = _parse_line(first)
            if not isinstance(head, dict) or not isinstance(head.get("facts"), dict):
                raise CheckpointError(
                    f"{self.path}, line 1: this is not a journal, or it is damaged: remove it, or"
                    " name another file"
                )
            JOURNAL.check(head, self.path)
            check_facts(self.path, head["facts"], json.loads(json.dumps(facts)))
            self._ends.append(len(first))
            while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
                self._ends.append(self._ends[-1] + len(line))


def check_facts(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise CheckpointError, with the differences, if a file was written with other settings."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if names:
        changes = [f"{n} was {old.get(n)!r:.60}, is {new.get(n)!r:.60}" for n in names]
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join(changes)}. Use the same settings, or"
            " another file"
        )


def _encode_line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse_line(line: bytes) -> Any:
    """Parse a line; None if it is incomplete or its checksum is wrong."""
    text = line[_CHECKSUM_BYTES:-1]
    if not line.endswith(b"\n") or line[:_CHECKSUM_BYTES] != b"%08x " % zlib.crc32(text):
        return None
    return parse_json(text, "a journal's line")
