"""The library's ids from the pieces of a text alone, and when the whole vocabulary is built."""

import json
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given

from jaxllm.text import encoder
from jaxllm.text.encoder import ListedMerges, PieceEncoder, find_merges
from jaxllm.text.formats import read_tree
from jaxllm.text.tokenizer import Tokenizer
from tests.text.conftest import TEXTS


def tree(pieces: list[str], listed: list[Any], **fields: Any) -> dict[str, Any]:
    """Return a tokenizer.json of a BPE."""
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": listed}
    return {"version": "1.0", "added_tokens": [], "model": model | fields}


def added(index: int, content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": index, "content": content, **usual, **flags}


def add_tokens(file: Path) -> None:
    """Give a tokenizer.json added tokens of every kind, after its pieces."""
    content = json.loads(file.read_text(encoding="utf-8"))
    count = len(content["model"]["vocab"])
    content["added_tokens"] += [
        added(count, "<tool>"),
        added(count + 1, " cat", normalized=True),
        added(count + 2, "the", single_word=True, rstrip=True),
        added(count + 3, "\u212b", normalized=True, special=True),
    ]
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Prepend", "prepend": "▁"},
            content["normalizer"],
        ],
    }
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("name", ["byte_level", "mergeable_specials", "spm", "added"])
def test_ids_of_pieces_equal_whole_vocabulary(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With and without special tokens, for any text, also with added tokens of every kind."""
    directory = request.getfixturevalue("mergeable_specials" if name == "added" else name)
    if name == "added":
        shutil.copy(directory / "tokenizer.json", tmp_path)
        add_tokens(tmp_path / "tokenizer.json")
        directory = tmp_path
    tokenizer = Tokenizer.from_directory(directory)

    @given(TEXTS)
    @example("the cat the\u212b <tool>the \u212bcat")
    def check(text: str) -> None:
        for one in (tokenizer._plain, tokenizer._parsing):
            pieces = one._by_pieces
            assert pieces is not None
            assert (
                pieces.encode(text)
                == one.library_tokenizer.encode(text, add_special_tokens=False).ids
            )

    check()


def test_whole_vocabulary_is_built_for_much_text(
    byte_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is built in a thread once the texts have more characters than the limit, not
    before; at once for one text of so many.
    """
    monkeypatch.setattr(encoder, "MAX_CHARACTERS", 20)
    tokenizer = Tokenizer.from_directory(byte_level)
    tokenizer = pickle.loads(pickle.dumps(tokenizer))  # as it goes to other processes
    first = tokenizer.encode("the cat sat ")
    assert "library_tokenizer" not in vars(tokenizer._plain)
    assert tokenizer.encode("the cat sat ") == first
    while "library_tokenizer" not in vars(tokenizer._plain):
        time.sleep(0.01)
    assert tokenizer.encode("the cat sat ") == first and "library_tokenizer" not in vars(
        tokenizer._parsing
    )
    long = "the cat sat " * 2
    assert tokenizer.encode(long, parse_special=True) == tokenizer.encode(long)
    assert "library_tokenizer" in vars(tokenizer._parsing)


@pytest.mark.parametrize(
    "changed",
    [
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"type": "WordPiece"},
        {"unk_token": "<unk>"},
        {"merges": ["a b", ["b", "c"]]},
        {"merges": ["b c"]},
        {"merges": ["a d"]},
        {"merges": ["#version b"]},
        {"merges": [["a b", "c"]], "vocab": {"a b": 0, "c": 1, "a bc": 2}},
        {
            "byte_fallback": True,
            "vocab": {"<0x41>": 0, "a": 1, "<0x41>a": 2},
            "merges": ["<0x41> a"],
        },
    ],
)
def test_other_vocabularies_are_built_whole(changed: dict[str, Any]) -> None:
    """What pieces alone do not determine, or what the library may refuse, is left to it."""
    assert find_merges(tree(["a", "b", "ab"], ["a b"], **changed), None) is None


def test_vocabularies_with_wrong_ids_are_built_whole() -> None:
    """Ids of added tokens must be those that the library gives: the piece's, or the next."""
    for tokens, same in (
        ([added(2, "<a>"), added(3, "<b>")], True),
        ([added(1, "b"), added(2, "<b>")], True),
        ([added(3, "<a>")], False),
        ([added(2, "b")], False),
        ([added(2, "")], False),
    ):
        found = find_merges(tree(["a", "b"], []) | {"added_tokens": tokens}, None)
        assert (found is not None) is same


def test_last_of_equal_merges_counts() -> None:
    """As in the library, whose table of merges keeps the last one."""
    vocab, merges = ["a", "b", "c", "ab", "bc"], ["a b", "b c", "a b"]
    assert ListedMerges(merges).select(vocab) == [("b", "c"), ("a", "b")]
    pieces = PieceEncoder(tree(vocab, []), ListedMerges(merges), frozenset())
    assert pieces.encode("abc") == [0, 4]


def test_file_formats_without_merges_keep_their_ids(train_spm: Callable[..., Path]) -> None:
    """A SentencePiece model has scores in place of merges; `with_merges` derives them."""
    source = read_tree(train_spm())
    assert source.scores is not None and "merges" not in source.tree["model"]
    whole = source.with_merges()
    merges, scored = find_merges(whole, None), find_merges(source.tree, source.scores)
    assert merges is not None and scored is not None
    pieces = set(source.tree["model"]["vocab"])
    assert merges.select(pieces) == scored.select(pieces) == whole["model"]["merges"]
