"""The config.json files of published checkpoints, as data.

Rows of one kind share a base and state what differs; a file with the fields of another and other
sizes is left out. SmolLM3-3B is put together from fields that public pages quote; all others are
copies of whole files, or of transformers' prints of them, in public code and on pages of the Hub.
`_name_or_path`, which nothing reads, is left out.
"""

from typing import Any

Row = dict[str, Any]

_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_PLAIN: Row = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
_NO_BIAS: Row = {"attention_bias": False, "attention_dropout": 0.0}
_LLAMA: Row = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", **_PLAIN, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}  # fmt: skip


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, keys: int | None, context: int, vocab: int
) -> Row:
    row = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": context, "vocab_size": vocab,
    }  # fmt: skip
    return row if keys is None else {**row, "num_key_value_heads": keys}


_LLAMA2: Row = {
    **_LLAMA, **_ENDS, "pad_token_id": 0, "pretraining_tp": 1, "rope_scaling": None,
    "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
}  # fmt: skip
_CODE: Row = {
    **_LLAMA, **_ENDS, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 1000000,
    "torch_dtype": "bfloat16", "transformers_version": "4.32.0.dev0",
}  # fmt: skip
_LLAMA3: Row = {
    **_LLAMA, **_NO_BIAS, "bos_token_id": 128000, "mlp_bias": False, "pretraining_tp": 1,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
_ENDS31 = {"eos_token_id": [128001, 128008, 128009]}


def _scaled(factor: float) -> Row:
    return {
        "rope_scaling": {
            "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        }
    }  # fmt: skip


_SMOL: Row = {
    **_LLAMA, **_NO_BIAS, **_ENDS, "mlp_bias": False, "pad_token_id": 2, "pretraining_tp": 1,
    "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
}  # fmt: skip
_SMOL2: Row = {
    **_SMOL, "is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}  # fmt: skip
_TINY = {"pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0}

LLAMA: dict[str, Row] = {
    "meta-llama/Llama-2-7b-hf": {**_LLAMA2, **_sizes(4096, 11008, 32, 32, 32, 2048, 32000)},
    "codellama/CodeLlama-7b-hf": {
        **_CODE, **_sizes(4096, 11008, 32, 32, 32, 16384, 32016),
        "transformers_version": "4.33.0.dev0",
    },
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": {
        **_LLAMA, **_ENDS, **_TINY, **_sizes(2048, 5632, 22, 32, 4, 2048, 32000),
        "attention_bias": False, "torch_dtype": "bfloat16", "transformers_version": "4.35.0",
    },
    "meta-llama/Meta-Llama-3-8B": {
        **_LLAMA3, **_sizes(4096, 14336, 32, 32, 8, 8192, 128256), "eos_token_id": 128001,
        "rope_scaling": None, "transformers_version": "4.40.0.dev0",
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA3, **_sizes(4096, 14336, 32, 32, 8, 131072, 128256), **_ENDS31, **_scaled(8.0),
        "transformers_version": "4.42.3",
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        **_LLAMA3, **_sizes(2048, 8192, 16, 32, 8, 131072, 128256), **_ENDS31, **_scaled(32.0),
        "head_dim": 64, "tie_word_embeddings": True, "transformers_version": "4.45.0.dev0",
    },
    "joelewing/Llama-3.2-1B-Instruct-Capybara": {
        **_LLAMA3, **_sizes(2048, 8192, 16, 32, 8, 131072, 128256), **_ENDS31, **_scaled(32.0),
        "head_dim": 64, "pad_token_id": 128004, "tie_word_embeddings": True,
        "transformers_version": "4.44.2", "unsloth_version": "2024.10.7",
    },
    "meta-llama/Llama-3.1-8B": {
        **_LLAMA3, **_sizes(4096, 14336, 32, 32, 8, 131072, 128256), **_scaled(8.0),
        "eos_token_id": 128001, "transformers_version": "4.43.0.dev0",
    },
    "meta-llama/Llama-3.2-3B": {
        **_LLAMA3, **_sizes(3072, 8192, 28, 24, 8, 131072, 128256), **_scaled(32.0),
        "eos_token_id": 128001, "head_dim": 128, "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0",
    },
    "ALLaM-AI/ALLaM-7B-Instruct-preview": {
        **_LLAMA, **_NO_BIAS, **_ENDS, **_sizes(4096, 11008, 32, 32, 32, 4096, 64000),
        "head_dim": 128, "initializer_range": 0.006, "internal_version": "7b-alpha-v2.33.0.30",
        "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16", "transformers_version": "4.53.0",
    },
    "musabgultekin/functionary-7b-v0.2": {
        **_LLAMA, **_ENDS, **_sizes(4096, 11008, 32, 32, None, 2048, 32000), "pad_token_id": 0,
        "max_sequence_length": 2048, "rms_norm_eps": 1e-06, "torch_dtype": "float32",
        "transformers_version": "4.28.1", "use_cache": False,
    },
    "zpn/llama-7b": {  # without max_position_embeddings
        **_LLAMA, **_ENDS, "hidden_size": 4096, "intermediate_size": 11008,
        "max_sequence_length": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "torch_dtype": "float32",
        "transformers_version": "4.28.0.dev0", "vocab_size": 32000,
    },
    "tiiuae/Falcon3-7B-Instruct": {
        **{k: v for k, v in _LLAMA.items() if k != "initializer_range"}, **_NO_BIAS,
        **_sizes(3072, 23040, 28, 12, 4, 32768, 131072), "bos_token_id": 11, "eos_token_id": 11,
        "head_dim": 256, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000042, "torch_dtype": "bfloat16",
        "transformers_version": "4.46.1",
    },
    "HuggingFaceTB/SmolLM-135M-Instruct": {**_SMOL, **_sizes(576, 1536, 30, 9, 3, 2048, 49152)},
    "HuggingFaceTB/SmolLM2-135M": {
        **{k: v for k, v in _SMOL2.items() if k not in ("pad_token_id", "transformers.js_config")},
        **_sizes(576, 1536, 30, 9, 3, 2048, 49152), "bos_token_id": 0, "eos_token_id": 0,
        "head_dim": 64, "initializer_range": 0.041666666666666664, "transformers_version": "4.48.0",
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        **_SMOL2, **_sizes(576, 1536, 30, 9, 3, 8192, 49152),
        "initializer_range": 0.041666666666666664,
    },
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": {
        **_SMOL, **_sizes(2048, 8192, 24, 32, 32, 8192, 49152), "rope_theta": 130000,
        "transformers.js_config": {
            "dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"},
            "use_external_data_format": {"model.onnx": True, "model_fp16.onnx": True},
        },
    },
}  # fmt: skip

_MISTRAL: Row = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", **_PLAIN, **_ENDS,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL: dict[str, Row] = {
    "mistralai/Mistral-7B-v0.1": {
        **_MISTRAL, **_sizes(4096, 14336, 32, 32, 8, 32768, 32000), "rope_theta": 10000.0,
        "sliding_window": 4096, "transformers_version": "4.34.0.dev0",
    },
    "mistralai/Mistral-7B-Instruct-v0.3": {
        **_MISTRAL, **_sizes(4096, 14336, 32, 32, 8, 32768, 32768), "attention_dropout": 0.0,
        "rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0",
    },
    "mistralai/Mistral-Nemo-Base-2407": {
        **_MISTRAL, **_sizes(5120, 14336, 40, 32, 8, 128000, 131072), "attention_dropout": 0.0,
        "head_dim": 128, "rope_theta": 1000000.0, "sliding_window": None,
        "transformers_version": "4.43.3",
    },
    "dicta-il/dictalm2.0-instruct": {
        **_MISTRAL, **_sizes(4096, 14336, 32, 32, 8, 32768, 33152), "attention_dropout": 0.0,
        "document_attention": True, "rope_theta": 10000.0, "sliding_window": 4096,
        "transformers_version": "4.38.2", "use_cache": False,
    },
}  # fmt: skip

