"""Incremental detokenization equals decoding all tokens, without partial characters."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from jaxllm.errors import TokenError
from jaxllm.text import Detokenizer, Tokenizer
from tests.text.conftest import TEXTS

SMALL = ["byte_level", "spm", "mergeable_specials"]
REAL = [
    ("llama_tokenizer", "tokenizer.json", "tokenizer_config.json"),
    ("gpt2_tokenizer", "tokenizer.json"),
    ("stories260K", "tokenizer.model", "tokenizer_config.json"),
]


@pytest.fixture(params=[*SMALL, *REAL], ids=str)
def tokenizer(
    request: pytest.FixtureRequest,
    real_form: Callable[..., Path],
    load: Callable[[Path], Tokenizer],
) -> Tokenizer:
    which = request.param
    return load(request.getfixturevalue(which) if which in SMALL else real_form(*which))


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def test_detokenizer_pieces_join_to_decoded_text(tokenizer: Tokenizer) -> None:
    """Joined pieces equal decode without replacement characters, and flush adds nothing."""

    @given(TEXTS)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        printed = pieces(tokenizer, ids)
        assert "".join(printed) == tokenizer.decode(ids)
        assert "\ufffd" in text or "\ufffd" not in "".join(printed)
        assert printed[-1] == ""

    check()


def test_detokenizer_with_prompt_prints_only_continuation(tokenizer: Tokenizer) -> None:
    """The decoded prompt plus the printed pieces equal the decoded concatenation."""

    @given(TEXTS, TEXTS)
    def check(prompt: str, text: str) -> None:
        before = tokenizer.encode(prompt, bos=tokenizer.bos_id is not None)
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer, prompt=before)
        printed = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert tokenizer.decode(before) + printed == tokenizer.decode(before + ids)

    check()


def test_detokenizer_equals_decode_for_random_ids(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    def check(ids: list[int]) -> None:
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)

    check()


def byte(tokenizer: Tokenizer, value: int) -> int:
    return next(
        i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([value])
    )


@pytest.mark.parametrize("name", ["byte_level", "spm"])
def test_detokenizer_emits_character_with_its_last_byte(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = Tokenizer.from_directory(request.getfixturevalue(name))
    ids = [byte(tokenizer, value) for value in "é😀".encode()]
    assert pieces(tokenizer, ids) == ["", "é", "", "", "", "😀", ""]


@pytest.mark.parametrize("name", ["byte_level", "spm"])
def test_detokenizer_replaces_invalid_bytes_promptly(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Invalid bytes become replacement characters once they cannot start a character."""
    tokenizer = Tokenizer.from_directory(request.getfixturevalue(name))
    stray, lead = byte(tokenizer, 0x80), byte(tokenizer, 0xF0)
    assert pieces(tokenizer, [stray] * 3) == ["\ufffd", "\ufffd", "\ufffd", ""]
    assert pieces(tokenizer, [lead] * 3) == ["", "\ufffd", "\ufffd", "\ufffd"]
    [letter] = tokenizer.encode("x") if name == "byte_level" else [tokenizer.id("x") or 0]
    assert pieces(tokenizer, [lead, letter]) == ["", "\ufffdx", ""]


def test_detokenizer_skips_special_tokens_by_default(spm: Path) -> None:
    tokenizer = Tokenizer.from_directory(spm)
    ids = tokenizer.encode("the cat", bos=True, eos=True)
    assert "".join(pieces(tokenizer, ids)) == "the cat"
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    assert "".join(map(detokenizer.push, ids)) == tokenizer.decode(ids, skip_special=False)


def test_detokenizer_state_survives_refused_id(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)
    first, second = (byte(tokenizer, value) for value in "é".encode())
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(first)
    with pytest.raises(TokenError):
        detokenizer.push(-1)
    assert detokenizer.push(tokenizer.vocab_size) == ""  # no token, so no text
    assert detokenizer.push(second) == "é"


def test_detokenizer_decodes_at_most_two_ids(spm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost per token is constant: no call decodes more than two ids."""
    tokenizer = Tokenizer.from_directory(spm)
    decode, longest = Tokenizer.decode, 0

    def counted(self: Tokenizer, ids: list[int], *, skip_special: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    pieces(tokenizer, tokenizer.encode("the cat sat 漢 " * 200))
    assert longest == 2
