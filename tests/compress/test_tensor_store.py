"""Finished work survives an interruption; damaged or foreign parts are recomputed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress.calibration import Calibration, from_tokens
from jaxllm.compress.pipeline import build_model, initial_state, make_store, run_steps
from jaxllm.compress.recipe import ModelState, Recipe, StepContext, StepSpec, parse_lines
from jaxllm.compress.registry import STEPS
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import lock_file
from jaxllm.lm import LM
from jaxllm.weights.formats import as_format
from jaxllm.weights.paths import Params
from tests.compress.models import halve, same, tiny

FORMATS = ("float32", "bfloat16", "float16", "bf16-packed", "int8", "int8-g32-f16", "int4-g32-zp")


@pytest.fixture
def params() -> Params:
    """Leaves of every format, under names with and without dots."""
    rng = np.random.default_rng(0)
    w_OI = jnp.asarray(rng.standard_normal((12, 40)), jnp.bfloat16)
    made = {name: as_format(w_OI, name) for name in FORMATS}
    return {"layers.0": {"mlp": made, "norm": {"weight": w_OI[0]}}, "stack": w_OI.reshape(3, 4, 40)}


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def journal(tmp_path: Path, messages: list[str]) -> TensorStore:
    (tmp_path / "parts").mkdir()
    return TensorStore(tmp_path / "parts", "ours", log=messages.append)


def test_journal_restores_every_format_bit_for_bit(journal: TensorStore, params: Params) -> None:
    assert journal.get("0") is None
    journal.put("0", params, {"seconds": 2.5, "config": {"layers": [1, None]}})
    found = journal.get_with_facts("0")
    assert found is not None
    same(found[0], params)
    assert found[0].keys() == params.keys()
    assert found[1] == {"seconds": 2.5, "config": {"layers": [1, None]}}


def test_journal_steps_are_isolated(journal: TensorStore, params: Params) -> None:
    """A step sees only its own parts, and only if everything it depends on is equal."""
    first, second = journal.child("1", "a"), journal.child("2", "a", "b")
    first.put("0", params)
    assert second.get("0") is None
    assert journal.child("1", "b").get("0") is None  # other dependencies
    assert journal.child("1", "a").get("0") is not None
    second.put("0", params)
    second.put("row", {})
    second.clear("row")
    assert [path.name for path in journal.part_paths()] == ["1.0.part", "2.row.part"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda b: b[:-1], "truncated"),
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), "checksum does not match"),
        (lambda b: b.replace(b"float32", b"float33", 1), "checksum does not match"),
        (lambda b: b.replace(b'\\"seconds\\":1', b'\\"seconds\\":2', 1), "checksum does not match"),
        (lambda b: b"", "safetensors"),
        (lambda b: b"{}" * 40, "safetensors"),
    ],
)
def test_damaged_part_is_recomputed(
    journal: TensorStore,
    params: Params,
    messages: list[str],
    damage: Callable[[bytes], bytes],
    reason: str,
) -> None:
    """A damaged part is ignored with a message that names the file and the reason."""
    journal.put("0", {"weight": params["layers.0"]["mlp"]["float32"]}, {"seconds": 1})
    path = journal.part_paths()[0]
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    assert journal.get("0") is None
    assert reason in messages[0]
    assert str(path) in messages[0]
    assert messages[0].endswith(": computing it again")


def test_journal_without_directory_stores_nothing(params: Params) -> None:
    nowhere = TensorStore()
    with nowhere.lock():
        nowhere.put("0", params)
        assert nowhere.get("0") is None
        assert nowhere.child("1").part_paths() == []


def test_journal_locks_and_removes_its_directory(tmp_path: Path, params: Params) -> None:
    """The journal locks its directory against other processes and removes it once it is empty."""
    journal = TensorStore(tmp_path / "out.parts", "ours")
    with journal.lock():
        journal.put("0", params)
        with pytest.raises(CheckpointError, match="in use by another process"), journal.lock():
            pass
    assert journal.get("0") is not None
    with journal.lock():
        journal.clear()
    assert not journal.directory.exists() if journal.directory else False
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot write"), TensorStore(file).lock():
        pass
    with lock_file(file):
        pass


class Killed(BaseException):
    """An interrupt that no handler catches."""


def drop_last_layer(work: StepContext[Any]) -> ModelState:
    """Drop the last layer, so that the journal has to store another configuration."""
    subject = work.state
    count = subject.config.num_hidden_layers - 1
    config = dataclasses.replace(subject.config, num_hidden_layers=count)
    params = {name: x for name, x in subject.params.items() if name != f"layers.{count}"}
    return dataclasses.replace(subject, config=config, params=params)


TABLE = (
    StepSpec("scale", "halve", halve, "half"),
    StepSpec("drop", "last", drop_last_layer, "a layer less"),
    StepSpec("drop", "quickly", drop_last_layer, "a layer less", needs_calibration=False),
)
LINES = ["scale: halve", "drop: last", "drop: quickly", "scale: halve"]
CALIBRATION = from_tokens(np.arange(8).reshape(2, 4))


def recipe() -> Recipe:
    return parse_lines(LINES, TABLE)


def compress_and_save(
    lm: LM, directory: Path, parts: Path | None, calibration: Calibration = CALIBRATION
) -> list[str]:
    """Compress and save a model; return the layers that had to be computed."""
    done: list[str] = []
    journal = TensorStore() if parts is None else make_store(lm, calibration, parts, done.append)
    subject = initial_state(lm)
    with journal.lock():
        for stage in run_steps(lm, recipe(), calibration, journal, log=done.append):
            subject = stage.state or subject
        build_model(lm, recipe(), subject).save(directory)
        journal.clear()
    return done


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def uninterrupted(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "out"
    made = compress_and_save(lm, directory, None)
    assert made == ["layers.0", "layers.1", "layers.2", "layers.3", "layers.0", "layers.1"]
    return directory


@pytest.mark.parametrize("moment", range(10))
@pytest.mark.parametrize("written", [False, True])
def test_killed_run_resumes_to_identical_files(
    lm: LM,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: int,
    written: bool,
) -> None:
    """Killed before or after a part is written, then run again: nothing of it is made twice."""
    put, count = TensorStore.put, [0]

    def killing(self: TensorStore, *arguments: Any) -> None:
        count[0] += 1
        if count[0] == moment + 1 and not written:
            raise Killed
        put(self, *arguments)
        if count[0] == moment + 1:
            raise Killed

    parts, out = tmp_path / "out.parts", tmp_path / "out"
    monkeypatch.setattr(TensorStore, "put", killing)
    killed = False
    try:
        compress_and_save(lm, out, parts)
    except Killed:
        killed = True
    monkeypatch.undo()
    assert killed == (moment < 9)  # 4 layers, a step, a step, 2 layers, a step
    if killed:
        assert not out.exists()
        finished = min(moment + written, 9)
        made = compress_and_save(lm, out, parts)
        assert len(made) == max(0, min(4, 4 - finished)) + max(0, 2 - max(0, finished - 6))
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert not parts.exists()


def test_changed_calibration_restarts_run(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a run with another calibration are ignored, and every step runs again."""
    parts = tmp_path / "parts"

    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("cannot write out: No space left on device")

    monkeypatch.setattr(LM, "save", full)
    with pytest.raises(CheckpointError, match="No space"):
        compress_and_save(lm, tmp_path / "out", parts)
    monkeypatch.undo()
    assert [path.name for path in TensorStore(parts).part_paths()] == ["4.whole.part"]
    other = from_tokens(np.arange(8).reshape(2, 4) + 1)
    made = compress_and_save(lm, tmp_path / "other", parts, other)
    assert "4.whole.part was written for another model, recipe or calibration: comp" in made[0]
    assert len(made) == 1 + 6


