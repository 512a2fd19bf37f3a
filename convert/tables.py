"""What the tables of `llama.py` and `gpt2.py` are made of, and how a config.json is read by one."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.lazy import LazyTensor

from .layouts import Layout

REQUIRED = object()  # in place of a default: the checkpoint must say it
HEAD = "lm_head.weight"


class Field(NamedTuple):
    """A row of a configuration table: a checkpoint's field, ours, and what a missing one means."""

    theirs: str
    ours: str
    default: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one architecture's checkpoints are read and written.

    architectures: classes whose checkpoints these are, the one that is written first. Others have
    another head, or attend to what follows; so may classes that nobody here has heard of.
    fields: the configuration table. allowed: fields of one of these values only, or null, because
    another would change the result. ignored: fields without effect on inference, or read by
    `read_config`. aliases: other names of fields, each with the name that the table has.
    Tensors have the names of our parameters after a prefix, and their shapes, but for what is said
    here and in layouts (`layouts.py`): what is one matrix there and several here, or the other way
    round. transposed: regexes of the matrices that are `[in, out]` there (Conv1D). skipped: of what
    is a buffer, no weight. prefix: before every name but the head's; a checkpoint may lack it.
    writes_prefix: whether it is written. divides_width: whether transformers' class refuses a
    hidden_size that is no multiple of num_attention_heads, whatever head_dim says. head: the output
    matrix's name there; ours is read too.
    """

    architectures: tuple[str, ...]
    fields: tuple[Field, ...]
    allowed: Mapping[str, tuple[Any, ...]]
    ignored: frozenset[str]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    skipped: tuple[str, ...] = ()
    prefix: str
    writes_prefix: bool
    divides_width: bool = False
    head: str = HEAD

    def oriented(self, path: str, tensor: LazyTensor) -> LazyTensor:
        """Their tensor as ours, or ours as theirs: a transpose is its own inverse."""
        matrix = len(tensor.shape) == 2 and any(re.fullmatch(r, path) for r in self.transposed)
        return tensor.transposed() if matrix else tensor

    def written_name(self, path: str) -> str:
        """The name under which a parameter is written."""
        if path == HEAD:
            return self.head
        return f"{self.prefix}{path}" if self.writes_prefix else path


# Bookkeeping, training and generation settings, of transformers and of those who publish.
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
# What changes the result: a family that has no row for it refuses any value but these and null.
# transformers 5 reads some from any configuration (masks, the cache's layers, the file of weights);
# others are read by a few of its models, or by code that checkpoints brought of their own.
COMMON_ALLOWED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention": (),  # ours, of Llama
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


def read_fields(table: Architecture, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our spelling of the table's fields in a config.json, and every complaint about the rest.

    Fields that no row names are not looked at: see `unknown_fields`.
    """
    complaints = []
    result = {}
    data = dict(data)
    for alias, name in table.aliases.items():
        if (value := data.pop(alias, None)) is None:
            continue
        if data.get(name, value) != value:
            complaints.append(f"{name} {data[name]!r:.40} and {alias} {value!r:.40} differ")
        data[name] = value
    for theirs, ours, default in table.fields:
        value = data.get(theirs)
        if value is None:
            value = default
        if value is REQUIRED:
            complaints.append(f"{theirs} is missing")
        else:
            result[ours] = value
    read = {field.theirs for field in table.fields} | table.ignored
    for name, known in table.allowed.items():
        value = data.get(name)
        if value is not None and name not in read and value not in known:
            values = " or ".join(map(repr, known)) or "null"
            complaints.append(f"{name} must be {values}, got {value!r:.60}")
    return result, complaints


def unknown_fields(table: Architecture, data: Mapping[str, Any]) -> list[str]:
    """The names in a config.json that the table has no word for, and nothing here reads.

    What begins with an underscore is transformers' own bookkeeping.
    """
    known = {field.theirs for field in table.fields} | table.ignored
    known |= {*table.allowed, *table.aliases}
    return [name for name in data if name not in known and not name.startswith("_")]


def share(total: str, fields: Mapping[str, Any], parts: str) -> int:
    """`fields[total] / fields[parts]`, a whole number, or ConfigError."""
    whole, count = fields[total], fields[parts]
    if type(whole) is not int or type(count) is not int or count < 1 or whole % count:
        refuse("config.json", [f"{total} {whole!r} is not a multiple of {parts} {count!r}"])
    return whole // count


def refuse(what: str, complaints: list[str]) -> None:
    """Raise ConfigError with all the complaints, if there are any."""
    if complaints:
        raise ConfigError(f"{what}: {'; '.join(complaints)}")


def write_fields(table: Architecture, config: ModelConfig) -> dict[str, Any]:
    """The table's fields in the checkpoint's spelling; not those that became others as they were
    read.
    """
    fields = (field for field in table.fields if hasattr(config, field.ours))
    return {field.theirs: getattr(config, field.ours) for field in fields}
