"""Sequence-level distillation: texts that the teacher writes (Kim and Rush 2016, arXiv 1606.07947).

The teacher completes prompts by continuous batching. The result is a file of
`{"prompt": ..., "completion": ...}` lines, ordinary training data, so teacher and student may have
different tokenizers. Finished answers are saved next to the file, and a killed run resumes from
them. The file is written at the end, in the order of the prompts, and does not depend on
interruptions.
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
    """The number of completions in the file, and of prompts that failed."""

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
    """Let the teacher complete each prompt, and write a new file of training data.

    Prompts that fail are left out.

    Args:
      options: of `LM.generate`; each prompt has a seed of its own.
      rows: prompts that run at once.
      group: prompts whose answers are saved together.

    Raises:
      ConfigError: if there are no prompts, the seed is not an integer, or all prompts fail.
      CheckpointError: if the file exists or cannot be written, or the saved answers belong to
        another teacher, other prompts or other options.
    """
    if not prompts:
        raise ConfigError("there is no prompt for the teacher to complete")
    if not is_whole(options.get("seed", 0)):
        raise ConfigError(
            f"the seed must be a number, got {options['seed']!r:.40}: a resumed run repeats it"
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
        hint="the same command resumes from there",
        show_progress=show_progress,
    ) as answers:
        found = list(answers)
        texts = {answer["id"]: answer["text"] for answer in found if answer.get("text") is not None}
        if not texts:
            first = next((x["error"] for x in found if "error" in x), "no text")
            raise ConfigError(f"the teacher failed on all prompts: {first}")
        with writing(path, "w") as file:
            for i, text in texts.items():
                row = {"prompt": prompts[i], "completion": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return Wrote(len(texts), len(prompts) - len(texts))


def prompts_of(teacher: LM, texts: Sequence[str], tokens: int) -> list[str]:
    """Return the first `tokens` tokens of each text, as prompts for a teacher.

    Shorter texts are not changed. Raises ConfigError if there is no tokenizer.
    """
    if teacher.tokenizer is None:
        raise ConfigError(f"the teacher {teacher.path.name} has no tokenizer")
    encode, decode = teacher.tokenizer.encode, teacher.tokenizer.decode
    return [decode(ids[:tokens]) if len(ids := encode(x)) > tokens else x for x in texts]
