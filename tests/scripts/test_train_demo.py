"""Training from stories to a directory that others load, on a model of one layer."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import demo_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_demo
import transformers
from story_grammar import stories
from tokenizers import Tokenizer

import jaxllm
from jaxllm.weights.paths import flatten
from tests.twins import BOTH


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One layer, short rows, few stories: seconds instead of minutes."""
    settings = {"VOCAB_SIZE": 400, "POSITIONS": 64, "BATCH": 2, "HELD_OUT": 3, "TOKENIZED": 20}
    for name, value in settings.items():
        monkeypatch.setattr(train_demo, name, value)
    sizes = {"vocab_size": 400, "num_hidden_layers": 1, "max_position_embeddings": 64}
    for arch, config in train_demo.CONFIGS.items():
        monkeypatch.setitem(train_demo.CONFIGS, arch, dataclasses.replace(config, **sizes))
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its counter with floats
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_data.train_tokenizer(stories(20, 0), 400)


@pytest.mark.parametrize("arch", BOTH)
def test_a_trained_directory_loads_in_transformers(arch: str, tiny: None, tmp_path: Path) -> None:
    train_demo.make_model(arch, tmp_path, steps=2, seed=0)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / arch, output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == transformers.AutoConfig.from_pretrained(tmp_path / arch).dtype
    assert "steps 2" in " ".join((tmp_path / arch / "README.md").read_text().split()).replace(
        "| ", ""
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [arch]

    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / arch)("Once").input_ids
    ours = jaxllm.load(tmp_path / arch)
    assert ids == ours.tokenizer.encode("Once", bos=True)
    assert ours.tokenizer.adds_bos


@pytest.mark.full
def test_training_is_a_function_of_the_seed(tiny: None) -> None:
    model = jaxllm.build(train_demo.CONFIGS["llama"])
    _, rows, _ = train_demo.make_data(3, 0)
    first, again, other = (dict(flatten(train_demo.train(model, rows, s))) for s in (0, 0, 1))
    assert all(jnp.array_equal(first[path], again[path]) for path in first)
    assert not any(jnp.array_equal(first[path], other[path]) for path in first if "proj" in path)


def test_training_lowers_the_perplexity_of_unseen_stories(tiny: None) -> None:
    model = jaxllm.build(train_demo.CONFIGS["llama"])
    _, rows, held_out = train_demo.make_data(20, 0)
    untrained = train_demo.init_params(model, jax.random.key(0))
    trained = train_demo.train(model, rows, 0)
    before, after = (train_demo.perplexity(model, p, held_out) for p in (untrained, trained))
    assert before == pytest.approx(400, rel=0.1)  # as good as a guess
    assert after < before / 2


def test_the_loss_ignores_padding(tiny: None) -> None:
    model = jaxllm.build(train_demo.CONFIGS["gpt2"])
    params = train_demo.init_params(model, jax.random.key(0))
    row = np.arange(3, 30, dtype=np.int32)[None]
    short, padded = (demo_data.pad(row.tolist(), length) for length in (27, 40))
    (loss, count), (padded_loss, padded_count) = (
        train_demo.sum_loss(params, model, jnp.asarray(rows)) for rows in (short, padded)
    )
    assert count == padded_count == 26
    assert loss == pytest.approx(float(padded_loss), rel=1e-6)


def test_norms_start_at_one_and_biases_at_zero(tiny: None) -> None:
    for config in train_demo.CONFIGS.values():
        model = jaxllm.build(config)
        for path, array in flatten(train_demo.init_params(model, jax.random.key(0))):
            leaf = np.asarray(array)
            if leaf.ndim == 1:
                assert (leaf == float(path.endswith("weight"))).all(), path
            else:
                assert 0.005 < leaf.std() < 0.03, path


def test_rows_hold_whole_stories_and_every_row_begins_with_one(tokenizer: Tokenizer) -> None:
    encoded = demo_data.encode(tokenizer, list(stories(50, 3)))
    rows = demo_data.pack(encoded, 513)
    assert rows.shape[1] == 513
    assert not (rows == demo_data.PAD_ID).any()
    assert (rows[:, 0] == demo_data.BOS_ID).all()
    begun = int((rows == demo_data.BOS_ID).sum())
    ended = int((rows == demo_data.EOS_ID).sum())
    assert begun - len(rows) <= ended <= begun


def test_the_tokenizer_writes_any_text_and_knows_its_special_tokens(tokenizer: Tokenizer) -> None:
    text = "Mia ate 3 crêpes\n\t— 🦊 ok"
    encoded = tokenizer.encode(text).ids
    assert encoded[0] == demo_data.BOS_ID
    assert tokenizer.decode(encoded) == text
    assert tokenizer.encode(text, add_special_tokens=False).ids == encoded[1:]
    tree = json.loads(tokenizer.to_str())
    special = {token["content"]: token["id"] for token in tree["added_tokens"]}
    assert special == {"<|pad|>": 0, "<|bos|>": 1, "<|eos|>": 2}
