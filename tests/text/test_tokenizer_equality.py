"""Tokenizers equal their references: SentencePiece itself, and transformers.

transformers 5 replaces the normalizer of a Llama `tokenizer.json`; the replacement drops a leading
space and ignores `remove_extra_whitespaces`. From `tokenizer.model` only, it also reorders merges.
So `AutoTokenizer` is the reference for plain text only, and `PreTrainedTokenizerFast`, which reads
the file unchanged, for any text.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, strategies as st

from jaxllm.errors import CheckpointError
from jaxllm.text import Tokenizer
from tests.text.conftest import TEXTS

LLAMA = {
    form: ("llama_tokenizer", form, "tokenizer_config.json")
    for form in ("tokenizer.json", "tokenizer.model")
}
STORIES = {
    form: ("stories260K", form, "tokenizer_config.json")
    for form in ("tokenizer.json", "tokenizer.model")
}
GPT2 = [("gpt2_tokenizer", "tokenizer.json"), ("gpt2_tokenizer", "vocab.json", "merges.txt")]
Load = Callable[[Path], Tokenizer]
Form = Callable[..., Path]


def lines(data: Callable[[str], Path]) -> list[str]:
    """Return lines of plain text, without leading or repeated spaces."""
    text = (data("corpora") / "wiki.test.raw").read_text()[:60_000]
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": False},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
        {"add_dummy_prefix": False, "user_defined_symbols": ["<tool>", "▁▁"]},
        {"bos_id": -1, "eos_id": 0, "unk_id": 1, "pad_id": 2},
    ],
)
def test_trained_sentencepiece_models_equal_sentencepiece(
    options: dict[str, Any], train_spm: Callable[..., Path]
) -> None:
    directory = train_spm(**options)
    assert_equals_sentencepiece(Tokenizer.from_directory(directory), directory)


# Without the stories' tokenizer.json, which strips more than spaces, unlike its tokenizer.model.
@pytest.mark.parametrize("form", [*LLAMA.values(), STORIES["tokenizer.model"]])
def test_published_tokenizers_equal_sentencepiece(
    form: tuple[str, ...], data: Callable[[str], Path], real_form: Form, load: Load
) -> None:
    assert_equals_sentencepiece(load(real_form(*form)), data(form[0]))


def assert_equals_sentencepiece(tokenizer: Tokenizer, directory: Path) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    assert tokenizer.vocab_size == reference.vocab_size()
    for ours, theirs in (
        (tokenizer.bos_id, reference.bos_id()),
        (tokenizer.eos_id, reference.eos_id()),
        (tokenizer.unk_id, reference.unk_id()),
    ):
        assert ours == (None if theirs < 0 else theirs)

    @given(TEXTS)
    @example("Two spaces, tabs and numbers 12345")  # whose merges overlap
    def check(text: str) -> None:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids
        # If it removes spaces, only SentencePiece also drops escaped spaces in decode.
        if reference.unk_id() not in ids and "▁" not in text:
            assert tokenizer.decode(ids) == reference.decode(ids)

    check()


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 330},
        {"model_type": "char"},
        {"normalization_rule_name": "nmt_nfkc"},
        {"user_defined_symbols": ["<tool>"]},
        {"treat_whitespace_as_suffix": True},
    ],
)
def test_unsupported_sentencepiece_models_are_refused(
    options: dict[str, Any], train_spm: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=r"is not supported: .* Add a tokenizer\.json"):
        Tokenizer.from_directory(train_spm(**options))


@pytest.mark.parametrize("form", LLAMA.values())
def test_llama_tokenizer_gives_known_ids(
    form: tuple[str, ...], real_form: Form, load: Load
) -> None:
    tokenizer = load(real_form(*form))
    assert tokenizer.encode("Hello world", bos=True) == [1, 15043, 3186]
    assert tokenizer.encode("hi</s>", parse_special=True)[-1] == 2
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 0)
    assert tokenizer.adds_bos
    assert tokenizer.vocab_size == 32000


@pytest.mark.parametrize("form", GPT2)
def test_gpt2_tokenizer_gives_known_ids(form: tuple[str, ...], real_form: Form, load: Load) -> None:
    tokenizer = load(real_form(*form))
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("<|endoftext|>", parse_special=True) == [50256]
    assert 50256 not in tokenizer.encode("<|endoftext|>")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (50256, 50256, False)
    assert tokenizer.vocab_size == 50257


@pytest.mark.parametrize("form", [*LLAMA.values(), *STORIES.values(), *GPT2])
def test_plain_text_ids_equal_auto_tokenizer(
    form: tuple[str, ...],
    data: Callable[[str], Path],
    real_form: Form,
    load: Load,
    tmp_path: Path,
    transformers: Any,
) -> None:
    tokenizer = load(real_form(*form))
    shutil.copytree(real_form(*form), tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2" if form in GPT2 else "llama"})
    )
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in lines(data):
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("form", [LLAMA["tokenizer.json"], STORIES["tokenizer.json"], GPT2[0]])
def test_any_text_ids_equal_transformers_fast_tokenizer(
    form: tuple[str, ...], real_form: Form, load: Load, transformers: Any
) -> None:
    file = str(real_form(*form) / "tokenizer.json")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    tokenizer = load(real_form(*form))

    @given(TEXTS)
    def check(text: str) -> None:
        ids = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)

    check()


@pytest.mark.parametrize("forms", [list(LLAMA.values()), GPT2], ids=["llama", "gpt2"])
def test_tokenizer_file_formats_agree(
    forms: list[tuple[str, ...]], real_form: Form, load: Load
) -> None:
    """Every file format of the same tokenizer gives equal ids and decoded texts."""
    one, other = (load(real_form(*form)) for form in forms)

    @given(TEXTS, st.booleans())
    def check(text: str, parse: bool) -> None:
        ids = one.encode(text, parse_special=parse)
        assert ids == other.encode(text, parse_special=parse)
        assert one.decode(ids) == other.decode(ids)

    check()
