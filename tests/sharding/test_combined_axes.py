"""Split tokens, alone and combined with pipeline stages or experts: logits, caches, texts and
training equal those of one device.
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import steps
from jaxllm.cache import init_cache
from jaxllm.errors import ConfigError
from jaxllm.generation.loops.generate import generate
from jaxllm.research.pipeline.one_f_one_b import make_pipeline_loss, sum_loss
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.train.data.rows import Rows
from tests.research.pipeline.test_pipeline import check_caches, error_message, of_layers
from tests.research.pipeline.test_pipeline_training import numbers, plain, summed
from tests.sharding import mesh_matrix
from tests.sharding.context_parallel.test_model import LENGTHS, MORE, QUICK, packed, prompt
from tests.sharding.tiny_models import check_trace, largest_difference, shard_model

pytestmark = pytest.mark.devices
FULL = pytest.mark.full

EIGHT: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "num_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 8},
}
STAGES = [
    ("gpt2", "stage=2,tensor=2:tokens"),
    ("llama", "data=2,stage=2,tensor=2:tokens"),
    ("llama", "stage=2,tensor=4:tokens"),  # key/value heads on two devices each
    ("olmo2", "stage=4,tensor=2:tokens"),  # norms over all heads
    ("llama", "stage=2,sequence=2"),
    ("gpt2", "stage=2,sequence=4"),
    ("llama", "data=2,stage=2,sequence=2:heads"),
    ("gemma2", "stage=2,sequence=2,tensor=2"),  # windows and caps
    ("gpt2", "stage=2,sequence=2,tensor=2:tokens"),
    ("gpt2", "stage=2,sequence=2:heads,tensor=2:tokens"),
]
EXPERTS = [
    ("mixtral", "expert=2,sequence=2"),
    ("mixtral", "tensor=2:tokens"),
    ("mixtral", "expert=2,tensor=2:tokens"),
    ("qwen3_moe", "data=2,expert=2,tensor=2:tokens"),
    ("qwen3_moe", "expert=2,sequence=2:heads,tensor=2"),
    ("mixtral", "data=2,expert=2,sequence=2"),
    ("mixtral", "expert=2,sequence=4"),
    ("mixtral", "stage=2,expert=2,tensor=2:tokens"),
    ("qwen3_moe", "stage=2,sequence=2,expert=2"),
    ("qwen3_moe", "stage=2,sequence=2:heads,expert=2"),
    ("gpt_oss", "data=2,expert=2,sequence=2"),  # sinks
    ("gpt_oss", "expert=2,sequence=2:heads"),
    ("gpt_oss", "tensor=2:tokens"),
]
TOKENS = ("sequence=4", "sequence=2:heads")  # without other axes
EVERY_DAY = (
    "stage=2,sequence=2,tensor=2:tokens",
    "expert=2,sequence=2:heads",
)
CASES = [
    case if case[1] in EVERY_DAY else pytest.param(*case, marks=FULL)
    for case in STAGES + EXPERTS + QUICK + MORE
]
ROWS = 4


def make_pair(family: str, mesh: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Return a model on one device and on a mesh, with two microbatches if it has stages.

    A device's tokens of a microbatch are not its tokens of the full batch.
    """
    stages = parse_mesh(mesh).stage
    layers = {"gemma2": 2 * stages, "mixtral": stages}.get(family, max(2, stages))
    equal_layers = {"mlp_only_layers": []} if family == "qwen3_moe" and stages > 1 else {}
    model, params = of_layers(family, layers, **EIGHT.get(family, {}), **equal_layers)
    options |= {"microbatches": 2} if stages > 1 else {}
    return model, params, *shard_model(model, params, mesh, **options)


def check(family: str, mesh: str, slots: int) -> None:
    """Check prefill in chunks (the second on a cache, the last padded), then generated tokens and
    the cache.
    """
    model, params, over, shared = make_pair(family, mesh)
    ids, lengths = prompt(rows=ROWS), np.tile(LENGTHS, 2)
    found: list[Any] = []
    for m, p in ((over, shared), (model, params)):
        logits, cache = steps.prefill(
            m, p, init_cache(m, ROWS, slots), ids, lengths_B=lengths, chunk=24
        )
        more: Any = {"cache": cache, "max_new_tokens": 6}
        found.append((logits, generate(m, p, prompt(T=7, rows=ROWS, seed=1), **more)))
    (mine, ours), (whole, theirs) = found
    assert largest_difference(mine, whole) < mesh_matrix.CLOSE
    np.testing.assert_array_equal(ours.token_BT, theirs.token_BT)
    check_caches(ours.cache, theirs.cache)


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_generated_texts_equal_single_device(family: str, mesh: str) -> None:
    """Chunked prefill, then decoding on the cache, give the logits, tokens and cache
    of one device.
    """
    check(family, mesh, 56)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["stage=2,sequence=2", "stage=2,sequence=2:heads", *TOKENS])
