"""Prompts to answer, and rewards: from a Python function, or scores in the file of the prompts."""

import dataclasses
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.files import read_json_lines
from jaxllm.lm import LM
from jaxllm.runtime.schema import as_schema
from jaxllm.train.data.dataset import shuffle_rows
from jaxllm.train.data.rows import Ints, Rows, blank_rows
from jaxllm.train.data.sources import TextEncoder, read_examples

MAX_REWARD = 1e9  # of either sign, exclusive: advantages and their sums are finite in float32

# Takes the prompt, the answer without special tokens, and the prompt's line of the file.
Reward = Callable[[str, str, Mapping[str, Any]], float]


class ScoredAnswer(NamedTuple):
    """An answer of a file: int32 ids with the end-of-text token, and its reward."""

    token_N: np.ndarray
    reward: float


class Prompt(NamedTuple):
    """A prompt: its text and ids, its line, and its answers if the file has them."""

    text: str
    ids: Sequence[int]
    line: Mapping[str, Any]
    answers: tuple[ScoredAnswer, ...] = ()


class PromptRows(Rows):
    """Rows of prompts. index_B: int32, the number of each in the file."""

    index_B: Ints


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class _ScoredLine(msgspec.Struct):
    prompt: str
    completion: str
    reward: Annotated[float, msgspec.Meta(gt=-MAX_REWARD, lt=MAX_REWARD)]


def read_prompts(path: Path, lm: LM) -> list[Prompt]:
    """Read JSON lines with "prompt", or "messages" for the chat template; other fields are for the
    reward function.

    Raises TokenError with the line for other lines, and if there are none, and what `LM.encode`
    and `LM.chat_prompt` raise.
    """
    prompts = []
    for where, value in read_json_lines(path, TokenError, max_bytes=None):
        line = as_schema(value, _Line, where, TokenError)
        if (line.prompt is None) == (line.messages is None):
            raise TokenError(f'{where} must be an object with "prompt", or with "messages"')
        ids = lm.encode(line.prompt) if line.messages is None else lm.chat_prompt(line.messages)
        prompts.append(Prompt(lm.decode(ids) if line.prompt is None else line.prompt, ids, value))
    if not prompts:
        raise TokenError(f"there is no prompt in {path}")
    return prompts


def read_scored(path: Path, lm: LM) -> list[Prompt]:
    """Read JSON lines with "prompt", "completion" and "reward"; equal prompts are one group.

    Raises TokenError for other lines, and for groups of one or of unequal sizes.
    """
    examples = read_examples(path, TextEncoder(lm.tokenizer))
    lines = read_json_lines(path, TokenError, max_bytes=None)
    groups: dict[str, Prompt] = {}
    for number, (where, value) in enumerate(lines):
        line = as_schema(value, _ScoredLine, where, TokenError)
        token_T, learned_T = examples[number]
        begin = int(learned_T.argmax())
        group = groups.setdefault(line.prompt, Prompt(line.prompt, token_T[:begin].tolist(), value))
        if begin != len(group.ids):
            raise TokenError(f"{where}: the completion must start with a new token")
        answers = (*group.answers, ScoredAnswer(token_T[begin:], line.reward))
        groups[line.prompt] = group._replace(answers=answers)
    sizes = sorted({len(prompt.answers) for prompt in groups.values()})
    if sizes[0] < 2 or len(sizes) > 1:
        raise TokenError(
            f"{path}: every prompt must have the same number of answers, at least 2: got {sizes}"
        )
    return list(groups.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Batches of prompts in shuffled epochs (`Data`). All are full: one may span two epochs."""

    prompts: Sequence[Prompt]
    batch_size: int
    seed: int = 0

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.batch_size)

    @property
    def width(self) -> int:
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def tokens(self) -> int:
        """The number of prompt tokens, since how many the answers have is not known."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @cached_property
    def digest(self) -> str:
        texts = [
            (list(p.ids), p.line, [(a.token_N.tolist(), a.reward) for a in p.answers])
            for p in self.prompts
        ]
        return hashlib.sha256(repr((self.batch_size, self.seed, texts)).encode()).hexdigest()[:16]

    @property
    def facts(self) -> dict[str, Any]:
        return {"prompts": len(self.prompts), "width": self.width, "digest": self.digest}

    @property
    def summary(self) -> str:
        return f"{len(self.prompts):,} prompts of up to {self.width} tokens"

    def batch(self, number: int) -> PromptRows:
        """Return batch `number`, from 0; always the same one."""
        rows = blank_rows(self.batch_size, self.width)
        index_B = np.zeros(self.batch_size, np.int32)
        for row in range(self.batch_size):
            epoch, at = divmod(number * self.batch_size + row, len(self.prompts))
            index_B[row] = shuffle_rows(len(self.prompts), self.seed, epoch)[at]
            ids = self.prompts[index_B[row]].ids
            rows.token_BT[row, : len(ids)] = ids
            rows.position_BT[row, : len(ids)] = np.arange(len(ids))
        return PromptRows(**vars(rows), index_B=index_B)


def load_reward(name: str) -> Reward:
    """Import a reward function `MODULE:FUNCTION`; the working directory's modules come first.

    Raises ConfigError if it cannot be imported.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"the reward must be MODULE:FUNCTION, got {name!r:.60}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        attribute = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise ConfigError(f"the reward {name}: {type(error).__name__}: {error!s:.200}") from error
    if not callable(attribute):
        raise ConfigError(f"the reward {name} is not a function, but {attribute!r:.60}")
    reward: Reward = attribute
    return reward


def score_answer(reward: Reward, prompt: Prompt, answer: str) -> float:
    """Return the reward of an answer.

    Raises ConfigError if the function fails, or returns no number between plus and minus
    `MAX_REWARD`.
    """
    try:
        score = float(reward(prompt.text, answer, prompt.line))
    except Exception as error:
        raise ConfigError(
            f"the reward function raised {type(error).__name__}: {error!s:.200}, for the answer"
            f" {answer!r:.60} to {prompt.text!r:.60}"
        ) from error
    if not abs(score) < MAX_REWARD:
        raise ConfigError(
            f"the reward must be a number between -{MAX_REWARD:g} and {MAX_REWARD:g}, got {score},"
            f" for the answer {answer!r:.60} to {prompt.text!r:.60}"
        )
    return score
