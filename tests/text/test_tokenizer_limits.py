"""Tokenizer limits: files that could require unbounded work are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.text import Tokenizer
from jaxllm.text.tokenizer_limits import check_regex

# As published in the tokenizer.json of each model; tests/convert/gguf/test_tokenizer.py has more.
PUBLISHED = {
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "DeepSeek V3": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek V3, digits": r"\p{N}{1,3}",
    "DeepSeek V3, characters": "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "BLOOM": r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]"
    r"|[^\s\p{L}\p{N}]+",
    "OLMo, digits": r"\d{1,3}(?=(?:\d{3})*\b)",
}
SUPERLINEAR = [
    "(.+)+x", "(a*)*", "(a|a)*b", "(?:a?){30}a{30}", r"\s*\s*x", "(x+x+)+y", "(.*)(.*)(.*)y",
    "((a{1,16}){1,16}){1,16}", "(?i)(?:a|b|ab)*c", "(?=(a+)+b)", "a?" * 30 + "a" * 30, ".*.*=.*",
    "(?>(a+)+)b", r"[^b]\w*(?![^b]*)",
    "(?:(?:(?:a|b)(?:a|b))(?:a|b)(?:a|b)(?:a|b)(?:a|b)(?:a|b)(?:a|b)(?:a|b))x",
]  # fmt: skip
UNPARSED = [
    r"(\w)\1+", r"(?<n>a\g<n>?)", "a**", "a" * 3000, "[]a](b+)+", "((((", "a)", "(?~x)", "[[[",
    "(?(1)a|b)", "x{1001}", "(?x)a b", "\\", "(" * 50 + ")" * 50, "*a", "[" * 50 + "a" + "]" * 50,
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_check_regex_accepts_published_patterns(name: str) -> None:
    check_regex(PUBLISHED[name], name)


@pytest.mark.parametrize("regex", [*SUPERLINEAR, *UNPARSED])
def test_check_regex_refuses_patterns_without_cost_bound(regex: str) -> None:
    """Patterns with superlinear backtracking, or beyond the checker, are refused."""
    with pytest.raises(CheckpointError, match=r"the tokenizer: the regex .* is rejected"):
        check_regex(regex, "the tokenizer")


def tree(**changes: Any) -> dict[str, Any]:
    vocab = {"<unk>": 0, "a": 1, "b": 2}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"}
    return {"version": "1.0", "added_tokens": [], "model": model, **changes}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(count: int, step: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [step] * count}


ADDED = {"id": 3, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}  # fmt: skip
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "doubling": (
        {"normalizer": sequence(32, replace({"String": "a"}, "aa"))},
        "by more than a factor of 64",
    ),
    "doubling between": ({"normalizer": sequence(7, replace({"Regex": ""}, "a"))}, "factor of 64"),
    "steps": ({"normalizer": sequence(65, {"type": "NFC"})}, "more than 64 steps"),
    "a long text": ({"normalizer": {"type": "Prepend", "prepend": "a" * 5000}}, "4096 characters"),
    "a regex": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(.+)+x"}}},
        "match in several ways",
    ),
    "a step that is none": ({"decoder": {"type": "Sequence", "decoders": [5]}}, "decoders"),
    "a decoder that is none": ({"decoder": 5}, "decoder must be an object or null"),
    "no model": ({"model": None}, "model must be an object"),
    "no vocabulary": ({"model": {"type": "BPE"}}, "missing required field vocab"),
    "an id": ({"model": {"vocab": {"a": "x"}}}, "must be a whole number"),
    "a merge": ({"model": {"vocab": {"a": 0}, "merges": [["a", "b", "c"]]}}, "list of length 2"),
    "a long piece": ({"model": {"vocab": {"a" * 5000: 0}}}, "of length <= 4096"),
    "words": ({"model": {"vocab": {}, "max_input_chars_per_word": 10**9}}, "<= 1000"),
    "an added id": ({"added_tokens": [{**ADDED, "id": -1}]}, r"added_tokens\[0\].id"),
    "an added text": ({"added_tokens": [{**ADDED, "content": None}]}, r"added_tokens\[0\].content"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_tokenizer_json_with_unbounded_work_is_refused(name: str, tmp_path: Path) -> None:
    """Growing normalizers, long steps, unsafe regexes, malformed fields raise with the file."""
    changes, words = INVALID[name]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree(**changes)))
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_tokenizer_json_within_limits_is_accepted(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": PUBLISHED["GPT-2"]}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    spaces = sequence(3, replace({"String": " "}, "\u2581"))
    content = tree(added_tokens=[ADDED], normalizer=spaces, pre_tokenizer=split)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_directory(tmp_path).encode("ab") == [1, 2]


def test_sentencepiece_model_with_long_piece_is_refused(spm: Path, tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    schema: Any = sentencepiece_model_pb2
    model = schema.ModelProto()
    model.ParseFromString((spm / "tokenizer.model").read_bytes())
    model.pieces[300].piece = "a" * 400_000
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match="400,000 in one"):
        Tokenizer.from_directory(tmp_path)
