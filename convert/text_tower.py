"""The text model of a multimodal checkpoint: its part of config.json, and its tensors.

Only the text model is read. For text alone the three coordinates of Qwen's multimodal rotary
positions are equal, so that they are plain rotary positions.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# The text model's own model_type, if it is not a family's name: the family.
_FAMILIES = {
    "exaone4_5_text": "exaone4",
    "gemma4_unified_text": "gemma4_text",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_GRANITE_4 = "granitemoehybrid"  # two families: with and without experts
_FLAT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}  # files with the text model's fields on top
# Defaults of transformers' text classes, which published files leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma4_unified_text": {
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
}
# The parts of the file that are not text models.
OTHER_TOWERS = ("vision_config", "audio_config")
# Fields that may be stated for the whole checkpoint.
_SHARED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "dtype",
    "tie_word_embeddings",
    "quantization_config",
)
_MROPE = ("mrope_section", "mrope_interleaved")
_TEXT = re.compile(r"(model\.language_model|language_model\.model)\.")
_HEAD = re.compile(r"language_model\.(?=lm_head\.)")
_OTHER_TENSORS = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector"
    r"|embed_vision|embed_audio|vision_embed_tokens|vision_embedder|audio_embedder|mtp)\."
)


def is_multimodal(data: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a checkpoint with a text model among others."""
    return isinstance(data.get("text_config"), Mapping) or str(data.get("model_type")) in _FLAT


def select_text_config(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's config.json, its model_type being our family's name.

    That of a text model is otherwise unchanged. Special ids, the quantization and a tied head may
    be stated for the whole checkpoint.
    """
    if not is_multimodal(data):
        return _name_mixture(data)
    nested = data.get("text_config")
    text = dict(nested) if isinstance(nested, Mapping) else dict(data)
    kind = str(text.get("model_type"))
    family = _FAMILIES.get(kind, _FLAT.get(kind, kind))
    for name in _SHARED:
        if data.get(name) is not None:
            text.setdefault(name, data[name])
    ignored = {"architectures", *OTHER_TOWERS}
    ignored |= {name for name in text if name.endswith("_token_id") and name not in _SHARED}
    text = {name: value for name, value in text.items() if name not in ignored}
    plain = drop_mrope(text)
    return _name_mixture({**_DEFAULTS.get(kind, {}), **plain, "model_type": family})


def _name_mixture(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with the name of our family of Granite 4 with experts, if it is one."""
    mixture = data.get("model_type") == _GRANITE_4 and data.get("num_local_experts") != 0
    return {**data, "model_type": f"{_GRANITE_4}_moe"} if mixture else data


def drop_mrope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the settings of multimodal positions, which text does not need."""
    plain = dict(data)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(settings := data.get(name), Mapping):
            kept = {key: value for key, value in settings.items() if key not in _MROPE}
            plain[name] = {k: "default" if v == "mrope" else v for k, v in kept.items()}
    return plain


def select_text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the text model's tensors, by the names of a checkpoint of it alone."""
    return {
        _HEAD.sub("", _TEXT.sub("model.", name)): tensor
        for name, tensor in tensors.items()
        if not _OTHER_TENSORS.match(name)
    }
