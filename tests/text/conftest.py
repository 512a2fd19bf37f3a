"""Small tokenizers of each kind, trained here, so that the tests need no downloaded data."""

import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jaxllm.text import Tokenizer as JaxTokenizer

# Any text, and texts of pieces that tokenizers treat differently.
TEXTS = st.text() | st.lists(
    st.sampled_from([
        *(" ", "  ", "   ", "\t", "\n", "▁", "▁▁", "<", ">", "/", "s>", "<s>", "</s>", "<unk>"),
        *("<|endoftext|>", "<0x41>", "<tool>", "the", "the ", "cat", "A", "=" * 9, "é", "e\u0301"),
        *("漢", "漢字", "\U0001f600", "\U0001f600👩\u200d🚀", "\ufffd", "\u212b"),
    ])
    | st.text(max_size=4)
).map("".join)  # fmt: skip
SENTENCES = [
    "The <s>cat</s> sat on the mat, and the <s>dog</s> did not.",
    "  Two  spaces,\ttabs\nand new lines\n\n    are text too.",
    "Fünf große Bäume; 漢字 and かな; emoji \U0001f600\U0001f680; numbers 12345 and 3.14159.",
    "<|endoftext|> is written like this, <unk> like that.",
] * 8


def train_byte_level(sentences: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def train_sentencepiece(sentences: list[str], **options: Any) -> bytes:
    """Train a SentencePiece model like that of Llama, with changed options."""
    model = io.BytesIO()
    usual = {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "hard_vocab_limit": False,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, minloglevel=3, **{**usual, **options}
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `vocab.json` and `merges.txt` of a byte-level BPE."""
    directory = tmp_path_factory.mktemp("byte_level")
    train_byte_level(SENTENCES, 400).model.save(str(directory))
    return directory


@pytest.fixture(scope="session")
def mergeable_specials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tokenizer.json` whose BPE merges spell its own special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([*SENTENCES, *["<s>", "</s>"] * 20], trainer)
    directory = tmp_path_factory.mktemp("mergeable_specials")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def train_spm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that trains a SentencePiece model, with options, into a new directory."""

    def train(**options: Any) -> Path:
        usual = {"vocab_size": 420, "character_coverage": 0.98}
        directory = tmp_path_factory.mktemp("spm")
        model = train_sentencepiece(SENTENCES, **{**usual, **options})
        (directory / "tokenizer.model").write_bytes(model)
        return directory

    return train


@pytest.fixture(scope="session")
def spm(train_spm: Callable[..., Path]) -> Path:
    """A directory with a small `tokenizer.model` like that of Llama."""
    return train_spm()


@pytest.fixture(scope="session")
def real_form(
    data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return a function that copies chosen files of a shared tokenizer to a cached directory."""
    directories: dict[tuple[str, ...], Path] = {}

    def make(name: str, *files: str) -> Path:
        source = data(name)
        if (name, *files) not in directories:
            directories[name, *files] = tmp_path_factory.mktemp(name)
            for file in files:
                shutil.copy(source / file, directories[name, *files])
        return directories[name, *files]

    return make


@pytest.fixture(scope="session")
def load() -> Callable[[Path], JaxTokenizer]:
    """Return a loader that loads each tokenizer once per session."""
    return functools.cache(JaxTokenizer.from_directory)


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Return a function that writes a JSON file to the test's directory and returns the latter."""

    def write(name: str, content: Any) -> Path:
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path

    return write
