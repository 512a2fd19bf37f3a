"""Versions of the files that jaxllm alone reads: their marks, and one check of them.

A mark is a format's name and a version number. A version is raised if older programs cannot read
the new files correctly. tests/files/fixtures has files of each released version, which a test
reads. Formats of other programs (Hugging Face, PEFT, SAELens, GGUF) have no marks of ours.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, NewerFileError


@dataclasses.dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Attributes:
        what: Its name in messages.
        format: Its name in files.
        version: Of new files, and the newest that can be read.
        oldest: The oldest version that can be read.
        unmarked: Whether files without the mark, as jaxllm wrote them before 0.9, are version 1.
    """

    what: str
    format: str
    version: int = 1
    oldest: int = 1
    unmarked: bool = False

    @property
    def mark(self) -> dict[str, Any]:
        """The mark in a JSON file."""
        return {"format": self.format, "version": self.version}

    @property
    def text_mark(self) -> dict[str, str]:
        """The mark in a safetensors file, where all metadata must be strings."""
        return {name: str(value) for name, value in self.mark.items()}

    def check(self, header: Mapping[str, Any], where: str | Path) -> int:
        """Return the version in the mark of a file.

        Args:
            header: `format` and `version` as the file has them, among other fields.
            where: The file, for messages.

        Raises:
            NewerFileError: A later jaxllm wrote the file.
            CheckpointError: It is of another kind, of a version that is too old, or has no version.
        """
        if header.get("format") != self.format:
            if self.unmarked:
                return 1
            raise CheckpointError(
                f"{where} has format {header.get('format')!r:.40}, expected {self.format!r}"
            )
        version = header.get("version")
        if isinstance(version, str) and version.isdecimal() and len(version) < 10:
            version = int(version)
        if type(version) is not int or version < 1:
            raise CheckpointError(
                f"{where} has no valid {self.what} format version: got {version!r:.40}, expected a"
                " positive integer"
            )
        if version > self.version:
            raise NewerFileError(
                f"{where} was written by a newer jaxllm ({self.what} format {version}; this version"
                f" reads up to {self.version}): upgrade jaxllm"
            )
        if version < self.oldest:
            raise CheckpointError(
                f"{where} was written by an older jaxllm ({self.what} format {version}; this"
                f" version reads formats from {self.oldest} on): make it again"
            )
        return version


CHECKPOINT = FileKind("checkpoint", "jaxllm")
CACHE = FileKind("cache", "jaxllm-cache", version=2, oldest=2)
CHAT = FileKind("conversation", "jaxllm-chat")
EXPORT = FileKind("export", "jaxllm-export")
JOURNAL = FileKind("journal", "jaxllm-journal", unmarked=True)
LENS = FileKind("lens", "jaxllm-lens", unmarked=True)
PART = FileKind("part of a run", "jaxllm-part", unmarked=True)
PROGRAM = FileKind("compiled program", "jaxllm-program")
STEERING = FileKind("steering vector", "jaxllm-steering", unmarked=True)
VECTORS = FileKind("test vectors", "jaxllm-vectors")

KINDS = (CHECKPOINT, CACHE, CHAT, EXPORT, JOURNAL, LENS, PART, PROGRAM, STEERING, VECTORS)
