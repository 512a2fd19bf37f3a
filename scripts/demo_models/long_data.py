"""Long texts in which facts set early are asked late: what train_long.py trains on.

The sentences are those of `jaxllm recall --texts meetings`, of the demo's grammar. One decision:
only answers are learned. What else the texts say is drawn at random, and a model this small would
spend its few minutes on it.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from functools import cached_property
from random import Random

import numpy as np
from tokenizers import Tokenizer

from jaxllm.evaluate.needle.stories import FRIENDS, KINDS, MEETING, MEETING_QUESTION, filler
from jaxllm.train.data.rows import IGNORED, Rows, blank_rows
from scripts.demo_models.demo_data import BOS_ID

SENTENCE = 10  # tokens of one, about
PER_FACT = 32  # tokens of a text for each fact in it
EARLY = 0.6  # facts are set in this share of a text, its beginning
TOLD = 400  # texts that a tokenizer is made of

Part = tuple[str, bool]  # some words, and whether they are learned


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Some steps of rows of one width."""

    steps: int
    rows: int
    width: int


def tell(rng: Random, width: int) -> Iterator[Part]:
    """A text of about `width` tokens, without end: kinds are met, each with a name of its own, and
    each is asked for once, later.
    """
    slots = max(6, width // SENTENCE)
    count = min(len(KINDS) - 1, width // PER_FACT)
    said: dict[int, list[Part]] = {}
    for kind, name in zip(rng.sample(KINDS, count), rng.sample(FRIENDS, count), strict=True):
        free = [slot for slot in range(int(slots * EARLY)) if slot not in said]
        met = rng.choice(free)
        said[met] = [(" " + MEETING.format(kind=kind, name=name), False)]
        asked = rng.choice([slot for slot in range(met + 1, slots) if slot not in said])
        said[asked] = [
            (MEETING_QUESTION.format(kind=kind), False),
            (f" {name}", True),
            (".", False),
        ]
    slot = 0
    while True:
        yield from said.get(slot) or [(" " + filler(rng), False)]
        slot += 1


def corpus(seed: int) -> Iterator[str]:
    """Texts for a tokenizer."""
    rng = Random(f"words {seed}")
    for _ in range(TOLD):
        parts = tell(rng, 256)
        yield "".join(next(parts)[0] for _ in range(24))


@dataclasses.dataclass(frozen=True, eq=False)
class Lasting:
    """`Data` told on the way: a batch a step, stretch after stretch, no text twice."""

    tokenizer: Tokenizer
    stretches: tuple[Stretch, ...]
    seed: int

    def __len__(self) -> int:
        return sum(stretch.steps for stretch in self.stretches)

    @property
    def tokens(self) -> int:
        """About as many as count: the answers."""
        return sum(s.steps * s.rows * s.width for s in self.stretches) // PER_FACT

    @cached_property
    def digest(self) -> str:
        facts = [self.tokenizer.to_str(), self.seed, self.stretches, EARLY, PER_FACT]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def batch(self, number: int) -> Rows:
        """Batch `number` from 0; always the same one."""
        rng, stretch = Random(f"{self.seed} {number}"), self._stretch(number)
        rows = blank_rows(stretch.rows, stretch.width)
        rows.position_BT[:] = np.arange(stretch.width)
        rows.document_BT[:] = 0
        for row in range(stretch.rows):
            token_L, counts_L = self._text(rng, stretch.width)
            rows.token_BT[row] = token_L[:-1]
            rows.label_BT[row] = np.where(counts_L[1:], token_L[1:], IGNORED)
        return rows

    def _stretch(self, number: int) -> Stretch:
        left = number % len(self)
        for stretch in self.stretches:
            if left < stretch.steps:
                return stretch
            left -= stretch.steps
        raise AssertionError(number)

    def _text(self, rng: Random, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `width` + 1 tokens of a text, and which of them are learned."""
        ids, counts = [BOS_ID], [False]
        for words, learned in tell(rng, width):
            new = self._encoded(words.lstrip() if len(ids) == 1 else words)
            ids += new
            counts += [learned] * len(new)
            if len(ids) > width:
                break
        return np.array(ids[: width + 1], np.int32), np.array(counts[: width + 1])

    def _encoded(self, words: str) -> list[int]:
        if words not in self._known:
            self._known[words] = self.tokenizer.encode(words, add_special_tokens=False).ids
        return self._known[words]

    @cached_property
    def _known(self) -> dict[str, list[int]]:
        return {}
