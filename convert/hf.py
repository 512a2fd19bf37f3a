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

from jaxllm.checkpoints.native import (
    HF_FORMAT,
    Checkpoint,
    check_output_directory,
    check_special_ids,
    check_tensors,
    native_precision,
    read_generation_config,
    read_model_json,
    write_checkpoint,
)
from jaxllm.config.model import ModelConfig, ScoreHead
from jaxllm.convert import flax_msgpack
from jaxllm.convert.compressed_tensors import (
    COMPRESSED_TENSORS,
    CompressedScheme,
    import_compressed_tensors,
    read_compressed_scheme,
)
from jaxllm.convert.decoders import unknown_rope_settings
from jaxllm.convert.flax_msgpack import as_torch, open_flax
from jaxllm.convert.fp8 import FP8, Fp8Scheme, read_fp8_scheme, scale_fp8
from jaxllm.convert.gptq_awq import import_gptq_awq, list_tensor_names, make_rules
from jaxllm.convert.quantization_config import CONFIG_KEY, Scheme, read_scheme
from jaxllm.convert.quantized_export import export_integers
from jaxllm.convert.rotary_pairs import sort_quantized
from jaxllm.convert.score_head import read_score_head, write_score_head
from jaxllm.convert.tables import HEAD, Architecture, is_unread, unknown_fields
from jaxllm.convert.text_tower import (
    OTHER_TOWERS,
    is_multimodal,
    select_text_config,
    select_text_tensors,
)
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import path_exists, path_inside, read_json
from jaxllm.models import FAMILIES, build, get_family, param_shapes
from jaxllm.runtime.schema import as_schema
from jaxllm.text.embedding_settings import MODULES
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import flatten
from jaxllm.weights.safetensors import open_tensors
from jaxllm.weights.types.base import BLOCK_ROWS


class _Index(msgspec.Struct):
    """model.safetensors.index.json or its Flax counterpart. weight_map: each tensor's shard."""

    weight_map: dict[str, str]


_OpenFile = Callable[[Path], dict[str, LazyTensor]]  # reads a file's tensors


class _ModelKind(msgspec.Struct):
    """The fields of config.json that select a table; the table reads the others."""

    model_type: str
    architectures: list[str] | None = None


# By model_type. Each family has a module of the same name with `TABLES`.
TABLES: dict[str, Architecture] = {
    table.model_type: table
    for name in FAMILIES
    for table in import_module(f"{__package__}.{name}").TABLES
}

MXFP4 = "mxfp4"  # a `quant_method`, and our format of the same name
WEIGHTS_STEM = "model"  # file name of unsharded weights, without its suffix
AUTOGPTQ_CONFIG = "quantize_config.json"  # AutoGPTQ's settings, before they moved to config.json

# Older checkpoints have these in config.json instead of generation_config.json.
GENERATION_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def open_hf(
    directory: Path, data: Mapping[str, Any] | None = None, *, strict: bool = False
) -> Checkpoint:
    """Open a Hugging Face checkpoint of a supported family, with lazy tensors.

    Weights are in safetensors, one file or shards, or in a file written by a Flax class of
    transformers 4 (`flax_msgpack`). Matrices quantized by GPTQ, AWQ or compressed-tensors
    (`quantization_config`) become leaves with the same integers; those in FP8, floats.

    Args:
        data: The contents of config.json, if already read.
        strict: As for `read_config`.

    Raises:
        ConfigError, CheckpointError: With everything that is wrong.
    """
    data = read_model_json(directory) if data is None else data
    config, table = read_config(data, strict=strict)
    multimodal, ignored, data = is_multimodal(data), unread_fields(data), select_text_config(data)
    stored = _open_weights(directory, data["model_type"])
    stored = select_text_tensors(stored) if multimodal else stored
    scheme = _read_scheme(directory, data, stored)
    precision = native_precision(stored)  # FP8's products are in float32, whatever the others are
    stored = scale_fp8(stored, scheme if isinstance(scheme, Fp8Scheme) else None, str(directory))
    tensors = _rename_tensors(stored, config, table, str(directory))
    if multimodal:  # tie_word_embeddings may stand for the text model or for all: the file decides
        config = dataclasses.replace(config, tie_word_embeddings=HEAD not in tensors)
    if config.tie_word_embeddings and HEAD in tensors:
        _drop_tied_head(
            tensors, f"{get_family(config.model_type).token_table}.weight", str(directory)
        )
    if HEAD not in tensors and not config.tie_word_embeddings and _is_embedder(directory, data):
        config = dataclasses.replace(config, score=config.score or ScoreHead(labels=()))
    formats, complaints = dict[str, str](), list[str]()
    if scheme is not None and not isinstance(scheme, Fp8Scheme):
        paths = dict(flatten(param_shapes(build(config))))
        if isinstance(scheme, str):  # MXFP4: `GptOssLayout` reads the tensors
            pieces = (path for path in tensors if path.endswith(".data"))
            formats = {path.removesuffix(".data"): scheme for path in pieces}
        elif isinstance(scheme, CompressedScheme):
            formats = import_compressed_tensors(scheme, tensors, _linear_shapes(config), complaints)
        else:
            formats = import_gptq_awq(scheme, tensors, _linear_shapes(config), paths, complaints)
        tensors = sort_quantized(tensors, config, table.layouts)
        precision = dataclasses.replace(precision, quantize=make_rules(formats, paths))
    check_tensors(tensors, config, str(directory), formats, complaints)
    ids = {k: data[k] for k in GENERATION_IDS if data.get(k) is not None}
    generation = check_special_ids(
        {**ids, **read_generation_config(directory)}, f"{directory / 'config.json'}"
    )
    return Checkpoint(
        directory,
        config,
        tensors,
        generation,
        precision,
        formats,
        file_format=HF_FORMAT,
        ignored=ignored,
    )


