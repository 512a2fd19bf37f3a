"""GGUF files written by the `gguf` package from Hugging Face directories, in the layout of
llama.cpp's converter.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

A = gguf.MODEL_ARCH
ARCHS = {
    "llama": A.LLAMA, "mistral": A.LLAMA, "mixtral": A.LLAMA, "gpt2": A.GPT2, "qwen2": A.QWEN2,
    "qwen3": A.QWEN3, "qwen3_moe": A.QWEN3MOE, "gemma2": A.GEMMA2, "gemma3_text": A.GEMMA3,
    "phi3": A.PHI3, "olmo2": A.OLMO2, "smollm3": A.SMOLLM3, "granite": A.GRANITE,
    "gpt_neox": A.GPTNEOX, "olmo3": A.OLMO2, "ministral3": A.MISTRAL3,
    "glm4": A.GLM4, "seed_oss": A.SEED_OSS, "ernie4_5": A.ERNIE4_5, "exaone4": A.EXAONE4,
    "cohere2": A.COHERE2, "granitemoehybrid": A.GRANITE, "glm4_moe": A.GLM4_MOE,
    "gpt_oss": A.GPT_OSS, "qwen3_5_text": A.QWEN35, "lfm2": A.LFM2, "gemma4_text": A.GEMMA4,
    "qwen3_5_moe_text": A.QWEN35MOE, "lfm2_moe": A.LFM2MOE, "qwen3_next": A.QWEN3NEXT,
    "deepseek_v2": A.DEEPSEEK2, "deepseek_v3": A.DEEPSEEK2,
}  # fmt: skip
PERMUTED = {
    "llama",
    "mistral",
    "mixtral",
    "granite",
    "smollm3",
    "ministral3",
    "granitemoehybrid",
}  # classes of `LlamaModel`
DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(w\d|\w+_proj)\.weight")
# gpt-oss: rows of gate and up alternate, and matrices are `[in, out]`.
FUSED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj_?(bias|)")
CONV1D = re.compile(r"\.c_(attn|proj|fc)\.weight$")  # GPT-2's matrices that are `[in, out]`
Bytes = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's converter."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def hf_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors by their GGUF names, in GGUF's layout."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    known = gguf.get_tensor_name_map(ARCHS[kind], layers)
    found = {}
    tensors = load_file(directory / "model.safetensors")
    tensors = name_experts(tensors) if kind == "gemma4_text" else stacked(tensors)
    tensors = split_kv_b(split_qkvz(tensors, config), config)
    for name, array in separate_mlp(tensors).items():
        if kind == "gpt2" and CONV1D.search(name):
            array = array.T
        if kind in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            array = permuted(array, config[heads])
        if "linear_attn" in name:
            array = array if kind == "qwen3_next" else tiled(name, array, config)
            name = name.replace("dt_bias", "dt_proj.bias")
        if "conv1d" in name or "conv.conv" in name:
            array = array.squeeze(1)
        if name.endswith("A_log"):
            array = -np.exp(array)
        if name.endswith(("sinks", "layer_scalar")):
            name += ".weight"
        offset = kind in DELTA_NETS and "linear_attn" not in name
        if (offset or kind in ("gemma2", "gemma3_text")) and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if "query_key_value" in name:  # per head there, all queries first here
            per_head = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
            array = per_head.swapaxes(0, 1).reshape(array.shape)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("expert_bias", "expert_bias.bias")
        if name.startswith("blk."):
            theirs = name
        else:
            theirs = known.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        found[theirs] = np.ascontiguousarray(array)
    return found


def tiled(name: str, array: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """`_LinearAttentionVReorderBase` of llama.cpp's converter."""
    H, N = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if ".norm." in name:
        return array
    if "out_proj" in name:
        return np.ascontiguousarray(tiled("in_proj_z", array.T, config).T)
    queries = 2 * H * config["linear_key_head_dim"]
    first = queries if "qkv" in name or "conv1d" in name else 0
    heads = array[first:].reshape(H, N // H, -1, *array.shape[1:])
    return np.concatenate([array[:first], heads.swapaxes(0, 1).reshape(array[first:].shape)])


def split_qkvz(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """`Qwen3NextModel.modify_tensors` of llama.cpp's converter."""
    found = dict[str, np.ndarray]()
    for name, array in tensors.items():
        if "in_proj_qkvz" not in name:
            found[name] = array
            continue
        H, dk, dv = (
            config[f"linear_{x}"] for x in ("num_key_heads", "key_head_dim", "value_head_dim")
        )
        wide = config["linear_num_value_heads"] // H * dv
        parts = np.split(array.reshape(H, -1, array.shape[1]), np.cumsum([dk, dk, wide]), axis=1)
        *qkv, z = (part.reshape(-1, array.shape[1]) for part in parts)
        found[name.replace("qkvz", "qkv")] = np.concatenate(qkv)
        found[name.replace("qkvz", "z")] = z
    return found


def split_kv_b(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Split keys from values of latent attention, and transpose them, as the converter does."""
    found = dict[str, np.ndarray]()
    for name, array in tensors.items():
        if "kv_b_proj" not in name:
            found[name] = array
            continue
        heads = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        k, v = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        found[name.replace("kv_b", "k_b")] = k.swapaxes(1, 2)
        found[name.replace("kv_b", "v_b")] = v
    return found


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the experts of each layer into one tensor, under the converter's names."""
    found, experts = dict[str, np.ndarray](), dict[str, dict[int, np.ndarray]]()
    for name, array in tensors.items():
        if one := EXPERT.fullmatch(name):
            module = one[1].replace("block_sparse_moe", "feed_forward")
            module = module.removeprefix("model.") if "feed_forward" in module else module
            experts.setdefault(f"{module}.experts.{one[3]}.weight", {})[int(one[2])] = array
        elif fused := FUSED.fullmatch(name):
            rows = array if fused[3] else array.swapaxes(1, 2)
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            for part, some in (parts if fused[2] == "gate_up" else {"down": rows}).items():
                found[f"{fused[1]}{part}_proj.{fused[3] or 'weight'}"] = some
        else:
            found[name] = array
    return found | {n: np.stack([each[i] for i in range(len(each))]) for n, each in experts.items()}


def name_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`filter_tensors` and `modify_tensors` of llama.cpp's `Gemma4Model`."""
    found = dict[str, np.ndarray]()
    for name, array in tensors.items():
        layer, _, last = name.removeprefix("model.layers.").partition(".")
        scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
        if last in scales:
            found[f"blk.{layer}.{scales[last]}.scale"] = array
        else:
            found[f"{name}.weight" if last.startswith("experts.") else name] = array
    return found


def separate_mlp(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Name Granite 4's MLP as Granite's, and split its gate from up."""
    found = dict[str, np.ndarray]()
    for name, array in tensors.items():
        module, _, linear = name.partition("shared_mlp.")
        if linear == "input_linear.weight":
            halves = np.split(array, 2)
            found |= {
                f"{module}mlp.{x}_proj.weight": y
                for x, y in zip(("gate", "up"), halves, strict=True)
            }
        else:
            found[f"{module}mlp.down_proj.weight" if linear else name] = array
    return found


# A setting of GGUF, and its names in config.json.
SETTINGS = {
    "context_length": ("n_positions", "max_position_embeddings"),
    "embedding_length": ("n_embd", "hidden_size"),
    "feed_forward_length": ("n_inner", "shared_intermediate_size", "intermediate_size"),
    "block_count": ("n_layer", "num_hidden_layers"),
    "head_count": ("n_head", "num_attention_heads"),
    "head_count_kv": ("num_key_value_heads",),
    "layer_norm_eps": ("layer_norm_epsilon", "layer_norm_eps"),
    "layer_norm_rms_eps": ("rms_norm_eps", "norm_eps"),
    "parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_shared_count": ("n_shared_experts",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention_scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
}


def add_settings(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    kind = config["model_type"]
    for setting, names in SETTINGS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if kind.startswith("lfm2") and setting == "head_count_kv":
            value = [value * (layer != "conv") for layer in config["layer_types"]]
        if kind == "gemma4_text" and setting in ("feed_forward_length", "head_count_kv"):
            value = by_layer(setting, value, config)
        if kind == "lfm2_moe" and setting == "expert_weights_scale":
            continue
        if kind.startswith("deepseek") and setting == "head_count_kv":
            value = 1
        if value is not None:
            getattr(writer, f"add_{setting}")(value)
    if kind == "gpt2":
        if config["n_inner"] is None:
            writer.add_feed_forward_length(4 * config["n_embd"])
        return
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if kind in ("gemma3_text", "gemma4_text", "olmo3"):
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("glm4_moe", "lfm2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "glm4_moe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if kind in ("gpt_neox", "glm4", "glm4_moe", "cohere2"):
        turned = int(rope.get("partial_rotary_factor", 1) * head_dim)
        writer.add_rope_dimension_count(turned)
    elif kind == "phi3":
        add_longrope(writer, config, head_dim)
    own_sizes = ("gpt_neox", "phi3", "cohere2", "gemma4_text", "deepseek_v2", "deepseek_v3")
    if kind not in own_sizes and config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind.startswith("deepseek"):
        add_latents(writer, config)
        rope = {**rope, "mscale_all_dim": 0.1 * rope.get("mscale_all_dim", 0)}
    if rope["rope_type"] == "yarn":
        add_yarn(writer, rope)
    if kind in PERMUTED:
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config["vocab_size"])
    windowed = (
        "mistral", "phi3", "gemma2", "gemma3_text", "olmo3", "ministral3", "exaone4", "cohere2",
        "gpt_oss", "gemma4_text",
    )  # fmt: skip
    if kind in DELTA_NETS:
        add_delta_net(writer, config)
    if kind == "gemma4_text":
        add_gemma4(writer, config)
    if kind.startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config.get("sliding_window") and kind in windowed:
        writer.add_sliding_window(config["sliding_window"])
    if kind in ("olmo3", "exaone4"):
        slides = [layer == "sliding_attention" for layer in config["layer_types"]]
        writer.add_sliding_window_pattern(slides)


def add_delta_net(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """`Qwen3NextModel.set_gguf_parameters` of llama.cpp's converter."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    share = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config["head_dim"]))
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([1, 1, 0, 0])


def by_layer(setting: str, value: int, config: Mapping[str, Any]) -> Any:
    """The numbers that Gemma 4 has for each layer, in `Gemma4Model.set_gguf_parameters`."""
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    if setting == "head_count_kv":
        own = config["per_layer_config"][str(kinds.index("full_attention"))]
        heads = {"sliding_attention": value, "full_attention": own.get("num_key_value_heads")}
        return value if None in heads.values() else [heads[kind] for kind in kinds]
    if config["use_double_wide_mlp"]:
        return [value * (1 + (i >= len(kinds) - shared)) for i in range(len(kinds))]
    return value


def add_gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """`set_gguf_parameters` and `generate_extra_tensors` of llama.cpp's `Gemma4Model`."""
    kinds, rope = config["layer_types"], config["rope_parameters"]
    local = config["head_dim"]
    full = config["per_layer_config"][str(kinds.index("full_attention"))]["head_dim"]
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    turned = int(full * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = np.array([1.0] * turned + [1e30] * (full // 2 - turned), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def add_latents(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """`DeepseekV2Model.set_gguf_parameters` of llama.cpp's converter."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def add_yarn(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name, add in (
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ("mscale_all_dim", writer.add_rope_scaling_yarn_log_mul),
        ("llama_4_scaling_beta", writer.add_attn_temperature_scale),
    ):
        if name in rope:
            add(rope[name])


def add_longrope(writer: gguf.GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    rope = config["rope_parameters"]
    share, original = rope["partial_rotary_factor"], rope["original_max_position_embeddings"]
    scale = config["max_position_embeddings"] / original
    writer.add_rope_dimension_count(int(share * head_dim))
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    for which in ("long", "short"):
        factors = np.array(rope[f"{which}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{which}.weight", factors)


def raw_of(kind: gguf.GGMLQuantizationType, seed: int = 0) -> Bytes:
    """Store matrices in one type and vectors in F32, as llama.cpp does.

    K types, which the package does not quantize, are random blocks of about the same magnitude.
    """
    rng = np.random.default_rng(seed)

    def store(name: str, array: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if (
            array.ndim < 2
            or name.endswith(".bias")
            or "position_embd" in name
            or "conv.weight" in name
            or "conv1d" in name
            or "ffn_gate_inp" in name
        ):
            return array.astype(np.float32), gguf.GGMLQuantizationType.F32
        if not kind.name.endswith("_K"):
            return gguf.quants.quantize(array.astype(np.float32), kind), kind
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (array.size // columns, size), np.uint8)
        for at, spread in {"Q6_K": ((208, 2e-4),)}.get(kind.name, ((0, 1e-3), (2, 3e-3))):
            scale = (rng.standard_normal((len(raw), 1)) * spread).astype(np.float16)
            raw[:, at : at + 2] = scale.view(np.uint8)
        return raw.reshape(*array.shape[:-1], -1), kind

    return store


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file of a writer that has all its keys and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def overwrite(change: Callable[[gguf.GGUFWriter], object]) -> Callable[[gguf.GGUFWriter], None]:
    """Return `also` for `write` with a change whose keys replace those of the checkpoint."""

    def also(writer: gguf.GGUFWriter) -> None:
        kept = dict(writer.kv_data[0])
        writer.kv_data[0].clear()  # the writer refuses a key that it has
        change(writer)
        for key, value in kept.items():
            writer.kv_data[0].setdefault(key, value)

    return also


def write(
    path: Path,
    directory: Path,
    raw: Bytes | None = None,
    also: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    **options: Any,
) -> Path:
    """Write a Hugging Face directory as GGUF; `also` receives the writer before the tensors."""
    raw = raw or raw_of(gguf.GGMLQuantizationType.F32)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    arch = gguf.MODEL_ARCH_NAMES[ARCHS[config["model_type"]]]
    writer = gguf.GGUFWriter(path, arch, **options)
    add_settings(writer, config)
    also(writer)
    for name, array in hf_tensors(directory).items():
        data, kind = raw(name, array)
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return path


def raw_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return type, shape and bytes of a file's tensors, as the package reads them."""
    return {
        t.name: (t.tensor_type.name, tuple(map(int, t.shape)), np.asarray(t.data).tobytes())
        for t in gguf.GGUFReader(path).tensors
    }


def dequantized(path: Path) -> dict[str, np.ndarray]:
    """Return a file's tensors as the package dequantizes them, by their GGUF names."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        found[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return found
