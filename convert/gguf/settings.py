"""A GGUF file's settings as a configuration of ours, and back: a row a family.

Keys are `{architecture}.{key}`. As with Hugging Face's tables, what is not known is refused, and
all complaints come in one error. What a file does not say, its tensors do: how many tokens there
are, which linears have biases, whether the head is the table of tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig, Rope
from jaxllm.errors import ConfigError
from jaxllm.models.family import Family
from jaxllm.models.gpt2 import FAMILY as GPT2_FAMILY
from jaxllm.models.llama import FAMILY as LLAMA_FAMILY

from ..tables import REQUIRED, Field, refuse
from . import names
from .header import Entry, Header
from .names import Module
from .rotary import ROPE_KEYS, read_rope, write_rope

TOKENS = "token_embd.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A `general.architecture`.

    family: the models that it is. modules: its tensors. fields: their key, our field, what a
    missing one means. constants: fields that have one value here, since llama.cpp computes nothing
    else. says: fields that a tensor's presence decides. allowed: keys of one meaning only. ignored:
    without effect on what a model computes.
    """

    family: Family
    modules: tuple[Module, ...]
    fields: tuple[Field, ...]
    constants: Mapping[str, Any]
    says: Mapping[str, str]
    allowed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    rotary: bool = True


# Ours from theirs where they agree in all that is read here.
SIZES = (
    Field("embedding_length", "hidden_size", REQUIRED),
    Field("feed_forward_length", "intermediate_size", REQUIRED),
    Field("block_count", "num_hidden_layers", REQUIRED),
    Field("attention.head_count", "num_attention_heads", REQUIRED),
    Field("attention.head_count_kv", "num_key_value_heads", None),  # as many as query heads
    Field("attention.key_length", "head_dim", None),  # embedding_length / attention.head_count
    Field("context_length", "max_position_embeddings", REQUIRED),
)
IGNORED = frozenset({"vocab_size", "attention.value_length", "rope.dimension_count"})  # see below
ALLOWED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),  # none of its own
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "use_parallel_residual": (False,),
}

