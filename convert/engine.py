"""The engine: reads and writes Hugging Face directories by the table of their architecture.

Strict in both directions: every parameter needs a tensor, every tensor must be known, and one error
lists all complaints. It opens no file outside the directory and runs no code from it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxllm.checkpoint import (
    Checkpoint,
    check_ids,
    check_names,
    claim,
    native_precision,
    read_generation,
    read_model_json,
    write_checkpoint,
)
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import (
    as_schema,
    inside,
    is_there,
    read_json,
)
from jaxllm.models import FAMILIES, build, family, param_shapes
from jaxllm.weights.files import open_tensors
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.leaves.leaf import ROWS
from jaxllm.weights.paths import flatten

from . import flaxfiles
from .compressed import METHOD, Compressed, read_compressed, take_compressed
from .decoders import unknown_rope_settings
from .flaxfiles import as_torch, open_flax
from .quantized import rules, take_quantized, their_names
from .quantized_export import keep_quantized
from .scheme import KEY, Scheme, read_scheme
from .tables import HEAD, Architecture, unknown_fields


class _Index(msgspec.Struct):
    """model.safetensors.index.json or its Flax counterpart. weight_map: each tensor's shard."""

    weight_map: dict[str, str]


_Opened = Callable[[Path], dict[str, LazyTensor]]  # reads a file's tensors


class _Kind(msgspec.Struct):
    """The fields of config.json that select a table; the table reads the others."""

    model_type: str
    architectures: list[str] | None = None


# Each family has a module of the same name with `READS` (tables by model_type), `read_config` and
# `write_config`.
TABLES: dict[str, Any] = {name: import_module(f"{__package__}.{name}") for name in FAMILIES}
READERS: dict[str, tuple[Any, Architecture]] = {
    theirs: (module.read_config, table)
    for module in TABLES.values()
    for theirs, table in module.READS.items()
}

FORM = "Hugging Face"
SINGLE = "model"  # file name of unsharded weights, without its suffix
OLDER = "quantize_config.json"  # AutoGPTQ's settings, before they moved to config.json

# Older checkpoints have these in config.json instead of generation_config.json.
GENERATION_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def open_hf(
    directory: Path, data: Mapping[str, Any] | None = None, *, strict: bool = False
) -> Checkpoint:
    """Open a Hugging Face checkpoint of a supported family, with lazy tensors.

    Weights are in safetensors, one file or shards, or in a file written by a Flax class of
    transformers 4 (`flaxfiles`). Matrices quantized by GPTQ, AWQ or compressed-tensors
    (`quantization_config`) become leaves with the same integers.

    Args:
        data: The contents of config.json, if already read.
        strict: As for `read_config`.

    Raises:
        ConfigError, CheckpointError: With everything that is wrong.
    """
    data = read_model_json(directory) if data is None else data
    config, table = read_config(data, strict=strict)
    tensors = _ours(_open_files(directory, data["model_type"]), config, table, str(directory))
    if config.tie_word_embeddings and HEAD in tensors:
        _drop_tied_head(tensors, f"{family(config.model_type).tokens}.weight", str(directory))
    precision, formats = native_precision(tensors), dict[str, str]()
    complaints: list[str] = []
    if (scheme := _scheme(directory, data, tensors)) is not None:
        paths = dict(flatten(param_shapes(build(config))))
        if isinstance(scheme, Compressed):
            formats = take_compressed(scheme, tensors, _linears(config), complaints)
        else:
            formats = take_quantized(scheme, tensors, _linears(config), paths, complaints)
        precision = dataclasses.replace(precision, quantize=rules(formats, paths))
    check_names(tensors, config, str(directory), formats, complaints)
    ids = {k: data[k] for k in GENERATION_IDS if data.get(k) is not None}
    generation = check_ids({**ids, **read_generation(directory)}, f"{directory / 'config.json'}")
    return Checkpoint(
        directory,
        config,
        tensors,
        generation,
        precision,
        formats,
        form=FORM,
        ignored=unread_fields(data),
    )


