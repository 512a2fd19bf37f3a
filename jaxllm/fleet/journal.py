"""What is finished survives: a file that only grows, a line for each group that was answered.

The first line says all that the answers depend on. A line begins with a checksum of the rest: what
a kill has cut off, and what was changed, is as if it were not there, and is answered again. One
process writes; a group counts once, by its first whole line.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxllm.errors import CheckpointError
from jaxllm.files import open_regular, parse_json
from jaxllm.fleet.worker import Answered

_MARK = 9  # bytes of a checksum and a space


class Place(NamedTuple):
    """Where a line stands: its first byte, and how many there are."""

    start: int
    size: int


class Journal:
    """Open for writing, after what is there."""

    def __init__(
        self, path: Path, facts: Mapping[str, Any], say: Callable[[str], None] = lambda _: None
    ) -> None:
        """facts: what the answers depend on, by name. say: told of lines that do not count.

        Raises CheckpointError for another run's journal, with what differs by name, and where it
        cannot be read or written.
        """
        self.path, self.model = path, ""
        self.places: dict[int, Place] = {}
        end = self._read(facts, say) if path.exists() else 0
        try:
            self._file: BinaryIO = open(path, "r+b" if path.exists() else "x+b", buffering=0)  # noqa: SIM115
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
        if not end:
            self._append({"facts": facts})

    def put(self, answered: Answered) -> None:
        """Keep a group's answers, unless they are there. They are on the disk when this returns.

        Raises CheckpointError for answers of another model than those before.
        """
        if self.model and answered.model != self.model:
            raise CheckpointError(
                f"{self.path} has answers of another model, or of other versions or kernels: go on"
                " with what it was begun with, or remove it"
            )
        self.model = answered.model
        if answered.group not in self.places:
            self.places[answered.group] = self._append(answered._asdict())

    def rows(self, group: int) -> list[dict[str, Any]]:
        """A group's answers. Raises CheckpointError where they cannot be read any more."""
        place = self.places[group]
        with open_regular(self.path) as file:
            file.seek(place.start)
            found = _whole(file.read(place.size))
        if found is None:
            raise CheckpointError(f"{self.path} was changed while it was read")
        rows: list[dict[str, Any]] = found["rows"]
        return rows

    def close(self) -> None:
        """No more is written."""
        self._file.close()

    def _append(self, value: Mapping[str, Any]) -> Place:
        text = json.dumps(value, ensure_ascii=False).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        place = Place(self._file.tell(), len(line))
        try:
            left = line
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from None
        return place

    def _read(self, facts: Mapping[str, Any], say: Callable[[str], None]) -> int:
        """Find the groups that are there; returns where the last whole line ends."""
        end = damaged = 0
        with open_regular(self.path) as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # a kill has cut it off
                found = _whole(line)
                if number == 0:
                    if found is None:
                        raise CheckpointError(f"{self.path} is no run's journal: remove it")
                    self._check(found.get("facts"), facts)
                elif found is None:
                    damaged += 1
                else:
                    self.model = self.model or found["model"]
                    self.places.setdefault(found["group"], Place(end, len(line)))
                end += len(line)
        if damaged:
            say(f"{self.path}: {damaged} of its lines are not whole: their rows are run again")
        return end

    def _check(self, before: Any, now: Mapping[str, Any]) -> None:
        if before == now:
            return
        before = before if isinstance(before, dict) else {}
        names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
        told = "; ".join(f"{n} was {before.get(n)!r:.60}, is {now.get(n)!r:.60}" for n in names)
        raise CheckpointError(
            f"{self.path} is of another run: {told}. Go on with what it was begun with, or name"
            " another --out"
        )


def _whole(line: bytes) -> Any:
    """What a line says; None where it is not what was written."""
    text = line[_MARK:-1]
    if line[:_MARK] != b"%08x " % zlib.crc32(text):
        return None
    return parse_json(text, "a journal's line")