def test_indivisible_slots_are_replicated(mesh: str) -> None:
    """If the cache size does not divide, every device holds all slots, with unchanged results."""
    check("llama", mesh, 55)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("gpt2", "stage=2,sequence=2,tensor=2:tokens"),
        ("llama", "stage=2,sequence=2:heads"),
        ("mixtral", "stage=2,expert=2,tensor=2:tokens"),
    ],
)
def test_hidden_states_equal_single_device(family: str, mesh: str) -> None:
    model, params, over, shared = make_pair(family, mesh)
    ours, theirs = (
        steps.forward(m, p, None, prompt(rows=ROWS), hidden_states=True)
        for m, p in ((over, shared), (model, params))
    )
    check_trace(ours, theirs, mesh_matrix.CLOSE)


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", ["stage=2,sequence=2,tensor=2:tokens", "data=2,stage=2,sequence=2:heads"]
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_matrix_cell_equals_single_device(family: str, mesh: str) -> None:
    """Logits and a train step are within rounding, and generated, sampled and served tokens are
    equal.
    """
    mesh_matrix.check_cell(family, mesh, "float32")


def batch() -> Rows:
    """Return packed rows of two documents each; some end in padding."""
    return jax.tree.map(lambda *x: np.concatenate(x), packed(), packed(seed=1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mesh"), STAGES + EXPERTS + [("llama", mesh) for mesh in TOKENS]
)
def test_train_step_equals_single_device(family: str, mesh: str) -> None:
    """AdamW on packed rows gives the parameters, loss and gradient norm of one device."""
    model, params, over, shared = make_pair(family, mesh, fsdp="data" in mesh)
    ours, metrics = mesh_matrix.train_once(over, shared, batch())
    theirs, expected = mesh_matrix.train_once(model, params, batch())
    assert float(metrics.loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert float(metrics.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-4)
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        assert largest_difference(ours[path], x) < mesh_matrix.TRAINED, path


SCHEDULED = [
    ("gpt2", "stage=2,tensor=2:tokens", "1f1b", {}),
    pytest.param("gpt2", "data=2,stage=2,tensor=2:tokens", "gpipe", {}, marks=FULL),
    pytest.param("llama", "stage=2,tensor=4:tokens", "1f1b", {"chunks": 2}, marks=FULL),
    pytest.param("mixtral", "stage=2,expert=2,tensor=2:tokens", "1f1b", {}, marks=FULL),
    pytest.param("llama", "stage=2,sequence=2:heads", "1f1b", {"chunks": 2}, marks=FULL),
    pytest.param("gpt2", "stage=2,sequence=2:heads,tensor=2:tokens", "1f1b", {}, marks=FULL),
    pytest.param("mixtral", "stage=2,sequence=2:heads,expert=2", "gpipe", {}, marks=FULL),
]


@pytest.mark.parametrize(("family", "mesh", "schedule", "options"), SCHEDULED)
def test_scheduled_gradients_equal_single_device(
    family: str, mesh: str, schedule: str, options: dict[str, Any]
) -> None:
    """A pipeline schedule with split tokens gives the loss and gradients of one device."""
    layers = 2 * options.get("chunks", 1)
    model, params = of_layers(family, layers, **EIGHT.get(family, {}))
    over, shared = shard_model(model, params, mesh, microbatches=2, **options)
    rows = batch()
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: plain(model, p, rows)))(params)
    how = make_pipeline_loss(over, summed, schedule, 2)
    found, gradients = jax.jit(jax.value_and_grad(lambda p: sum_loss(how, p, rows)))(shared)
    assert float(found) == pytest.approx(float(loss), rel=1e-5)
    for a, b in zip(numbers(gradients), numbers(over.shard(gradient)), strict=True):
        assert largest_difference(a, b) < 1e-4


def test_ring_with_uneven_stages_is_refused() -> None:
    """A collective-permute needs all devices at once, so that stages must run the same layers."""
    message = error_message("llama", 4, "stage=2,sequence=2", chunks=2)
    assert "a ring needs all devices at once, but the stages run different layers" in message
    assert "Use sequence=2:heads, or one chunk" in message
    model, params = of_layers("llama", 2)
    over, shared = shard_model(model, params, "stage=2,sequence=2")
    with pytest.raises(ConfigError, match=r"mesh stage=2,sequence=2\) .* train without a schedule"):
        make_pipeline_loss(over, summed, "1f1b", 2)
    over, shared = shard_model(model, params, "stage=2,sequence=2:heads")
    rows = jax.tree.map(lambda x: x[:, :38], batch())
    with pytest.raises(ConfigError, match=r"sequence=2, got 38. Pad rows to 40"):
        sum_loss(make_pipeline_loss(over, summed, "1f1b", 2), shared, rows)
