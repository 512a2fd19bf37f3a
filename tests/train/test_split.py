"""The train/validation split: disjoint and complete."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError, TokenError
from jaxllm.train.data.examples import Examples, from_examples, split_examples
from jaxllm.train.data.rows import Example


def examples(*texts: list[int]) -> Examples:
    return from_examples(Example(np.array(ids, np.int32), np.arange(len(ids)) > 0) for ids in texts)


def read(found: Examples) -> list[list[int]]:
    return [found[n].token_T.tolist() for n in range(len(found))]


def test_split_examples_partitions_by_seed() -> None:
    """The split is disjoint, complete, keeps order and loss masks, and depends only on the seed."""
    texts = [[n, n + 1, n + 2][: 2 + n % 2] for n in range(0, 40, 4)]
    train_part, validation_part = split_examples(examples(*texts), 0.3)
    assert len(validation_part) == 3
    assert sorted(read(train_part) + read(validation_part)) == texts
    assert read(train_part) == sorted(read(train_part))
    assert all(train_part[n].loss_mask_T.tolist()[0] is False for n in range(len(train_part)))
    assert read(split_examples(examples(*texts), 0.3)[1]) == read(validation_part)
    assert read(split_examples(examples(*texts), 0.3, seed=1)[1]) != read(validation_part)


def test_split_examples_cuts_single_text_at_end() -> None:
    train_part, validation_part = split_examples(examples(list(range(100))), 0.1)
    assert read(train_part) == [list(range(90))]
    assert read(validation_part) == [list(range(90, 100))]


def test_split_examples_refuses_too_little_data() -> None:
    with pytest.raises(TokenError, match="3 tokens are too few"):
        split_examples(examples([1, 2, 3]), 0.1)
    with pytest.raises(ConfigError, match="between 0 and 1, got 1"):
        split_examples(examples([1, 2], [3, 4]), 1)
