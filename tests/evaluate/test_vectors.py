"""Test vectors: demo models equal transformers' stored values, and changes are detected."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.errors import CheckpointError, ConfigError, TokenError
from jaxllm.evaluate.parity.activations import (
    LOGITS,
    JaxBackend,
    ParityCase,
    activation_names,
    pad_case,
)
from jaxllm.evaluate.parity.compare import Tolerance
from jaxllm.evaluate.parity.golden import check, make, read
from jaxllm.evaluate.parity.transformers_backend import TransformersBackend
from tests.conftest import ROOT, assert_refused, succeed
from tests.evaluate.test_parity import change_weight, verdict
from tests.tiny_models import random_model, save_random

COMMITTED = ROOT / "tests" / "vectors"
TEXTS = [[5, 77, 130, 1, 9], [12, 8, 3]]


@pytest.fixture(scope="module")
def tiny() -> JaxBackend:
    model, params = random_model("llama")
    return JaxBackend("tiny", model, params)


@pytest.fixture(scope="module")
def frozen(tiny: JaxBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vectors") / "tiny"
    make(directory, tiny, TEXTS, new_tokens=3)
    return directory


# The committed vectors: transformers' values for the demo models.


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_demo_models_equal_committed_vectors(name: str) -> None:
    """The demos equal the committed vectors, made by transformers, in all cases and tokens."""
    vectors = read(COMMITTED / name)
    assert vectors.header.made_by.startswith("transformers")
    lm = jaxllm.load(f"demo:{name}", dtype="float32")
    checked = check(vectors, JaxBackend(name, lm.model, lm.params))
    for case, report in checked.reports.items():
        print(case, max(d.relative_max for d in report.differences))
        assert report.holds, case
        assert report.greedy.agreed == report.greedy.compared
    assert checked.holds
    assert list(checked.reports) == ["text 0", "left", "right", "cached"]
    prompts = [lm.tokenizer.decode(text).strip() for text in vectors.header.texts if lm.tokenizer]
    assert prompts == ["Once upon a time", "One day"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_reproduces_committed_vectors(name: str) -> None:
    """The installed transformers computes the committed activations and greedy tokens."""
    vectors, theirs = read(COMMITTED / name), TransformersBackend.load(DEMO_DIR / name)
    case, tensors = pad_case(vectors.header.texts), vectors.tensors
    for stage, x in theirs.activations(case).items():
        close = {"rtol": 1e-4, "atol": 1e-5 * max(1.0, float(np.abs(x).max()))}
        np.testing.assert_allclose(x[case.real_BT], tensors[stage], **close)
    decoded = theirs.decode(case, tensors["generated"].shape[1])
    np.testing.assert_array_equal(decoded[LOGITS].argmax(axis=2), tensors["generated"])


def test_committed_vectors_are_small_and_readable() -> None:
    """The committed files are under 1 MB and hold plain float32 tensors with one row per token."""
    files = [f for f in COMMITTED.rglob("*") if f.is_file()]
    assert {f.name for f in files} == {"vectors.json", "vectors.safetensors"}
    assert sum(f.stat().st_size for f in files) < 1_000_000
    tensors = load_file(COMMITTED / "llama" / "vectors.safetensors")
    header = json.loads((COMMITTED / "llama" / "vectors.json").read_text(encoding="utf-8"))
    assert header["stages"] == activation_names("llama", header["config"]["num_hidden_layers"])
    tokens = sum(map(len, header["texts"]))
    assert {x.shape[0] for n, x in tensors.items() if "generated" not in n} == {tokens}
    assert {x.dtype for n, x in tensors.items() if n != "generated"} == {np.dtype(np.float32)}
    assert tensors["embed_tokens"].shape == (tokens, header["config"]["hidden_size"])
    table = load_file(DEMO_DIR / "llama" / "model.safetensors")["model.embed_tokens.weight"]
    ids = [token for text in header["texts"] for token in text]
    np.testing.assert_array_equal(tensors["embed_tokens"], table[ids].astype(np.float32))


# Detection of changes.


def test_weight_digest_detects_unused_weight_change(tiny: JaxBackend, frozen: Path) -> None:
    """Row 100 of the embedding is in no text, and no head: only the digest reports the change."""
    vectors = read(frozen)
    assert not any(100 in row for row in (*TEXTS, *vectors.tensors["generated"].tolist()))
    other = change_weight(tiny, "embed_tokens.weight", lambda x: x.at[100, 3].multiply(-1))
    checked = check(vectors, other)
    assert checked.numbers_hold
    assert checked.model_mismatches == ("weights",)
    assert not checked.holds


@dataclasses.dataclass(frozen=True)
class Shifted(JaxBackend):
    """A backend that counts left padding as text: positions begin at the padding."""

    def activations(self, case: ParityCase) -> dict[str, np.ndarray]:
        B, T = case.token_BT.shape
        everything = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
        return super().activations(dataclasses.replace(case, position_BT=everything))


def test_padding_error_is_detected_only_in_left_case(tiny: JaxBackend, frozen: Path) -> None:
    """Positions that count padding fail with left padding, at the padded row's first queries, and
    not with right or no padding.
    """
    checked = check(read(frozen), Shifted("shifted", tiny.model, tiny.params))
    assert checked.model_mismatches == ()
    wrong = {name: report.first for name, report in checked.reports.items()}
    # A causal model does not attend to right padding; left padding shifts the positions.
    assert wrong["text 0"] is None
    assert wrong["right"] is None
    assert wrong["left"] is not None
    assert wrong["left"].name == "layers.0.q"
    assert wrong["left"].worst[0] == 1  # the padded row


def test_rounded_weights_hold_only_with_loose_tolerance(
    tiny: JaxBackend, frozen: Path, tmp_path: Path
) -> None:
    """bfloat16-rounded weights and another cache format are reported as mismatches; the values hold
    only with a loose tolerance.
    """
    params = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), tiny.params)
    vectors = read(
        _copy_edited(frozen, tmp_path / "half", lambda h: h["precision"].update(cache="int8"))
    )
    checked = check(vectors, dataclasses.replace(tiny, params=params), tolerance=Tolerance(0.5))
    assert checked.model_mismatches == ("precision", "weights")
    assert all(report.first is None for report in checked.reports.values())
    assert not checked.holds
    assert not check(vectors, dataclasses.replace(tiny, params=params)).numbers_hold


# Files.


def test_vector_files_are_self_describing(tiny: JaxBackend, frozen: Path) -> None:
    """Read with json and safetensors alone, positions index rows, and logits are the model's."""
    header = json.loads((frozen / "vectors.json").read_text(encoding="utf-8"))
    tensors = load_file(frozen / "vectors.safetensors")
    assert header["texts"] == TEXTS
    starts = [0, 5]
    for name, case in header["cases"].items():
        out = jaxllm.forward(
            tiny.model, tiny.params, None, case["tokens"], positions_BT=np.array(case["positions"])
        )
        for row, text in enumerate(case["texts"]):
            for column, position in enumerate(case["positions"][row]):
                if position >= 0:
                    assert case["tokens"][row][column] == TEXTS[text][position], name
                    np.testing.assert_allclose(
                        out.logits[row, column],
                        tensors["logits"][starts[text] + position],
                        rtol=1e-4,
                        atol=1e-4,
                    )


