"""From stories to arrays: the demo's tokenizer, and rows of token ids to train on.

One decision: a story is `<|bos|>` + text + `<|eos|>`, and a row is stories one after another, the
last one cut off where the row ends. So no row holds padding, and every position is trained.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
PAD_ID, BOS_ID, EOS_ID = range(3)


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
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, BOS_ID)],
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each story, from its `<|bos|>` to its `<|eos|>`."""
    return [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(list(texts))]


def pack(stories: Iterable[Sequence[int]], length: int) -> np.ndarray:
    """Rows `[R, length]` filled with stories; each row begins with one, what is over is dropped."""
    rows: list[list[int]] = []
    row: list[int] = []
    for story in stories:
        row += story
        if len(row) >= length:
            rows.append(row[:length])
            row = []
    return np.array(rows, np.int32).reshape(-1, length)


def pad(stories: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """One story a row, `[R, length]`, filled up with `<|pad|>`."""
    rows = np.full((len(stories), length), PAD_ID, np.int32)
    for row, story in zip(rows, stories, strict=True):
        row[: len(story)] = story[:length]
    return rows
