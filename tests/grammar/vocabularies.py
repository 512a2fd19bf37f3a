"""Vocabularies for the tests of grammars."""

import functools

import pytest

import jaxllm
from jaxllm.grammar.vocabulary import Vocabulary, make_vocabulary
from jaxllm.text.tokenizer import Tokenizer
from tests.conftest import SHARED_DATA

NAMES = ("demo:llama", "llama_tokenizer", "gpt2_tokenizer")


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    """Return a vocabulary by its name; a test that needs a missing one is skipped."""
    if name.startswith("demo:"):
        lm = jaxllm.load(name)
        return make_vocabulary(lm.tokenizer, lm.config.vocab_size, [lm.tokenizer.eos_id])
    if not (SHARED_DATA / name).exists():
        pytest.skip(f"needs shared/data/{name}")
    tokenizer = Tokenizer.from_directory(SHARED_DATA / name)
    return make_vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id])
