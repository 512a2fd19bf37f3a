"""PEFT adapter files in both directions, with equal logits."""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxllm import forward
from jaxllm.adapters import (
    LoraConfig,
    init_adapter,
    merge_adapter,
    read_adapter,
    write_adapter,
)
from jaxllm.adapters.targets import list_targets, resolve_targets
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import FAMILIES, build
from jaxllm.models.moe import MoEConfig
from tests.adapters.random_adapters import load_in_peft, random_adapter, with_one
from tests.tiny_models import (
    LATENTS,
    RECURRENT,
    Twin,
    assert_close,
    load_twin,
    make_twin,
    save_random,
    tokens,
)

LINEARS = ["q_proj", "v_proj", "down_proj"]
# Model family and PEFT's LoRA options.
PEFT_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
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
    "fused": (
        "phi3",
        {
            "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"],
            "r": 3,
            "lora_alpha": 7,
            "rank_pattern": {"qkv_proj": 4},
        },
    ),
    "fused-dora": (
        "gpt_neox",
        {"target_modules": ["query_key_value", "lm_head"], "r": 2, "use_dora": True},
    ),
    "paired-dora": (
        "glm4",
        {"target_modules": ["q_proj", "k_proj", "gate_up_proj"], "r": 3, "use_dora": True},
    ),
    "tied": ("gpt2", {"target_modules": ["wte", "lm_head", "wpe"], "r": 3}),
}
TOKENS = tokens(2, 9)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Twin]:
    return {
        family: make_twin(tmp_path_factory.mktemp(family), family)
        for family in ("llama", "gpt2", "phi3", "gpt_neox", "glm4")
    }


