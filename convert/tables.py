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
    fields: the configuration table. allowed: fields that may only have one of these values,
    because others would change the mathematics. ignored: fields without effect on inference.
    Tensors have the names of our parameters after a prefix, and their shapes, but for what is said
    here and in layouts (`layouts.py`): what is one matrix there and several here, or the other way
    round. transposed: regexes of the matrices that are `[in, out]` there (Conv1D). skipped: of what
    is a buffer, no weight. prefix: before every name but the head's; a checkpoint may lack it.
    writes_prefix: whether it is written. head: the output matrix's name there; ours is read too.
    """

    architectures: tuple[str, ...]
    fields: tuple[Field, ...]
    allowed: Mapping[str, tuple[Any, ...]]
    ignored: frozenset[str]
    transposed: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    skipped: tuple[str, ...] = ()
    prefix: str
    writes_prefix: bool
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


# Bookkeeping, training and generation settings that transformers writes into any config.json.
COMMON_IGNORED = frozenset(
    {
        "architectures",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    }
)
COMMON_ALLOWED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
}


def read_fields(table: Architecture, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our spelling of the table's fields in a config.json, and every complaint about the rest."""
    complaints = []
    result = {}
    for theirs, ours, default in table.fields:
        value = data.get(theirs)
        if value is None:
            value = default
        if value is REQUIRED:
            complaints.append(f"{theirs} is missing")
        else:
            result[ours] = value
    known = {field.theirs for field in table.fields}
    for name, value in data.items():
        if name in known or name in table.ignored or name.startswith("_"):
            continue
        if name not in table.allowed:
            complaints.append(f"{name} is not supported (got {value!r:.60})")
        elif value not in table.allowed[name]:
            values = " or ".join(map(repr, table.allowed[name]))
            complaints.append(f"{name} must be {values}, got {value!r:.60}")
    return result, complaints


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
