"""Training data of the story models: the demo tokenizer and batches of rows.

A story is `<|bos|>` + text + `<|eos|>`. One decision: every batch is drawn on the fly, by a
generator that its number seeds. So stories hardly repeat, nothing is stored, and an interrupted run
resumes with the next batch.
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
from scripts.demo_models.story_grammar import draw_glimpse, draw_story

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
PAD_ID, BOS_ID, EOS_ID = range(3)
# Words that are a single token even without a space before them, so that copying a word from a
# sentence to the start of a paragraph copies one token.
SINGLE_TOKENS = (*(name for names in NAMES.values() for name in names), "He", "She", "His", "Her")
SINGLE_TOKEN_REPEATS = 600  # in the tokenizer's corpus


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, which can encode any text; encoding adds `<|bos|>` by default."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *SINGLE_TOKENS * SINGLE_TOKEN_REPEATS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, BOS_ID)],
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each story, with `<|bos|>` and `<|eos|>`."""
    return [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(list(texts))]


def find_cast_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that are a name or a pronoun, with or without a leading space."""
    words = {word for words in (*NAMES.values(), *PRONOUNS.values()) for word in words}
    words |= {word.capitalize() for word in words}
    encodings = [
        tokenizer.encode(space + word, add_special_tokens=False).ids
        for word in sorted(words)
        for space in ("", " ")
    ]
    return sorted({ids[0] for ids in encodings if len(ids) == 1})


def pad(stories: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Return one story per row, `[R, length]`, truncated or padded with `<|pad|>`."""
    rows = np.full((len(stories), length), PAD_ID, np.int32)
    for row, story in zip(rows, stories, strict=True):
        row[: len(story)] = story[:length]
    return rows


def make_rows(token_RT: np.ndarray) -> Rows:
    """Make rows in which a token sees all earlier ones; the last column is only a label."""
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
    """Training steps with rows of one kind."""

    steps: int
    rows: int
    width: int
    draw_text: Callable[[Random], str] = draw_story
    packed: bool = False
    """Whether a row concatenates texts until it is full, which trains the last positions too;
    otherwise each text has a row."""


GLIMPSES = Phase(steps=300, rows=32, width=64, draw_text=draw_glimpse)
STORIES = Phase(steps=3600, rows=8, width=256)
PACKED = Phase(steps=640, rows=4, width=512, packed=True)


@dataclasses.dataclass(frozen=True, eq=False)
class StoryData:
    """`Data` drawn on the fly: a batch per step, phase after phase."""

    tokenizer: Tokenizer
    phases: tuple[Phase, ...]
    seed: int

    def __len__(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Number of token positions, an upper bound on the tokens with a loss."""
        return sum(phase.steps * phase.rows * phase.width for phase in self.phases)

    @cached_property
    def digest(self) -> str:
        facts: list[Any] = [self.tokenizer.to_str(), self.seed]
        facts += [(p.steps, p.rows, p.width, p.draw_text.__name__, p.packed) for p in self.phases]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def batch(self, number: int) -> Rows:
        """Return batch `number`, counted from 0; it depends only on the seed and the number."""
        rng, phase = Random(f"{self.seed} {number}"), self._find_phase(number)
        length = phase.width + 1
        if phase.packed:
            packed = [self._pack_row(rng, phase) for _ in range(phase.rows)]
            return make_rows(np.array(packed, np.int32))
        texts = [phase.draw_text(rng) for _ in range(phase.rows)]
        return make_rows(pad(encode(self.tokenizer, texts), length))

    def _find_phase(self, number: int) -> Phase:
        step = number % len(self)
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise AssertionError(number)

    def _pack_row(self, rng: Random, phase: Phase) -> list[int]:
        row: list[int] = []
        while len(row) <= phase.width:
            row += encode(self.tokenizer, [phase.draw_text(rng)])[0]
        return row[: phase.width + 1]
