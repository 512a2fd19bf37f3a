"""Conversion between a GGUF file's keys and a configuration, by the rows of `families`.

Keys are `{architecture}.{key}`. As with Hugging Face's tables, a key that changes llama.cpp's
results is read or refused, any other is ignored (`unknown_keys`), and one error lists all
complaints. The tensors decide what no key does: the vocabulary size, which linears have biases,
whether the head is tied.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config.model import ModelConfig, Rope
from jaxllm.convert.gguf.architecture import (
    ALLOWED,
    IGNORED,
    MATH_PREFIXES,
    MAX_LAYERS,
    GGUFArchitecture,
)
from jaxllm.convert.gguf.families import ARCHITECTURES, VARIANTS
from jaxllm.convert.gguf.header import GGUFHeader, TensorInfo
from jaxllm.convert.gguf.rotary import LOG_MULTIPLIER, ROPE_KEYS, read_rope, write_rope
from jaxllm.convert.tables import REQUIRED, refuse
from jaxllm.errors import ConfigError
from jaxllm.ops import ACTIVATIONS

TOKEN_TABLE = "token_embd.weight"


def find_architecture(header: GGUFHeader) -> tuple[str, GGUFArchitecture]:
    """Return a model file's architecture and row; raise ConfigError if it is not supported."""
    name, kind = header.settings.get("general.architecture"), header.settings.get("general.type")
    if kind not in (None, "model"):
        what = "an adapter (--adapter takes it)" if kind == "adapter" else f"{kind!r:.40}"
        raise ConfigError(f"{header.path}: general.type is {what}, expected a model")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{header.path}: general.architecture {name!r:.40} is not supported"
            f" (known: {', '.join(ARCHITECTURES)})"
        )
    for architecture, key, row in VARIANTS:
        count = header.settings.get(f"{name}.{key}")
        is_allowed = count in row.allowed_values.get(key, (count,))
        if architecture == name and type(count) is int and count and is_allowed:
            return name, row
    return name, ARCHITECTURES[name]


def unknown_keys(header: GGUFHeader) -> tuple[str, ...]:
    """Return the architecture's keys that `read_config` ignores because it does not know them."""
    name, row = find_architecture(header)
    begins = f"{name}."
    keys = (key for key in header.settings if key.startswith(begins))
    return tuple(key for key in keys if not _is_known(row, key.removeprefix(begins)))


def _is_known(row: GGUFArchitecture, key: str) -> bool:
    """Return whether a key (without the architecture) is read, allowed or refused."""
    named = {field.key for field in row.fields} | {*ALLOWED, *row.allowed_values}
    return key.startswith(MATH_PREFIXES) or key in named | IGNORED | row.derive_keys


