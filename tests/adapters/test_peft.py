"""PEFT's files both ways, with equal logits: PEFT loads ours, and we load what it wrote."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxllm import forward
from jaxllm.adapters import (
    attached,
    choose,
    merged,
    read_adapter,
    with_adapters,
    write_adapter,
)
from jaxllm.models import build
from tests.twins import Twin, assert_close, load_twin, save_random, tokens

LINEARS = ["q_proj", "v_proj", "down_proj"]
# What PEFT is asked to make, over which model.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": LINEARS, "r": 3, "lora_alpha": 7}),
    "patterns": (
        "llama",
        {
            "target_modules": r".*\.(q_proj|up_proj)",
            "rank_pattern": {"up_proj": 5},
            "alpha_pattern": {r"self_attn\.q_proj": 2.5},
            "use_rslora": True,
        },
    ),
    "dora": ("llama", {"target_modules": "all-linear", "r": 2, "use_dora": True}),
    "tables": (
        "llama",
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "r": 4, "use_dora": True},
    ),
    "layers": (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj"],
            "layers_to_transform": [0],
            "layers_pattern": "layers",
            "exclude_modules": ["k_proj"],
        },
    ),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
    "conv1d-dora": (
        "gpt2",
        {"target_modules": "all-linear", "fan_in_fan_out": True, "use_dora": True},
    ),
    "tied": ("gpt2", {"target_modules": ["wte", "lm_head", "wpe"], "r": 3}),
}
TOKENS = tokens(2, 9)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Twin]:
    made = {}
    for family, layers in (("llama", "num_hidden_layers"), ("gpt2", "n_layer")):
        directory = tmp_path_factory.mktemp(family)
        save_random(directory, family, **{layers: 1})
        made[family] = load_twin(directory)
    return made


def adapted_by_peft(twin: Twin, seed: int = 0, **asked: Any) -> Any:
    """PEFT's model over a twin, every number of its adapter random."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        twin.directory, attn_implementation="eager"
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **asked))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return made.eval()


def saved(model: Any, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    return directory


def peft_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor(TOKENS)).logits.numpy()
    return found


def ours(twin: Twin, params: Any) -> Any:
    return forward(twin.model, params, None, TOKENS).logits


@pytest.mark.parametrize("name", ASKED)
def test_we_read_what_peft_wrote_and_it_reads_what_we_write(
    twins: dict[str, Twin], name: str, tmp_path: Path
) -> None:
    family, asked = ASKED[name]
    twin = twins[family]
    theirs = adapted_by_peft(twin, **asked)
    directory = saved(theirs, tmp_path / "theirs")
    adapter = read_adapter(directory, twin.config, twin.params)
    expected = peft_logits(theirs)
    assert_close(ours(twin, attached(twin.config, twin.params, adapter)), expected)
    stacked = with_adapters(twin.config, twin.params, {"x": adapter})
    assert_close(ours(twin, choose(stacked, np.zeros(1, np.int32))), expected)  # type: ignore[arg-type]
    assert np.abs(expected - twin.logits(TOKENS)).max() > 0.1

    write_adapter(tmp_path / "ours", adapter, twin.config, base=str(twin.directory))
    base = transformers.AutoModelForCausalLM.from_pretrained(
        twin.directory, attn_implementation="eager"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    np.testing.assert_array_equal(peft_logits(again), expected)
    kept = {k: v for k, v in load_file(directory / "adapter_model.safetensors").items()}
    for key, tensor in load_file(tmp_path / "ours/adapter_model.safetensors").items():
        np.testing.assert_array_equal(tensor, kept[key])


@pytest.mark.parametrize("name", ["dora", "conv1d", "tied", "tables"])
def test_merged_is_as_beside_the_weights(twins: dict[str, Twin], name: str, tmp_path: Path) -> None:
    family, asked = ASKED[name]
    twin = twins[family]
    directory = saved(adapted_by_peft(twin, **asked), tmp_path / "theirs")
    adapter = read_adapter(directory, twin.config, twin.params)
    params = attached(twin.config, twin.params, adapter)
    config, one = merged(twin.config, params)
    assert config.tie_word_embeddings is (name == "conv1d")
    beside = np.asarray(ours(twin, params))
    assert_close(forward(build(config), one, None, TOKENS).logits, beside)
