"""Conversion tables, one per architecture, and the reader and writer of config.json's fields."""

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

from msgspec import Meta

from jaxllm.config.model import ModelConfig
from jaxllm.convert.fused_layouts import Layout
from jaxllm.errors import ConfigError
from jaxllm.runtime.schema import value_errors
from jaxllm.weights.lazy import LazyTensor

REQUIRED = object()  # as a default: the field must be present
Interval = Annotated[int, Meta(ge=1)]  # in layers; it may exceed their number
HEAD = "lm_head.weight"
SCORE = "score.weight"
_KEYS = re.compile(r"layers\.(\d{1,4})\.self_attn\.[kv]_(?:proj|norm)\..+")


class Field(NamedTuple):
    """A row of a configuration table: the checkpoint's field, our field, and the default.

    schema: The annotation of the checkpoint's values; None: that of the configuration's field.
    """

    key: str
    name: str
    default: Any
    schema: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldTable:
    """The fields of a JSON object in a checkpoint.

    Attributes:
        fields: The rows.
        allowed_values: Fields that may only have these values, or null, since others change
            results.
        ignored_fields: Fields without effect on inference, or read by `read_config`.
        aliases: Other names of fields, with the name in the table.
    """

    fields: tuple[Field, ...]
    allowed_values: Mapping[str, tuple[Any, ...]]
    ignored_fields: frozenset[str]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(FieldTable, abc.ABC):
    """The table of one `model_type`: how its checkpoints are read and written.

    A tensor has our parameter's name after a prefix, and its shape, except as listed here.

    Attributes:
        config: The class of our configurations.
        writes: Whether a configuration of this class is written as this `model_type`.
        architectures: Supported classes; the first one is written, and the second one has no head.
            Other classes may have another head or attend bidirectionally.
        classifier: The class with a score head; None: transformers has none.
        conv1d: Regexes of matrices that the checkpoint stores as `[in, out]` (Conv1D).
        layouts: Matrices that are fused in the checkpoint and separate here, or vice versa. Files
            are read in this order and written in the reverse one.
        buffers: Regexes of buffers, which are not weights.
        prefix: The prefix of every name but the head's; a checkpoint may lack it.
        writes_prefix: Whether the prefix is written.
        heads_divide_width: Whether transformers' class requires hidden_size to be a multiple of
            num_attention_heads, whatever head_dim is.
        head: The checkpoint's name of the output matrix; `HEAD` is read too.
    """

    model_type: str
    config: type[ModelConfig]
    writes: Callable[[Any], bool] = lambda config: True
    architectures: tuple[str, ...]
    classifier: str | None = None
    conv1d: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    buffers: tuple[str, ...] = ()
    prefix: str
    writes_prefix: bool
    heads_divide_width: bool = False
    head: str = HEAD

    def read_config(self, data: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration; raise ConfigError with everything that is wrong."""
        try:
            return self.parse_config(data)
        except ConfigError as error:
            names = {name: key for key, name, *_ in self.fields}
            names |= {name: alias for alias, name in self.aliases.items() if alias in data}
            names |= {f.name: names[f.key] for f in self.fields if f.key in names}
            words = rf"\b(?<!')({'|'.join(names)})\b(?!')"

            def respell(word: re.Match[str]) -> str:
                return word[0] if word[0] in data else names[word[0]]

            raise ConfigError(re.sub(words, respell, str(error))) from None

    @abc.abstractmethod
    def parse_config(self, data: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration; raise ConfigError, which may have our names of fields."""

    def write_config(self, config: Any) -> dict[str, Any]:
        """Return config.json's fields. Raises ConfigError for what the format cannot express."""
        fields = (field for field in self.fields if hasattr(config, field.name))
        return {
            "architectures": [self.architectures[0]],
            "model_type": self.model_type,
            **{field.key: getattr(config, field.name) for field in fields},
        }

    def orient_tensor(self, path: str, tensor: LazyTensor) -> LazyTensor:
        """Convert a tensor from the checkpoint's orientation to ours, or back."""
        matrix = len(tensor.shape) == 2 and any(re.fullmatch(r, path) for r in self.conv1d)
        return tensor.transpose() if matrix else tensor

    def output_name(self, path: str) -> str:
        """Return the name under which a parameter is written."""
        if path == HEAD:
            return self.head
        if path == SCORE:
            return path
        return f"{self.prefix}{path}" if self.writes_prefix else path


# Bookkeeping, training and generation settings of transformers and of publishers.
COMMON_IGNORED = frozenset({
    "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
    "id2label", "initializer_range", "is_llama_config", "label2id", "length_penalty", "max_length",
    "max_sequence_length", "min_length", "model_type", "n_special", "neftune_noise_alpha",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_past", "output_scores", "pad_token_id",
    "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class",
    "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "use_bfloat16", "use_cache",
})  # fmt: skip
# Fields that change results: a family without a row for one refuses any value but these and null.
# transformers 5 reads some from any configuration (masks, the cache's layers, the weight file);
# others are read by a few of its models, or by code that was shipped with checkpoints.
COMMON_ALLOWED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention": (),  # jaxllm's own field, for Llama
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "decoder": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "full_attn_mod": (1,),
    "generator": (),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "kv_sharing_modes": (),
    "lm_head_bias": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (),
    "sliding_window_pattern": (),
    "text_config": (),
    "tie_encoder_decoder": (False,),
    "transformers_weights": (),
    "use_alibi": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_sliding_window": (False,),
    "vision_config": (),
}


