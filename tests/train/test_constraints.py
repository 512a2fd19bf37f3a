"""Training pruned models: masks are kept, sparsity is exact, and the loss recovers."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxllm
from jaxllm.compress.methods.magnitude import prune_magnitude
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.train import jobs
from jaxllm.train.constraints import KeepZeros, PruneGradually, keep_zeros, prune_gradually
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_ids
from jaxllm.train.objective import LossOutput, NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import combine, partition
from jaxllm.train.step import Setup, init_state, train_step
from jaxllm.weights.formats import to_dense, weight_format
from jaxllm.weights.linear import linear
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.quantize import quantize
from jaxllm.weights.sparsity import Sparsity, lowest_mask
from jaxllm.weights.types.low_rank import LowRankWeight
from tests.tiny_models import random_model, tokens

KEY = jax.random.key(0)
LINEAR = re.compile(r"\.c_\w+\.weight$")  # GPT-2, which compiles quickly
SHAPES = {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 64}


def rng_array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


WEIGHT, RATE = "w.weight", 0.5
GIVEN = tuple(np.asarray(rng_array(9, width, seed=width)) for width in (40, 24))


def text() -> Any:
    """Return the one batch that the model overfits, `[1, B, T]`."""
    data = Dataset(from_ids(list(tokens(3, 14))), width=13, batch_size=3)
    return jax.tree.map(lambda x: x[None], data.batch(0))


def train(params: Params, setup: Setup, steps: int) -> tuple[Params, list[float]]:
    trained, rest = partition(params)
    state, losses = init_state(trained, setup), []
    for _ in range(steps):
        state, metrics = train_step(state, rest, GIVEN, text(), KEY, setup=setup)
        losses.append(float(metrics.loss))
    return combine(state.trained, rest), losses


@dataclasses.dataclass(frozen=True)
class Regression:
    """Mean squared error of one matrix product, which compiles quickly."""

    def __call__(self, model: Any, params: Params, given: Any, rows: Any, key: Any) -> LossOutput:
        error = linear(jnp.asarray(given[0]), params["w"]["weight"]) - given[1]
        return LossOutput((error**2).sum(), jnp.float32(error.size))


@dataclasses.dataclass(frozen=True)
class Descent:
    """Plain gradient descent: a step shows the gradient."""

    rate: float

    def build(self) -> Any:
        return optax.sgd(self.rate)


def regress(weight: Any, constraint: Any = None, steps: int = 4) -> tuple[Any, list[float]]:
    setup = Setup(Model(), Regression(), Descent(RATE), constraint)
    params, losses = train({"w": {"weight": weight}}, setup, steps)
    return params["w"]["weight"], losses


def pruned_model() -> tuple[Any, Params]:
    """Return a model with half of its linear weights set to zero."""
    model, params = random_model("gpt2", spread=0.2, n_layer=1)

    def prune(path: str, leaf: Any) -> Any:
        return prune_magnitude(leaf, Sparsity(0.5)) if LINEAR.search(path) else leaf

    return model, map_leaves(prune, params)


def zeros(params: Params) -> dict[str, np.ndarray]:
    return {p: np.asarray(x) == 0 for p, x in flatten(params) if LINEAR.search(p)}


def test_keep_zeros_recovers_loss_and_keeps_mask() -> None:
    """AdamW with momentum and decay would move every weight; with the constraint the zeros stay and
    the loss falls.
    """
    model, params = pruned_model()
    constraint = keep_zeros(partition(params)[0])
    assert set(constraint.paths) == zeros(params).keys()
    optimizer = Optimizer(steps=40, lr=2e-2, warmup=0.0, weight_decay=0.1)
    found, losses = train(params, Setup(model, NextToken(), optimizer, constraint), 12)
    before, after = zeros(params), zeros(found)
    for path, mask in before.items():
        assert mask.sum() == mask.size // 2
        np.testing.assert_array_equal(after[path], mask)
    assert losses[-1] < 0.3 * losses[0]
    hash(constraint)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_weights_are_saved_in_their_formats(dtype: str, tmp_path: Path) -> None:
    """Low-rank and frozen integer weights keep their formats in training and in the result; arrays
    are in the requested dtype.
    """
    assert_saved_in_formats(
        {"self_attn.q_proj": "rank3/float32", "self_attn.o_proj": "int8"}, dtype, tmp_path
    )


def assert_saved_in_formats(formats: dict[str, str], dtype: str, directory: Path) -> None:
    """Check a layer's weights in these formats after training; those of `o_proj` are frozen, and
    MLPs begin with half of their weights at zero.
    """
    model, params = random_model("llama", num_hidden_layers=1)

    def prune(path: str, leaf: Any) -> jax.Array:
        kept = jnp.arange(leaf.shape[-1]) % 4 < 2
        return jnp.where(kept[None], leaf, 0.0) if ".mlp." in path else leaf

    formats_of = [(f".*{name}.*", to) for name, to in formats.items()]
    mixed = quantize(map_leaves(prune, params), [*formats_of, (".*", None)])
    lm = LM(model.config, model, mixed, None, {}, directory)
    rules = ((".*o_proj.*", False), (".*", True))
    job = jobs.full_finetune(lm, dtype, rules=rules)
    trained, rest = partition(job.params, rules, job.compute_params)
    moved = {path: x * 1.5 for path, x in trained.items()}  # zeros stay zero
    job.finish(combine(moved, rest), directory / "out")
    again = jaxllm.load(directory / "out")
    for (path, leaf), (_, before) in zip(flatten(again.params), flatten(mixed), strict=True):
        name = path.removeprefix("layers.0.").removesuffix(".weight")
        assert weight_format(leaf) == formats.get(name, dtype), path
        changed = not np.array_equal(to_dense(leaf, "float32"), to_dense(before, "float32"))
        assert changed == (name != "self_attn.o_proj"), path
        if name.startswith("mlp"):
            np.testing.assert_array_equal(to_dense(leaf) == 0, to_dense(before) == 0)


def test_low_rank_training_equals_manual_gradient_descent() -> None:
    """Losses equal gradient descent on both factors by hand, and the weight stays factored."""
    factors = LowRankWeight(rng_array(24, 6) * 0.3, rng_array(6, 40, seed=1) * 0.3)
    trained, _ = partition({"w": {"weight": factors}})
    assert trained.keys() == {f"{WEIGHT}.left", f"{WEIGHT}.right"}
    found, losses = regress(factors)
    assert isinstance(found, LowRankWeight)
    assert (found.rank, found.shape) == (6, (24, 40))
    x, y = GIVEN
    left, right = np.asarray(factors.left, np.float64), np.asarray(factors.right, np.float64)
    for expected in losses[:2]:
        error = x @ (left @ right).T - y
        assert expected == pytest.approx((error**2).mean(), rel=1e-4)
        slope = 2 * error / error.size
        left, right = (
            left - RATE * slope.T @ x @ right.T,
            right - RATE * left.T @ slope.T @ x,
        )


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_prune_gradually_follows_published_schedule(pattern: tuple[int, int] | None) -> None:
    """The fraction follows the closed form of Zhu and Gupta; the pruned set is the one found by
    sorting magnitudes.
    """
    weight = rng_array(6, 24)
    last = 0.5 if pattern else 0.8
    prune = PruneGradually(paths=("w",), sparsity=Sparsity(last, pattern), begin=2, end=11, every=3)
    apply = jax.jit(prune)
    before = {"w": weight, "b": jnp.zeros(3)}
    for step in range(14):
        # The update restores every weight; pruned weights must stay zero.
        after = {"w": weight + 0.01 * step, "b": before["b"] + 1}
        now = apply(before, after, jnp.asarray(step))
        is_pruned = np.asarray(now["w"]) == 0
        when = max(s for s in (0, 2, 5, 8, 11) if s <= step)
        share = 0.0 if when < 2 else last * (1 - (1 - (when - 2) / 9) ** 3)
        if pattern:
            groups = is_pruned.reshape(-1, 4).sum(axis=1)
            assert set(groups.tolist()) == {int(4 * share + 1e-9)}
        else:
            assert is_pruned.sum() == int(weight.size * share)
        if step in (2, 5, 8, 11):
            masked = np.where(np.asarray(before["w"]) == 0, 0, after["w"])
            per = 4 if pattern else weight.size
            count = int(per * share + 1e-9)
            order = np.argsort(np.abs(masked).reshape(-1, per), axis=1, kind="stable")[:, :count]
            mask = np.zeros_like(masked, bool).reshape(-1, per)
            np.put_along_axis(mask, order, True, axis=1)
            np.testing.assert_array_equal(is_pruned, mask.reshape(is_pruned.shape))
        else:
            np.testing.assert_array_equal(is_pruned, np.asarray(before["w"]) == 0)
        assert float(now["b"][0]) == step + 1
        before = now
    np.testing.assert_array_equal(
        is_pruned, lowest_mask(np.abs(np.asarray(masked)), prune.sparsity, rows=False)
    )


def test_prune_gradually_reaches_final_sparsity_at_end() -> None:
    """The last pruning happens at the end step, even if it is no multiple of the interval."""
    prune = PruneGradually(paths=("w",), sparsity=Sparsity(0.75), begin=0, end=5, every=2)
    apply, now = jax.jit(prune), {"w": rng_array(4, 20)}
    for step, share in ((4, 0.75 * (1 - (1 - 4 / 5) ** 3)), (5, 0.75)):
        now = apply(now, now, jnp.asarray(step))
        assert int((now["w"] == 0).sum()) == int(80 * share)


def test_prune_gradually_during_training_gives_2_4_pattern() -> None:
    """The trained weight has the 2:4 pattern and the loss falls after the last pruning."""
    weight = rng_array(24, 40)
    trained, _ = partition({"w": {"weight": weight}})
    prune = prune_gradually(trained, "2:4", begin=1, end=6, every=2)
    found, losses = regress(weight, prune, steps=12)
    assert ((np.asarray(found) == 0).reshape(-1, 4).sum(axis=1) == 2).all()
    assert losses[-1] < losses[7]  # after the last pruning


def test_constraints_refuse_invalid_input() -> None:
    _, params = random_model("llama", **SHAPES)
    trained, _ = partition(params)
    steps = {"begin": 0, "end": 4, "every": 2}
    for make, message in (
        (lambda: keep_zeros(trained), "no zeros to keep: none of 9 trained matrices has 10%"),
        (lambda: prune_gradually(trained, "half", **steps), "share must be between 0 and 100%"),
        (lambda: prune_gradually(trained, "2:64", **steps), "not a multiple of 64"),
        (lambda: prune_gradually(trained, "0.5", **steps, rules=(("norm", True),)), "no matrix"),
        (lambda: prune_gradually(trained, "0.5", begin=4, end=4, every=1), "end of pruning must"),
        (lambda: prune_gradually(trained, "0.5", begin=0, end=4, every=0), "between prunings"),
        (
            lambda: PruneGradually(paths=(), sparsity=Sparsity(0.5), initial_fraction=0.6, **steps),
            "at least 0 and below its last one, 0.5",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    assert keep_zeros({"w": jnp.eye(4)}) == KeepZeros(("w",))
