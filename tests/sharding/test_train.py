"""Training on meshes: steps and sharded states equal one device."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.adapters import LoraConfig, extract_adapter, init_adapter, make_attacher
from jaxllm.checkpoints import resolve
from jaxllm.errors import ConfigError
from jaxllm.sharding import ShardedModel, make_sharded_model
from jaxllm.sharding.collective_stats import count_collectives
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.sharding.shard_params import bytes_per_device
from jaxllm.sharding.sharded_model import attach_adapter
from jaxllm.train import loop
from jaxllm.train.checkpointing import StateLayout
from jaxllm.train.data.rows import Rows
from jaxllm.train.loop import TrainPlan, TrainResult, train
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import ALL_PARAMS, Rules, combine, partition
from jaxllm.train.step import Setup, eval_step, init_state, train_step
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.precision import Precision
from tests.conftest import Run as Command, assert_refused, succeed
from tests.sharding.mesh_matrix import texts
from tests.sharding.tiny_models import WIDE, load_weights, make_model
from tests.tiny_models import KINDS

ADAPTERS: Rules = ((r".*\.weight\.(a|b|magnitude)", True),)
CUBE = "data=2,stage=2,tensor=2"


@dataclasses.dataclass(frozen=True)
class Texts:
    """Random texts of unequal lengths."""

    rows: int = 4
    width: int = 9
    digest: str = "texts"
    tokens: int = 100

    def __len__(self) -> int:
        return 3

    def batch(self, number: int) -> Rows:
        return texts(self.rows, self.width, number % 3)


def on_mesh(model: Any, mesh: str, fsdp: bool = False) -> ShardedModel:
    return make_sharded_model(model.config, model.precision, parse_mesh(mesh), fsdp=fsdp)


pytestmark = pytest.mark.devices
FULL = pytest.mark.full
EPS = 1e-3  # Adam: a smaller one would amplify gradients that are pure rounding (key biases)
MESH_OPTIONS = ("--mesh", CUBE, "--objective", "1f1b:2")
EXPERTS = {"mixtral": {"num_local_experts": 4}}


class Stopped(Exception):
    """Raised to interrupt a run."""


def run_steps(model: Any, params: Params, steps: int, **options: Any) -> TrainResult:
    optimizer = Optimizer(steps=steps, lr=0.01, max_grad_norm=0.5, weight_decay=0.1, eps=EPS)
    setup = Setup(model, NextToken(), optimizer)
    plan = TrainPlan(steps=steps, gradient_accumulation_steps=2)
    return train(params, Texts(), setup, plan, show_progress=False, **options)


def unsharded_params(model: Any, found: TrainResult) -> dict[str, np.ndarray]:
    whole = model.gather(found.params)
    return {path: np.asarray(x) for path, x in flatten(whole)}


def assert_close_params(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], off: float = 1e-4
) -> None:
    """Check that differences are at most `off`, relative to max(1, largest value)."""
    assert found.keys() == expected.keys()
    for path, x in found.items():
        assert x.shape == expected[path].shape, path
        error = np.abs(x - expected[path]).max()
        assert error <= off * max(1.0, np.abs(expected[path]).max()), (path, error)


@pytest.mark.parametrize(
    ("family", "layers", "meshes", "steps"),
    [
        ("llama", 1, [("data=2,tensor=2", True), None], 2),
        pytest.param("llama", 1, [None, ("data=4", False), ("tensor=8", False)], 6, marks=FULL),
        pytest.param("gpt2", 2, [("data=2,tensor=4", True), (CUBE, False), None], 10, marks=FULL),
        pytest.param("llama", 2, [("data=4", True), (CUBE, False)], 10, marks=FULL),
        pytest.param(
            "mixtral", 2, [("data=2,expert=2,tensor=2", True), ("tensor=2", False)], 4, marks=FULL
        ),
    ],
)
def test_train_steps_resume_on_another_mesh(
    family: str,
    layers: int,
    meshes: Sequence[tuple[str, bool] | None],
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupted runs resume on another mesh with equal records and weights (clipping, weight
    decay, two accumulated batches).
    """
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_FACTOR", 0.0)
    depth = {"num_hidden_layers": layers, "n_layer": layers}
    changes = {k: v for k, v in depth.items() if k in KINDS[family][1]}
    model, params = make_model(family, **changes, **EXPERTS.get(family, {}))
    expected = run_steps(model, params, steps)
    left = [0]

    def stop(params: Params, rows: Rows, key: jax.Array) -> Rows:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        return rows

    for number, mesh in enumerate(meshes):
        many = model if mesh is None else on_mesh(model, *mesh)
        spread = params if mesh is None else many.shard(params)
        last = number == len(meshes) - 1
        left[0] = steps if last else steps // len(meshes)
        if not last:
            with pytest.raises(Stopped):
                run_steps(many, spread, steps, directory=tmp_path, prepare=stop)
            continue
        found = run_steps(many, spread, steps, directory=tmp_path, prepare=stop)
    assert left[0] > 0  # it resumed and did not start over
    for mine, theirs in zip(found.records, expected.records, strict=True):
        assert mine.weight == theirs.weight
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.norm == pytest.approx(theirs.norm, rel=1e-4)
    assert_close_params(unsharded_params(many, found), unsharded_params(model, expected))