def unread_fields(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a config.json that `read_config` ignores because it does not know them.

    Fields that are known to have no effect are not listed.
    """
    _, table = READERS[data["model_type"]]
    names = unknown_fields(table, {name: value for name, value in data.items() if name != KEY})
    return (*names, *(unknown_rope_settings(data) if "rope_scaling" in table.ignored else ()))


def read_config(
    data: Mapping[str, Any], *, strict: bool = False
) -> tuple[ModelConfig, Architecture]:
    """Return the configuration in a config.json, and the table that reads its weights.

    The reference is transformers' class for the model_type. A field that this class reads, or that
    is known to change results elsewhere (`COMMON_ALLOWED`), is read or refused. Any other field is
    ignored and listed by `unread_fields`. So is `auto_map`: the code that it names is never run.

    Args:
        strict: Whether to refuse fields that would be ignored.

    Raises:
        ConfigError: With every field that is missing or has an unsupported value.
    """
    kind: _Kind = as_schema(data, _Kind, "config.json", ConfigError)
    if kind.model_type not in READERS:
        raise ConfigError(
            f"config.json: model_type {kind.model_type!r:.40} is not supported"
            f" (known: {', '.join(READERS)})"
        )
    if data.get(KEY) is not None:  # first, since it may explain other complaints
        _read_settings(data[KEY])
    if strict and (names := unread_fields(data)):
        raise ConfigError(
            f"config.json: unknown fields {', '.join(names)}. Drop strict to ignore them"
        )
    read, table = READERS[kind.model_type]
    for name in kind.architectures or ():
        if name not in table.architectures:
            raise ConfigError(
                f"config.json: architectures is not supported: got {name!r:.60}, expected a plain"
                f" causal model ({', '.join(table.architectures)} for {kind.model_type}). If the"
                " tensors belong to one, write its name there"
            )
    return read(table, {name: value for name, value in data.items() if name != KEY}), table


def write_hf(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    files: Iterable[Path] = (),
    keep: tuple[str, Checkpoint] | None = None,
    show_progress: bool | None = None,
) -> None:
    """Write a Hugging Face directory that transformers loads, atomically.

    Args:
        directory: The directory to write.
        checkpoint: The checkpoint, not quantized.
        files: Other files of the checkpoint's directory to copy (the tokenizer's).
        keep: A name of `quantized_export.METHODS` and the same checkpoint with quantized weights,
            whose integer matrices are written in that format.

    Raises:
        CheckpointError: If `directory` already holds a checkpoint, or cannot be written.
        ConfigError: If no table writes the configuration's class, or the format of `keep` cannot
            hold a matrix.
    """
    claim(directory)
    config = checkpoint.config
    if config.model_type not in TABLES or type(config) is not family(config.model_type).config:
        raise ConfigError(f"{type(config).__name__} cannot be written in the Hugging Face format")
    data, table = TABLES[config.model_type].write_config(config)
    export = None
    if keep is not None:
        export = keep_quantized(keep[1], keep[0], table, _linears(config))
        data = {**data, KEY: export.settings}
    without = export.paths if export is not None else frozenset[str]()
    theirs = {path: x for path, x in checkpoint.tensors.items() if path not in without}
    for layout in table.layouts:
        theirs = layout.write(theirs, config)
    tensors = {
        table.written_name(path): table.oriented(path, tensor) for path, tensor in theirs.items()
    }
    ids = {k: v for k in GENERATION_IDS if (v := checkpoint.generation.get(k)) is not None}
    dtype = native_precision(tensors).weights
    tensors |= export.tensors if export is not None else {}
    generation = {"generation_config.json": checkpoint.generation} if checkpoint.generation else {}
    write_checkpoint(
        directory,
        tensors,
        {**generation, "config.json": {**data, **ids, "torch_dtype": dtype}},
        metadata={"format": "pt"},
        aligned=False,
        files=files,
        show_progress=show_progress,
    )


def _ours(
    tensors: dict[str, LazyTensor], config: ModelConfig, table: Architecture, where: str
) -> dict[str, LazyTensor]:
    """Return the tensors by our paths. Unknown ones keep their names, for `check_names` to list."""
    linears = _linears(config)
    known = {HEAD, *dict(flatten(param_shapes(build(config)))), *their_names(linears)}
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        path = HEAD if name == table.head else name.removeprefix(table.prefix)
        if any(re.fullmatch(regex, path) for regex in table.skipped):
            continue
        if path.endswith(".weight_shape"):  # of compressed-tensors; config.json implies it
            continue
        theirs = any(layout.knows(path) for layout in table.layouts)
        path = path if path in known or theirs else name
        if path in found:
            raise CheckpointError(f"{where}: {path} is stored twice, with and without a prefix")
        found[path] = table.oriented(path, tensor)
    for layout in table.layouts:
        found = layout.read(found, config)
    return found


def _scheme(
    directory: Path, data: Mapping[str, Any], tensors: Iterable[str]
) -> Scheme | Compressed | None:
    """Return how the weights are quantized, by config.json or by AutoGPTQ's older settings file."""
    if data.get(KEY) is not None:
        return _read_settings(data[KEY])
    older = _older_settings(directory)
    if older is None or not any(name.endswith(".qweight") for name in tensors):
        return None
    missing = {"quant_method": "gptq", "group_size": -1, "desc_act": True}  # AutoGPTQ's defaults
    return read_scheme({**missing, **older}, str(directory / OLDER))


def _read_settings(settings: Any) -> Scheme | Compressed:
    """Return how the weights are stored, from config.json's `quantization_config`.

    Raises:
        ConfigError: With every option that is not supported.
    """
    if isinstance(settings, Mapping) and settings.get("quant_method") == METHOD:
        return read_compressed(settings, f"config.json: {KEY}")
    return read_scheme(settings)


def _older_settings(directory: Path) -> dict[str, Any] | None:
    """Return the contents of AutoGPTQ's settings file; None if there is none."""
    return read_json(inside(directory, OLDER)) if is_there(directory / OLDER) else None