def test_finished_steps_depend_on_earlier_steps(lm: LM, tmp_path: Path) -> None:
    """A finished step is reused only after the same earlier steps."""
    journal = TensorStore(tmp_path, "ours")
    for first in ("drop: last", "drop: quickly"):
        done: list[str] = []
        for _ in run_steps(
            lm, parse_lines([first, LINES[0]], TABLE), CALIBRATION, journal, log=done.append
        ):
            pass
        assert done == ["layers.0", "layers.1", "layers.2"]


def test_rule_matching_dropped_layer_is_refused(lm: LM) -> None:
    """A rule that matches only layers dropped by an earlier step raises an error."""
    table = (*TABLE, *STEPS)
    lines = parse_lines(["drop: quickly", r"quantize: rtn int8 on=layers\.3"], table)
    with pytest.raises(ConfigError, match=r"on=layers\\.3 matches no matrix of this model"):
        list(run_steps(lm, lines, None, TensorStore()))


def test_step_with_inconsistent_parameters_is_refused(lm: LM) -> None:
    """A step whose parameters do not match its configuration raises an error."""

    def broken(work: StepContext[Any]) -> ModelState:
        return dataclasses.replace(work.state, params=drop_last_layer(work).params)

    lines = parse_lines(
        ["drop: badly"], (StepSpec("drop", "badly", broken, "", needs_calibration=False),)
    )
    with pytest.raises(ValueError, match=r"drop: badly: .* wrong shape at layers\.3"):
        list(run_steps(lm, lines, None, TensorStore()))
