"""Demo training, from stories to a loadable directory, with a one-layer model."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

import jaxllm
from jaxllm.train.data.rows import IGNORED
from scripts.demo_models import demo_data, train_demo
from scripts.demo_models.demo_data import Phase, StoryData
from scripts.demo_models.story_grammar import draw_glimpse, draw_stories
from tests.tiny_models import BOTH

WIDTH = 48
SHORT = Phase(steps=2, rows=2, width=WIDTH, draw_text=draw_glimpse)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one layer, short rows and few stories, to train in seconds."""
    settings = {"VOCAB_SIZE": 600, "POSITIONS": 128, "HELD_OUT": 3, "TOKENIZED": 20, "MEASURED": 1}
    for name, value in settings.items():
        monkeypatch.setattr(train_demo, name, value)
    sizes = {"vocab_size": 600, "num_hidden_layers": 1, "max_position_embeddings": 128}
    for arch, config in train_demo.CONFIGS.items():
        monkeypatch.setitem(train_demo.CONFIGS, arch, dataclasses.replace(config, **sizes))
    run = train_demo.TrainRun((SHORT,), cast_weight=3.0, warmup=1, floor=1.0)
    monkeypatch.setattr(train_demo, "make_runs", lambda steps: (run,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_data.train_tokenizer(draw_stories(20, 0), 600)


@pytest.mark.parametrize("arch", BOTH)
def test_trained_directory_loads_in_transformers(arch: str, tiny: None, tmp_path: Path) -> None:
    """A trained model loads in transformers and jaxllm with dtype, README and equal ids."""
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


def test_weighted_loss_equals_torch_cross_entropy(tiny: None, tokenizer: Tokenizer) -> None:
    model = jaxllm.build(train_demo.CONFIGS["gpt2"])
    params = train_demo.init_params(model, jax.random.key(0))
    rows = StoryData(tokenizer, (dataclasses.replace(SHORT, rows=4),), 0).batch(0)
    weight_V = np.random.default_rng(0).uniform(0.5, 3.0, 600).astype(np.float32)
    measured = train_demo.WeightedLoss()(
        model, params, jnp.asarray(weight_V), rows, jax.random.key(0)
    )
    logits = train_demo.forward(model, params, rows).logits
    loss = torch.nn.functional.cross_entropy(
        torch.tensor(np.asarray(logits)).flatten(0, 1),
        torch.tensor(rows.label_BT).flatten().long(),
        weight=torch.tensor(weight_V),
        ignore_index=IGNORED,
    )
    assert measured.total / measured.weight == pytest.approx(float(loss), rel=1e-5)


def test_labels_are_next_tokens_and_ignore_padding(tokenizer: Tokenizer) -> None:
    phase = dataclasses.replace(SHORT, rows=40, width=128)
    rows = StoryData(tokenizer, (phase,), 0).batch(0)
    assert (rows.token_BT[:, 0] == demo_data.BOS_ID).all()
    padding = rows.token_BT == demo_data.PAD_ID
    assert padding.any()
    assert (rows.label_BT[:, :-1][~padding[:, 1:]] == rows.token_BT[:, 1:][~padding[:, 1:]]).all()
    assert (rows.label_BT[padding] == IGNORED).all()
    assert (rows.position_BT[padding] == -1).all()
    steps = np.diff(rows.position_BT, axis=1)[~padding[:, 1:]]
    assert (steps == 1).all()
    assert (rows.position_BT[:, 0] == 0).all()