@pytest.mark.parametrize(
    ("family", "quantize", "dora", "mesh"),
    [
        ("llama", "int8", False, "data=2,tensor=2"),
        pytest.param("llama", "nf4", False, "data=4,tensor=2", marks=FULL),
        pytest.param("llama", None, True, "data=2,tensor=2", marks=FULL),
        pytest.param("gpt2", None, True, "data=2,tensor=4", marks=FULL),
        ("gpt2", "int8", False, CUBE),
        pytest.param("llama", "int4", False, "stage=2,tensor=2", marks=FULL),
        pytest.param("llama", None, False, "stage=2", marks=FULL),
    ],
)
def test_adapter_training_equals_single_device(
    family: str, quantize: str | None, dora: bool, mesh: str
) -> None:
    """LoRA and DoRA steps, with dropout, give the adapters and losses of one device."""
    layers = 2 if "stage" in mesh else 1
    changes = {} if family == "gpt2" else {"num_hidden_layers": layers}
    # Blocks of int4 and nf4 must span whole rows.
    changes |= WIDE[family] if quantize in ("int4", "nf4") else {}
    model, params = make_model(family, Precision(quantize=quantize), **changes)
    modules = "all-linear" if family == "gpt2" or dora else ("q_proj", "down_proj")
    dropout = 0.0 if "stage" in mesh else 0.4
    lora = LoraConfig(r=3, target_modules=modules, lora_dropout=dropout, use_dora=dora)
    optimizer = Optimizer(steps=2, lr=0.01, eps=EPS)
    rows = jax.tree.map(lambda x: x[None], Texts().batch(0))
    found = []
    for mine in (model, on_mesh(model, mesh, True)):
        base = mine.shard(params)
        adapter = init_adapter(model.config, base, lora, jax.random.key(1))
        adapted = attach_adapter(mine, base, make_attacher(model.config, adapter))
        trained, rest = partition(adapted, ADAPTERS, None, mine.unsharded_paths)
        setup = Setup(mine, NextToken(), optimizer)
        state = init_state(trained, setup)
        for _ in range(2):
            args = (state, rest, None, rows, jax.random.key(7))
            state, metrics = train_step(*args, setup=setup)
        held = eval_step(
            state.trained, rest, None, Texts().batch(1), jax.random.key(7), setup=setup
        )
        losses = float(metrics.loss), float(held.total / held.weight)
        found.append(
            (load_weights(StateLayout.from_model(mine, rest).gather_lazy(state.trained)), losses)
        )
        params_of = combine(state.trained, rest)
        written = mine.gather(params_of)
        assert extract_adapter(model.config, written, lora).num_params == adapter.num_params
    (expected, losses), (mine, others) = found
    assert others == pytest.approx(losses, rel=1e-5)
    assert_close_params(mine, expected)


def step_arguments(model: Any, params: Params, fsdp: bool) -> tuple[Any, ...]:
    """Return the arguments of a train step on eight devices, and its set-up."""
    many = on_mesh(model, "data=8", fsdp)
    trained, rest = partition(many.shard(params), ALL_PARAMS, None, many.unsharded_paths)
    setup = Setup(many, NextToken(), Optimizer(steps=3))
    rows = jax.tree.map(lambda x: x[None], texts(8))
    return (init_state(trained, setup), rest, None, rows, jax.random.key(0)), setup


