"""Random checkpoints: published names and shapes, shards, and atomic writes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxllm.convert.hf import open_hf
from scripts.tools import make_checkpoint

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 131, "n_embd": 96, "n_head": 3, "n_positions": 37, "n_ctx": 37},
    "tinyllama": {"vocab_size": 131, "hidden_size": 96, "intermediate_size": 160,
                  "num_attention_heads": 6, "num_key_value_heads": 2},
}  # fmt: skip


@pytest.fixture(params=sorted(SMALL))
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Shrink a checkpoint kind and return its name."""
    kind: str = request.param
    model = make_checkpoint.KINDS[kind]
    config = model.config | SMALL[kind]
    monkeypatch.setitem(make_checkpoint.KINDS, kind, dataclasses.replace(model, config=config))
    return kind


def make(kind: str, destination: Path, **options: Any) -> dict[str, np.ndarray]:
    """Make a float32 checkpoint, seed 0, and read all its tensors."""
    make_checkpoint.make_checkpoint(
        kind, destination, **({"dtype": "float32", "seed": 0} | options)
    )
    files = sorted(destination.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_checkpoint_names_and_shapes_equal_transformers(kind: str) -> None:
    model = make_checkpoint.KINDS[kind]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**model.config)
        theirs = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    if kind == "gpt2":  # published without the prefix and with a tied head
        del theirs["lm_head.weight"]
    expected = {k.removeprefix("transformer."): tuple(v.shape) for k, v in theirs.items()}
    assert dict(model.shapes(model.config)) == expected


def test_checkpoint_loads_in_transformers_and_jaxllm(small: str, tmp_path: Path) -> None:
    make(small, tmp_path / "m", layers=2, dtype="bfloat16")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert open_hf(tmp_path / "m").config.num_hidden_layers == 2


def test_shards_equal_single_file_and_index(small: str, tmp_path: Path) -> None:
    """A sharded checkpoint has the tensors of the single file, and its index names each shard."""
    whole = make(small, tmp_path / "whole", layers=2)
    parts = make(small, tmp_path / "parts", layers=2, shards=3)
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)

    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    files = {f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)}
    assert set(index["weight_map"].values()) == files
    for file in files:
        with safe_open(tmp_path / "parts" / file, framework="numpy") as shard:
            held = set(shard.keys())
        assert held == {name for name, where in index["weight_map"].items() if where == file}
    assert open_hf(tmp_path / "parts").tensors.keys() == open_hf(tmp_path / "whole").tensors.keys()


def test_existing_checkpoint_is_replaced_only_with_force(small: str, tmp_path: Path) -> None:
    make(small, tmp_path, layers=1)
    with pytest.raises(FileExistsError, match="--force"):
        make(small, tmp_path, layers=2)
    assert open_hf(tmp_path).config.num_hidden_layers == 1
    make(small, tmp_path, layers=2, force=True)
    assert open_hf(tmp_path).config.num_hidden_layers == 2


def test_force_replaces_only_checkpoints(small: str, tmp_path: Path) -> None:
    """force refuses a directory that is no checkpoint and leaves its files."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a checkpoint"):
        make(small, tmp_path, force=True)
    assert (tmp_path / "thesis.txt").exists()


def test_failure_leaves_no_files(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(make_checkpoint, "write_json", fail)
    with pytest.raises(OSError, match="full"):
        make(small, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_tokenizer_files_are_copied(small: str, tmp_path: Path) -> None:
    """Tokenizer files are copied, others are not, and a missing tokenizer.json raises."""
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        make(small, tmp_path / "m", tokenizer=source)
    (source / "tokenizer.json").write_text("{}")
    (source / "secret.txt").write_text("no")
    make(small, tmp_path / "m", tokenizer=source)
    assert (tmp_path / "m" / "tokenizer.json").exists()
    assert not (tmp_path / "m" / "secret.txt").exists()


def test_fields_replace_config_values(small: str, tmp_path: Path) -> None:
    """fields changes a published shape's vocabulary; a field that the kind lacks is refused."""
    make(small, tmp_path / "m", layers=1, fields={"vocab_size": 77})
    assert open_hf(tmp_path / "m").config.vocab_size == 77
    with pytest.raises(ValueError, match="no field vocab"):
        make(small, tmp_path / "n", fields={"vocab": 77})
