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

from jaxllm.batch_inference.job import BatchJob
from jaxllm.batch_inference.processes import InProcessWorkers, available_cores
from jaxllm.batch_inference.rows import Row
from jaxllm.batch_inference.runner import answer_rows
from jaxllm.batch_inference.worker import model_identity
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import atomic_file, path_exists
from jaxllm.lm import LM
from jaxllm.runtime.validation import is_integer


@dataclasses.dataclass(frozen=True)
class WriteSummary:
    """The number of completions in the file, and of prompts that failed."""

    completions: int
    failed: int


def write_completions(
    teacher: LM,
    prompts: Sequence[str],
    path: Path,
    options: Mapping[str, Any],
    *,
    rows: int = 8,
    group: int = 64,
    show_progress: bool | None = None,
) -> WriteSummary:
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
    if not is_integer(options.get("seed", 0)):
        raise ConfigError(
            f"the seed must be a number, got {options['seed']!r:.40}: a resumed run repeats it"
        )
    if path_exists(path):
        raise CheckpointError(f"{path} exists: name another file")
    seed = int(options.get("seed", 0))
    job = BatchJob(
        task="generate",
        options=options,
        rows=rows,
        group=group,
        threads=len(available_cores()),
        metadata={"teacher": model_identity(teacher)},
    )
    asked = [
        Row(i + 1, i, {"prompt": prompt, "seed": (seed + i) % (1 << 63)})
        for i, prompt in enumerate(prompts)
    ]
    with answer_rows(
        asked,
        job,
        InProcessWorkers(lambda: teacher),
        path.with_name(f"{path.name}.parts"),
        hint="the same command resumes from there",
        show_progress=show_progress,
    ) as answers:
        found = list(answers)
        texts = {answer["id"]: answer["text"] for answer in found if answer.get("text") is not None}
        if not texts:
            first = next((x["error"] for x in found if "error" in x), "no text")
            raise ConfigError(f"the teacher failed on all prompts: {first}")
        with atomic_file(path, "w") as file:
            for i, text in texts.items():
                row = {"prompt": prompts[i], "completion": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return WriteSummary(len(texts), len(prompts) - len(texts))


def cut_prompts(teacher: LM, texts: Sequence[str], tokens: int) -> list[str]:
    """Return the first `tokens` tokens of each text, as prompts for a teacher.

    Shorter texts are not changed. Raises ConfigError if there is no tokenizer.
    """
    if teacher.tokenizer is None:
        raise ConfigError(f"the teacher {teacher.path.name} has no tokenizer")
    encode, decode = teacher.tokenizer.encode, teacher.tokenizer.decode
    return [decode(ids[:tokens]) if len(ids := encode(x)) > tokens else x for x in texts]
