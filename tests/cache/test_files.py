"""Cache files: exact round trips, for the model that wrote them only."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.cache import drop_range, fingerprint, fork, load_cache, save_cache
from jaxllm.cache.files import digest
from jaxllm.errors import CacheMismatchError, CapacityError, CheckpointError, JaxllmError
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.precision import Precision
from jaxllm.weights.safetensors import read_header
from tests.cache.caches import KINDS, entries, filled, lm_of, peek
from tests.tiny_models import random_model, tokens

BFLOAT16 = pytest.param(("llama", "bfloat16"), id="llama-bfloat16", marks=pytest.mark.full)


@pytest.fixture(scope="module", params=[*KINDS, BFLOAT16])
def lm(request: pytest.FixtureRequest) -> Any:
    return lm_of(request.param)


def test_cache_file_round_trip_restores_every_bit(lm: Any, tmp_path: Path) -> None:
    """A loaded cache has all bits and segments of the saved one, one prefix, and goes on alike."""
    forks = fork(drop_range(filled(lm, tokens(1, 9)), 3, 5), 3, capacity=6)
    _, cache = jaxllm.decode_step(*lm, forks, np.array([1, 2, 3]))
    file = tmp_path / "story.cache"
    save_cache(file, cache, *lm)
    again = load_cache(file, *lm)
    assert entries(again) == entries(cache)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    assert [x.shape for x in jax.tree.leaves(again)] == [x.shape for x in jax.tree.leaves(cache)]
    assert repr(again) == repr(cache)
    np.testing.assert_array_equal(peek(lm, again), peek(lm, cache))  # bit for bit
    for ours, theirs in zip(
        jaxllm.decode_step(*lm, again, np.array([4, 5, 6])),
        jaxllm.decode_step(*lm, cache, np.array([4, 5, 6])),
        strict=True,
    ):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert again.tokens(2) == cache.tokens(2)
    assert file.stat().st_size < 1.2 * cache.nbytes + 20_000  # shared entries are stored once
    assert list(tmp_path.iterdir()) == [file]


def test_load_cache_changes_capacity(lm: Any, tmp_path: Path) -> None:
    """Loading can change the capacity, but not below the slots in use."""
    cache = filled(lm, tokens(2, 9))
    save_cache(tmp_path / "c", cache, *lm)
    for capacity in (9, 40):
        other = load_cache(tmp_path / "c", *lm, capacity=capacity)
        assert other.capacity == capacity
        assert entries(other) == entries(cache)
    with pytest.raises(CapacityError, match="9 slots are used, more than 8"):
        load_cache(tmp_path / "c", *lm, capacity=8)


def test_cache_mismatch_is_refused_by_field(tmp_path: Path) -> None:
    """A cache of other weights, model, precision or prefix is refused with the difference."""
    model, params = lm = random_model("llama")
    file = tmp_path / "c"
    save_cache(file, filled(lm, tokens(1, 9)), model, params)
    changed = jax.tree.map(lambda x: x, params)
    weight = changed["layers.1"]["mlp"]["up_proj"]["weight"]
    changed["layers.1"]["mlp"]["up_proj"]["weight"] = weight.at[3, 4].add(1e-6)
    other, _ = random_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    rounded = jaxllm.build(model.config, Precision(activations="bfloat16"))
    for message, (m, p) in {
        "other weights": (model, changed),
        "config has rope .*7.0": (other, params),
        "model_type": random_model("gpt2"),
        "precision has activations 'float32', the model's 'bfloat16'": (rounded, params),
    }.items():
        with pytest.raises(CacheMismatchError, match=message):
            load_cache(file, m, p)
    less = {**header_of(file), "config": {**model.config.to_dict()}}
    assert less["config"].pop("sliding_window") is None  # as in a version without the field
    load_cache(_written(tmp_path / "null", less, load_file(file)), model, params)
    del less["config"]["vocab_size"]
    with pytest.raises(CacheMismatchError, match="has vocab_size None, the model's 131"):
        load_cache(_written(tmp_path / "less", less, load_file(file)), model, params)
    ids = tokens(1, 9)[0].tolist()
    assert load_cache(file, model, params, prefix=ids[:4]).tokens() == ids
    with pytest.raises(CacheMismatchError, match="begin with this prefix: only 3 of its 4"):
        load_cache(file, model, params, prefix=[*ids[:3], 130])
    with pytest.raises(CacheMismatchError, match="9 of its 10"):
        load_cache(file, model, params, prefix=[*ids, 1])
    with pytest.raises(CacheMismatchError, match="model_type"):
        save_cache(file, filled(lm, tokens(1, 9)), *random_model("gpt2"))


def test_damage_is_detected_and_failed_saves_keep_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged or foreign files raise errors; an interrupted save leaves the old file unchanged."""
    lm = random_model("llama")
    file, cache = tmp_path / "c", filled(lm, tokens(1, 9))
    save_cache(file, cache, *lm)
    whole = file.read_bytes()
    key = whole.index(np.asarray(cache.tail.k[1]).tobytes()[:64]) + 7
    for damaged in (
        whole[:100],
        whole[:-1],
        b"",
        whole[:key] + bytes([whole[key] ^ 1]) + whole[key + 1 :],
    ):
        (tmp_path / "d").write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_cache(tmp_path / "d", *lm)
    save_file({"x": np.zeros(1)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="not written by save_cache"):
        load_cache(tmp_path / "other", *lm)
    arrays = load_file(file)
    for name, array in {"0.k.1": np.zeros((1, 9, 2, 5), np.float32), "0.token_BS": None}.items():
        changed = {n: a for n, a in {**arrays, name: array}.items() if a is not None}
        with pytest.raises(CheckpointError, match=name):
            load_cache(_written(tmp_path / "f", header_of(file), changed), *lm)
    with pytest.raises(CheckpointError, match="cannot read"):
        load_cache(tmp_path / "nowhere", *lm)
    with pytest.raises(CheckpointError, match="cannot write"):
        save_cache(tmp_path / "no" / "folder", filled(lm, tokens(1, 9)), *lm)

    def interrupted() -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        LazyTensor, "from_array", lambda x: LazyTensor(x.dtype, x.shape, interrupted)
    )
    with pytest.raises(KeyboardInterrupt):
        save_cache(file, filled(lm, tokens(1, 5)), *lm)
    assert file.read_bytes() == whole