_MIXTRAL: Row = {
    **_MISTRAL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "attention_dropout": 0.0, "num_experts_per_tok": 2, "num_local_experts": 8,
    "output_router_logits": False, "rope_theta": 1000000.0, "sliding_window": None,
}  # fmt: skip
MIXTRAL: dict[str, Row] = {
    "mistralai/Mixtral-8x7B-v0.1": {
        **_MIXTRAL, **_sizes(4096, 14336, 32, 32, 8, 32768, 32000), "router_aux_loss_coef": 0.02,
        "transformers_version": "4.36.0.dev0",
    },
    "mistral-community/Mixtral-8x22B-v0.1": {
        **_MIXTRAL, **_sizes(6144, 16384, 56, 48, 8, 65536, 32000), "router_aux_loss_coef": 0.001,
        "rope_theta": 1000000, "router_jitter_noise": 0.0, "transformers_version": "4.40.0.dev0",
    },
}  # fmt: skip

_QWEN2: Row = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_PLAIN,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "transformers_version": "4.40.1",
}  # fmt: skip
QWEN2: dict[str, Row] = {
    "Qwen/Qwen1.5-1.8B-Chat": {
        **_QWEN2, **_sizes(2048, 5504, 24, 16, 16, 4096, 151936), "max_window_layers": 21,
        "transformers_version": "4.37.2",
    },
    "Qwen/Qwen2-7B-Instruct": {
        **_QWEN2, **_sizes(3584, 18944, 28, 28, 4, 32768, 152064), "max_window_layers": 28,
        "sliding_window": 131072, "tie_word_embeddings": False, "transformers_version": "4.41.2",
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN2, **_sizes(896, 4864, 24, 14, 2, 32768, 151936), "max_window_layers": 24,
        "eos_token_id": 151643, "use_mrope": False,
    },
    "GramTrans/GramTrans_DSL_LR1": {
        **_QWEN2, **_sizes(1536, 8960, 28, 12, 2, 131072, 151936), "max_window_layers": 28,
        "eos_token_id": 151643, "rope_scaling": None, "sliding_window": 131072,
        "transformers_version": "4.49.0", "use_cache": False, "use_mrope": False,
    },
    "Qwen/Qwen2.5-7B": {
        **_QWEN2, **_sizes(3584, 18944, 28, 28, 4, 131072, 152064), "max_window_layers": 28,
        "eos_token_id": 151643, "sliding_window": 131072, "tie_word_embeddings": False,
        "use_mrope": False,
    },
    "onnx-community/DeepSeek-R1-Distill-Qwen-1.5B-ONNX": {
        **_QWEN2, **_sizes(1536, 8960, 28, 12, 2, 131072, 151936), "max_window_layers": 21,
        "eos_token_id": 151643, "rope_scaling": None, "rope_theta": 10000, "sliding_window": None,
        "tie_word_embeddings": False, "transformers_version": "4.46.3", "use_mrope": False,
        "transformers.js_config": {
            "dtype": "q4f16", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"},
        },
    },
}  # fmt: skip

