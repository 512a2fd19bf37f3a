"""examples/minimal.py computes what the library does, and its cache is a value, too."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

import jaxllm
from examples import minimal
from tests.conftest import ROOT
from tests.tiny_models import tokens

FILE = ROOT / "examples" / "minimal.py"
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _shapes_promote() -> Iterator[None]:
    """The file has shapes and dtypes promoted as JAX does by default; the library never does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped queries, a head of its own and other settings than the usual ones."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=40, intermediate_size=56, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-3,
        rope_theta=5e5, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("minimal")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lm(checkpoint: Path) -> jaxllm.LM:
    return jaxllm.load(checkpoint, dtype="float32", show_progress=False)


def test_logits_equal_the_library(checkpoint: Path, lm: jaxllm.LM) -> None:
    """Of a whole text at once, and in pieces through the cache, which stays as it was."""
    config, params = minimal.load(checkpoint)
    token_BT = tokens(2, 9)
    expected = np.asarray(jaxllm.forward(lm.model, lm.params, None, token_BT).logits)
    empty = minimal.init_cache(config, 2, 16)
    whole, _ = minimal.forward(config, params, empty, token_BT)
    np.testing.assert_allclose(whole, expected, atol=CLOSE)
    cache, pieces = empty, []
    for piece_BT in np.split(token_BT, [4, 8], axis=1):
        logits_BTV, delta = minimal.forward(config, params, cache, piece_BT)
        cache = minimal.commit(cache, delta)
        pieces.append(logits_BTV)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, atol=CLOSE)
    assert int(cache.length) == 9 and int(empty.length) == 0
    assert not any(np.asarray(x).any() for x in (*empty.layers[0], *empty.layers[-1]))


def test_branches_equal_texts_of_their_own(checkpoint: Path) -> None:
    """Two continuations of one cache are those of the whole texts."""
    config, params = minimal.load(checkpoint)
    prompt_BT = tokens(1, 6)
    _, delta = minimal.forward(config, params, minimal.init_cache(config, 1, 16), prompt_BT)
    cache = minimal.commit(minimal.init_cache(config, 1, 16), delta)
    for number in (5, 70):
        next_BT = np.array([[number]])
        branch, _ = minimal.forward(config, params, cache, next_BT)
        text_BT = np.concatenate([prompt_BT, next_BT], axis=1)
        alone, _ = minimal.forward(config, params, minimal.init_cache(config, 1, 16), text_BT)
        np.testing.assert_allclose(branch[:, -1], alone[:, -1], atol=CLOSE)


def test_generated_tokens_and_cache_equal_the_library(checkpoint: Path, lm: jaxllm.LM) -> None:
    config, params = minimal.load(checkpoint)
    prompt_BT = tokens(2, 7)
    cache = minimal.init_cache(config, 2, 16)
    token_BN, cache = minimal.generate(config, params, cache, prompt_BT, 8)
    found = jaxllm.generate(lm.model, lm.params, prompt_BT, max_new_tokens=8, sampler=jaxllm.GREEDY)
    np.testing.assert_array_equal(token_BN, found.token_BT)
    assert int(cache.length) == 14
    keys_BSKE = np.asarray(found.cache.tail.k[2])[:, :14].reshape(2, 14, 2, 12)
    np.testing.assert_allclose(cache.layers[2][0][:, :14], keys_BSKE, atol=CLOSE)


def test_scaled_positions_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    text = (checkpoint / "config.json").read_text()
    scaled: Any = '"rope_type": "llama3"'
    assert '"rope_type": "default"' in text
    (tmp_path / "config.json").write_text(text.replace('"rope_type": "default"', scaled))
    with pytest.raises(SystemExit, match="scaled rotary embeddings"):
        minimal.load(tmp_path)


def test_file_is_short_and_needs_no_library() -> None:
    text = FILE.read_text("utf-8")
    assert len(text.splitlines()) <= 200
    assert "import jaxllm" not in text and "from jaxllm" not in text


@pytest.mark.more
def test_command_writes_the_greedy_text() -> None:
    prompt = "Once upon a time"
    done = subprocess.run(
        [sys.executable, str(FILE), str(ROOT / "jaxllm/demo/llama"), prompt],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    text = jaxllm.load("demo:llama").generate(prompt, max_new_tokens=40, temperature=0).text
    assert done.stdout.rstrip("\n") == prompt + text
