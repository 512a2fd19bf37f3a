"""Checkpoint files: validation of every field, links, and atomic writes."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm import models
from jaxllm.checkpoints.native import open_native, save
from jaxllm.cli.convert import convert
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.lazy import LazyTensor
from tests.convert.test_convert import edit_config
from tests.tiny_models import random_model, save_random


def test_missing_layers_are_refused_by_name(tmp_path: Path) -> None:
    """A config that claims 1024 layers is refused by its first missing tensor, before tracing."""
    save_random(tmp_path, "llama", num_hidden_layers=2)
    edit_config(tmp_path, num_hidden_layers=1024)
    with pytest.raises(CheckpointError, match=r"layers\.2\.input_layernorm\.weight is missing"):
        open_hf(tmp_path)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_param_shapes_equal_traced_init(family: str, layers: int) -> None:
    name = "num_hidden_layers" if family == "llama" else "n_layer"
    model, _ = random_model(family, **{name: layers})
    ids, lengths = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((1, 1), (1,)))
    whole = jax.eval_shape(model.init, jax.random.key(0), ids, ids, lengths)["params"]
    assert models.param_shapes(model) == whole


def save_native(tmp_path: Path) -> Path:
    save_random(tmp_path / "hf", "gpt2", n_layer=1)
    save(tmp_path / "native", open_hf(tmp_path / "hf"))
    return tmp_path / "native"


def test_native_config_is_validated_by_field(tmp_path: Path) -> None:
    """Missing, unknown and wrong fields are refused by name, and RE2 accepts patterns that
    backtracking could not match.
    """
    directory = save_native(tmp_path)
    good = json.loads((directory / "config.json").read_text())
    model, precision = good["model"], good["precision"]
    for change, words in (
        ({"model": "delete"}, "missing required field model"),
        ({"precision": "delete"}, "missing required field precision"),
        ({"model": 5}, "model must be an object, got 5"),
        ({"model": {**model, "hidden_size": [40]}}, "model: hidden_size must be a whole number"),
        ({"model": {**model, "colour": 1}}, "model: unknown colour"),
        ({"model": {**model, "model_type": ["gpt2"]}}, "model_type .* is not supported"),
        ({"precision": {**precision, "cache": ["int8"]}}, "precision: cache must be a string"),
        ({"precision": {**precision, "overrides": [["(.+)+x\\1", {}]]}}, "not a valid regex"),
        ({"precision": {**precision, "overrides": [["x", {"a": 1}]]}}, "precision: unknown a"),
        ({"colour": 1}, "unknown field colour"),
        ({"model": {"model_type": "gpt2"}}, "missing"),
        ({"version": 99}, "newer jaxllm .checkpoint format 99;"),
        ({"formats": []}, "formats.* must be an object"),
        ({"formats": {"wte.weight": 8}}, "must be a string"),
    ):
        edit_config(directory, **{**good, **change})
        with pytest.raises((CheckpointError, ConfigError), match=words):
            open_native(directory)
        (directory / "config.json").write_text(json.dumps(good))
    rows = [["(.+)+x", {"weights": "float32"}]]  # RE2 matches it in linear time
    edit_config(directory, precision={**precision, "overrides": rows})
    open_native(directory)


@pytest.mark.parametrize(
    "ids", [{"bos_token_id": "x"}, {"eos_token_id": [1, 2.5]}, {"pad_token_id": 1 << 40}]
)
def test_invalid_token_ids_are_refused(ids: dict[str, Any], tmp_path: Path) -> None:
    """Invalid special ids in generation_config.json or config.json are refused in both formats."""
    directory = save_native(tmp_path)
    for folder in (directory, tmp_path / "hf"):
        (folder / "generation_config.json").write_text(json.dumps(ids))
        with pytest.raises(CheckpointError, match=next(iter(ids))):
            jaxllm.load(folder)
    (tmp_path / "hf" / "generation_config.json").unlink()
    edit_config(tmp_path / "hf", **ids)
    with pytest.raises(CheckpointError, match=next(iter(ids))):
        jaxllm.load(tmp_path / "hf")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_native_checkpoint_refuses_external_links(name: str, tmp_path: Path) -> None:
    directory = save_native(tmp_path)
    shutil.move(directory / name, tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a link that leaves the directory"):
        open_native(directory)


def test_convert_refuses_linked_tokenizer_file(tmp_path: Path) -> None:
    """Otherwise, a stranger's checkpoint could copy a local file of yours when converted."""
    directory = save_native(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (directory / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link that leaves the directory"):
        convert(str(directory), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("write", [save, write_hf])
def test_failed_write_leaves_existing_files_unchanged(write: Any, tmp_path: Path) -> None:
    """A failed write creates nothing new, removes its temporary files, and keeps existing files."""
    opened = open_native(save_native(tmp_path))
    there = tmp_path / "there"
    there.mkdir()
    (there / "model.safetensors").write_text("mine")

    def full() -> np.ndarray:
        raise OSError(28, "No space left on device")

    last = opened.tensors["ln_f.weight"]
    broken = LazyTensor(last.dtype, last.shape, full)
    opened = dataclasses.replace(opened, tensors={**opened.tensors, "ln_f.weight": broken})
    for target in (tmp_path / "new", there):
        with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device"):
            write(target, opened)
    assert not (tmp_path / "new").exists()
    assert [f.name for f in there.iterdir()] == ["model.safetensors"]
    assert (there / "model.safetensors").read_text() == "mine"
    assert {f.name for f in tmp_path.iterdir()} == {"hf", "native", "there"}


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "demo:" + "a" * 5000, "\ud800"])
def test_impossible_paths_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not a directory|no demo"):
        jaxllm.load(name)