_QWEN3: Row = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_PLAIN, **_NO_BIAS,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_sliding_window": False,
}  # fmt: skip
_QWEN3_MOE: Row = {
    **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128,
    "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "rope_theta": 1000000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3: dict[str, Row] = {
    "Qwen/Qwen3-0.6B": {
        **_QWEN3, **_sizes(1024, 3072, 28, 16, 8, 40960, 151936), "max_window_layers": 28,
    },
    "Qwen/Qwen3-8B": {
        **_QWEN3, **_sizes(4096, 12288, 36, 32, 8, 40960, 151936), "max_window_layers": 36,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
QWEN3_MOE: dict[str, Row] = {
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3_MOE, **_sizes(2048, 6144, 48, 32, 4, 40960, 151936), "max_window_layers": 48,
        "moe_intermediate_size": 768,
    },
}  # fmt: skip

_GEMMA2: Row = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_NO_BIAS,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
}  # fmt: skip
_GEMMA3: Row = {
    **{k: v for k, v in _GEMMA2.items() if k != "hidden_act"},
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "transformers_version": "4.50.0.dev0",
}  # fmt: skip
_GEMMA_270M: Row = {
    **{
        k: v
        for k, v in _GEMMA3.items()
        if k not in ("cache_implementation", "sliding_window_pattern")
    },
    **_sizes(640, 2048, 18, 4, 1, 32768, 262144),
    "_sliding_window_pattern": 6,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
    "unsloth_fixed": True, "use_bidirectional_attention": False,
}  # fmt: skip
GEMMA: dict[str, Row] = {
    "google/gemma-2-2b-it": {
        **_GEMMA2, **_sizes(2304, 9216, 26, 8, 4, 8192, 256000), "eos_token_id": [1, 107],
        "transformers_version": "4.42.4",
    },
    "google/gemma-2-2b-jpn-it": {
        **{k: v for k, v in _GEMMA2.items() if k != "hidden_act"}, "dtype": "bfloat16",
        **_sizes(2304, 9216, 26, 8, 4, 8192, 256000), "query_pre_attn_scalar": 224,
        "transformers_version": "4.44.2",
    },
    "google/gemma-2-9b-it": {
        **_GEMMA2, **_sizes(3584, 14336, 42, 16, 8, 8192, 256000), "sliding_window_size": 4096,
    },
    "google/gemma-2-27b-it": {
        **_GEMMA2, **_sizes(4608, 36864, 46, 32, 16, 8192, 256000), "head_dim": 128,
        "query_pre_attn_scalar": 144, "sliding_window_size": 4096, "_attn_implementation": "eager",
    },
    "google/gemma-3-1b-it": {
        **_GEMMA3, **_sizes(1152, 6912, 26, 4, 1, 32768, 262144), "eos_token_id": [1, 106],
    },
    "Creekside/gemma-3": {
        **_GEMMA3, **_sizes(2560, 10240, 34, 8, 4, 131072, 262208), "sliding_window": 1024,
        "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "Codingstark/gemma3-270m-leetcode": {
        **_GEMMA_270M, "eos_token_id": 106, "torch_dtype": "float16",
        "transformers_version": "4.55.2", "unsloth_version": "2025.8.9",
    },
    "mariocde/functiongemma-270m-onnx": {
        **{k: v for k, v in _GEMMA_270M.items() if k != "rope_scaling"},
        "eos_token_id": [1, 50, 106], "transformers_version": "4.57.3",
    },
}  # fmt: skip

