"""Training pruned models: masks are kept, and the loss recovers."""

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
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.train import jobs
from jaxllm.train.constraints import KeepZeros, keep_zeros
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
        size = jnp.abs(leaf)
        return jnp.where(size < jnp.median(size), 0.0, leaf) if LINEAR.search(path) else leaf

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


def test_keep_zeros_refuses_model_without_zeros() -> None:
    _, params = random_model("llama", **SHAPES)
    with pytest.raises(ConfigError, match="no zeros to keep: none of 9 trained matrices has 10%"):
        keep_zeros(partition(params)[0])
    assert keep_zeros({"w": jnp.eye(4)}) == KeepZeros(("w",))
