"""Tiny random models of all families, and the same models in transformers.

Every tensor is random, and sizes are coprime where possible, so that confused axes raise errors.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxllm import models
from jaxllm.checkpoints.native import load_params
from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.config.model import ModelConfig
from jaxllm.convert.hf import open_hf, read_config
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.precision import Precision

VOCAB = 131

# If both families run the same code, GPT-2 runs only in `make test-full`; in `make test` it runs in
# the one or two tests of each file that would reveal a fault specific to GPT-2.
BOTH = ["llama", pytest.param("gpt2", marks=pytest.mark.full)]

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 97,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 40,
    "n_layer": 3,
    "n_head": 8,
    "n_inner": 52,
    "n_positions": 97,
    "layer_norm_epsilon": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# RoPE settings of config.json.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 40,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}  # fmt: skip
SQUARE = {**{k: v for k, v in LLAMA.items() if k != "head_dim"}, "hidden_size": 48}
GEMMA = {**LLAMA, "query_pre_attn_scalar": 9, "sliding_window": 5, "pad_token_id": 0}
LATENT = {
    **SQUARE,
    "num_key_value_heads": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
LATENT_MOE = {
    **LATENT,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
# model_type -> (class name prefix in transformers, tiny configuration).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "mistral": ("Mistral", LLAMA),
    "gpt2": ("GPT2", GPT2),
    "qwen2": (
        "Qwen2",
        {**SQUARE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", LLAMA),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3_text": ("Gemma3", {**GEMMA, "sliding_window_pattern": 3}),
    "gemma4_text": (
        "Gemma4",
        {
            **LLAMA,
            "global_head_dim": 12,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,  # its root is a power of two, as published
            "sliding_window": 5,
            "final_logit_softcapping": 30.0,
            "pad_token_id": 0,
        },
    ),
    "phi3": (
        "Phi3",
        {
            **SQUARE,
            "pad_token_id": 0,
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1],
                "long_factor": [2.0, 3.5],
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 40,
            },
        },
    ),
    "olmo2": ("Olmo2", SQUARE),
    "olmo3": (
        "Olmo3",
        {
            **SQUARE,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": ROPES["yarn"],
                "sliding_attention": ROPES["default"],
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            **LLAMA,
            "rope_parameters": {
                **ROPES["yarn"],
                "original_max_position_embeddings": 8,
                "max_position_embeddings": 97,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "smollm3": ("SmolLM3", {**SQUARE, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "mixtral": (
        "Mixtral",
        {
            **SQUARE,
            "num_hidden_layers": 2,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SQUARE,
            "num_hidden_layers": 2,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **SQUARE,
            "head_dim": 6,
            "num_hidden_layers": 2,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 1.5,
            "rope_parameters": {**ROPES["yarn"], "truncate": False},
        },
    ),
    "granite": (
        "Granite",
        {
            **SQUARE,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5",
        {
            **LLAMA,
            "head_dim": 16,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            **{k: v for k, v in SQUARE.items() if k != "rms_norm_eps"},
            "norm_eps": 1e-3,
            "block_multiple_of": 8,
            "full_attn_idxs": [1],
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **{k: v for k, v in SQUARE.items() if k != "rms_norm_eps"},
            "norm_eps": 1e-3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe",
        {
            **{k: v for k, v in LLAMA.items() if k != "intermediate_size"},
            "num_hidden_layers": 2,
            "head_dim": 24,
            # In the other order, rounding grows beyond the tests' bounds, in transformers too.
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 4,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **LLAMA,
            "num_hidden_layers": 2,
            "head_dim": 24,
            "hidden_act": "gelu",  # also of the convolution
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 4,
            "mlp_only_layers": [0],
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "glm4": ("Glm4", {**LLAMA, "head_dim": 12, "pad_token_id": 0}),  # 6 rotated dimensions
    "seed_oss": ("SeedOss", {**LLAMA, "pad_token_id": 0}),
    "ernie4_5": ("Ernie4_5", LLAMA),
    "exaone4": ("Exaone4", {**SQUARE, "sliding_window": 5, "sliding_window_pattern": 3}),
    "cohere2": (
        "Cohere2",
        {
            **{k: v for k, v in SQUARE.items() if k != "rms_norm_eps"},
            "layer_norm_eps": 1e-3,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "pad_token_id": 0,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **SQUARE,
            "shared_intermediate_size": 56,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoehybrid_moe": (
        "GraniteMoeHybrid",
        {
            **SQUARE,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "shared_intermediate_size": 28,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **LLAMA,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT_MOE,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT_MOE,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": {**ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT_MOE, "pad_token_id": 0}),
    "minicpm3": (
        "MiniCPM3",
        {**LATENT, "v_head_dim": 7, "scale_emb": 3, "scale_depth": 1.3, "dim_model_base": 24},
    ),
    "gpt_neox": (
        "GPTNeoX",
        {
            **{k: v for k, v in SQUARE.items() if k not in ("num_key_value_heads", "rms_norm_eps")},
            "hidden_size": 40,
            "num_attention_heads": 5,
            "layer_norm_eps": 1e-3,
            "rotary_pct": 0.75,
            "rotary_emb_base": 500.0,
        },
    ),
}

# Settings with which a family has bits that depend on a row alone, if not its own.
INVARIANT: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
}
# Families with recurrent layers.
RECURRENT = (
    "qwen3_5_text", "lfm2", "granitemoehybrid", "granitemoehybrid_moe", "lfm2_moe",
    "qwen3_5_moe_text", "qwen3_next",
)  # fmt: skip
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")  # with latent attention
# These share code with the remaining families, which cover them in the daily tests.
SHARED_CODE = (
    "qwen2", "qwen3", "gemma3_text", "olmo2", "olmo3", "ministral3", "smollm3", "granite",
    "granitemoehybrid_moe", "qwen3_moe", "qwen3_next", "glm4", "glm4_moe", "seed_oss", "ernie4_5",
    "exaone4", "deepseek_v2", "glm4_moe_lite", "minicpm3", "lfm2_moe", "qwen3_5_moe_text",
)  # fmt: skip


def each_family(names: Iterable[str]) -> list[Any]:
    """Return a parameter for each family; `make test-full` runs those of shared code."""
    return [pytest.param(n, marks=[pytest.mark.full] if n in SHARED_CODE else []) for n in names]


def marks_of(family: str, daily: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test's family, of which `make test` runs one."""
    later = pytest.mark.full if family in SHARED_CODE else pytest.mark.more
    return [] if family == daily else [later]


