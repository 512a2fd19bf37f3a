"""Training from stories to a directory that others load, on a model of one layer."""

import dataclasses
import json
from pathlib import Path

import demo_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import train_demo
import transformers
from demo_data import Phase, Told
from story_grammar import glimpse, stories, tell
from tokenizers import Tokenizer

import jaxllm
from jaxllm.train.data.rows import IGNORED
from jaxllm.weights.paths import flatten
from tests.twins import BOTH

WIDTH = 48
SHORT = Phase(steps=2, rows=2, width=WIDTH, tells=glimpse)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, short rows, few stories: seconds instead of minutes."""
    settings = {"VOCAB_SIZE": 600, "POSITIONS": 128, "HELD_OUT": 3, "TOKENIZED": 20, "MEASURED": 1}
    for name, value in settings.items():
        monkeypatch.setattr(train_demo, name, value)
    sizes = {"vocab_size": 600, "num_hidden_layers": 1, "max_position_embeddings": 128}
    for arch, config in train_demo.CONFIGS.items():
        monkeypatch.setitem(train_demo.CONFIGS, arch, dataclasses.replace(config, **sizes))
    lesson = train_demo.Lesson((SHORT,), cast=3.0, warm=1, floor=1.0)
    monkeypatch.setattr(train_demo, "lessons", lambda steps: (lesson,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_data.train_tokenizer(stories(20, 0), 600)


@pytest.mark.parametrize("arch", BOTH)
def test_a_trained_directory_loads_in_transformers(arch: str, tiny: None, tmp_path: Path) -> None:
    train_demo.make_model(arch, tmp_path, steps=1, seed=0)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / arch, output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == transformers.AutoConfig.from_pretrained(tmp_path / arch).dtype
    assert f"2 of 2 x {WIDTH} tokens" in (tmp_path / arch / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [arch]

    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / arch)("Once").input_ids
    ours = jaxllm.load(tmp_path / arch)
    assert ids == ours.tokenizer.encode("Once", bos=True)
    assert ours.tokenizer.adds_bos


def test_an_interrupted_lesson_goes_on_to_the_same_bits(
    tiny: None, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = jaxllm.build(train_demo.CONFIGS["llama"])
    start = train_demo.init_params(model, jax.random.key(0))
    (lesson,) = train_demo.lessons(1)
    whole = train_demo.learn(model, start, tokenizer, lesson, 0)
    batch = Told.batch

    def interrupted(self: Told, number: int) -> object:
        if number == 1:
            raise KeyboardInterrupt
        return batch(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(Told, "batch", interrupted)
        patched.setattr("jaxllm.train.loop.KEEP_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            train_demo.learn(model, start, tokenizer, lesson, 0, tmp_path / "work")
    resumed = train_demo.learn(model, start, tokenizer, lesson, 0, tmp_path / "work")
    again = dict(flatten(resumed))
    assert all(np.array_equal(array, again[path]) for path, array in flatten(whole))


def test_training_lowers_the_perplexity_of_unseen_stories(tiny: None, tokenizer: Tokenizer) -> None:
    model = jaxllm.build(train_demo.CONFIGS["llama"])
    phase = dataclasses.replace(SHORT, steps=16, rows=4, tells=tell)
    lesson = train_demo.Lesson((phase,), cast=1.0, warm=2, floor=1.0)
    held_out = train_demo.held_out_rows(tokenizer)
    untrained = train_demo.init_params(model, jax.random.key(0))
    trained = train_demo.learn(model, untrained, tokenizer, lesson, 0)
    before, after = (train_demo.perplexity(model, p, held_out) for p in (untrained, trained))
    assert before > 600  # no better than a guess
    assert after < before / 2


def test_the_loss_is_the_weighted_cross_entropy_of_torch(tiny: None, tokenizer: Tokenizer) -> None:
    model = jaxllm.build(train_demo.CONFIGS["gpt2"])
    params = train_demo.init_params(model, jax.random.key(0))
    rows = Told(tokenizer, (dataclasses.replace(SHORT, rows=4),), 0).batch(0)
    weight_V = np.random.default_rng(0).uniform(0.5, 3.0, 600).astype(np.float32)
    measured = train_demo.Weighted()(model, params, jnp.asarray(weight_V), rows, jax.random.key(0))
    logits = train_demo.run(model, params, rows).logits
    loss = torch.nn.functional.cross_entropy(
        torch.tensor(np.asarray(logits)).flatten(0, 1),
        torch.tensor(rows.label_BT).flatten().long(),
        weight=torch.tensor(weight_V),
        ignore_index=IGNORED,
    )
    assert measured.total / measured.weight == pytest.approx(float(loss), rel=1e-5)


def test_norms_start_at_one_biases_at_zero_and_tables_large(tiny: None) -> None:
    for config in train_demo.CONFIGS.values():
        model = jaxllm.build(config)
        for path, array in flatten(train_demo.init_params(model, jax.random.key(0))):
            leaf = np.asarray(array)
            if leaf.ndim == 1:
                assert (leaf == float(path.endswith("weight"))).all(), path
            else:
                large = "embed_tokens" in path or "wte" in path
                assert (0.09 if large else 0.005) < leaf.std() < (0.11 if large else 0.03), path


@pytest.mark.parametrize("arch", BOTH)
def test_heads_start_as_copies_of_what_they_look_at(arch: str) -> None:
    """With x of one token, attention adds `COPY` times x to it; q and k agree on what is alike."""
    sizes = {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 3}
    model = jaxllm.build(dataclasses.replace(train_demo.CONFIGS[arch], **sizes))
    params = dict(flatten(train_demo.init_params(model, jax.random.key(0))))
    D = model.config.hidden_size
    for layer in range(model.config.num_hidden_layers):
        if arch == "llama":
            q, k, v, o = (
                np.asarray(params[f"layers.{layer}.self_attn.{x}_proj.weight"]) for x in "qkvo"
            )
        else:
            q, k, v = np.split(np.asarray(params[f"h.{layer}.attn.c_attn.weight"]), 3)
            o = np.asarray(params[f"h.{layer}.attn.c_proj.weight"])
        copies, seeks = layer >= train_demo.COPIES_FROM, layer >= train_demo.SEEKS_FROM
        assert np.allclose(o @ v, train_demo.COPY * np.eye(D), atol=1e-5) == copies
        assert np.allclose(q.T @ k, train_demo.SEEK * np.eye(D), atol=1e-5) == seeks


def test_a_batch_depends_on_its_number_alone(tokenizer: Tokenizer) -> None:
    packed = Phase(steps=1, rows=3, width=64, packed=True)
    data, same = (Told(tokenizer, (SHORT, packed), 5) for _ in range(2))
    assert len(data) == 3
    assert data.digest == same.digest
    assert data.digest != Told(tokenizer, (SHORT, packed), 6).digest
    first, again, other = data.batch(1), same.batch(1), data.batch(0)
    assert np.array_equal(first.token_BT, again.token_BT)
    assert not np.array_equal(first.token_BT, other.token_BT)
    assert data.batch(2).token_BT.shape == (3, 64)


def test_rows_say_what_follows_each_token_and_ignore_padding(tokenizer: Tokenizer) -> None:
    phase = dataclasses.replace(SHORT, rows=40, width=128)
    rows = Told(tokenizer, (phase,), 0).batch(0)
    assert (rows.token_BT[:, 0] == demo_data.BOS_ID).all()
    padding = rows.token_BT == demo_data.PAD_ID
    assert padding.any()
    assert (rows.label_BT[:, :-1][~padding[:, 1:]] == rows.token_BT[:, 1:][~padding[:, 1:]]).all()
    assert (rows.label_BT[padding] == IGNORED).all()
    assert (rows.position_BT[padding] == -1).all()
    steps = np.diff(rows.position_BT, axis=1)[~padding[:, 1:]]
    assert (steps == 1).all()
    assert (rows.position_BT[:, 0] == 0).all()


def test_packed_rows_are_full_and_begin_with_a_story(tokenizer: Tokenizer) -> None:
    rows = Told(tokenizer, (Phase(1, 6, 512, packed=True),), 0).batch(0)
    assert not (rows.token_BT == demo_data.PAD_ID).any()
    assert (rows.token_BT[:, 0] == demo_data.BOS_ID).all()
    assert (rows.label_BT != IGNORED).all()
    assert (rows.position_BT == np.arange(512)).all()


def test_names_and_pronouns_are_one_token_each_with_a_space_or_without() -> None:
    tokenizer = demo_data.train_tokenizer(stories(300, 0), 1536)
    for word in demo_data.WHOLE:
        for text in (word, " " + word):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert len(ids) == 1, text
            assert ids[0] in demo_data.cast_ids(tokenizer)


def test_the_tokenizer_writes_any_text_and_knows_its_special_tokens(tokenizer: Tokenizer) -> None:
    text = "Mia ate 3 crêpes\n\t— 🦊 ok"
    encoded = tokenizer.encode(text).ids
    assert encoded[0] == demo_data.BOS_ID
    assert tokenizer.decode(encoded) == text
    assert tokenizer.encode(text, add_special_tokens=False).ids == encoded[1:]
    tree = json.loads(tokenizer.to_str())
    special = {token["content"]: token["id"] for token in tree["added_tokens"]}
    assert special == {"<|pad|>": 0, "<|bos|>": 1, "<|eos|>": 2}
