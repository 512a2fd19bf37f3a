"""Files of transformers 4's Flax classes load like PyTorch's or are refused by name."""

import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

import jaxllm
from jaxllm.convert.flax_msgpack import open_flax
from jaxllm.convert.hf import open_hf
from jaxllm.errors import CheckpointError
from tests.convert.flax_twin import as_flax, as_flax_safetensors, flax_arrays, packed
from tests.fuzz.mutate import cut, fill, flip, number, splice
from tests.tiny_models import assert_close, load_twin, save_random, tokens


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PyTorch checkpoint of transformers; GPT-2 is tied, Llama is not."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_random(directory, request.param, **{"gpt2": {"n_layer": 1}}.get(request.param, {}))
    return directory


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def same(one: Path, other: Path) -> None:
    before, after = open_hf(one), open_hf(other)
    assert before.config == after.config
    assert set(before.tensors) == set(after.tensors)
    for path, tensor in before.tensors.items():
        np.testing.assert_array_equal(tensor.read(), after.tensors[path].read(), path)


def test_flax_checkpoint_logits_equal_transformers(source: Path, copy: Path) -> None:
    as_flax(copy)
    twin, ids = load_twin(source), tokens(2, 9)
    lm = jaxllm.load(copy)
    assert_close(jaxllm.forward(lm.model, lm.params, None, ids).logits, twin.logits(ids))


def test_sharded_flax_checkpoint_equals_single_file(source: Path, copy: Path) -> None:
    """Shards form one model, and a missing one raises an error."""
    first = as_flax(copy, shards=3)
    same(source, copy)
    first.unlink()
    with pytest.raises(CheckpointError, match=r"flax_model-00001-of-00003.msgpack is missing"):
        open_hf(copy)


def test_flax_safetensors_names_are_read(source: Path, copy: Path) -> None:
    """A safetensors file of a Flax class has Flax names and layouts, which are converted."""
    as_flax_safetensors(copy)
    same(source, copy)


def test_chunked_arrays_are_joined(
    source: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flax splits arrays above 1 GiB into chunks; the test lowers that limit."""
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)  # 1 GiB
    as_flax(copy)
    assert b"__msgpack_chunked_array__" in (copy / "flax_model.msgpack").read_bytes()
    same(source, copy)


def test_bfloat16_flax_weights_keep_dtype(source: Path, copy: Path) -> None:
    as_flax(copy, dtype=jnp.bfloat16)
    opened = open_hf(copy)
    assert opened.precision.weights == "bfloat16"
    expected = open_hf(source).tensors
    for path, tensor in opened.tensors.items():
        wide = jnp.asarray(expected[path].read(), jnp.bfloat16)
        np.testing.assert_array_equal(tensor.read(), np.asarray(wide), path)


def test_base_model_and_params_wrapper_are_read(source: Path, copy: Path) -> None:
    """A base model without prefix, inside a params dict, loads as the whole model does."""
    file = as_flax(copy)
    arrays = flax_arrays(source)
    prefix = {"gpt2": "transformer/", "llama": "model/"}[open_hf(source).config.model_type]
    file.write_bytes(
        packed({f"params/{path.removeprefix(prefix)}": x for path, x in arrays.items()})
    )
    same(source, copy)


def test_opening_flax_file_reads_no_tensor(tmp_path: Path) -> None:
    file = tmp_path / "flax_model.msgpack"
    file.write_bytes(packed({"wte/embedding": np.ones((1024, 1024), np.float32)}))
    tracemalloc.start()
    tensor = open_flax(file)["wte/embedding"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 17
    assert tensor.rows(5, 7).read().shape == (2, 1024)


def test_family_without_flax_class_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3", num_hidden_layers=1)
    as_flax(tmp_path)
    with pytest.raises(CheckpointError, match=r"no Flax class for qwen3 .* gpt2, llama"):
        open_hf(tmp_path)


def array(shape: Any = (2,), dtype: Any = "float32", data: Any = b"\0" * 8) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


CHUNK = "__msgpack_chunked_array__"
BAD: dict[str, tuple[Any, str]] = {
    "no map": (7, "has no map"),
    "a list": ([1, 2], "value of type 0x92"),
    "a text": ({"a": "b"}, "value of type 0xa1"),
    "a number": ({"a": 5}, "a is 5, expected an array"),
    "a complex number": ({"a": msgpack.ExtType(2, msgpack.packb((1.0, 2.0)))}, "extension 2"),
    "too few bytes": ({"a": array((3,))}, r"8 bytes for float32 \(3,\)"),
    "too many": ({"a": array((1,))}, r"8 bytes for float32 \(1,\)"),
    "a huge shape": ({"a": array((1 << 62,))}, r"bytes for float32"),
    "a negative axis": ({"a": array((-2,))}, "not integers"),
    "many axes": ({"a": array((1,) * 9)}, "at most 8 axes"),
    "objects": ({"a": array(dtype="object")}, "an array of 'object'"),
    "a path as a name": ({"a/b": array()}, "invalid name 'a/b'"),
    "no name": ({"": array()}, "invalid name ''"),
    "a long name": ({"a" * 300: array()}, "a name of at most 200 bytes"),
    "short chunks": (
        {"a": {CHUNK: True, "shape": {"0": 3}, "chunks": {"0": array()}}}, "2 numbers in its chunks"
    ),
    "missing chunks": ({"a": {CHUNK: True, "shape": {"0": 3}}}, "lacks the list of"),
    "empty chunks": ({"a": {CHUNK: True, "shape": {"0": 0}, "chunks": {}}}, "not vectors"),
    "misnumbered chunks": (
        {"a": {CHUNK: True, "shape": {"0": 2}, "chunks": {"1": array()}}}, "lacks the list of"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_flax_file_is_refused(name: str, tmp_path: Path) -> None:
    """A malformed file raises a one-line error that begins with its path and names the problem."""
    tree, message = BAD[name]
    file = tmp_path / "flax_model.msgpack"
    file.write_bytes(msgpack.packb(tree))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_flax(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_truncated_nested_or_trailing_data_is_refused(tmp_path: Path) -> None:
    """Truncated, deeply nested, oversized, duplicated or trailing data raise errors."""
    file, good = tmp_path / "flax_model.msgpack", msgpack.packb({"a": array()})
    texts = {
        b"": "ends too soon",
        good[:-1]: "has 27 bytes of extension|ends too soon|bytes of",
        good + b"\0": "1 bytes after its end",
        b"\x81\xa1a" * 1000: "nests more than 16 maps",
        b"\xdf\xff\xff\xff\xff": "nests more than 16 maps, or 1,048,576 entries",
        b"\x82" + good[1:] * 2: "duplicate or invalid name 'a'",
    }
    for content, message in texts.items():
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            open_flax(file)


def test_mutated_flax_files_load_or_fail_cleanly(source: Path, copy: Path) -> None:
    """A randomly changed file loads or raises a CheckpointError, never anything else, and both
    occur.
    """
    file = as_flax(copy)
    good, outcomes = file.read_bytes(), []
    for seed in range(60):
        rng = random.Random(seed)
        # The structure is in the first bytes of each entry; half of the changes hit the first one.
        head = good[: rng.choice((64, 4096, len(good)))]
        changed = rng.choice((flip, flip, cut, splice, number, fill))(rng, head) + good[len(head) :]
        file.write_bytes(changed)
        try:
            for tensor in open_hf(copy).tensors.values():
                tensor.read()
            outcomes.append(True)
        except CheckpointError:
            outcomes.append(False)
    assert any(outcomes)
    assert not all(outcomes)