@dataclasses.dataclass(frozen=True)
class Twin:
    """One checkpoint directory, loaded by transformers and by jaxllm."""

    directory: Path
    torch_model: Any
    config: ModelConfig
    model: Any
    params: Params

    def logits(self, tokens_BT: np.ndarray, **kwargs: Any) -> np.ndarray:
        """Return the float32 logits of transformers."""
        import torch

        with torch.no_grad():
            out = self.torch_model(torch.tensor(np.asarray(tokens_BT, np.int64)), **kwargs)
        return out.logits.float().numpy()


def theirs(family: str, **changes: Any) -> Any:
    """Return the transformers configuration of a tiny model."""
    kind, base = KINDS[family]
    text = "Text" if family.endswith("_text") else ""
    fields = {**base, **changes}
    if "layer_types" in base:  # a type for each layer
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    if (
        "num_kv_shared_layers" in base.keys() - changes.keys()
    ):  # a layer of each type is left to read from
        fields["num_kv_shared_layers"] = max(0, fields["num_hidden_layers"] - 2)
    return getattr(transformers, f"{kind}{text}Config")(**fields)


def random_torch_model(
    config: Any,
    seed: int = 0,
    spread: float = 0.3,
    make: Any = None,
) -> Any:
    """Return a transformers model with every tensor random, including norms and biases.

    Args:
        make: A class of transformers, by default AutoModelForCausalLM.
    """
    import torch

    torch.set_num_threads(1)  # threads only slow tiny models down
    torch.manual_seed(seed)
    model = (make or transformers.AutoModelForCausalLM).from_config(config)
    gemma = config.model_type.startswith("gemma")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            norm = ("norm" in path or ".ln_" in path) and not gemma
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if norm else 0.0))
        for path, buffer in model.named_buffers():
            if path.endswith(("bias", "layer_scalar")):  # of the experts' selection
                buffer.copy_(torch.randn_like(buffer) * spread)
    return model.eval()


