"""Texts that the teacher writes for the student to learn (Kim and Rush 2016, arXiv 1606.07947).

Prompts are continued by continuous batching, each as it would be alone, into a file of
`{"prompt": ..., "completion": ...}` lines, which is data to train on like any other; teacher and
student may have different tokenizers. Answers are kept as they come beside the file, so that a run
that was killed goes on; the file appears when all are there, in the order of the prompts, the same
whether the run was interrupted or not.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.api import LM
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import is_there, writing
from jaxllm.fleet.job import Job
from jaxllm.fleet.processes import Here, available_cores
from jaxllm.fleet.rows import Row
from jaxllm.fleet.running import answered
from jaxllm.fleet.worker import identity
from jaxllm.whole import is_whole


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
    group: int = 64,
    show_progress: bool | None = None,
) -> Wrote:
    """Let the teacher complete each prompt into a new file of lines to train on.

    options: as `LM.generate` takes them; where they draw, each prompt draws by its own number.
    rows: how many are answered at once. group: how many are kept at once. What cannot be answered
    is left out. Raises ConfigError where there is no prompt, the seed is no number, or none can be
    answered; CheckpointError where the file is there already or cannot be written, or the answers
    beside it are of another teacher, other prompts or options.
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
    seed = int(options.get("seed", 0))
    job = Job(
        task="generate",
        options=options,
        rows=rows,
        group=group,
        threads=len(available_cores()),
        about={"teacher": identity(teacher)},
    )
    asked = [
        Row(i + 1, i, {"prompt": prompt, "seed": (seed + i) % (1 << 63)})
        for i, prompt in enumerate(prompts)
    ]
    with answered(
        asked,
        job,
        Here(lambda: teacher),
        path.with_name(f"{path.name}.parts"),
        hint="the same command goes on",
        show_progress=show_progress,
    ) as answers:
        found = list(answers)
        texts = {answer["id"]: answer["text"] for answer in found if answer.get("text") is not None}
        if not texts:
            first = next((x["error"] for x in found if "error" in x), "no text")
            raise ConfigError(f"the teacher could complete no prompt: {first}")
        with writing(path, "w") as file:
            for i, text in texts.items():
                row = {"prompt": prompts[i], "completion": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return Wrote(len(texts), len(prompts) - len(texts))


def prompts_of(teacher: LM, texts: Sequence[str], tokens: int) -> list[str]:
    """The beginnings of texts, of so many tokens each, for a teacher to go on from.

    Texts that are no longer than that are whole. Raises ConfigError where there is no tokenizer.
    """
    if teacher.tokenizer is None:
        raise ConfigError(f"the teacher {teacher.path.name} has no tokenizer")
    encode, decode = teacher.tokenizer.encode, teacher.tokenizer.decode
    return [decode(ids[:tokens]) if len(ids := encode(x)) > tokens else x for x in texts]