_PHI3: Row = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **_PLAIN, **_NO_BIAS,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_PHI35_SHORT = [
    1.0, 1.0199999809265137, *[1.0299999713897705] * 2, *[1.0499999523162842] * 5,
    1.0699999332427979, 1.0999999046325684, 1.1099998950958252, *[1.1599998474121094] * 2,
    1.1699998378753662, 1.2899998426437378, 1.339999794960022, 1.679999828338623,
    1.7899998426437378, 1.8199998140335083, 1.8499997854232788, 1.8799997568130493,
    1.9099997282028198, 1.9399996995925903, 1.9899996519088745, *[2.0199997425079346] * 6,
    *[2.0299997329711914] * 9, 2.0799996852874756, 2.0899996757507324, 2.189999580383301,
    2.2199995517730713, 2.5899994373321533, 2.729999542236328, 2.749999523162842,
    2.8399994373321533,
]  # fmt: skip
_PHI35_LONG = [
    1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601,
    1.5899999141693115, 1.600000023841858, 1.6200000047683716, 2.620000123977661,
    *[3.2300000190734863] * 2, 4.789999961853027, 7.400000095367432, 7.700000286102295,
    9.09000015258789, 12.199999809265137, 17.670000076293945, 24.46000099182129, 28.57000160217285,
    30.420001983642578, 30.840002059936523, 32.590003967285156, 32.93000411987305,
    42.320003509521484, 44.96000289916992, 50.340003967285156, 50.45000457763672, 57.55000305175781,
    57.93000411987305, 58.21000289916992, 60.1400032043457, 62.61000442504883, 62.62000274658203,
    62.71000289916992, *[63.1400032043457] * 2, 63.77000427246094, 63.93000411987305,
    63.96000289916992, 63.970001220703125, 64.02999877929688, 64.06999969482422, 64.08000183105469,
    64.12000274658203, 64.41000366210938, 64.4800033569336, 64.51000213623047, 64.52999877929688,
    64.83999633789062,
]  # fmt: skip
_PHI4_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
PHI3: dict[str, Row] = {
    "microsoft/Phi-3-mini-4k-instruct": {
        **{k: v for k, v in _PHI3.items() if k != "attention_bias"},
        **_sizes(3072, 8192, 32, 32, 32, 4096, 32064), "sliding_window": 2047,
        "transformers_version": "4.39.3",
    },
    "microsoft/Phi-3.5-mini-instruct": {
        **_PHI3, **_sizes(3072, 8192, 32, 32, 32, 131072, 32064), "sliding_window": 262144,
        "rope_scaling": {
            "long_factor": _PHI35_LONG, "short_factor": _PHI35_SHORT, "type": "longrope",
        },
        "transformers_version": "4.43.3",
    },
    "microsoft/Phi-4-mini-instruct": {
        **_PHI3, **_sizes(3072, 8192, 32, 24, 8, 131072, 200064),
        "auto_map": {**_PHI3["auto_map"], "AutoTokenizer": "Xenova/gpt-4o"},
        "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999, "full_attn_mod": 1,
        "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True,
        "rope_scaling": {
            "long_factor": _PHI4_LONG, "short_factor": [1.0] * 48, "type": "longrope",
        },
        "transformers_version": "4.45.0",
    },
    "microsoft/phi-4": {
        **{k: v for k, v in _PHI3.items() if k != "auto_map"},
        **_sizes(5120, 17920, 40, 40, 10, 16384, 100352), "bos_token_id": 100257,
        "eos_token_id": 100265, "original_max_position_embeddings": 16384, "pad_token_id": 100349,
        "rope_theta": 250000.0, "sliding_window": None, "transformers_version": "4.47.0",
    },
}  # fmt: skip