def read_config(
    header: GGUFHeader,
    entries: Mapping[str, TensorInfo],
    divisors: Mapping[str, np.ndarray],
    *,
    strict: bool = False,
) -> ModelConfig:
    """Return the configuration in a file's keys and tensors.

    Args:
        entries: The tensors of all parts.
        divisors: The values of those in `DIVISOR_TENSORS`.
        strict: Whether to refuse `unknown_keys`.

    Raises:
        ConfigError: With every key that is missing or has an unsupported value.
    """
    name, row = find_architecture(header)
    begins, complaints = f"{name}.", list[str]()
    if strict and (unread := unknown_keys(header)):
        complaints.append(f"unknown keys {', '.join(unread)}. Drop strict to ignore them")
    data = {
        key.removeprefix(begins): _common_value(
            key, value, key.removeprefix(begins) in row.derive_keys, complaints
        )
        for key, value in header.settings.items()
        if key.startswith(begins)
    }
    fields: dict[str, Any] = {}
    for key, name, default, _ in row.fields:
        value = data.get(key, default)
        if value is REQUIRED:
            complaints.append(f"{begins}{key} is missing")
        # 0 means none: no window, no scale.
        fields[name] = default if value == 0 and default in (None, 1.0) else value
    if TOKEN_TABLE not in entries or len(entries[TOKEN_TABLE].shape) != 2:
        complaints.append(f"{TOKEN_TABLE} is missing or not a matrix")
    own = {field.key for field in row.fields} | row.derive_keys
    known = own | IGNORED
    allowed = {**ALLOWED, **row.allowed_values}
    for key, value in data.items():
        if key in known or (row.uses_rope and key in ROPE_KEYS and key not in row.allowed_values):
            continue
        if key not in allowed:
            if key.startswith(MATH_PREFIXES):
                complaints.append(f"{begins}{key} is not supported (got {value!r:.60})")
        elif value not in allowed[key]:
            values = " or ".join(map(repr, allowed[key]))
            complaints.append(f"{begins}{key} must be {values}, got {value!r:.60}")
    where = f"{header.path}"
    refuse(where, complaints)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if fields.get("num_key_value_heads", 0) is None:
        fields["num_key_value_heads"] = heads
    if fields[row.head_dim] is None:
        if type(hidden) is not int or type(heads) is not int or heads < 1 or hidden % heads:
            refuse(
                where, [f"embedding_length {hidden!r:.20} is not a multiple of head_count {heads}"]
            )
        fields[row.head_dim] = hidden // heads
    size = fields[row.head_dim]
    fields |= {"vocab_size": entries[TOKEN_TABLE].shape[0], **row.constants}
    fields |= {field: tensor in entries for field, tensor in row.tensor_flags.items()}
    fields |= row.read_names(entries)
    fields["tie_word_embeddings"] = "output.weight" not in entries
    if "attention_multiplier" in fields and fields["attention_multiplier"] is None:
        fields["attention_multiplier"] = float(size**-0.5)
    sizes = {"attention.value_length"}
    if row.uses_rope and not row.partial_rotary:
        sizes.add("rope.dimension_count")
    for key in sorted(sizes - own):
        for name, expected in ((key, size), (f"{key}_swa", fields["head_dim"])):
            if data.get(name, expected) != expected:
                complaints.append(
                    f"{begins}{name} is not supported: got {data[name]!r:.20}, expected the head"
                    f" size {expected}"
                )
    if row.uses_rope:
        share = data.get("rope.dimension_count", size) if row.partial_rotary else None
        rotary = {key: value for key, value in data.items() if key not in row.derive_keys}
        rope = read_rope(rotary, divisors, begins, complaints, (share, size), row.allowed_values)
        if rope is not None and rope.rope_type == "yarn" and not row.truncates_yarn:
            rope = dataclasses.replace(rope, truncate=False)
        fields["rope"] = rope
    refuse(where, complaints)
    try:
        return row.family.config(**{**fields, **row.derive(fields, data)})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def write_config(
    config: ModelConfig,
) -> tuple[str, GGUFArchitecture, dict[str, Any], dict[str, np.ndarray]]:
    """Return the architecture, its row, keys with values, and the tensors of divisors to write.

    Raises ConfigError with everything in a configuration that GGUF cannot express.
    """
    rows = [*((name, row) for name, _, row in VARIANTS), *ARCHITECTURES.items()]
    candidates = [(n, row) for n, row in rows if type(config) is row.family.config]
    has_states = any(config.state_shape(i) for i in range(config.num_hidden_layers))
    if has_states and len(candidates) > 1:
        candidates.pop(0)  # Granite 4 is Granite only without Mamba layers
    if not candidates:
        raise ConfigError(f"{type(config).__name__} cannot be written as GGUF")
    name, row = candidates[0]
    slides = tuple(config.window(i) is not None for i in range(config.num_hidden_layers))
    keys = row.write_keys(config)
    if row.writes_pattern:
        keys["attention.sliding_window_pattern"] = slides
    complaints = [
        f"{field} {getattr(config, field)!r} (expected {value!r})"
        for field, value in {**row.constants, **row.derive(vars(config), keys)}.items()
        if not _is_equivalent(getattr(config, field), value)
    ]
    kind = config.attention
    if kind is not None:
        complaints.append(f"attention of kind {kind.kind!r} (llama.cpp's attention is dense)")
    head_dim = getattr(config, row.head_dim)
    values = {"attention.value_length": head_dim, "vocab_size": config.vocab_size}
    values |= {key: getattr(config, name) for key, name, *_ in row.fields} | keys
    if row.writes_pattern and not any(slides):
        values.pop("attention.sliding_window_pattern", None)
    for key, value in values.items():
        if type(value) is int and key.endswith("scale"):  # a float to llama.cpp
            values[key] = float(value)
        if isinstance(value, tuple):
            values[key] = np.array(value, bool if type(value[0]) is bool else np.int32)
    divisors, rope = dict[str, np.ndarray](), getattr(config, "rope", None)
    if row.uses_rope and isinstance(rope, Rope):
        context = config.max_position_embeddings
        unit = LOG_MULTIPLIER in row.allowed_values
        if not row.truncates_yarn and rope.rope_type == "yarn":
            if rope.truncate is not False:
                complaints.append(f"YaRN's truncate {rope.truncate}")
            rope = dataclasses.replace(rope, truncate=None)
        if LOG_MULTIPLIER in row.derive_keys:  # which `derive` compares
            rope = dataclasses.replace(
                rope, mscale=None, mscale_all_dim=None, attention_factor=None
            )
        settings, divisors = write_rope(rope, head_dim, context, complaints, unit)
        turned = rope.rotary_dim(head_dim)
        if turned != head_dim and not row.partial_rotary:
            complaints.append(f"partial_rotary_factor {rope.partial_rotary_factor!r}")
        values = {"rope.dimension_count": turned, **settings} | values
    if complaints:
        raise ConfigError(f"GGUF does not support {'; '.join(complaints)}")
    keys = {f"{name}.{key}": value for key, value in values.items() if value is not None}
    return name, row, keys, divisors


def _is_equivalent(value: Any, known: Any) -> bool:
    names = isinstance(value, str) and value in ACTIVATIONS
    return value == known or (names and ACTIVATIONS[value] is ACTIVATIONS.get(known))


def _common_value(key: str, value: Any, derives: bool, complaints: list[str]) -> Any:
    """Reduce per-layer values to their common value; keep those that `derive` reads as a tuple."""
    if not isinstance(value, np.ndarray):
        return value
    if derives or key.endswith(".sliding_window_pattern"):
        return tuple(int(x) for x in value[:MAX_LAYERS])
    if value.ndim == 1 and value.size and (value == value[0]).all():
        return value[0].item()
    complaints.append(f"{key} differs from layer to layer, which is not supported")
    return None
