"""The engine: opens a Hugging Face directory through its architecture's table, and writes one.

Strict in both directions: every tensor of the model is found, every tensor found is known, and all
complaints come in one error. Nothing outside the directory is opened and nothing in it is run.
"""

import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint import (
    Checkpoint,
    check_names,
    claim,
    native_precision,
    read_generation,
    read_model_json,
)
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import read_json, write_json
from jaxllm.models import family
from jaxllm.progress import bytes_bar
from jaxllm.weights.files import LazyTensor, open_tensors, write_tensors

from . import gpt2, llama
from .tables import Architecture, Same, Transposed

READERS: dict[str, tuple[Any, Architecture]] = {
    "llama": (llama.read_config, llama.LLAMA),
    "mistral": (llama.read_config, llama.MISTRAL),
    "gpt2": (gpt2.read_config, gpt2.GPT2),
}

# By our model_type: a configuration as config.json's fields, and the table of its tensors.
WRITERS: dict[str, Any] = {"llama": llama.write_config, "gpt2": gpt2.write_config}

# What generation_config.json says, where older checkpoints have it in config.json instead.
GENERATION_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def open_hf(directory: Path) -> Checkpoint:
    """Open a Hugging Face checkpoint (Llama, Mistral or GPT-2; one safetensors file or shards).

    Raises ConfigError or CheckpointError with all that is wrong; no tensor has been read then.
    """
    data = read_model_json(directory)
    config, table = read_config(data)
    tensors = _rename(_open_files(directory), config, table, str(directory))
    check_names(tensors, config, str(directory))
    generation = read_generation(directory)
    ids = {k: data[k] for k in GENERATION_IDS if data.get(k) is not None}
    return Checkpoint(directory, config, tensors, {**ids, **generation}, native_precision(tensors))


def read_config(data: Mapping[str, Any]) -> tuple[ModelConfig, Architecture]:
    """A config.json's contents to our configuration and the table that reads its weights.

    Raises ConfigError with every field that is missing, unknown, or asks for what is not there.
    """
    model_type = data.get("model_type")
    if model_type not in READERS:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported (known: {', '.join(READERS)})"
        )
    if "quantization_config" in data:
        raise ConfigError(
            "config.json: the weights are quantized by another tool (quantization_config);"
            " load the original checkpoint"
        )
    if "auto_map" in data:
        raise ConfigError(
            "config.json: the checkpoint brings code of its own (auto_map), which is never run"
        )
    read, table = READERS[model_type]
    return read(table, data), table


def write_hf(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    files: Iterable[Path] = (),
    show_progress: bool | None = None,
) -> None:
    """Write a Hugging Face directory that transformers loads; config.json comes last.

    files: further files to copy (the tokenizer's). Raises CheckpointError if `directory` already
    holds a checkpoint.
    """
    claim(directory)
    config = checkpoint.config
    if config.model_type not in WRITERS or type(config) is not family(config.model_type).config:
        raise ConfigError(f"{type(config).__name__} has no Hugging Face form")
    data, table = WRITERS[config.model_type](config)
    rows = {ours: row for row, _, ours in _rows(table, config)}
    names = {ours: theirs for _, theirs, ours in _rows(table, config)}
    # Conv1D's transpose is its own inverse, so the rows that read also write.
    tensors = {names[path]: rows[path].apply(t) for path, t in checkpoint.tensors.items()}
    total = sum(t.nbytes for t in tensors.values())
    with bytes_bar(f"writing {directory.name}", total, show_progress) as advance:
        write_tensors(
            directory / "model.safetensors",
            tensors,
            aligned=False,
            metadata={"format": "pt"},
            progress=advance,
        )
    ids = {k: v for k in GENERATION_IDS if (v := checkpoint.generation.get(k)) is not None}
    for file in files:
        shutil.copyfile(file, directory / file.name)
    if checkpoint.generation:
        write_json(directory / "generation_config.json", checkpoint.generation)
    dtype = native_precision(tensors).weights
    write_json(directory / "config.json", {**data, **ids, "torch_dtype": dtype})