LLAMA = Architecture(
    family=LLAMA_FAMILY,
    modules=names.LLAMA,
    fields=(
        *SIZES,
        Field("attention.layer_norm_rms_epsilon", "norm_eps", REQUIRED),
        Field("attention.sliding_window", "sliding_window", None),
    ),
    constants={"hidden_act": "silu"},
    says={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"},
)
GPT2 = Architecture(
    family=GPT2_FAMILY,
    modules=names.GPT2,
    fields=(*SIZES, Field("attention.layer_norm_epsilon", "norm_eps", REQUIRED)),
    constants={
        "hidden_act": "gelu_new",  # ggml's GELU is the one by tanh
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    says={},
    rotary=False,
)
ARCHITECTURES: dict[str, Architecture] = {"llama": LLAMA, "gpt2": GPT2}


def architecture_of(header: Header) -> tuple[str, Architecture]:
    """Raises ConfigError for an architecture that no row reads, and for a file of another kind."""
    name, kind = header.settings.get("general.architecture"), header.settings.get("general.type")
    if kind not in (None, "model"):
        what = "an adapter (--adapter takes it)" if kind == "adapter" else f"{kind!r:.40}"
        raise ConfigError(f"{header.path}: general.type says that this is {what}, not a model")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{header.path}: general.architecture {name!r:.40} is not supported"
            f" (known: {', '.join(ARCHITECTURES)})"
        )
    return name, ARCHITECTURES[name]


def read_config(
    header: Header, entries: Mapping[str, Entry], freqs: np.ndarray | None
) -> ModelConfig:
    """The configuration. entries: the tensors of all parts. freqs: what `rope_freqs.weight` holds.

    Raises ConfigError with every key that is missing, unknown, or asks for what is not there.
    """
    name, row = architecture_of(header)
    begins, complaints = f"{name}.", list[str]()
    data = {
        key.removeprefix(begins): _common(key, value, complaints)
        for key, value in header.settings.items()
        if key.startswith(begins)
    }
    fields: dict[str, Any] = {}
    for theirs, ours, default in row.fields:
        value = data.get(theirs, default)
        if value is REQUIRED:
            complaints.append(f"{begins}{theirs} is missing")
        fields[ours] = None if ours == "sliding_window" and value == 0 else value  # 0: none
    if TOKENS not in entries or len(entries[TOKENS].shape) != 2:
        complaints.append(f"{TOKENS} is missing, or no matrix")
    known = {field.theirs for field in row.fields} | IGNORED | row.ignored
    allowed = {**ALLOWED, **row.allowed}
    for key, value in data.items():
        if key in known or (row.rotary and key in ROPE_KEYS):
            continue
        if key not in allowed:
            complaints.append(f"{begins}{key} is not supported (got {value!r:.60})")
        elif value not in allowed[key]:
            values = " or ".join(map(repr, allowed[key]))
            complaints.append(f"{begins}{key} must be {values}, got {value!r:.60}")
    where = f"{header.path}"
    refuse(where, complaints)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    if fields["head_dim"] is None:
        if type(hidden) is not int or type(heads) is not int or heads < 1 or hidden % heads:
            refuse(where, [f"embedding_length {hidden!r:.20} is no multiple of head_count {heads}"])
        fields["head_dim"] = hidden // heads
    fields |= {"vocab_size": entries[TOKENS].shape[0], **row.constants}
    fields |= {field: tensor in entries for field, tensor in row.says.items()}
    fields["tie_word_embeddings"] = "output.weight" not in entries
    for key in ("attention.value_length", *(["rope.dimension_count"] if row.rotary else [])):
        if data.get(key, fields["head_dim"]) != fields["head_dim"]:
            complaints.append(
                f"{begins}{key} is {data[key]!r:.20}, and a head has {fields['head_dim']}: not"
                " supported"
            )
    if row.rotary:
        fields["rope"] = read_rope(data, freqs, begins, complaints)
    refuse(where, complaints)
    try:
        return row.family.config(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def write_config(config: ModelConfig) -> tuple[str, Architecture, dict[str, Any], Any]:
    """The architecture, its row, its keys and values, and what `rope_freqs.weight` is to hold.

    Raises ConfigError with everything in a configuration that GGUF has no words for.
    """
    found = [(n, row) for n, row in ARCHITECTURES.items() if type(config) is row.family.config]
    if not found:
        raise ConfigError(f"{type(config).__name__} has no GGUF form")
    name, row = found[0]
    complaints = [
        f"{field} {getattr(config, field)!r} (it can only be {value!r})"
        for field, value in row.constants.items()
        if not _same_meaning(getattr(config, field), value)
    ]
    values = {theirs: getattr(config, ours) for theirs, ours, _ in row.fields}
    values |= {"attention.value_length": config.head_dim, "vocab_size": config.vocab_size}
    freqs, rope = None, getattr(config, "rope", None)
    if row.rotary and isinstance(rope, Rope):
        settings, freqs = write_rope(rope, config.head_dim, complaints)
        values |= {"rope.dimension_count": config.head_dim, **settings}
    if complaints:
        raise ConfigError(f"GGUF has no words for {'; '.join(complaints)}")
    keys = {f"{name}.{key}": value for key, value in values.items() if value is not None}
    return name, row, keys, freqs


def _same_meaning(value: Any, known: Any) -> bool:
    tanh = {"gelu_new", "gelu_pytorch_tanh"}
    return value == known or {value, known} <= tanh


def _common(key: str, value: Any, complaints: list[str]) -> Any:
    """The one value of all layers, where a file has one for each."""
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 1 and value.size and (value == value[0]).all():
        return value[0].item()
    complaints.append(f"{key} differs from layer to layer, which is not supported")
    return None