def _is_embedder(directory: Path, data: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint is meant for vectors, and so may lack an output matrix."""
    bare = TABLES[data["model_type"]].architectures[1]
    return data.get("architectures") == [bare] or path_exists(directory / MODULES)


def unread_fields(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a config.json that `read_config` ignores because it does not know them.

    Fields that are known to have no effect are not listed.
    """
    towers = [name for name in OTHER_TOWERS if is_multimodal(data) and name in data]
    data = select_text_config(data)
    table = TABLES[data["model_type"]]
    names = unknown_fields(
        table, {name: value for name, value in data.items() if name != CONFIG_KEY}
    )
    return (
        *towers,
        *names,
        *(unknown_rope_settings(data) if "rope_scaling" in table.ignored_fields else ()),
    )


def read_config(
    data: Mapping[str, Any], *, strict: bool = False
) -> tuple[ModelConfig, Architecture]:
    """Return the configuration in a config.json, and the table that reads its weights.

    The reference is transformers' class for the model_type. A field that this class reads, or that
    is known to change results elsewhere (`COMMON_ALLOWED`), is read or refused. Any other field is
    ignored and listed by `unread_fields`. So is `auto_map`: the code that it names is never run.

    Of a multimodal checkpoint, the text model is read.

    Args:
        strict: Whether to refuse fields that would be ignored.

    Raises:
        ConfigError: With every field that is missing or has an unsupported value.
    """
    given, data = data, select_text_config(data)
    kind: _ModelKind = as_schema(data, _ModelKind, "config.json", ConfigError)
    if kind.model_type not in TABLES:
        raise ConfigError(
            f"config.json: model_type {kind.model_type!r:.40} is not supported"
            f" (known: {', '.join(TABLES)})"
        )
    if data.get(CONFIG_KEY) is not None:  # first, since it may explain other complaints
        _read_quantization(data[CONFIG_KEY])
    if strict and (names := unread_fields(given)):
        raise ConfigError(
            f"config.json: unknown fields {', '.join(names)}. Drop strict to ignore them"
        )
    table = TABLES[kind.model_type]
    own = {name: value for name, value in data.items() if name != CONFIG_KEY}
    if table.classifier is not None and kind.architectures == [table.classifier]:
        return dataclasses.replace(table.read_config(own), score=read_score_head(own)), table
    for name in kind.architectures or ():
        if name not in table.architectures:
            raise ConfigError(
                f"config.json: architectures is not supported: got {name!r:.60}, expected a plain"
                f" causal model ({', '.join(table.architectures)} for {kind.model_type})"
                f"{f' or {table.classifier}' if table.classifier else ''}. If the tensors belong to"
                " one, write its name there"
            )
    return table.read_config(own), table


def write_config(config: ModelConfig) -> tuple[dict[str, Any], Architecture]:
    """Return config.json's fields, and the table that writes the weights.

    Raises ConfigError for a configuration that the format cannot express.
    """
    family = config.model_type
    tables = (t for t in TABLES.values() if t.config.model_type == family and t.writes(config))
    table = next(tables)
    data = table.write_config(config)
    if config.score is None:
        return data, table
    if not config.score.labels:
        return {**data, "architectures": [table.architectures[1]]}, table
    if table.classifier is None:
        raise ConfigError(f"transformers has no classifier of {family}, so it cannot be written")
    return {**data, "architectures": [table.classifier], **write_score_head(config.score)}, table


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
        show_progress: None shows progress if stderr is a terminal.

    Raises:
        CheckpointError: If `directory` already holds a checkpoint, or cannot be written.
        ConfigError: If no table writes the configuration's class, or the format of `keep` cannot
            hold a matrix.
    """
    check_output_directory(directory)
    config = checkpoint.config
    if type(config) not in {table.config for table in TABLES.values()}:
        raise ConfigError(f"{type(config).__name__} cannot be written in the Hugging Face format")
    data, table = write_config(config)
    export = None
    if keep is not None:
        export = export_integers(keep[1], keep[0], table, _linear_shapes(config))
        data = {**data, CONFIG_KEY: export.settings}
    without = export.paths if export is not None else frozenset[str]()
    stored = {path: x for path, x in checkpoint.tensors.items() if path not in without}
    for layout in reversed(table.layouts):
        stored = layout.write(stored, config)
    tensors = {
        table.output_name(path): table.orient_tensor(path, tensor)
        for path, tensor in stored.items()
    }
    ids = {k: v for k in GENERATION_IDS if (v := checkpoint.generation.get(k)) is not None}
    dtype = native_precision(tensors).weights
    tensors |= export.tensors if export is not None else {}
    generation = {"generation_config.json": checkpoint.generation} if checkpoint.generation else {}
    write_checkpoint(
        directory,
        tensors,
        {**generation, "config.json": {**ids, **data, "torch_dtype": dtype}},
        metadata={"format": "pt"},
        aligned=False,
        files=files,
        show_progress=show_progress,
    )


def _rename_tensors(
    tensors: dict[str, LazyTensor], config: ModelConfig, table: Architecture, where: str
) -> dict[str, LazyTensor]:
    """Return the tensors by our paths. Unknown ones keep their names, for `check_tensors` to
    list.
    """
    linears = _linear_shapes(config)
    known = {HEAD, *dict(flatten(param_shapes(build(config)))), *list_tensor_names(linears)}
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        path = HEAD if name == table.head else name.removeprefix(table.prefix)
        if any(re.fullmatch(regex, path) for regex in table.buffers) or is_unread(path, config):
            continue
        if path.endswith(".weight_shape"):  # of compressed-tensors; config.json implies it
            continue
        is_fused = any(layout.matches(path) for layout in table.layouts)
        path = path if path in known or is_fused else name
        if path in renamed:
            raise CheckpointError(f"{where}: {path} is stored twice, with and without a prefix")
        renamed[path] = table.orient_tensor(path, tensor)
    for layout in table.layouts:
        renamed = layout.read(renamed, config)
    return renamed


def _read_scheme(
    directory: Path, data: Mapping[str, Any], tensors: Iterable[str]
) -> Scheme | CompressedScheme | Fp8Scheme | str | None:
    """Return how the weights are quantized, by config.json or by AutoGPTQ's older settings file."""
    if data.get(CONFIG_KEY) is not None:
        return _read_quantization(data[CONFIG_KEY])
    older = _read_autogptq_config(directory)
    if older is None or not any(name.endswith(".qweight") for name in tensors):
        return None
    missing = {"quant_method": "gptq", "group_size": -1, "desc_act": True}  # AutoGPTQ's defaults
    return read_scheme({**missing, **older}, str(directory / AUTOGPTQ_CONFIG))


def _read_quantization(settings: Any) -> Scheme | CompressedScheme | Fp8Scheme | str:
    """Return how the weights are stored, from config.json's `quantization_config`.

    Raises:
        ConfigError: With every option that is not supported.
    """
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method == COMPRESSED_TENSORS:
        return read_compressed_scheme(settings, f"config.json: {CONFIG_KEY}")
    if method == FP8:
        return read_fp8_scheme(settings, f"config.json: {CONFIG_KEY}")
    if method == MXFP4:
        return MXFP4
    return read_scheme(settings)


def _read_autogptq_config(directory: Path) -> dict[str, Any] | None:
    """Return the contents of AutoGPTQ's settings file; None if there is none."""
    return (
        read_json(path_inside(directory, AUTOGPTQ_CONFIG))
        if path_exists(directory / AUTOGPTQ_CONFIG)
        else None
    )


def _base_names(directory: Path) -> list[str]:
    """Return possible names of weight files, without `.safetensors`, the preferred one first.

    AutoGPTQ names them by bits and group size, or by a field of its settings.
    """
    older = _read_autogptq_config(directory)
    if older is None:
        return [WEIGHTS_STEM]
    own = older.get("model_file_base_name")
    by_size = f"gptq_model-{older.get('bits')}bit-{older.get('group_size', -1)}g"
    names = [name for name in (own, by_size, WEIGHTS_STEM) if isinstance(name, str) and name]
    return list(dict.fromkeys(names))


def _linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes `[O, I]` of linear weights, by path; norms and tables are left out."""
    shapes, tables = (
        flatten(param_shapes(build(config))),
        get_family(config.model_type).embedding_tables,
    )
    return {
        path: leaf.shape
        for path, leaf in shapes
        if len(leaf.shape) == 2 and path.endswith(".weight") and path[:-7] not in tables
    }


def _drop_tied_head(tensors: dict[str, LazyTensor], tokens: str, where: str) -> None:
    """Remove the head of a tied checkpoint, which must equal the embedding if it is stored."""
    table = tensors.get(tokens)
    head = tensors.pop(HEAD)
    if table is not None and not (
        head.shape == table.shape
        and all(map(np.array_equal, head.blocks(BLOCK_ROWS), table.blocks(BLOCK_ROWS)))
    ):
        raise CheckpointError(
            f"{where}: config.json ties the head to the embedding (tie_word_embeddings), but"
            f" {HEAD} differs from it. To use the stored head, set tie_word_embeddings to false"
        )


def _open_weights(directory: Path, model_type: str) -> dict[str, LazyTensor]:
    """Open all tensors, by their names in a PyTorch checkpoint."""
    names = [f"{base}.safetensors" for base in _base_names(directory)]
    for name in names:
        if (
            files := _open_file_or_shards(directory, name, f"{name}.index.json", open_tensors)
        ) is None:
            continue
        # Safetensors written by a Flax class have Flax names too, joined by dots.
        if not any(name.endswith(".kernel") for name in files):
            return files
        return _from_flax(directory, {n.replace(".", "/"): t for n, t in files.items()}, model_type)
    if (
        files := _open_file_or_shards(
            directory, flax_msgpack.FILE_NAME, flax_msgpack.INDEX_NAME, open_flax
        )
    ) is not None:
        return _from_flax(directory, files, model_type)
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
        f" {', '.join(known)} or {flax_msgpack.FILE_NAME}." + _suggest_remedy(directory, others)
    )


def _suggest_remedy(directory: Path, others: list[str]) -> str:
    """Return the remedy for weight files with an unexpected name."""
    if any(name.startswith("gptq_model-") for name in others) and not path_exists(
        directory / AUTOGPTQ_CONFIG
    ):
        return f" AutoGPTQ's files need {AUTOGPTQ_CONFIG}, which sets their bits and group_size."
    return f" Rename {others[0]} to {WEIGHTS_STEM}.safetensors." if len(others) == 1 else ""


def _open_file_or_shards(
    directory: Path, single: str, index: str, open_file: _OpenFile
) -> dict[str, LazyTensor] | None:
    """Open one file, or the shards of an index; return None if neither exists."""
    if path_exists(directory / single):
        return open_file(path_inside(directory, single))
    if not path_exists(directory / index):
        return None
    shards: _Index = as_schema(
        read_json(path_inside(directory, index)), _Index, str(directory / index)
    )
    return _open_shards(directory, shards.weight_map, open_file)


def _from_flax(
    directory: Path, tensors: Mapping[str, LazyTensor], model_type: str
) -> dict[str, LazyTensor]:
    if model_type not in flax_msgpack.MODEL_TYPES:
        raise CheckpointError(
            f"{directory}: the weights have Flax names, but transformers had no Flax class for"
            f" {model_type} (known: {', '.join(flax_msgpack.MODEL_TYPES)})"
        )
    return as_torch(tensors)


def _open_shards(
    directory: Path, weight_map: Mapping[str, str], open_file: _OpenFile
) -> dict[str, LazyTensor]:
    files = {f: open_file(path_inside(directory, f)) for f in sorted(set(weight_map.values()))}
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
