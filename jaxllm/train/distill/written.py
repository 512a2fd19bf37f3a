"""Texts that the teacher writes for the student to learn (Kim and Rush 2016, arXiv 1606.07947).

Prompts are continued by continuous batching, each as it would be alone, into a file of
`{"prompt": ..., "completion": ...}` lines, which is data to train on like any other; teacher and
student may have different tokenizers. Answers are kept as they come beside the file, so that a run
that was killed goes on; the file appears when all are there, in the order of the prompts, the same
whether the run was interrupted or not.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxllm import process
from jaxllm.api import LM
from jaxllm.batchfile import answer
from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import as_schema, is_there, locked, parse_json, read_bytes, writing
from jaxllm.progress import steps_bar
from jaxllm.whole import is_whole

_MOST = 1 << 31  # bytes of answers


class _Owner(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of the answers: what all of them depend on."""

    owner: str


class _Answer(msgspec.Struct):
    """A line that `batchfile.answer` writes: of which prompt, and its text or what is wrong."""

    id: int
    text: str | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Wrote:
    """How many completions are in the file, and how many prompts could not be answered."""

    completions: int
    failed: int


def write(
    teacher: LM,
    prompts: Sequence[str],
    path: Path,
    options: Mapping[str, Any],
    *,
    rows: int = 8,
    show_progress: bool | None = None,
) -> Wrote:
    """Let the teacher complete each prompt into a new file of lines to train on.

    options: as `LM.generate` takes them; where they draw, each prompt draws by its own number.
    rows: how many are answered at once. What cannot be answered is left out. Raises ConfigError
    where there is no prompt, the seed is no number, none can be answered, or the answers beside the
    file are of another teacher, other prompts or options; CheckpointError where the file is there
    already, or cannot be written.
    """
    if not prompts:
        raise ConfigError("there is no prompt for the teacher to complete")
    if not is_whole(options.get("seed", 0)):
        raise ConfigError(
            f"the seed must be a number, got {options['seed']!r:.40}: a run that goes on draws as"
            " it would have drawn"
        )
    if is_there(path):
        raise CheckpointError(f"{path} exists: name another file")
    beside = path.with_name(f"{path.name}.answers")
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(beside))
        stack.enter_context(process.saying(lambda: f"the same command goes on from {beside}"))
        answers = _Answers(beside, _owner(teacher, prompts, options))
        found = answers.read()
        lines = [_line(i, x, options) if i not in found else "" for i, x in enumerate(prompts)]
        done = stack.enter_context(steps_bar("the teacher writes", len(prompts), show_progress))
        for _ in found:
            done()
        answer(teacher, lines, options, rows=rows, write=answers.append, done=done)
        found = answers.read()
        texts = {i: x.text for i, x in found.items() if x.text is not None}
        if not texts:
            first = next((x.error for x in found.values() if x.error), "no answers")
            raise ConfigError(f"the teacher could complete no prompt: {first}")
        with writing(path, "w") as file:
            for i in sorted(texts):
                row = {"prompt": prompts[i], "completion": texts[i]}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        beside.unlink()
    return Wrote(len(texts), len(prompts) - len(texts))


def _line(number: int, prompt: str, options: Mapping[str, Any]) -> str:
    """A request: each draws with a seed of its own."""
    seed = int(options.get("seed", 0))
    return json.dumps({"prompt": prompt, "id": number, "seed": (seed + number) % (1 << 63)})


def _owner(teacher: LM, prompts: Sequence[str], options: Mapping[str, Any]) -> str:
    said = [fingerprint(teacher.params), repr(teacher.config), repr(teacher.model.precision)]
    text = json.dumps([said, list(prompts), sorted(options.items())], default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class _Answers:
    """The answers so far, a line each, after a line that says whose they are."""

    path: Path
    owner: str

    def read(self) -> dict[int, _Answer]:
        """Answers by the number of their prompt; what an interrupt has cut off goes."""
        content = read_bytes(self.path, _MOST)
        whole = content[: content.rfind(b"\n") + 1]
        with self._told(), open(self.path, "r+b") as file:
            file.truncate(len(whole))
        head, *lines = whole.splitlines() or [b""]
        if not head:
            self.append(json.dumps({"owner": self.owner}) + "\n")
            return {}
        owner: _Owner = as_schema(self._parsed(head, 1), _Owner, f"{self.path}, line 1")
        if owner.owner != self.owner:
            raise ConfigError(
                f"{self.path} has answers of another teacher, or to other prompts or options:"
                " remove it, or name another file"
            )
        found: dict[int, _Answer] = {}
        for number, line in enumerate(lines, 2):
            where = f"{self.path}, line {number}"
            each: _Answer = as_schema(self._parsed(line, number), _Answer, where)
            found[each.id] = each
        return found

    def append(self, line: str) -> None:
        with self._told(), open(self.path, "ab") as file:
            file.write(line.encode())

    def _parsed(self, line: bytes, number: int) -> Any:
        return parse_json(line, f"{self.path}, line {number}")

    @contextlib.contextmanager
    def _told(self) -> Any:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error


def prompts_of(teacher: LM, texts: Sequence[str], tokens: int) -> list[str]:
    """The beginnings of texts, of so many tokens each, for a teacher to go on from.

    Texts that are no longer than that are whole. Raises ConfigError where there is no tokenizer.
    """
    if teacher.tokenizer is None:
        raise ConfigError(f"the teacher {teacher.path.name} has no tokenizer")
    encode, decode = teacher.tokenizer.encode, teacher.tokenizer.decode
    return [decode(ids[:tokens]) if len(ids := encode(x)) > tokens else x for x in texts]