def adapted_by_peft(twin: Twin, seed: int = 0, **options: Any) -> Any:
    """Return PEFT's model of a twin with a fully random adapter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        twin.directory, attn_implementation="eager"
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
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


# Together these cover every feature; the full suite also runs the others.
DAILY = (
    "patterns",
    "tables",
    "layers",
    "conv1d-dora",
    "fused",
    "fused-dora",
    "paired-dora",
    "tied",
)


@pytest.mark.parametrize(
    "name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.full) for n in PEFT_OPTIONS]
)
def test_peft_checkpoints_round_trip_with_equal_logits(
    twins: dict[str, Twin], name: str, tmp_path: Path
) -> None:
    """Adapters written by PEFT give PEFT's logits here, merged or not, and PEFT loads the adapters
    written here bit for bit.
    """
    family, options = PEFT_OPTIONS[name]
    twin = twins[family]
    theirs = adapted_by_peft(twin, **options)
    directory = saved(theirs, tmp_path / "theirs")
    adapter = read_adapter(directory, twin.config, twin.params)
    expected = peft_logits(theirs)
    chosen = with_one(twin.config, twin.params, adapter)
    assert_close(forward(twin.model, chosen, None, TOKENS).logits, expected)
    config, one = merge_adapter(twin.config, chosen)
    assert config.tie_word_embeddings is name.startswith("conv1d")  # others are untied now
    assert_close(forward(build(config), one, None, TOKENS).logits, expected)
    assert np.abs(expected - twin.logits(TOKENS)).max() > 0.1

    write_adapter(tmp_path / "ours", adapter, twin.config, base=str(twin.directory))
    again = load_in_peft(twin, tmp_path / "ours")
    np.testing.assert_array_equal(peft_logits(again), expected)
    kept = load_file(directory / "adapter_model.safetensors")
    for key, tensor in load_file(tmp_path / "ours/adapter_model.safetensors").items():
        np.testing.assert_array_equal(tensor, kept[key])


EACH_FAMILY = [
    pytest.param(f, marks=pytest.mark.more if f in RECURRENT else pytest.mark.full)
    for f in FAMILIES
]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_adapters_of_each_family_equal_peft(family: str, tmp_path: Path) -> None:
    """On all linears; with experts, which PEFT would adapt too, on those of attention or more.
    `kv_b_proj` of latent attention is refused, since it is two linears of heads here.
    """
    save_random(tmp_path, family)
    twin = load_twin(tmp_path)
    output = "out_proj" if family == "lfm2_moe" else "o_proj"
    linears = ["q_proj", output] if isinstance(twin.config, MoEConfig) else "all-linear"
    if family == "qwen3_next":  # runs of two fused linears
        linears = [*linears, "in_proj_qkvz", "in_proj_ba"]
    if family in LATENTS:
        query = ["q_a_proj", "q_b_proj"] if twin.config.q_lora_rank else ["q_proj"]
        linears = [*query, "kv_a_proj_with_mqa", "o_proj"]
        refused = adapted_by_peft(twin, seed=1, target_modules=["kv_b_proj"], r=2)
        with pytest.raises(CheckpointError, match="'kv_b_proj' matches no module"):
            read_adapter(saved(refused, tmp_path / "refused"), twin.config, twin.params)
    theirs = adapted_by_peft(twin, seed=1, target_modules=linears, r=2)
    adapter = read_adapter(saved(theirs, tmp_path / "theirs"), twin.config, twin.params)
    chosen = with_one(twin.config, twin.params, adapter)
    assert_close(forward(twin.model, chosen, None, TOKENS).logits, peft_logits(theirs))


def test_separate_adapters_write_as_fused_module(twins: dict[str, Twin], tmp_path: Path) -> None:
    """Separate adapters of q, v and gate_up, with different ranks, are written as PEFT's fused
    modules with equal logits.
    """
    twin = twins["phi3"]
    lora = LoraConfig(
        r=2, lora_alpha=6, target_modules=("q_proj", "v_proj", "gate_up_proj"),
        rank_pattern={"v_proj": 3},
    )  # fmt: skip
    adapter = random_adapter(twin.config, twin.params, lora)
    chosen = with_one(twin.config, twin.params, adapter)
    ours = forward(twin.model, chosen, None, TOKENS).logits
    write_adapter(tmp_path / "ours", adapter, twin.config, base=str(twin.directory))
    assert json.loads((tmp_path / "ours/adapter_config.json").read_text())["target_modules"] == [
        "gate_up_proj", "qkv_proj",
    ]  # fmt: skip
    assert_close(ours, peft_logits(load_in_peft(twin, tmp_path / "ours")))
    dora = LoraConfig(r=2, target_modules=("q_proj",), use_dora=True)
    adapter = random_adapter(twin.config, twin.params, dora)
    with pytest.raises(ConfigError, match=r"DoRA on .*q_proj alone cannot be written for PEFT"):
        write_adapter(tmp_path / "dora", adapter, twin.config)


@pytest.mark.parametrize(
    "regex",
    [
        r"^(?!.*lm_head).*\.(q_proj|up_proj)$",
        r"model\.layers\.(?!1\.).*(?<!down)_proj",
        r".*\.(q|k)_proj(?=$)",
        r".*\.(?P<x>\w)(?P=x)?_proj",
        r"model\.layers\.\d+\.(?>mlp|self_attn)\.(?:up|o)_proj",
    ],
)
def test_target_regexes_match_like_peft(twins: dict[str, Twin], regex: str) -> None:
    """Lookaround regexes match PEFT's modules in target_modules, exclude_modules, rank_pattern and
    alpha_pattern.
    """
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    config = twins["llama"].config
    names = {target.name for target in list_targets(config).values()}

    def chosen(**options: Any) -> set[str]:
        return {low.target.name for low in resolve_targets(config, LoraConfig(**options)).values()}

    def by_peft(**options: Any) -> set[str]:
        theirs = peft.LoraConfig(**options)
        return {name for name in names if check_target_module_exists(theirs, name) is True or (
            isinstance(check_target_module_exists(theirs, name), re.Match)
        )}  # fmt: skip

    assert chosen(target_modules=regex) == by_peft(target_modules=regex) != set()
    options = {"target_modules": ["q_proj", "up_proj", "down_proj"], "exclude_modules": regex}
    assert chosen(**options) == by_peft(**options)
    patterns = {regex.removeprefix("^").removesuffix("$"): 3, "gate_proj": 5}
    lora = LoraConfig(r=2, target_modules=".*", rank_pattern=patterns, alpha_pattern=patterns)
    for low in resolve_targets(config, lora).values():
        expected = patterns.get(get_pattern_key(patterns.keys(), low.target.name))
        assert low.rank == (expected or 2), low.target.name
        assert low.alpha == (expected or 8), low.target.name


@pytest.fixture(scope="module")
def written(twins: dict[str, Twin], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid adapter directory."""
    twin = twins["llama"]
    directory = tmp_path_factory.mktemp("adapter") / "a"
    lora = LoraConfig(r=2, target_modules=("q_proj", "up_proj"))
    write_adapter(
        directory, init_adapter(twin.config, twin.params, lora, jax.random.key(0)), twin.config
    )
    return directory