def header_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_header(file).metadata["header"])
    return found


def _written(path: Path, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    """Write a cache file with a valid digest, as an attacker could."""
    real = {n: np.ascontiguousarray(a) for n, a in arrays.items() if not n.startswith("__")}
    header = {**header, "digest": digest(header, real)}
    save_file(real, path, metadata={"format": "jaxllm-cache", "header": json.dumps(header)})
    return path


# Invalid header changes and the words of their errors; the digests are updated.
HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "an earlier cursor": ({"cursor": 3}, "cursor is 3, but the tail has 9 slots"),
    "a negative cursor": ({"cursor": -3}, "cursor must be a whole number >= 0, got -3"),
    "a capacity beyond the machine": ({"capacity": 10**9}, "this machine has"),
    "a capacity beyond int32": ({"capacity": 10**12}, "capacity must be a whole number <= "),
    "a smaller capacity": ({"capacity": 8}, "9 slots are used, more than 8"),
    "an unknown field": ({"colour": 1}, "unknown field colour"),
    "a missing field": ({"segments": None}, "segments"),
    "another kind": ({"weights": 5}, "weights must be a string, got 5"),
    "an older version": ({"version": 1}, "written by an older jaxllm (cache format 1;"),
    "a newer version": (
        {"version": 3},
        "newer jaxllm (cache format 3; this version reads up to 2)",
    ),
    "a field of the model": ({"config": {"colour": 1}}, "the cache's config has"),
    "another dtype": ({"cache_dtype": "float8"}, "cache dtype must be one of"),
    "no segments": ({"segments": 0}, "segments must be"),
    "more segments": ({"segments": 2}, "1.k.0 is"),
}


def test_header_fields_are_validated_against_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header contradicting its tensors or exceeding memory raises, even with a valid digest."""
    monkeypatch.setattr("jaxllm.files.memory_limit.machine_memory", lambda: 1 << 30)
    lm = random_model("llama")
    file = tmp_path / "c"
    save_cache(file, filled(lm, tokens(1, 9)), *lm)
    arrays = load_file(file)
    for change, words in HEADERS.values():
        changed = {n: v for n, v in {**header_of(file), **change}.items() if v is not None}
        with pytest.raises(JaxllmError, match=re.escape(words)):
            load_cache(_written(tmp_path / "d", changed, arrays), *lm)
        # With the old digest any change is detected.
        metadata = {"format": "jaxllm-cache", "header": json.dumps(changed)}
        save_file(arrays, tmp_path / "e", metadata=metadata)
        with pytest.raises(JaxllmError):
            load_cache(tmp_path / "e", *lm)


def test_inconsistent_cache_tensors_are_refused(tmp_path: Path) -> None:
    """Tensors with invalid values, shapes or names raise an error, even with a valid digest."""
    lm = random_model("llama")
    file = tmp_path / "c"
    save_cache(file, filled(lm, tokens(2, 9)), *lm)
    arrays, header = load_file(file), header_of(file)
    for name, array, words in (
        ("0.token_BS", arrays["0.token_BS"] + 131, "is outside the vocabulary of 131"),
        ("0.position_BS", arrays["0.position_BS"] + 1, "not below next_position_B"),
        ("next_position_B", arrays["next_position_B"] + (1 << 25), "next_position_B is above"),
        ("0.k.0", arrays["0.k.0"][:1], "the tail does not have the 2 rows"),
        ("next_position_B", arrays["next_position_B"][:0], "next_position_B is missing"),
        ("extra", np.zeros(1), "extra is not part of this cache"),
    ):
        written = _written(tmp_path / "d", header, {**arrays, name: array})
        with pytest.raises(CheckpointError, match=words):
            load_cache(written, *lm)


def test_fingerprint_covers_names_values_and_formats() -> None:
    """Swapped layers and casts change the fingerprint; moving parameters to the host does not."""
    _, params = random_model("llama")
    base = fingerprint(params)
    assert base == fingerprint(jax.tree.map(np.asarray, params))
    swapped = dict(params, **{"layers.0": params["layers.1"], "layers.1": params["layers.0"]})
    cast = jaxllm.cast(params, Precision.uniform("bfloat16"))
    assert len({base, fingerprint(swapped), fingerprint(cast)}) == 3
