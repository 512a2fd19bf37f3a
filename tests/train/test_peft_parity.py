"""LoRA, DoRA and QLoRA training compared with PEFT: same start, same data, same losses."""

import copy
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from jaxllm import quantize
from jaxllm.adapters import (
    Adapter,
    LoraConfig,
    attach_adapter,
    extract_adapter,
    init_adapter,
    read_adapter,
    write_adapter,
)
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import combine, partition
from jaxllm.train.step import Setup, init_state, train_step
from jaxllm.weights.formats import to_dense, weight_format
from jaxllm.weights.paths import Params, flatten
from tests.tiny_models import Twin, make_twin, tokens

STEPS, RATE = 10, 1e-2
ADAPTERS = ((r".*\.weight\.(a|b|magnitude)", True),)
BLOCKS = r"(layers|h)\..*"  # embeddings and the head stay unquantized, as in QLoRA
ADAMW: dict[str, Any] = {
    "schedule": "constant",
    "warmup": 0.0,
    "max_grad_norm": None,
    "weight_decay": 0.1,
}
GPT2 = {"family": "gpt2", "lora": LoraConfig(r=3, lora_alpha=7)}
# For each case: the family, the LoRA options and the weight format of the base model.
CASES: dict[str, dict[str, Any]] = {
    "lora": {
        "lora": LoraConfig(
            r=3,
            lora_alpha=7,
            target_modules=["q_proj", "v_proj", "down_proj", "embed_tokens"],
            rank_pattern={"v_proj": 2},
            use_rslora=True,
        )
    },
    "dora": {"lora": LoraConfig(r=2, lora_alpha=5, use_dora=True)},
    "qlora": {"lora": LoraConfig(r=3, lora_alpha=7), "base": "nf4"},
    "gpt2-lora": GPT2,
    "gpt2-dora": {"family": "gpt2", "lora": LoraConfig(r=2, lora_alpha=5, use_dora=True)},
    "gpt2-qlora": {**GPT2, "base": "nf4"},
}
EACH = [pytest.param(n, marks=[pytest.mark.full] if "gpt2" in n else []) for n in CASES]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Twin]:
    return {
        family: make_twin(tmp_path_factory.mktemp(family), family, spread=0.15)
        for family in ("llama", "gpt2")
    }


def batch(number: int) -> Rows:
    """Return rows `[1, 2, 9]` of two texts; the second has ignored labels and padding."""
    ids = tokens(2, 10, number % 3)
    label = ids[:, 1:].copy()
    label[1, :2] = label[1, 7:] = IGNORED
    position = np.broadcast_to(np.arange(9), (2, 9)).copy()
    position[1, 7:] = -1
    document = np.where(position < 0, -1, 0)
    return Rows(*(np.asarray(x, np.int32)[None] for x in (ids[:, :-1], label, position, document)))


def train_ours(twin: Twin, params: Params, adapter: Adapter) -> tuple[list[float], Adapter]:
    """Return our losses and the trained adapter."""
    setup = Setup(twin.model, NextToken(), Optimizer(steps=STEPS, lr=RATE, eps=1e-6, **ADAMW))
    trained, rest = partition(attach_adapter(twin.config, params, adapter), ADAPTERS)
    state, losses, key = init_state(trained, setup), [], jax.random.key(0)
    for number in range(STEPS):
        state, metrics = train_step(state, rest, None, batch(number), key, setup=setup)
        losses.append(float(metrics.loss))
    return losses, extract_adapter(twin.config, combine(state.trained, rest), adapter.config)


def load_peft(twin: Twin, params: Params, directory: Path) -> Any:
    """Load the adapter of a directory with PEFT, on the dequantized base weights."""
    model = copy.deepcopy(twin.torch_model)
    gpt2 = twin.config.model_type == "gpt2"
    prefix = "transformer." if gpt2 else "model."
    with torch.no_grad():
        for path, leaf in flatten(params):
            if weight_format(leaf) == "nf4":  # GPT-2 keeps its linears as [in, out]
                array = np.array(to_dense(leaf, jnp.float32))
                model.get_parameter(prefix + path).copy_(torch.tensor(array.T if gpt2 else array))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, str(directory), is_trainable=True)


def train_peft(model: Any) -> list[float]:
    """Train the adapter of the PEFT model in place and return the losses."""
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.ndim >= 2], "weight_decay": ADAMW["weight_decay"]},
        {"params": [p for p in learned if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw, losses = torch.optim.AdamW(groups, lr=RATE, eps=1e-6), []
    for number in range(STEPS):
        rows = batch(number)
        ids, labels = (torch.tensor(x[0].astype(np.int64)) for x in (rows.token_BT, rows.label_BT))
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", EACH)
def test_adapter_training_equals_peft(twins: dict[str, Twin], name: str, tmp_path: Path) -> None:
    """Losses of ten AdamW steps and the trained adapter equal PEFT, from the same
    start and data.
    """
    case = CASES[name]
    twin = twins[case.get("family", "llama")]
    params = twin.params
    if "base" in case:
        params = quantize(params, [(BLOCKS, case["base"])])
    before = init_adapter(twin.config, params, case["lora"], jax.random.key(1))
    write_adapter(tmp_path / "start", before, twin.config)
    peer = load_peft(twin, params, tmp_path / "start")

    losses, after = train_ours(twin, params, before)
    np.testing.assert_allclose(losses, train_peft(peer), rtol=2e-5)
    assert losses[-1] < 0.95 * losses[0]  # training made progress

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.save_pretrained(tmp_path / "end")
    found = read_adapter(tmp_path / "end", twin.config)
    assert found.matrices.keys() == after.matrices.keys()
    for module, matrices in after.matrices.items():
        for field in matrices._fields:
            actual, expected = (getattr(m, field) for m in (matrices, found.matrices[module]))
            if actual is not None:
                message = f"{module}.{field}"
                np.testing.assert_allclose(actual, expected, atol=RATE * 0.02, err_msg=message)
                moved = np.abs(np.asarray(actual - getattr(before.matrices[module], field)))
                assert moved.max() > RATE, message