_OLMO2: Row = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", **_PLAIN, **_NO_BIAS,
    "eos_token_id": 100257, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32",
    "transformers_version": "4.47.0",
}  # fmt: skip
OLMO2: dict[str, Row] = {
    "allenai/OLMo-2-1124-13B": {**_OLMO2, **_sizes(5120, 13824, 40, 40, 40, 4096, 100352)},
    "allenai/OLMo-2-0325-32B": {
        **_OLMO2, **_sizes(5120, 27648, 64, 40, 8, 4096, 100352), "bos_token_id": 100257,
        "transformers_version": "4.49.0",
    },
}  # fmt: skip

_SMOLLM3: Row = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", **_PLAIN, **_NO_BIAS,
    **_sizes(2048, 11008, 36, 16, 4, 65536, 128256), "bos_token_id": 128000,
    "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_sliding_window": False,
}  # fmt: skip
SMOLLM3: dict[str, Row] = {
    "HuggingFaceTB/SmolLM3-3B": {**_SMOLLM3, "eos_token_id": 128012, "pad_token_id": 128004},
    "optimum-intel-internal-testing/tiny-random-smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", **_PLAIN, **_NO_BIAS,
        **_sizes(32, 64, 2, 4, 2, 256, 128256), "bos_token_id": 128000, "dtype": "float32",
        "eos_token_id": 128012, "layer_types": ["full_attention"] * 2, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1], "pad_token_id": 128004,
        "rms_norm_eps": 1e-06, "sliding_window": None, "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 2000000.0, "rope_type": "default"},
        "transformers_version": "5.0.0", "use_sliding_window": False,
    },
}  # fmt: skip

