"""Training rows: contents and order, packing, truncation, completeness, validation split."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ConfigError, TokenError
from jaxllm.train.data.dataset import Dataset, best_fit
from jaxllm.train.data.examples import Examples, build_examples, from_ids, split_examples
from jaxllm.train.data.rows import IGNORED, Example, Rows


def from_examples(examples: Iterable[Example], **options: Any) -> Examples:
    return build_examples(([example] for example in examples), **options)


def documents(count: int, longest: int, seed: int = 0) -> list[np.ndarray]:
    """Return documents of 2 to `longest` tokens; no token id occurs twice."""
    length = np.random.default_rng(seed).integers(2, longest + 1, count)
    return np.split(np.arange(length.sum()), np.cumsum(length)[:-1])


def prompted(prompt: int, learned: int, first: int = 0) -> Example:
    """Return ids first, first + 1, ..., where only the last `learned` count in the loss."""
    length = prompt + learned
    return Example(np.arange(first, first + length), np.arange(length) >= prompt)


def pairs(data: Dataset, epoch: int = 0) -> list[tuple[int, int]]:
    """Return all counted (token, label) pairs of an epoch, sorted."""
    found = []
    for number in range(epoch * len(data), (epoch + 1) * len(data)):
        rows = data.batch(number)
        counted = rows.label_BT != IGNORED
        found += zip(rows.token_BT[counted], rows.label_BT[counted], strict=True)
    return sorted((int(a), int(b)) for a, b in found)


def read_back(rows: Rows) -> list[list[int]]:
    """Return the documents of a batch as lists of ids: inputs and the last label."""
    found = []
    token, label, position, document = map(np.asarray, jax_leaves(rows))
    for row in range(len(token)):
        for number in range(document[row].max() + 1):
            (columns,) = np.nonzero(document[row] == number)
            assert position[row, columns].tolist() == list(range(len(columns)))
            found.append([*token[row, columns].tolist(), int(label[row, columns[-1]])])
    return found


def jax_leaves(rows: Rows) -> list[Any]:
    return [rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT]


@pytest.mark.parametrize("pack", [True, False])
def test_dataset_labels_every_token_once_per_epoch(pack: bool) -> None:
    """Every token except the first of its document is a label exactly once per epoch, packed or
    not.
    """
    texts = documents(37, 19)
    data = Dataset(from_ids(texts), width=18, batch_size=3, seed=5, pack=pack)
    expected = sorted((int(a), int(b)) for ids in texts for a, b in pairwise(ids))
    assert pairs(data) == pairs(data, epoch=4) == expected
    assert data.tokens == len(expected)
    read = [ids for n in range(len(data)) for ids in read_back(data.batch(n))]
    assert sorted(read) == sorted(ids.tolist() for ids in texts)


def test_dataset_padding_values() -> None:
    """Padding has token 0, label -100, position -1 and document -1."""
    rows = Dataset(from_ids([[7, 8, 9]]), width=5, batch_size=2).batch(0)
    assert rows.token_BT.tolist() == [[7, 8, 0, 0, 0], [0] * 5]
    assert rows.label_BT.tolist() == [[8, 9, -100, -100, -100], [-100] * 5]
    assert rows.position_BT.tolist() == [[0, 1, -1, -1, -1], [-1] * 5]
    assert rows.document_BT.tolist() == [[0, 0, -1, -1, -1], [-1] * 5]
    assert {x.dtype.name for x in jax_leaves(rows)} == {"int32"}


def test_dataset_ignores_prompt_labels() -> None:
    rows = Dataset(from_examples([prompted(2, 3, first=10)]), width=4).batch(0)
    assert rows.token_BT.tolist() == [[10, 11, 12, 13]]
    assert rows.label_BT.tolist() == [[-100, 12, 13, 14]]


def test_dataset_batches_are_reproducible_and_epochs_differ() -> None:
    """Batches and digest depend only on the data and the seed, and every epoch has
    another order.
    """
    texts = documents(40, 9)
    one, two = (Dataset(from_ids(texts), width=8, batch_size=4, seed=s) for s in (1, 2))
    again = Dataset(from_ids(texts), width=8, batch_size=4, seed=1)
    for number in (3, 0, 2 * len(one) + 1):
        for ours, theirs in zip(
            jax_leaves(one.batch(number)), jax_leaves(again.batch(number)), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    first = [one.batch(n).token_BT.tolist() for n in range(2 * len(one))]
    assert first[: len(one)] != first[len(one) :]
    assert first[0] != two.batch(0).token_BT.tolist()
    assert one.digest == again.digest != two.digest
    assert one.digest != Dataset(from_ids(texts[1:]), width=8, batch_size=4, seed=1).digest


def test_dataset_splits_long_text_over_rows() -> None:
    data = Dataset(from_ids([range(100, 111)]), width=4, pack=False)
    read = sorted(ids for n in range(len(data)) for ids in read_back(data.batch(n)))
    assert read == [[100, 101, 102, 103, 104], [104, 105, 106, 107, 108], [108, 109, 110]]
    assert data.tokens == 10
    assert data.facts["cut"] == 0


def test_rows_of_long_texts_begin_with_bos() -> None:
    """A text that begins with the begin-of-text token does so in all of its rows and in its
    held-out end; it replaces a token that the row before it has learned. Others have none.
    """
    texts = from_ids([[1, *range(100, 110)], [*range(200, 206)]], bos=1)
    data = Dataset(texts, width=4, pack=False)
    read_rows = sorted(ids for n in range(len(data)) for ids in read_back(data.batch(n)))
    assert read_rows == [
        [1, 100, 101, 102, 103], [1, 104, 105, 106, 107], [1, 108, 109], [200, 201, 202, 203, 204],
        [204, 205],
    ]  # fmt: skip
    assert data.tokens == 10 + 5
    one = from_ids([[1, *range(100, 119)]], bos=1)
    assert [read(part) for part in split_examples(one, 0.2)] == [
        [[1, *range(100, 115)]],
        [[1, 116, 117, 118]],
    ]


def test_long_left_truncates_prompt_and_keeps_bos() -> None:
    examples = from_examples(
        [prompted(9, 2, first=20), prompted(3, 9, first=40)], long="left", bos=1
    )
    data = Dataset(examples, width=4, pack=False)
    read = sorted(ids for n in range(len(data)) for ids in read_back(data.batch(n)))
    # Room for bos and two prompt tokens in the first example, only for bos in the second.
    assert read == [[1, 27, 28, 29, 30], [1, 43, 44, 45, 46]]
    assert data.tokens == 2 + 4
    assert data.facts["cut"] == 2


def test_long_right_truncates_conversation_end() -> None:
    """Truncation on the right drops an example if none of its learned tokens is left."""
    late = prompted(9, 2, first=60)  # no learned token is left
    examples = from_examples([prompted(2, 9, first=20), late], long="right")
    data = Dataset(examples, width=4)
    assert read_back(data.batch(0)) == [[20, 21, 22, 23, 24]]
    assert (len(data), data.tokens) == (1, 3)
    assert (data.facts["cut"], data.facts["dropped"]) == (2, 1)


def test_best_fit_row_count_is_within_bound() -> None:
    """At most 11/9 of the optimum plus 6/9 of a row (Dosa 2007); the optimum is known, because full
    rows were split into the pieces.
    """
    rng, width, rows = np.random.default_rng(3), 64, 50
    lengths: list[int] = []
    for _ in range(rows):
        marks = np.sort(rng.choice(np.arange(1, width), 3, replace=False))
        lengths += np.diff([0, *marks, width]).tolist()
    length_P = np.array(lengths)
    packed = best_fit(length_P, width, seed=0)
    assert sorted(np.concatenate(packed).tolist()) == list(range(len(length_P)))
    assert max(length_P[row].sum() for row in packed) <= width
    assert rows <= len(packed) <= rows * 11 / 9 + 6 / 9


def test_best_fit_chooses_fullest_fitting_row() -> None:
    """By hand, with rows of 8: after 6 and 5, the 3 fills the row with 5, and the 2
    the row with 6.
    """
    packed = best_fit(np.array([3, 6, 5, 2]), 8, seed=0)
    assert sorted(sorted(row.tolist()) for row in packed) == [[0, 2], [1, 3]]


def nothing_learned() -> Examples:
    return from_examples([Example(np.arange(4), np.zeros(4, bool))])


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: from_ids([]), TokenError, "no data to train on"),
        (lambda: from_examples([]), TokenError, "no data to train on"),
        (lambda: from_ids([[1, 2**32 + 5]]), TokenError, "example 0 has token id 4294967301"),
        (lambda: from_ids([np.array([1, -2])]), TokenError, "example 0 has token id -2"),
        (lambda: from_ids([[1], [1.5, 2.5]]), TokenError, "example 1 must be an array of integers"),
        (lambda: from_ids([[[1, 2], [3, 4]]]), TokenError, r"got shape \(2, 2\)"),
        (lambda: from_ids([[1, 2**70]]), TokenError, "example 0 must be an array of integers"),
        (lambda: from_ids([["a"]]), TokenError, "example 0 must be an array of integers"),
        (lambda: from_ids([None]), TokenError, "got NoneType"),
        (lambda: from_ids(5), TokenError, "examples must be a list"),  # type: ignore[arg-type]
        (lambda: from_examples([prompted(2, 3)], long="nope"), ConfigError, "long must be one of"),  # type: ignore[arg-type]
        (lambda: from_ids([[1, 2]], bos=2**31), TokenError, "bos must be a whole number"),
        (lambda: Dataset(nothing_learned(), 8), TokenError, "no token is marked to be learned"),
        (lambda: Dataset(from_ids([[1], []]), 8), TokenError, "no example has a token"),
        (lambda: Dataset(from_ids([[1, 2]]), 0), ConfigError, "row width must"),
        (lambda: Dataset(from_ids([[1, 2]]), 8, 0), ConfigError, "batch size must"),
        (lambda: Dataset(from_ids([[1, 2]]), 8).batch(-1), ConfigError, "batch must"),
    ],
)
def test_dataset_refuses_invalid_input_in_one_line(
    make: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def plain_examples(*texts: list[int]) -> Examples:
    return from_examples(Example(np.array(ids, np.int32), np.arange(len(ids)) > 0) for ids in texts)


def read(found: Examples) -> list[list[int]]:
    return [found[n].token_T.tolist() for n in range(len(found))]


def test_split_examples_partitions_by_seed() -> None:
    """The split is disjoint, complete, keeps order and loss masks, and depends only on the seed."""
    texts = [[n, n + 1, n + 2][: 2 + n % 2] for n in range(0, 40, 4)]
    train_part, validation_part = split_examples(plain_examples(*texts), 0.3)
    assert len(validation_part) == 3
    assert sorted(read(train_part) + read(validation_part)) == texts
    assert read(train_part) == sorted(read(train_part))
    assert all(train_part[n].loss_mask_T.tolist()[0] is False for n in range(len(train_part)))
    assert read(split_examples(plain_examples(*texts), 0.3)[1]) == read(validation_part)
    assert read(split_examples(plain_examples(*texts), 0.3, seed=1)[1]) != read(validation_part)


def test_split_examples_cuts_single_text_at_end() -> None:
    train_part, validation_part = split_examples(plain_examples(list(range(100))), 0.1)
    assert read(train_part) == [list(range(90))]
    assert read(validation_part) == [list(range(90, 100))]


def test_split_examples_refuses_too_little_data() -> None:
    with pytest.raises(TokenError, match="3 tokens are too few"):
        split_examples(plain_examples([1, 2, 3]), 0.1)
    with pytest.raises(ConfigError, match="between 0 and 1, got 1"):
        split_examples(plain_examples([1, 2], [3, 4]), 1)