def copy_changed(written: Path, target: Path, changes: dict[str, Any]) -> None:
    """Copy an adapter directory and change its configuration."""
    data = json.loads((written / "adapter_config.json").read_text(encoding="utf-8"))
    (target / "adapter_config.json").write_text(json.dumps({**data, **changes}))
    shutil.copy(written / WEIGHTS, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"bias": "all"}, "bias must be 'none', got 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"target_parameters": ["x"]}, "target_parameters is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is not supported"),
        (
            {"use_qalora": True, "arrow_config": {"k": 1}},
            "use_qalora is not supported (got True); ",
        ),
        ({"of_the_future": 3}, "of_the_future is not supported (got 3)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' requires a modified base"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": ["c_attn"]}, "not an adapter for this model: target_modules: 'c_attn'"),
        ({"target_modules": r"q_proj(?=x"}, "target_modules: 'q_proj(?=x' is not a valid regex"),
        (
            {"target_modules": r"(?=m)((\w|\w\w|\.)+)+y"},
            r"target_modules takes too long: '(?=m)((\\w|\\w\\w|\\.)+)+y'",
        ),
        ({"r": 3}, "q_proj.lora_A.weight has shape (2, 40), expected (3, 40)"),
        ({"r": 1.5}, "r must be a whole number"),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing"),
        (
            {"target_modules": ["q_proj"]},
            "up_proj.lora_A.weight is not covered by its adapter_config",
        ),
        ({"target_modules": ["k_proj"]}, "is an adapter for another model: no tensor"),
    ],
)
def test_unsupported_peft_config_is_refused(
    twins: dict[str, Twin], written: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A PEFT configuration that is unsupported or does not fit the model or its tensors raises an
    error that names the field.
    """
    copy_changed(written, tmp_path, changes)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path, twins["llama"].config)
    assert message in str(caught.value)
    assert all(name in str(caught.value) for name in changes if "supported" in message)


def test_unused_peft_fields_are_accepted(
    twins: dict[str, Twin], written: Path, tmp_path: Path
) -> None:
    """Configuration fields that change nothing are accepted."""
    more = {
        "megatron_core": "megatron.core",
        "loftq_config": {},
        "modules_to_save": [],
        "qalora_group_size": 16,
        "trainable_token_indices": None,
        "of_the_future": None,
        "init_lora_weights": "eva",
    }
    copy_changed(written, tmp_path, more)
    assert read_adapter(tmp_path, twins["llama"].config).config.r == 2


def test_missing_or_damaged_adapter_files_are_refused(
    twins: dict[str, Twin], written: Path, tmp_path: Path
) -> None:
    """Missing files, pickles, NaN, a changed embedding table and an occupied output directory raise
    errors.
    """
    config = twins["llama"].config
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, config)
    (tmp_path / "adapter_config.json").write_bytes((written / "adapter_config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        read_adapter(tmp_path, config)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a pickle"):
        read_adapter(tmp_path, config)
    tensors = load_file(written / WEIGHTS)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] * np.nan}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="holds nan at index 0"):
        read_adapter(tmp_path, config)
    table = np.zeros((131, 40), np.float32)
    prefix = "base_model.model.model.embed_tokens.base_layer.weight"
    save_file({**tensors, prefix: table}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="differs from this model's embedding"):
        read_adapter(tmp_path, config, twins["llama"].params)
    with pytest.raises(CheckpointError, match="already holds an adapter"):
        write_adapter(written, read_adapter(written, config), config)
