"""Files of every released version are read, and those of later versions refused by name."""

import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.adapters.peft_io import read_adapter
from jaxllm.cache.files import load_cache
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.cli.conversation import _read_messages
from jaxllm.errors import CheckpointError, NewerFileError
from jaxllm.evaluate.parity import golden
from jaxllm.export import runtime
from jaxllm.files import JsonLog
from jaxllm.files.versions import CACHE, JOURNAL, KINDS, LENS, FileKind
from jaxllm.inside.lens import read_lens
from jaxllm.inside.sae import load_autoencoder
from jaxllm.inside.steering import read_directions
from jaxllm.ops.compile_cache import _read_payload
from jaxllm.weights.formats import to_dense, weight_format
from jaxllm.weights.paths import flatten
from scripts.tools import write_file_fixtures as fixtures
from tests.conftest import ROOT

FOLDER = Path(__file__).parent / "fixtures"
LATEST = FOLDER / "v0.9"
VECTORS = ROOT / "tests" / "vectors" / "llama"


@pytest.fixture(scope="module")
def lm() -> jaxllm.LM:
    return jaxllm.load(LATEST / "checkpoint", show_progress=False)


def test_checkpoint_of_every_format_is_read(lm: jaxllm.LM) -> None:
    """Each matrix has its format and exactly its numbers."""
    leaves = {path: leaf for path, leaf in flatten(lm.params) if leaf.ndim == 2}
    assert len(leaves) == len(fixtures.MATRICES)
    for name, (format, _) in fixtures.MATRICES.items():
        suffix = f"{name.rpartition('.')[2]}.weight"
        (leaf,) = (leaf for path, leaf in leaves.items() if path.endswith(suffix))
        assert weight_format(leaf) == format
        np.testing.assert_array_equal(to_dense(leaf, jnp.float32), fixtures.matrix(name))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_cache_is_read(lm: jaxllm.LM, dtype: str) -> None:
    """Tokens and positions are equal; keys and values are as the model computes them today, up to
    the rounding of their dtype.
    """
    cache = load_cache(LATEST / f"{dtype}.cache", lm.model, lm.params, prefix=[1])
    assert [cache.tokens(row) for row in (0, 1)] == fixtures.TOKENS
    assert (cache.dtype, cache.capacity, int(cache.cursor)) == (dtype, 6, 4)
    empty = jaxllm.init_cache(lm.model, 2, 6, dtype=dtype)
    fresh = jaxllm.prefill(lm.model, lm.params, empty, np.array(fixtures.TOKENS)).cache
    for name in ("k", "v"):
        for ours, now in zip(getattr(cache.tail, name), getattr(fresh.tail, name), strict=True):
            a, b = (
                np.float32(x.value) * np.float32(x.scale)[..., None]
                if dtype == "int8"
                else np.float32(x)
                for x in jax.tree.map(lambda x: x[:, :4], (ours, now))  # the slots in use
            )
            np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-6 * np.abs(b).max())
    np.testing.assert_array_equal(cache.position_BS, fresh.position_BS)


def _read_parts(folder: Path) -> None:
    store = TensorStore(folder, fixtures.DIGEST)
    found = store.get_with_facts("weights")
    assert found is not None
    expected = dict(flatten(fixtures.part_weights()))
    assert dict(flatten(found[0])).keys() == expected.keys()
    for path, leaf in flatten(found[0]):
        assert weight_format(leaf) == weight_format(expected[path])
        np.testing.assert_array_equal(to_dense(leaf), to_dense(expected[path]))
    assert found[1] == {"seconds": 1.5}
    arrays = store.open_tensors("arrays")
    assert arrays is not None and arrays[1].facts == fixtures.FACTS
    np.testing.assert_array_equal(arrays[0]["ids"].read(), [[0, 1, 2], [3, 4, 5]])


def _read_journal(folder: Path) -> None:
    log = JsonLog(folder / "journal", fixtures.FACTS)
    assert list(log) == fixtures.RECORDS
    log.close()


def _read_lens(folder: Path) -> None:
    config = jaxllm.load(LATEST / "checkpoint", show_progress=False).config
    lens, expected = read_lens(folder / "lens.safetensors", config), fixtures.lens()
    np.testing.assert_array_equal(lens.weight_LDD, expected.weight_LDD)
    np.testing.assert_array_equal(lens.bias_LD, expected.bias_LD)


def _read_steering(folder: Path) -> None:
    found, expected = read_directions(folder / "steering.safetensors"), fixtures.steering()
    assert found.keys() == expected.keys()
    for layer, direction in expected.items():
        np.testing.assert_array_equal(found[layer], direction)


def _read_chat(folder: Path) -> None:
    assert _read_messages(folder / "chat.json") == fixtures.MESSAGES


def _read_checkpoint(folder: Path) -> None:
    jaxllm.load(folder / "checkpoint", show_progress=False)


def _read_cache(folder: Path) -> None:
    lm = jaxllm.load(LATEST / "checkpoint", show_progress=False)
    load_cache(folder / "int8.cache", lm.model, lm.params)


def _read_export(folder: Path) -> None:
    runtime.load(folder / "export")


def _read_vectors(folder: Path) -> None:
    assert golden.read(folder).texts


