"""What a teacher does before its student is trained: it gives a part of itself, or writes texts."""

from pathlib import Path

import numpy as np

from jaxllm.api import LM
from jaxllm.files import is_there
from jaxllm.train.data.examples import Examples
from jaxllm.train.data.rows import Data
from jaxllm.train.data.sources import Writing, read_examples
from jaxllm.train.distill.student import Smaller, made_from
from jaxllm.train.distill.written import write

ROWS = 8  # of the data that a choice of heads and channels looks at


def part_of(teacher: LM, smaller: Smaller, data: Data) -> LM:
    """A student that is a part of its teacher, chosen by what the teacher makes of the data."""
    rows = data.batch(0)
    whole_R = (np.asarray(rows.position_BT) >= 0).all(axis=1)
    token_NT = np.asarray(rows.token_BT)[whole_R][:ROWS]
    return made_from(teacher, smaller, token_NT if len(token_NT) else None)


def completed(
    teacher: LM, path: Path, tokens: int, directory: Path, seed: int, new_tokens: int = 128
) -> Examples:
    """The examples of a file begun, by so many tokens, and completed by the teacher.

    directory: where they are kept, in a file that is not written again when it is there.
    """
    writing = Writing(teacher.tokenizer, teacher.chat_template)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{path.stem}.written.jsonl"
    if not is_there(file):
        found = read_examples(path, writing)
        starts = [found[n].token_T[:tokens].tolist() for n in range(len(found))]
        prompts = [writing.known.decode(ids) for ids in starts]
        options = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": seed}
        write(teacher, prompts, file, options)
    return read_examples(file, writing)
