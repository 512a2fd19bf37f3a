"""Training data of train_long.py: long texts with early facts and late questions.

The sentences are those of `jaxllm recall --texts meetings`, with words of the demo's grammar. One
decision: only answers have a loss. Everything else in the texts is random, and a model this small
would spend its few minutes on learning it.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from functools import cached_property
from random import Random

import numpy as np
from tokenizers import Tokenizer

from jaxllm.research.needle.haystack import FRIENDS, KINDS, MEETING, MEETING_QUESTION, random_filler
from jaxllm.train.data.rows import IGNORED, Rows, blank_rows
from scripts.demo_models.demo_data import BOS_ID

SENTENCE = 10  # approximate tokens per sentence
PER_FACT = 32  # tokens of text per fact
EARLY = 0.6  # share of a text, from its beginning, in which facts occur
TOKENIZER_TEXTS = 400  # texts that train the tokenizer

Part = tuple[str, bool]  # words, and whether they have a loss


@dataclasses.dataclass(frozen=True)
class Phase:
    """Training steps with rows of one width."""

    steps: int
    rows: int
    width: int


def draw_parts(rng: Random, width: int) -> Iterator[Part]:
    """Yield the parts of a text with facts and questions in about its first `width` tokens.

    Each fact introduces an animal kind with a name, and one later question asks for the name.
    Filler sentences continue without end.
    """
    slots = max(6, width // SENTENCE)
    count = min(len(KINDS) - 1, width // PER_FACT)
    sentences: dict[int, list[Part]] = {}
    for kind, name in zip(rng.sample(KINDS, count), rng.sample(FRIENDS, count), strict=True):
        free = [slot for slot in range(int(slots * EARLY)) if slot not in sentences]
        fact = rng.choice(free)
        sentences[fact] = [(" " + MEETING.format(kind=kind, name=name), False)]
        question = rng.choice([slot for slot in range(fact + 1, slots) if slot not in sentences])
        sentences[question] = [
            (MEETING_QUESTION.format(kind=kind), False),
            (f" {name}", True),
            (".", False),
        ]
    slot = 0
    while True:
        yield from sentences.get(slot) or [(" " + random_filler(rng), False)]
        slot += 1


def draw_tokenizer_texts(seed: int) -> Iterator[str]:
    """Yield texts to train a tokenizer on."""
    rng = Random(f"words {seed}")
    for _ in range(TOKENIZER_TEXTS):
        parts = draw_parts(rng, 256)
        yield "".join(next(parts)[0] for _ in range(24))


@dataclasses.dataclass(frozen=True, eq=False)
class LongTextData:
    """`Data` drawn on the fly: a batch per step, phase after phase."""

    tokenizer: Tokenizer
    phases: tuple[Phase, ...]
    seed: int

    def __len__(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Approximate number of tokens with a loss: the answers."""
        return sum(p.steps * p.rows * p.width for p in self.phases) // PER_FACT

    @cached_property
    def digest(self) -> str:
        facts = [self.tokenizer.to_str(), self.seed, self.phases, EARLY, PER_FACT]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def batch(self, number: int) -> Rows:
        """Return batch `number`, counted from 0; it depends only on the seed and the number."""
        rng, phase = Random(f"{self.seed} {number}"), self._find_phase(number)
        rows = blank_rows(phase.rows, phase.width)
        rows.position_BT[:] = np.arange(phase.width)
        rows.document_BT[:] = 0
        for row in range(phase.rows):
            token_L, has_loss_L = self._draw_tokens(rng, phase.width)
            rows.token_BT[row] = token_L[:-1]
            rows.label_BT[row] = np.where(has_loss_L[1:], token_L[1:], IGNORED)
        return rows

    def _find_phase(self, number: int) -> Phase:
        step = number % len(self)
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise AssertionError(number)

    def _draw_tokens(self, rng: Random, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `width` + 1 tokens of a text, and which of them have a loss."""
        ids, has_loss = [BOS_ID], [False]
        for words, is_answer in draw_parts(rng, width):
            new = self._encode(words.lstrip() if len(ids) == 1 else words)
            ids += new
            has_loss += [is_answer] * len(new)
            if len(ids) > width:
                break
        return np.array(ids[: width + 1], np.int32), np.array(has_loss[: width + 1])

    def _encode(self, words: str) -> list[int]:
        if words not in self._encodings:
            self._encodings[words] = self.tokenizer.encode(words, add_special_tokens=False).ids
        return self._encodings[words]

    @cached_property
    def _encodings(self) -> dict[str, list[int]]:
        return {}
