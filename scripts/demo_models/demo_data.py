"""From stories to arrays: the demo's tokenizer, and the rows that a model is trained on.

A story is `<|bos|>` + text + `<|eos|>`. One decision: every batch is told when it is asked for, by
a generator that its number seeds. So no story is seen twice, nothing is stored, and a run that was
interrupted asks for the next batch.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxllm.train.data.rows import IGNORED, Rows
from scripts.demo_models.story.tables import NAMES, PRONOUNS
from scripts.demo_models.story_grammar import glimpse, tell

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
PAD_ID, BOS_ID, EOS_ID = range(3)
# Words that are one token each also where no space stands before them, so that what is copied from
# the middle of a sentence to the beginning of a paragraph is one token in both places.
WHOLE = (*(name for names in NAMES.values() for name in names), "He", "She", "His", "Her")
WHOLE_COUNT = 600  # times that the tokenizer's corpus repeats them


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE, which can write any text; encoding adds `<|bos|>` unless told not to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *WHOLE * WHOLE_COUNT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, BOS_ID)],
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each story, from its `<|bos|>` to its `<|eos|>`."""
    return [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(list(texts))]


def cast_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are a name or a pronoun, with a space before it or without."""
    words = {word for words in (*NAMES.values(), *PRONOUNS.values()) for word in words}
    words |= {word.capitalize() for word in words}
    spelled = [
        tokenizer.encode(space + word, add_special_tokens=False).ids
        for word in sorted(words)
        for space in ("", " ")
    ]
    return sorted({ids[0] for ids in spelled if len(ids) == 1})


def pad(stories: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """One story a row, `[R, length]`, filled up with `<|pad|>`."""
    rows = np.full((len(stories), length), PAD_ID, np.int32)
    for row, story in zip(rows, stories, strict=True):
        row[: len(story)] = story[:length]
    return rows


def rows_of(token_RT: np.ndarray) -> Rows:
    """Rows whose every token sees all that stands before it; the last column is only a label."""
    token_BT, label_BT = token_RT[:, :-1], token_RT[:, 1:]
    real_BT = token_BT != PAD_ID
    return Rows(
        token_BT=token_BT,
        label_BT=np.where(label_BT == PAD_ID, IGNORED, label_BT).astype(np.int32),
        position_BT=np.where(real_BT, np.arange(token_BT.shape[1]), -1).astype(np.int32),
        document_BT=np.where(real_BT, 0, -1).astype(np.int32),
    )


@dataclasses.dataclass(frozen=True)
class Phase:
    """Some steps of like rows. tells: one text; packed: texts follow each other until a row is
    full, which trains the last positions too, else each has a row of its own.
    """

    steps: int
    rows: int
    width: int
    tells: Callable[[Random], str] = tell
    packed: bool = False


GLIMPSES = Phase(steps=300, rows=32, width=64, tells=glimpse)
STORIES = Phase(steps=3600, rows=8, width=256)
PACKED = Phase(steps=640, rows=4, width=512, packed=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Told:
    """`Data` told on the way: a batch a step, phase after phase."""

    tokenizer: Tokenizer
    phases: tuple[Phase, ...]
    seed: int

    def __len__(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        """About as many as count: all places."""
        return sum(phase.steps * phase.rows * phase.width for phase in self.phases)

    @cached_property
    def digest(self) -> str:
        facts: list[Any] = [self.tokenizer.to_str(), self.seed]
        facts += [(p.steps, p.rows, p.width, p.tells.__name__, p.packed) for p in self.phases]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def batch(self, number: int) -> Rows:
        """Batch `number` from 0; always the same one."""
        rng, phase = Random(f"{self.seed} {number}"), self._phase(number)
        length = phase.width + 1
        if phase.packed:
            return rows_of(np.array([self._full(rng, phase) for _ in range(phase.rows)], np.int32))
        texts = [phase.tells(rng) for _ in range(phase.rows)]
        return rows_of(pad(encode(self.tokenizer, texts), length))

    def _phase(self, number: int) -> Phase:
        left = number % len(self)
        for phase in self.phases:
            if left < phase.steps:
                return phase
            left -= phase.steps
        raise AssertionError(number)

    def _full(self, rng: Random, phase: Phase) -> list[int]:
        row: list[int] = []
        while len(row) <= phase.width:
            row += encode(self.tokenizer, [phase.tells(rng)])[0]
        return row[: phase.width + 1]