def _base_names(directory: Path) -> list[str]:
    """Return possible names of weight files, without `.safetensors`, the preferred one first.

    AutoGPTQ names them by bits and group size, or by a field of its settings.
    """
    older = _older_settings(directory)
    if older is None:
        return [SINGLE]
    own = older.get("model_file_base_name")
    by_size = f"gptq_model-{older.get('bits')}bit-{older.get('group_size', -1)}g"
    names = [name for name in (own, by_size, SINGLE) if isinstance(name, str) and name]
    return list(dict.fromkeys(names))


def _linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes `[O, I]` of linear weights, by path; norms and tables are left out."""
    shapes, tables = flatten(param_shapes(build(config))), family(config.model_type).tables
    return {
        path: leaf.shape
        for path, leaf in shapes
        if len(leaf.shape) == 2 and path.removesuffix(".weight") not in tables
    }


def _drop_tied_head(tensors: dict[str, LazyTensor], tokens: str, where: str) -> None:
    """Remove the head of a tied checkpoint, which must equal the embedding if it is stored."""
    table = tensors.get(tokens)
    head = tensors.pop(HEAD)
    if table is not None and not (
        head.shape == table.shape
        and all(map(np.array_equal, head.blocks(ROWS), table.blocks(ROWS)))
    ):
        raise CheckpointError(
            f"{where}: config.json ties the head to the embedding (tie_word_embeddings), but"
            f" {HEAD} differs from it. To use the stored head, set tie_word_embeddings to false"
        )


def _open_files(directory: Path, model_type: str) -> dict[str, LazyTensor]:
    """Open all tensors, by their names in a PyTorch checkpoint."""
    names = [f"{base}.safetensors" for base in _base_names(directory)]
    for name in names:
        if (found := _open(directory, name, f"{name}.index.json", open_tensors)) is None:
            continue
        # Safetensors written by a Flax class have Flax names too, joined by dots.
        if not any(name.endswith(".kernel") for name in found):
            return found
        return _of_flax(directory, {n.replace(".", "/"): t for n, t in found.items()}, model_type)
    if (found := _open(directory, flaxfiles.NAME, flaxfiles.INDEX, open_flax)) is not None:
        return _of_flax(directory, found, model_type)
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    pickles = sorted(p.name for end in ("bin", "pt", "pth") for p in directory.glob(f"*.{end}"))
    if pickles and not others:
        raise CheckpointError(
            f"{directory}: {pickles[0]} is a pickle, which can run code when it is read, so jaxllm"
            " does not open it. Convert it with transformers:"
            " AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)"
        )
    known = [other for name in names for other in (name, f"{name}.index.json")]
    raise CheckpointError(
        f"{directory} has no weights: got {', '.join(others) or 'no .safetensors file'}, expected"
        f" {', '.join(known)} or {flaxfiles.NAME}." + _missing_weights(directory, others)
    )


def _missing_weights(directory: Path, others: list[str]) -> str:
    """Return the remedy for weight files with an unexpected name."""
    if any(name.startswith("gptq_model-") for name in others) and not is_there(directory / OLDER):
        return f" AutoGPTQ's files need {OLDER}, which sets their bits and group_size."
    return f" Rename {others[0]} to {SINGLE}.safetensors." if len(others) == 1 else ""


def _open(
    directory: Path, single: str, index: str, opened: _Opened
) -> dict[str, LazyTensor] | None:
    """Open one file, or the shards of an index; return None if neither exists."""
    if is_there(directory / single):
        return opened(inside(directory, single))
    if not is_there(directory / index):
        return None
    shards: _Index = as_schema(read_json(inside(directory, index)), _Index, str(directory / index))
    return _open_shards(directory, shards.weight_map, opened)


def _of_flax(
    directory: Path, tensors: Mapping[str, LazyTensor], model_type: str
) -> dict[str, LazyTensor]:
    if model_type not in flaxfiles.READS:
        raise CheckpointError(
            f"{directory}: the weights have Flax names, but transformers had no Flax class for"
            f" {model_type} (known: {', '.join(flaxfiles.READS)})"
        )
    return as_torch(tensors)


def _open_shards(
    directory: Path, weight_map: Mapping[str, str], opened: _Opened
) -> dict[str, LazyTensor]:
    files = {f: opened(inside(directory, f)) for f in sorted(set(weight_map.values()))}
    complaints = []
    tensors: dict[str, LazyTensor] = {}
    for file, held in files.items():
        for name, tensor in held.items():
            if name in tensors:
                complaints.append(f"{name} is in more than one shard")
            elif weight_map.get(name) != file:
                complaints.append(f"{name} is in {file}, the index names {weight_map.get(name)}")
            tensors[name] = tensor
    complaints += [
        f"{name} is not in {file}" for name, file in weight_map.items() if name not in files[file]
    ]
    if complaints:
        raise CheckpointError(f"{directory}: {'; '.join(complaints[:50])}")
    return tensors