def save_random(
    directory: Path, family: str, seed: int = 0, spread: float = 0.3, **changes: Any
) -> None:
    """Write a Hugging Face directory with every tensor random."""
    random_torch_model(theirs(family, **changes), seed, spread).save_pretrained(directory)


def saved_once(
    folders: pytest.TempPathFactory, changes: Callable[[str], dict[str, Any]]
) -> Callable[[str], Path]:
    """Return a function that saves a random model of a family once and returns its directory.

    Args:
        folders: The factory of temporary directories.
        changes: Returns the changed configuration fields of a family.
    """

    @cache
    def find(family: str) -> Path:
        directory = folders.mktemp(family)
        save_random(directory, family, **changes(family))
        return directory

    return find


def in_both(fixture: str, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test in both families in `make test`, although its fixture is parametrized by `BOTH`.

    Args:
        fixture: The name of the fixture.
        values: Values of another argument; GPT-2 runs all but the first only in `make test-full`.
    """
    name, each = next(iter(values.items()), ("", ()))
    if not name:
        return pytest.mark.parametrize(fixture, ["llama", "gpt2"], indirect=True)
    rows = [
        pytest.param(family, value, marks=[pytest.mark.full] if family == "gpt2" and i else [])
        for family in ("llama", "gpt2")
        for i, value in enumerate(each)
    ]
    return pytest.mark.parametrize((fixture, name), rows, indirect=[fixture])


def cut_demo(family: str, directory: Path, layers: int = 2) -> Path:
    """Write the first layers of a demo model and its tokenizer; they compile three times faster."""
    source, count = DEMO_DIR / family, {"llama": "num_hidden_layers", "gpt2": "n_layer"}[family]
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, count: layers}))
    tensors = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not (number := re.search(r"\.(\d+)\.", name)) or int(number[1]) < layers
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def load_twin(directory: Path, dtype: str = "float32") -> Twin:
    """Load a Hugging Face directory in transformers and jaxllm, with the same dtype."""
    import torch

    torch.set_num_threads(1)
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    opened = open_hf(directory)
    precision = Precision.uniform(dtype)
    model = models.build(opened.config, precision)
    return Twin(directory, torch_model.eval(), opened.config, model, load_params(opened, precision))


@cache
def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Return random token ids `[rows, length]`."""
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length))


def random_model(
    family: str,
    seed: int = 0,
    precision: Precision | None = None,
    spread: float = 0.3,
    **changes: Any,
) -> tuple[Any, Params]:
    """Return a tiny jaxllm model with every tensor random, without writing files."""
    _, base = KINDS[family]
    settings = {"num_hidden_layers": 2, "n_layer": 2, "sliding_window_pattern": 2, **changes}
    known = {k: v for k, v in settings.items() if k in base or k in changes}
    config, _ = read_config(theirs(family, **known).to_dict())
    model = models.build(config, precision)
    rng = np.random.default_rng(seed)

    def leaf(path: str, shape: Any) -> jax.Array:
        centre = 1.0 if "norm" in path or ("ln_" in path and "weight" in path) else 0.0
        return jnp.asarray(centre + spread * rng.standard_normal(shape.shape, np.float32))

    return model, map_leaves(leaf, models.param_shapes(model))


def assert_close(ours: Any, theirs: np.ndarray) -> None:
    """Check the float32 tolerance: atol 1e-5 x max(1, max abs), rtol 1e-4."""
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-5 * scale, rtol=1e-4)


def make_twin(directory: Path, family: str, layers: int = 1, **changes: Any) -> Twin:
    """Write a random model of a few layers and load it in transformers and jaxllm."""
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    save_random(directory, family, **{name: layers}, **changes)
    return load_twin(directory)


def our_arrays(twin: Twin, tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return torch tensors under our names as [out, in]; GPT-2 stores linears as [in, out]."""
    found = {}
    for name, tensor in tensors.items():
        path = name.removeprefix("model.").removeprefix("transformer.")
        transposed = twin.config.model_type == "gpt2" and tensor.ndim == 2 and ".c_" in path
        found[path] = (tensor.T if transposed else tensor).detach().numpy().copy()
    return found