def read_fields(table: FieldTable, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the table's fields from a config.json, and check them against their schemas.

    Returns:
        Values by our field names, lists as tuples, and complaints. For unknown fields see
        `unknown_fields`.
    """
    complaints = []
    result: dict[str, Any] = {}
    data = dict(data)
    config = table.config if isinstance(table, Architecture) else None
    hints = get_type_hints(config, include_extras=True) if config else {}
    for alias, name in table.aliases.items():
        if (value := data.pop(alias, None)) is None:
            continue
        if (current := data.get(name)) not in (None, value):
            complaints.append(f"{name} {current!r:.40} and {alias} {value!r:.40} differ")
        data[name] = value
    for key, name, default, own in table.fields:
        value = data.get(key)
        schema = own or hints.get(name)
        if value is None:
            value = default
        elif schema is not None:
            complaints += value_errors(value, schema, key)
        if value is REQUIRED:
            complaints.append(f"{key} is missing")
        else:
            result[name] = tuple(value) if isinstance(value, list) else value
    read = {field.key for field in table.fields} | table.ignored_fields
    for name, known in table.allowed_values.items():
        value = data.get(name)
        if value is not None and name not in read and value not in known:
            values = " or ".join(map(repr, known)) or "null"
            complaints.append(f"{name} must be {values}, got {value!r:.60}")
    return result, complaints


def unknown_fields(table: FieldTable, data: Mapping[str, Any]) -> list[str]:
    """Return the names in a config.json that the table does not know.

    Names with a leading underscore are transformers' bookkeeping and are left out.
    """
    known = {field.key for field in table.fields} | table.ignored_fields
    known |= {*table.allowed_values, *table.aliases}
    return [name for name in data if name not in known and not name.startswith("_")]


def divide_exactly(total: str, fields: Mapping[str, Any], parts: str) -> int:
    """Return `fields[total] / fields[parts]`; raise ConfigError if it is not an integer."""
    total_count, count = fields[total], fields[parts]
    if type(total_count) is not int or type(count) is not int or count < 1 or total_count % count:
        refuse("config.json", [f"{total} {total_count!r} is not a multiple of {parts} {count!r}"])
    return total_count // count


def refuse(what: str, complaints: list[str]) -> None:
    """Raise ConfigError with all complaints, if there are any."""
    if complaints:
        raise ConfigError(f"{what}: {'; '.join(complaints)}")


def is_unread(path: str, config: ModelConfig) -> bool:
    """Return whether a tensor makes keys or values in a layer that reads those of an earlier one.

    Google's files of Gemma 4 have such tensors, those of transformers have not.
    """
    found = _KEYS.fullmatch(path)
    layer = int(found[1]) if found else config.num_hidden_layers
    return layer < config.num_hidden_layers and config.kv_source(layer) != layer
