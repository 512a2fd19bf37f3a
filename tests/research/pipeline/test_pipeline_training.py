"""Pipeline gradients against one device, and the memory of schedules."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import steps
from jaxllm.errors import ConfigError
from jaxllm.ops.token_logprobs import AxisNames
from jaxllm.research.pipeline.one_f_one_b import make_pipeline_loss, make_schedule_arrays, sum_loss
from jaxllm.research.pipeline.schedule import SCHEDULES
from jaxllm.sharding.shard_list import ShardList
from jaxllm.train.data.rows import Rows
from jaxllm.train.objective import cross_entropy
from tests.research.pipeline.test_pipeline import of_layers
from tests.sharding.test_sharded_logits import texts
from tests.sharding.tiny_models import largest_difference, shard_model
from tests.tiny_models import VOCAB

pytestmark = pytest.mark.devices


def summed(logits_BTV: jax.Array, rows: Rows, over: AxisNames = ()) -> jax.Array:
    return cross_entropy(logits_BTV, rows.label_BT, over)[0]


def numbers(gradient: Any) -> list[Any]:
    """Return the arrays of a gradient, without the padding of vocabulary tables."""
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
    # GPT-2 ties its head: the gradient is a sum over the first and last stage.
    ("gpt2", "data=2,stage=2,tensor=2", "1f1b", {}, 2),
    pytest.param("llama", "stage=2", "1f1b", {"chunks": 2}, 4, marks=pytest.mark.full),
    pytest.param("llama", "stage=4", "gpipe", {}, 8, marks=pytest.mark.full),
    pytest.param("llama", "stage=4,tensor=2", "1f1b", {}, 8, marks=pytest.mark.full),
    pytest.param("gemma2", "stage=2,tensor=2", "1f1b", {}, 4, marks=pytest.mark.full),
    pytest.param("gpt2", "stage=2", "gpipe", {"chunks": 2}, 4, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("family", "mesh", "schedule", "options", "microbatches"), CASES)
def test_pipeline_gradients_equal_single_device(
    family: str, mesh: str, schedule: Any, options: dict[str, Any], microbatches: int
) -> None:
    """The scheduled loss and plain differentiation both give the loss and gradients of
    one device.
    """
    # One stage has one layer less.
    model, params = of_layers(family, 3 if family == "gemma2" else 4)
    over, shared = shard_model(model, params, mesh, microbatches=microbatches, **options)
    rows = texts(8, 7)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: plain(model, p, rows)))(params)
    wanted = numbers(over.shard(gradient))
    how = make_pipeline_loss(over, summed, schedule, microbatches)
    for ours in (lambda p: sum_loss(how, p, rows), lambda p: plain(over, p, rows)):
        found, gradients = jax.jit(jax.value_and_grad(ours))(shared)
        assert float(found) == pytest.approx(float(loss), rel=1e-5)
        for a, b in zip(numbers(gradients), wanted, strict=True):
            assert largest_difference(a, b) < 1e-4


@pytest.mark.full
def test_gpipe_memory_exceeds_one_f_one_b() -> None:
    """GPipe holds the inputs of 16 microbatches, 1F1B of 2; the compiled programs differ by at
    least 12.
    """
    model, params = of_layers("llama", 2)
    over, shared = shard_model(model, params, "stage=2")
    rows, held = texts(16, 64), {}
    for name in SCHEDULES:
        how = make_pipeline_loss(over, summed, name, 16)
        compiled = jax.jit(jax.grad(lambda p, how=how: sum_loss(how, p, rows))).lower(shared)
        held[name] = compiled.compile().memory_analysis().temp_size_in_bytes
    each = 64 * 40 * 4
    assert held["gpipe"] - held["1f1b"] >= 12 * each


@pytest.mark.parametrize(("p", "m", "v"), [(2, 6, 1), (4, 16, 1), (4, 8, 2), (3, 3, 1)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_buffers_hold_expected_inputs(name: str, p: int, m: int, v: int) -> None:
    """Simulating the schedule by hand, each job finds its input in its buffer slot, not yet
    overwritten.
    """
    schedule = SCHEDULES[name](p, m, v)
    table, inputs, _ = make_schedule_arrays(schedule)
    if name == "1f1b" and v == 1:
        assert inputs <= p
    else:
        assert inputs <= m * v
    held: list[dict[int, Any]] = [{} for _ in range(p)]
    gradients: list[dict[int, Any]] = [{} for _ in range(p)]
    sent: list[Any] = [None] * p
    for tick, row in enumerate(schedule.ticks):
        for stage in range(p):
            before, after = sent[(stage - 1) % p], sent[(stage + 1) % p]
            if before is not None and before.forward:
                held[stage][int(table.x_in[tick, stage])] = before
            if after is not None and not after.forward:
                gradients[stage][int(table.g_in[tick, stage])] = after
        for stage, job in enumerate(row):
            if job is None:
                continue
            if stage > 0 or job.chunk > 0:
                chunk = job.chunk if stage > 0 else job.chunk - 1
                stored = held[stage][int(table.x_at[tick, stage])]
                assert (stored.microbatch, stored.chunk) == (job.microbatch, chunk)
            if not job.forward and (stage < p - 1 or job.chunk < v - 1):
                chunk = job.chunk if stage < p - 1 else job.chunk + 1
                stored = gradients[stage][int(table.g_at[tick, stage])]
                assert (stored.microbatch, stored.chunk) == (job.microbatch, chunk)
        sent = list(row)
    busy = [job for row in schedule.ticks for job in row if job is not None]
    assert np.count_nonzero(table.kind) == len(busy)


def test_pipeline_loss_refuses_unsupported_arguments() -> None:
    """A mesh without stages, an unknown schedule, and an indivisible batch are refused."""
    model, params = of_layers("llama", 2)
    over, _ = shard_model(model, params, "tensor=2")
    with pytest.raises(ConfigError, match="Load the model with stage=2"):
        make_pipeline_loss(over, summed, "1f1b", 2)
    over, shared = shard_model(model, params, "stage=2")
    with pytest.raises(ConfigError, match="must be one of gpipe, 1f1b, got 'zero'"):
        make_pipeline_loss(over, summed, "zero", 2)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="8 rows per device are not divisible into 3 microbatches"
    ):
        sum_loss(make_pipeline_loss(over, summed, "1f1b", 3), shared, texts(8, 5))