@pytest.mark.parametrize("fsdp", [True, pytest.param(False, marks=FULL)])
def test_fsdp_communication_and_state_follow_formulas(fsdp: bool) -> None:
    """The state takes 1/n; each weight is gathered for product and gradient, which is scattered
    once; one program for all steps.
    """
    layers, matrices = 2, 7
    model, params = make_model(
        "llama", num_hidden_layers=layers, vocab_size=136, intermediate_size=448
    )
    sizes = {path: x.nbytes for path, x in flatten(params) if x.ndim > 1}
    vectors = sum(x.nbytes for _, x in flatten(params) if x.ndim == 1)
    (state, *args), setup = step_arguments(model, params, fsdp)
    state_bytes = 3 * (sum(sizes.values()) // (8 if fsdp else 1) + vectors)
    assert set(bytes_per_device(state).values()) == {state_bytes + 3 * 4}  # plus three counters
    compiled = train_step.lower(state, *args, setup=setup).compile()
    stats = count_collectives(compiled.as_text())
    before = train_step._cache_size()
    for _ in range(3):
        state, metrics = train_step(state, *args, setup=setup)
    assert train_step._cache_size() == before + 1
    assert bool(metrics.finite)
    if not fsdp:
        assert "all-gather" not in stats
        assert stats["all-reduce"].bytes >= sum(sizes.values()) + vectors
        return
    used_twice = sum(sizes.values()) * 2 - sizes["embed_tokens.weight"]
    assert stats["all-gather"].calls == 2 * (layers * matrices + 1) + 1
    assert stats["all-gather"].bytes == used_twice
    assert stats["reduce-scatter"].calls == layers * matrices + 2
    assert stats["reduce-scatter"].bytes == sum(sizes.values()) // 8


@FULL
def test_fsdp_holds_few_full_weights() -> None:
    """With FSDP the step needs less temporary memory than 3/4 of the matrices, without it more than
    twice them.
    """
    model, params = make_model("llama", num_hidden_layers=6, hidden_size=64, intermediate_size=512)
    peaks = []
    for fsdp in (False, True):
        args, setup = step_arguments(model, params, fsdp)
        lowered = train_step.lower(*args, setup=setup)
        peaks.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    matrices = sum(x.nbytes for x in jax.tree.leaves(params) if x.ndim > 1)
    assert peaks[0] > 2 * matrices  # gradients and updates
    assert peaks[1] < matrices * 3 / 4


def test_train_command_runs_on_three_axes(
    run: Command, shallow_demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train on data, stage and tensor axes writes the unsharded model of one device; missing mesh
    options are refused.
    """
    monkeypatch.setattr(resolve, "DEMO_DIR", shallow_demos)
    text = tmp_path / "story.txt"
    text.write_text("".join(f"{n}. Once there was a red ball.\n" for n in range(9)), "utf-8")
    given = ("--data", text, "--length", 32, "--batch-size", 4, "--steps", 2, "--eval-split", 0)
    found = []
    for name, more in (("one", ()), ("many", (*MESH_OPTIONS, "--fsdp"))):
        out = tmp_path / name
        succeed(run, "train", "full", "demo:llama", out, *given, *more)
        found.append({p: np.asarray(x) for p, x in flatten(jaxllm.load(out).params)})
    assert_close_params(found[1], found[0], off=3e-4)  # two Adam steps of 1e-4 in either direction
    command = "train", "full", "demo:llama", tmp_path / "p", *given
    assert_refused(run, "requires pipeline stages", *command, "--objective", "1f1b")
    assert_refused(run, "give --mesh data=N", *command, "--fsdp")


def test_unsupported_training_on_mesh_is_refused(tmp_path: Path) -> None:
    model, params = make_model("llama")
    many = on_mesh(model, "data=3")
    with pytest.raises(ConfigError, match=r"4 rows is not divisible by data=3"):
        run_steps(many, many.shard(params), 1)
    with pytest.raises(
        ConfigError, match=r"embed_tokens.weight: FSDP .* no axis of .131, 40.*data=7"
    ):
        on_mesh(model, "data=7", True).shard(params)
    staged = on_mesh(model, "stage=2")
    for options, words in (
        ({"lora_dropout": 0.1}, r"dropout is drawn for all rows.*stage=1"),
        ({"layers_to_transform": [0]}, r"targets only some of layers\.0.* stage=1"),
        ({"use_dora": True}, r"DoRA cannot be trained on stages.*stage=1"),
    ):
        config = LoraConfig(target_modules=("q_proj",), **options)
        adapter = init_adapter(model.config, params, config, jax.random.key(0))
        with pytest.raises(ConfigError, match=words):
            attach_adapter(staged, staged.shard(params), make_attacher(model.config, adapter))
        if config.use_dora:
            with pytest.raises(ConfigError, match=r"needs the row norms of layers"):
                init_adapter(model.config, staged.shard(params), config, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"train some of layers\.0.* stage=1"):
        partition(staged.shard(params), ((r"layers\.0", True),), None, staged.unsharded_paths)
    eight = dataclasses.replace(model.precision, quantize="int8")
    whole, quantized = make_model("llama", eight)
    spread = on_mesh(whole, "data=2,tensor=2").shard(quantized)
    with pytest.raises(ConfigError, match=r"int8, which cannot be trained"):
        partition(spread)
