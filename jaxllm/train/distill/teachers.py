"""Use of a teacher before training: a student as part of it, and texts that it completes."""

import hashlib
import json
from pathlib import Path

import numpy as np

from jaxllm.api import LM
from jaxllm.cache.files import fingerprint
from jaxllm.config import ModelConfig
from jaxllm.distributed import agree, several, told
from jaxllm.errors import ConfigError
from jaxllm.files import is_there
from jaxllm.train.data.examples import Examples
from jaxllm.train.data.rows import Data
from jaxllm.train.data.sources import Writing, read_examples
from jaxllm.train.distill.student import Smaller, made_from
from jaxllm.train.distill.written import write
from jaxllm.train.jobs import alone, spread_as
from jaxllm.weights.paths import later

NEW_TOKENS = 128  # default maximum for the teacher's completions
ROWS = 8  # of the data, to choose layers, heads and channels


def part_of(teacher: LM, smaller: Smaller, data: Data) -> LM:
    """Return a student that is part of its teacher, chosen by the teacher's activations on data.

    It is made on one device, then sharded like the teacher. Each process makes it; different
    results raise an error.
    """
    rows = data.batch(0)
    whole_R = (np.asarray(rows.position_BT) >= 0).all(axis=1)
    token_NT = np.asarray(rows.token_BT)[whole_R][:ROWS]
    made = made_from(alone(teacher), smaller, token_NT if len(token_NT) else None)
    if several():
        agree({"student": fingerprint(made.params)})
    return spread_as(made, teacher)


def new_tokens(config: ModelConfig, prompt: int, asked: int | None) -> int:
    """Return how many tokens a teacher generates after a prompt: `asked`, or else `NEW_TOKENS`,
    limited by its context.

    Raises ConfigError if the context is too short.
    """
    room = config.context_length - prompt
    if room < (asked or 1):
        raise ConfigError(
            f"--written and --max-new-tokens exceed the teacher's context of"
            f" {config.context_length}: got {prompt} and {asked or 1} tokens. Use fewer."
        )
    return asked or min(NEW_TOKENS, room)


def completed(
    teacher: LM, path: Path, tokens: int, directory: Path, seed: int, new_tokens: int = NEW_TOKENS
) -> Examples:
    """Let the teacher complete the first `tokens` tokens of each example of a file.

    Args:
      directory: holds the completions, in a file named by teacher, prompts, options and seed. An
        existing file is used again.

    Raises ConfigError if the file does not exist and there are several processes.
    """
    writing = Writing(teacher.tokenizer, teacher.chat_template)
    found = read_examples(path, writing)
    starts = [found[n].token_T[:tokens].tolist() for n in range(len(found))]
    options = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": seed}
    weights = fingerprint(later(teacher.model, teacher.params))
    whose = json.dumps([weights, starts, options])
    file = directory / f"{hashlib.sha256(whose.encode()).hexdigest()[:16]}.jsonl"
    if not told(lambda: "there" if is_there(file) else ""):
        if several():
            raise ConfigError(
                f"the teacher's completions (--written) are not in {directory} yet, and a single"
                " process has to write them: first run the same command without --distributed"
            )
        directory.mkdir(parents=True, exist_ok=True)
        write(teacher, [writing.known.decode(ids) for ids in starts], file, options)
    return read_examples(file, writing)