def _copy_edited(frozen: Path, target: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(frozen, target)
    header = json.loads((target / "vectors.json").read_text(encoding="utf-8"))
    edit(header)
    (target / "vectors.json").write_text(json.dumps(header), encoding="utf-8")
    return target


def test_damaged_vectors_are_refused(frozen: Path, tmp_path: Path) -> None:
    """Missing files, altered tensors and invalid header fields are refused by name."""
    with pytest.raises(CheckpointError, match=r"no vectors\.json"):
        read(tmp_path)
    broken = tmp_path / "numbers"
    shutil.copytree(frozen, broken)
    tensors = load_file(broken / "vectors.safetensors")
    tensors["norm"][0, 0] += 1
    save_file(tensors, broken / "vectors.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        read(broken)
    edits: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
        "format": (lambda h: h.update(format="other"), "'other'"),
        "version": (lambda h: h.update(version=9), "newer jaxllm .test vectors format 9;"),
        "missing": (lambda h: h.pop("cases"), "missing required field cases"),
        "kind": (lambda h: h.update(cases=[1]), "cases must be an object, got"),
        "field": (lambda h: h.update(colour=1), "unknown field colour"),
        "stage": (lambda h: h["stages"].append("nothing"), "nothing does not have the 8 tokens"),
        "dtype": (lambda h: h.update(dtype=["float32"]), "dtype must be a string"),
        "short": (lambda h: h["texts"].append([1]), r"texts\[2\] must be a list of length >= 2"),
        "huge": (lambda h: h["texts"][0].append(10**30), "must be a whole number <= 2147483647"),
        "texts": (lambda h: h["texts"].append([1, 2]), "cases do not match its texts"),
        "cached": (lambda h: h["cases"]["left"].update(cached=9), "cases do not match its texts"),
        "ragged": (lambda h: h["cases"]["left"]["tokens"][0].pop(), "cases do not match its texts"),
    }
    for name, (edit, words) in edits.items():
        with pytest.raises(CheckpointError, match=words):
            read(_copy_edited(frozen, tmp_path / name, edit))


def test_make_refuses_overwrite_and_bad_texts(
    tiny: JaxBackend, frozen: Path, tmp_path: Path
) -> None:
    """make refuses existing vectors, a file as path and invalid texts, and leaves no directory."""
    with pytest.raises(CheckpointError, match="already holds"):
        make(frozen, tiny, TEXTS)
    for texts, words in (([[1]], "two tokens"), ([], "two tokens"), ([[1, 500]], "token id 500")):
        with pytest.raises(TokenError, match=words):
            make(tmp_path / "none", tiny, texts)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot write"):
        make(tmp_path / "file", tiny, TEXTS, new_tokens=3)
    assert not (tmp_path / "none").exists()


def test_check_refuses_different_architecture(frozen: Path) -> None:
    model, params = random_model("gpt2")
    with pytest.raises(ConfigError, match="different activations"):
        check(read(frozen), JaxBackend("gpt2", model, params))


# The command.


def test_vectors_command_makes_and_checks(run: Any, tmp_path: Path) -> None:
    """`vectors check` holds after `make`; other weights fail unless --other-weights is given, and
    existing vectors are not overwritten.
    """
    model, made = tmp_path / "model", tmp_path / "made"
    save_random(model, "llama", num_hidden_layers=2)
    status, _, err = run("vectors", "make", model, made, "--from", "transformers", "-n", 3)
    assert status == 0
    assert "wrote" in err
    assert verdict(run, "vectors", "check", model, made)[0]
    # A different weight digest with equal values.
    other = _copy_edited(made, tmp_path / "other", lambda h: h.update(weights="0" * 64))
    holds, out = verdict(run, "vectors", "check", model, other)
    assert not holds and "weights differ" in out
    status, out, _ = run("vectors", "check", model, other, "--other-weights", "--json")
    found = json.loads(out)
    assert (status, found["holds"], found["differs"]) == (0, True, ["weights"])
    assert found["cases"].keys() == {"text 0", "left", "right", "cached"}
    assert_refused(run, "already holds", "vectors", "make", model, made)
    assert_refused(run, "is not one of", "vectors", "make", model, made, "--from", "nowhere")


def test_vectors_command_supports_quantized_models(run: Any, tmp_path: Path) -> None:
    """Vectors of an int8 model hold with --quantize or an equal table, not with other weights."""
    model, made, table = (tmp_path / name for name in ("model", "made", "formats.json"))
    save_random(model, "llama", num_hidden_layers=1)
    succeed(
        run, "vectors", "make", model, made, "--quantize", "int8", "--from", "transformers", "-n", 2
    )
    assert verdict(run, "vectors", "check", model, made, "--quantize", "int8")[0]
    table.write_text(json.dumps({"quantize": "int8"}))
    assert verdict(run, "vectors", "check", model, made, "--precision", table)[0]
    holds, out = verdict(run, "vectors", "check", model, made, "--other-weights")
    assert not holds and "first to differ: embed_tokens" in out