# Format -> the file with its mark, the folder that holds it, and a function that reads it from
# there. Journals, parts, lenses and vectors had no mark before 0.9.
READERS: dict[str, tuple[Path, str, Callable[[Path], None]]] = {
    "jaxllm": (LATEST, "checkpoint/config.json", _read_checkpoint),
    "jaxllm-cache": (LATEST, "int8.cache", _read_cache),
    "jaxllm-chat": (LATEST, "chat.json", _read_chat),
    "jaxllm-export": (LATEST, "export/manifest.json", _read_export),
    "jaxllm-journal": (LATEST, "journal", _read_journal),
    "jaxllm-lens": (LATEST, "lens.safetensors", _read_lens),
    "jaxllm-part": (LATEST, "arrays.part", _read_parts),
    "jaxllm-steering": (LATEST, "steering.safetensors", _read_steering),
    "jaxllm-vectors": (VECTORS, "vectors.json", _read_vectors),
}
UNMARKED = [_read_parts, _read_journal, _read_lens, _read_steering]


@pytest.mark.parametrize("read", [*UNMARKED, _read_chat], ids=lambda f: f.__name__)
def test_files_of_0_9_are_read(tmp_path: Path, read: Callable[[Path], None]) -> None:
    """Every number and text is as it was written."""
    shutil.copytree(LATEST, tmp_path / "copy")  # a journal is opened for writing
    read(tmp_path / "copy")


@pytest.mark.parametrize("read", UNMARKED, ids=lambda f: f.__name__)
def test_files_without_marks_are_read(tmp_path: Path, read: Callable[[Path], None]) -> None:
    """Files that jaxllm 0.1 wrote are read as version 1."""
    shutil.copytree(FOLDER / "v0.1", tmp_path / "copy")
    read(tmp_path / "copy")


def test_export_runs_as_the_model(tmp_path: Path) -> None:
    """The exported step returns the logits of the model that it was made from."""
    small = fixtures.make_small_model(tmp_path / "small")
    step = runtime.load(LATEST / "export")["decode"]
    inputs = {**step.blank_inputs(), **step.token_inputs([[5]], 0)}
    logits = step(inputs)["logits"]
    expected = jaxllm.forward(small.model, small.params, None, np.array([[5]])).logits
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_files_of_other_formats_are_read(lm: jaxllm.LM) -> None:
    """PEFT, SAELens and GGUF: the programs that define them give them no version of ours."""
    found = read_adapter(LATEST / "adapter", lm.config)
    (module,) = found.matrices
    for ours, expected in zip(
        found.matrices[module], fixtures.adapter().matrices[module], strict=True
    ):
        if expected is not None:
            np.testing.assert_array_equal(ours, expected)
    sae, wanted = load_autoencoder(LATEST / "autoencoder"), fixtures.autoencoder()
    x = jnp.asarray(fixtures.numbers(3, 4))
    np.testing.assert_array_equal(sae.encode(x), wanted.encode(x))
    assert sae.site == wanted.site
    directions = read_directions(LATEST / "steering.gguf")
    assert [*directions] == [2]  # GGUF has none for layer 0
    np.testing.assert_array_equal(directions[2], fixtures.steering()[2])


def test_kept_value_of_another_version_is_computed_again(tmp_path: Path) -> None:
    """A compile cache never fails: what it cannot read is missing."""
    assert _read_payload(LATEST / "kept.forms") == fixtures.PAYLOAD
    later = tmp_path / "kept.forms"
    later.write_bytes((LATEST / "kept.forms").read_bytes().replace(b"program 1", b"program 2"))
    assert _read_payload(later) is None


def test_every_kind_has_a_fixture() -> None:
    assert {kind.format for kind in KINDS} == {*READERS, "jaxllm-program"}


@pytest.mark.parametrize("format", READERS)
def test_newer_file_is_refused_by_name(tmp_path: Path, format: str) -> None:
    """The message has the file, both versions and the remedy; the file stays as it is."""
    source, name, read = READERS[format]
    (kind,) = (kind for kind in KINDS if kind.format == format)
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    file = folder / name
    content, count = re.subn(rb'(version\\?": ?"?)\d', rb"\g<1>9", file.read_bytes(), count=1)
    assert count == 1
    if kind is JOURNAL:
        first, rest = content[9:].split(b"\n", 1)
        content = b"%08x %s\n%s" % (zlib.crc32(first), first, rest)
    file.write_bytes(content)
    where = re.escape(str(file.parent if "/" in name or kind.format == "jaxllm-vectors" else file))
    said = f"{where} was written by a newer jaxllm \\({kind.what} format 9; this version reads up"
    with pytest.raises(NewerFileError, match=f"^{said} to {kind.version}\\): upgrade jaxllm$"):
        read(folder)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "found, message",
    [
        ({}, "has format None"),
        ({"format": "jaxllm-lens", "version": 2}, "has format 'jaxllm-lens'"),
        ({"format": "jaxllm-cache"}, "no valid cache format version: got None"),
        ({"format": "jaxllm-cache", "version": True}, "got True"),
        ({"format": "jaxllm-cache", "version": "2x"}, "got '2x'"),
        ({"format": "jaxllm-cache", "version": "9" * 5000}, "got '9999"),
        ({"format": "jaxllm-cache", "version": 0}, "got 0"),
        ({"format": "jaxllm-cache", "version": 1}, "older jaxllm .cache format 1;.*make it again"),
        ({"format": "jaxllm-cache", "version": 3}, "newer jaxllm .cache format 3;.*upgrade jaxllm"),
    ],
)
def test_check_refuses_other_marks(found: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^FILE .*{message}"):
        CACHE.check(found, "FILE")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.format)
def test_own_mark_passes_as_json_and_as_text(kind: FileKind) -> None:
    assert kind.check(kind.mark, "FILE") == kind.check(kind.text_mark, "FILE") == kind.version
    assert LENS.check({"format": "pt"}, "FILE") == 1
