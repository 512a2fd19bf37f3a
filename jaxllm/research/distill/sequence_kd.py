"""Sequence-level distillation: texts that the teacher writes (Kim and Rush 2016, arXiv 1606.07947).

The teacher completes prompts by continuous batching. The result is a file of
`{"prompt": ..., "completion": ...}` lines, ordinary training data, so teacher and student may have
different tokenizers. Finished answers are saved next to the file, and a killed run resumes from
them. The file is written at the end, in the order of the prompts, and does not depend on
interruptions.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxllm.batch_inference.rows import BatchRow
from jaxllm.batch_inference.run import run_job, settings_file
from jaxllm.batch_inference.tasks import BatchJob, answer_rows
from jaxllm.cache.files import fingerprint
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import atomic_file, path_exists, read_json_lines
from jaxllm.lm import LM
from jaxllm.runtime.multihost import broadcast_from_zero, is_multiprocess
from jaxllm.runtime.validation import is_integer
from jaxllm.train.data.examples import Examples
from jaxllm.train.data.sources import TextEncoder, read_examples

NEW_TOKENS = 128  # default maximum for the teacher's completions


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
    show_progress: bool | None = None,
) -> WriteSummary:
    """Let the teacher complete each prompt, and write a new file of training data.

    Prompts that fail are left out.

    Args:
        options: of `LM.generate`; each prompt has a seed of its own.
        rows: prompts that run at once.

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
    requests = [
        BatchRow(i + 1, i, {"prompt": prompt, "seed": (seed + i) % (1 << 63)})
        for i, prompt in enumerate(prompts)
    ]
    job = BatchJob(task="generate", options=options, batch_size=rows)
    answers = path.with_name(f"{path.name}.answers")
    run_job(
        job,
        lambda: requests,
        partial(answer_rows, teacher, job),
        answers,
        facts={"teacher": fingerprint(teacher.params)},
        show_progress=show_progress,
    )
    lines = read_json_lines(answers, CheckpointError, max_bytes=None)
    results = sorted((line for _, line in lines), key=lambda line: line["id"])
    texts = {x["id"]: x["text"] for x in results if x.get("text") is not None}
    if not texts:
        first = next((x["error"] for x in results if "error" in x), "no text")
        raise ConfigError(f"the teacher failed on all prompts: {first}")
    with atomic_file(path, "w") as file:
        for i, text in texts.items():
            row = {"prompt": prompts[i], "completion": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    answers.unlink()
    settings_file(answers).unlink()
    return WriteSummary(len(texts), len(prompts) - len(texts))


def new_token_count(config: ModelConfig, prompt: int, requested: int | None) -> int:
    """Return how many tokens a teacher generates after a prompt: `requested`, or else `NEW_TOKENS`,
    limited by its context.

    Raises ConfigError if the context is too short.
    """
    room = config.context_length - prompt
    if room < (requested or 1):
        raise ConfigError(
            f"--written and --max-new-tokens exceed the teacher's context of"
            f" {config.context_length}: got {prompt} and {requested or 1} tokens. Use fewer."
        )
    return requested or min(NEW_TOKENS, room)


def complete_examples(
    teacher: LM, path: Path, tokens: int, directory: Path, seed: int, new_tokens: int = NEW_TOKENS
) -> Examples:
    """Let the teacher complete the first `tokens` tokens of each example of a file.

    Args:
        directory: holds the completions, in a file named by teacher, prompts, options and seed. An
            existing file is used again.

    Raises ConfigError if the file does not exist and there are several processes.
    """
    encoder = TextEncoder(teacher.tokenizer, teacher.chat_template)
    examples = read_examples(path, encoder)
    prompts = [examples[n].token_T[:tokens].tolist() for n in range(len(examples))]
    options = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": seed}
    weights = fingerprint(teacher.model.gather_lazy(teacher.params))
    request = json.dumps([weights, prompts, options])
    file = directory / f"{hashlib.sha256(request.encode()).hexdigest()[:16]}.jsonl"
    if not broadcast_from_zero(lambda: "there" if path_exists(file) else ""):
        if is_multiprocess():
            raise ConfigError(
                f"the teacher's completions (--written) are not in {directory} yet, and a single"
                " process has to write them: first run the same command without --distributed"
            )
        directory.mkdir(parents=True, exist_ok=True)
        write_completions(
            teacher, [encoder.required_tokenizer.decode(ids) for ids in prompts], file, options
        )
    return read_examples(file, encoder)
