"""Gradients through a pipeline against one device's, and what schedules hold at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import steps
from jaxllm.errors import ConfigError
from jaxllm.ops.token_logprobs import AxisNames
from jaxllm.sharding.pipeline.one_f_one_b import make_pipeline_loss, make_schedule_arrays, sum_loss
from jaxllm.sharding.pipeline.schedule import SCHEDULES
from jaxllm.sharding.shard_list import ShardList
from jaxllm.train.data.rows import Rows
from jaxllm.train.losses import cross_entropy
from tests.sharding.made import largest_difference, spread
from tests.sharding.test_pipeline import of_layers
from tests.twins import VOCAB, tokens

pytestmark = pytest.mark.devices


def summed(logits_BTV: jax.Array, rows: Rows, over: AxisNames = ()) -> jax.Array:
    return cross_entropy(logits_BTV, rows.label_BT, over)[0]


def batch(B: int, T: int) -> Rows:
    token, label = (jnp.asarray(tokens(B, T, seed), jnp.int32) for seed in (0, 1))
    position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    position = position.at[0, T - 2 :].set(-1)  # padding
    label = jnp.where(position < 0, -100, label)
    return Rows(token, label, position, jnp.zeros_like(token))


def numbers(gradient: Any) -> list[Any]:
    """The arrays, tables without what their last share has beyond the vocabulary."""
    leaves = jax.tree.leaves(gradient, is_leaf=lambda x: isinstance(x, ShardList))
    return [
        piece
        for x in leaves
        for piece in ([x.to_dense()] if getattr(x, "full_size", 0) == VOCAB else jax.tree.leaves(x))
    ]


def plain(model: Any, params: Any, rows: Rows) -> jax.Array:
    given = {"document_BT": rows.document_BT}
    trace = steps.run_model(model, params, (), rows.token_BT, rows.position_BT, **given)[0]
    return summed(trace.logits, rows)


CASES = [
    # GPT-2's table is its head too: its gradient is a sum of both ends'.
    ("gpt2", "data=2,stage=2,tensor=2", "1f1b", {}, 2),
    pytest.param("llama", "stage=2", "1f1b", {"chunks": 2}, 4, marks=pytest.mark.full),
    pytest.param("llama", "stage=4", "gpipe", {}, 8, marks=pytest.mark.full),
    pytest.param("llama", "stage=4,tensor=2", "1f1b", {}, 8, marks=pytest.mark.full),
    pytest.param("gemma2", "stage=2,tensor=2", "1f1b", {}, 4, marks=pytest.mark.full),
    pytest.param("gpt2", "stage=2", "gpipe", {"chunks": 2}, 4, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("family", "mesh", "schedule", "options", "microbatches"), CASES)
def test_gradients_are_those_of_one_device(
    family: str, mesh: str, schedule: Any, options: dict[str, Any], microbatches: int
) -> None:
    model, params = of_layers(family, 3 if family == "gemma2" else 4)  # a stage has one less
    over, shared = spread(model, params, mesh, microbatches=microbatches, **options)
    rows = batch(8, 7)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: plain(model, p, rows)))(params)
    wanted = numbers(over.shard(gradient))
    how = make_pipeline_loss(over, summed, schedule, microbatches)
    for ours in (lambda p: sum_loss(how, p, rows), lambda p: plain(over, p, rows)):
        found, slopes = jax.jit(jax.value_and_grad(ours))(shared)
        assert float(found) == pytest.approx(float(loss), rel=1e-5)
        for a, b in zip(numbers(slopes), wanted, strict=True):
            assert largest_difference(a, b) < 1e-4


@pytest.mark.full
def test_one_f_one_b_needs_less_memory_than_gpipe() -> None:
    """Inputs of 16 microbatches, or of 2: the difference is what the compiled programs hold."""
    model, params = of_layers("llama", 2)
    over, shared = spread(model, params, "stage=2")
    rows, held = batch(16, 64), {}
    for name in SCHEDULES:
        how = make_pipeline_loss(over, summed, name, 16)
        compiled = jax.jit(jax.grad(lambda p, how=how: sum_loss(how, p, rows))).lower(shared)
        held[name] = compiled.compile().memory_analysis().temp_size_in_bytes
    each = 64 * 40 * 4
    assert held["gpipe"] - held["1f1b"] >= 12 * each


@pytest.mark.parametrize(("p", "m", "v"), [(2, 6, 1), (4, 16, 1), (4, 8, 2), (3, 3, 1)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_stage_waits_for_lies_where_it_looks(name: str, p: int, m: int, v: int) -> None:
    """Played by hand: what is put in a place is there when its job comes, and not overwritten."""
    schedule = SCHEDULES[name](p, m, v)
    table, inputs, _ = make_schedule_arrays(schedule)
    if name == "1f1b" and v == 1:
        assert inputs <= p
    else:
        assert inputs <= m * v
    held: list[dict[int, Any]] = [{} for _ in range(p)]
    slopes: list[dict[int, Any]] = [{} for _ in range(p)]
    sent: list[Any] = [None] * p
    for tick, row in enumerate(schedule.ticks):
        for stage in range(p):
            before, after = sent[(stage - 1) % p], sent[(stage + 1) % p]
            if before is not None and before.forward:
                held[stage][int(table.x_in[tick, stage])] = before
            if after is not None and not after.forward:
                slopes[stage][int(table.g_in[tick, stage])] = after
        for stage, job in enumerate(row):
            if job is None:
                continue
            if stage > 0 or job.chunk > 0:
                chunk = job.chunk if stage > 0 else job.chunk - 1
                lies = held[stage][int(table.x_at[tick, stage])]
                assert (lies.microbatch, lies.chunk) == (job.microbatch, chunk)
            if not job.forward and (stage < p - 1 or job.chunk < v - 1):
                chunk = job.chunk if stage < p - 1 else job.chunk + 1
                lies = slopes[stage][int(table.g_at[tick, stage])]
                assert (lies.microbatch, lies.chunk) == (job.microbatch, chunk)
        sent = list(row)
    assert np.count_nonzero(table.kind) == schedule.busy_ticks


def test_schedules_are_refused_where_there_is_nothing_to_schedule() -> None:
    model, params = of_layers("llama", 2)
    over, _ = spread(model, params, "tensor=2")
    with pytest.raises(ConfigError, match="Load the model with stage=2"):
        make_pipeline_loss(over, summed, "1f1b", 2)
    over, shared = spread(model, params, "stage=2")
    with pytest.raises(ConfigError, match="must be one of gpipe, 1f1b, got 'zero'"):
        make_pipeline_loss(over, summed, "zero", 2)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="8 rows per device are not divisible into 3 microbatches"
    ):
        sum_loss(make_pipeline_loss(over, summed, "1f1b", 3), shared, batch(8, 5))