def _rows(table: Architecture, config: ModelConfig) -> list[tuple[Same | Transposed, str, str]]:
    """Every row of the weight table for every layer: (row, their name, our path)."""
    rows: list[tuple[Same | Transposed, str, str]] = []
    for row in table.tensors:
        if "{i}" in row.theirs:
            rows += [
                (row, row.theirs.format(i=i), row.ours.format(i=i))
                for i in range(config.num_hidden_layers)
            ]
        else:
            rows.append((row, row.theirs, row.ours))
    return rows


def _rename(
    tensors: dict[str, LazyTensor], config: ModelConfig, table: Architecture, where: str
) -> dict[str, LazyTensor]:
    """Their tensors under our paths; names that the table lacks stay, to be complained of."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(table.prefix)
        if any(re.fullmatch(regex, bare) for regex in table.skipped):
            continue
        if bare in found:
            raise CheckpointError(f"{where}: {bare} is there twice, with and without a prefix")
        found[bare] = tensor
    rows = {theirs: (row, ours) for row, theirs, ours in _rows(table, config)}
    renamed = {}
    for name, tensor in found.items():
        row, ours = rows.get(name, (None, name))
        renamed[ours] = row.apply(tensor) if row and len(tensor.shape) < 3 else tensor
    if config.tie_word_embeddings and "lm_head.weight" in renamed:
        _drop_tied_head(renamed, f"{family(config.model_type).tokens}.weight", where)
    return renamed


def _drop_tied_head(tensors: dict[str, LazyTensor], tokens: str, where: str) -> None:
    """A tied checkpoint may repeat the embedding as its head, but nothing else."""
    table = tensors.get(tokens)
    head = tensors.pop("lm_head.weight")
    if table is not None and not (
        head.shape == table.shape and np.array_equal(head.read(), table.read())
    ):
        raise CheckpointError(
            f"{where}: config.json ties the head to the embedding (tie_word_embeddings), but"
            " lm_head.weight differs from it. If the head is meant, set tie_word_embeddings false"
        )


def _open_files(directory: Path) -> dict[str, LazyTensor]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.exists():
        return open_tensors(_inside(directory, single.name))
    if index.exists():
        return _open_shards(directory, read_json(index))
    if pickles := sorted(p.name for p in directory.glob("*.bin")):
        raise CheckpointError(
            f"{directory}: {pickles[0]} is a pickle, which can run code when it is read, and is"
            " never opened here. Convert it with transformers:"
            " AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)"
        )
    raise CheckpointError(f"{directory}: no model.safetensors and no model.safetensors.index.json")


def _open_shards(directory: Path, index: Mapping[str, Any]) -> dict[str, LazyTensor]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and isinstance(file, str) for name, file in weight_map.items()
    ):
        raise CheckpointError(f"{directory}: the index has no weight_map from names to files")
    files = {f: open_tensors(_inside(directory, f)) for f in sorted(set(weight_map.values()))}
    complaints = []
    tensors: dict[str, LazyTensor] = {}
    for file, held in files.items():
        for name, tensor in held.items():
            if name in tensors:
                complaints.append(f"{name} is in more than one shard")
            elif weight_map.get(name) != file:
                complaints.append(f"{name} is in {file}, the index says {weight_map.get(name)}")
            tensors[name] = tensor
    complaints += [
        f"{name} is not in {file}" for name, file in weight_map.items() if name not in files[file]
    ]
    if complaints:
        raise CheckpointError(f"{directory}: {'; '.join(complaints[:50])}")
    return tensors


def _inside(directory: Path, name: str) -> Path:
    """A plain file of the directory, or CheckpointError before anything is opened."""
    if name != Path(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(f"{directory}: shard {name!r} is not a plain file name")
    path = directory / name
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):
        raise CheckpointError(f"{directory}: {name} is missing") from None
    home = directory.resolve()
    homes = [home]
    if home.parent.name == "snapshots":  # the hub's cache: links from snapshots/x into blobs
        homes.append(home.parent.parent / "blobs")
    if real.parent not in homes:
        raise CheckpointError(f"{directory}: {name} is a link that leaves the directory")
    if not regular:
        raise CheckpointError(f"{directory}: {name} is not a regular file")
    return path