_GRANITE: Row = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", **_PLAIN, **_NO_BIAS,
    "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0,
    "eos_token_id": 0, "logits_scaling": 16.0, "mlp_bias": False, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE: dict[str, Row] = {
    "ibm-granite/granite-3.3-8b-instruct": {
        **_GRANITE, **_sizes(4096, 12800, 40, 32, 8, 131072, 49159),
        "transformers_version": "4.49.0",
    },
}  # fmt: skip

_GPT2: Row = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}  # fmt: skip
_RUGPT3: Row = {
    **{k: v for k, v in _GPT2.items() if k != "task_specific_params"},
    "n_ctx": 2048, "n_embd": 1024, "n_head": 16, "n_inner": None, "n_layer": 24,
    "n_positions": 2048, "n_special": 0, "output_past": True, "predict_special_tokens": True,
    "reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True, "torch_dtype": "float32", "use_cache": True,
}  # fmt: skip
GPT2: dict[str, Row] = {
    "openai-community/gpt2": {**_GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12},
    "openai-community/gpt2-medium": {
        **_GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0,
        "predict_special_tokens": True,
    },
    "openai-community/gpt2-xl": {
        **_GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True,
    },
    "Dmitriy007/Socrat_tmp": {
        **_RUGPT3, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
        "transformers_version": "4.27.3",
    },
    "IlyaGusev/rugpt3medium_sum_gazeta": {
        **_RUGPT3, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2,
        "max_length": 800, "num_beams": 5, "pad_token_id": 0, "transformers_version": "4.12.5",
    },
}  # fmt: skip

_NEOX: Row = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-05,
    "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.24.0",
    "use_cache": True, "use_parallel_residual": True,
}  # fmt: skip
GPT_NEOX: dict[str, Row] = {
    "EleutherAI/pythia-1b": {**_NEOX, **_sizes(2048, 8192, 16, 8, None, 2048, 50304)},
    "EleutherAI/pythia-6.9b-deduped": {
        **_NEOX, **_sizes(4096, 16384, 32, 32, None, 2048, 50432), "attention_bias": True,
        "attention_dropout": 0.0, "classifier_dropout": 0.1, "hidden_dropout": 0.0,
        "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000,
        "transformers_version": "4.45.2",
    },
    "EleutherAI/pythia-6.9b-v0": {
        **{k: v for k, v in _NEOX.items() if k != "use_parallel_residual"},
        **_sizes(4096, 16384, 32, 32, None, 2048, 50432), "transformers_version": "4.22.2",
    },
    "iamplus/gpt-neoxt-20b-v2": {
        **_NEOX, **_sizes(6144, 24576, 44, 64, None, 2048, 50432), "hidden_act": "gelu_fast",
        "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "torch_dtype": "float32",
        "transformers_version": "4.27.1",
    },
    "togethercomputer/RedPajama-INCITE-Base-3B-v1": {
        **_NEOX, **_sizes(2560, 10240, 32, 32, None, 2048, 50432), "rotary_pct": 1.0,
        "transformers_version": "4.28.1", "use_parallel_residual": False,
    },
    "h2oai/h2ogpt-oig-oasst1-256-6_9b": {
        **_NEOX, **_sizes(4096, 16384, 32, 32, None, 2048, 50432),
        "custom_pipelines": {
            "text-generation": {
                "impl": "h2oai_pipeline.H2OTextGenerationPipeline", "pt": "AutoModelForCausalLM",
            }
        },
        "transformers_version": "4.28.1",
    },
}  # fmt: skip

FAMILIES = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA, PHI3, OLMO2, SMOLLM3, GRANITE, GPT2,
    GPT_NEOX,
)  # fmt: skip
PUBLISHED: dict[str, Row] = {name: row for family in FAMILIES for name, row in family.items()}
