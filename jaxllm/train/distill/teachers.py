"""Use of a teacher before training: a student as part of it, and texts that it completes."""

import hashlib
import json
from pathlib import Path

import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.files import path_exists
from jaxllm.lm import LM
from jaxllm.runtime.multihost import broadcast_from_zero, check_processes_agree, is_multiprocess
from jaxllm.train.data.examples import Examples
from jaxllm.train.data.rows import Data
from jaxllm.train.data.sources import TextEncoder, read_examples
from jaxllm.train.distill.sequence_kd import write_completions
from jaxllm.train.distill.student_init import StudentSize, cut_student
from jaxllm.train.jobs import shard_like, to_one_device

NEW_TOKENS = 128  # default maximum for the teacher's completions
MAX_ROWS = 8  # of the data, to choose layers, heads and channels


def make_student(teacher: LM, size: StudentSize, data: Data) -> LM:
    """Return a student that is part of its teacher, chosen by the teacher's activations on data.

    It is made on one device, then sharded like the teacher. Each process makes it; different
    results raise an error.
    """
    rows = data.batch(0)
    whole_R = (np.asarray(rows.position_BT) >= 0).all(axis=1)
    token_NT = np.asarray(rows.token_BT)[whole_R][:MAX_ROWS]
    made = cut_student(to_one_device(teacher), size, token_NT if len(token_NT) else None)
    if is_multiprocess():
        check_processes_agree({"student": fingerprint(made.params)})
    return shard_like(made, teacher)


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
    writing = TextEncoder(teacher.tokenizer, teacher.chat_template)
    found = read_examples(path, writing)
    starts = [found[n].token_T[:tokens].tolist() for n in range(len(found))]
    options = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": seed}
    weights = fingerprint(teacher.model.gather_lazy(teacher.params))
    whose = json.dumps([weights, starts, options])
    file = directory / f"{hashlib.sha256(whose.encode()).hexdigest()[:16]}.jsonl"
    if not broadcast_from_zero(lambda: "there" if path_exists(file) else ""):
        if is_multiprocess():
            raise ConfigError(
                f"the teacher's completions (--written) are not in {directory} yet, and a single"
                " process has to write them: first run the same command without --distributed"
            )
        directory.mkdir(parents=True, exist_ok=True)
        write_completions(
            teacher, [writing.required_tokenizer.decode(ids) for ids in starts], file, options
        )
    return read_examples(file, writing)
