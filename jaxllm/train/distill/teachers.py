"""What a teacher does before its student is trained: it gives a part of itself, or writes texts."""

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

NEW_TOKENS = 128  # that a teacher writes at most, if it is not asked for another number
ROWS = 8  # of the data that a choice of heads and channels looks at


def part_of(teacher: LM, smaller: Smaller, data: Data) -> LM:
    """A student that is a part of its teacher, chosen by what the teacher makes of the data. It is
    made on one device, and on the teacher's mesh where that is on one; by each of several processes
    by itself, and refused where they make different ones.
    """
    rows = data.batch(0)
    whole_R = (np.asarray(rows.position_BT) >= 0).all(axis=1)
    token_NT = np.asarray(rows.token_BT)[whole_R][:ROWS]
    made = made_from(alone(teacher), smaller, token_NT if len(token_NT) else None)
    if several():
        agree({"student": fingerprint(made.params)})
    return spread_as(made, teacher)


def new_tokens(config: ModelConfig, prompt: int, asked: int | None) -> int:
    """Return how many tokens a teacher writes after a prompt: those asked for, or `NEW_TOKENS`, or
    what its context leaves.

    Raises ConfigError if its context does not take them.
    """
    room = config.context_length - prompt
    if room < (asked or 1):
        raise ConfigError(
            f"--written and --max-new-tokens exceed the teacher's context of"
            f" {config.context_length}: got {prompt} and {asked or 1} tokens. Ask for fewer."
        )
    return asked or min(NEW_TOKENS, room)


def completed(
    teacher: LM, path: Path, tokens: int, directory: Path, seed: int, new_tokens: int = NEW_TOKENS
) -> Examples:
    """The examples of a file begun, by so many tokens, and completed by the teacher, by at most
    `new_tokens` more.

    directory: where they are kept, in a file of this teacher, these prompts and this seed, which is
    not written again when it is there. Raises ConfigError where several processes would write it.
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
                f"what the teacher writes (--written) is not in {directory} yet, and one process"
                " writes it: begin with the same command without --distributed"
            )
        directory.mkdir(parents=True, exist_ok=True)
        write(teacher, [writing.known.decode(ids) for ids in starts], file, options)
    return read_examples(file, writing)
