"""One cell of families x meshes x precisions: a model on a mesh compared with one device."""

from functools import cache
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm.adapters import LoraConfig, init_adapter, make_attacher
from jaxllm.sharding.mesh_spec import parse_mesh
from jaxllm.sharding.sharded_model import attach_adapter
from jaxllm.train.checkpointing import StateLayout
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import ALL_PARAMS, Rules, partition
from jaxllm.train.step import Metrics, Setup, init_state, train_step
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision
from tests.sharding.tiny_models import (
    FAMILIES,
    WIDE,
    largest_difference,
    load_weights,
    make_model,
    shard_model,
)
from tests.tiny_models import tokens

MESHES = ("tensor=2", "tensor=4", "tensor=8", "stage=2", "stage=4", "data=2,stage=2,tensor=2")
PRECISIONS = {
    "float32": Precision(),
    "int8": Precision(quantize="int8"),
    "int4": Precision(quantize="int4-g32"),
}
# Relative to the largest logit: sums run in another order. On one device, four random layers of
# Gemma 2 differ by 7e-5 between the kernels and plain JAX.
CLOSE = 1e-4
TRAINED = 3e-4  # Adam turns gradients of any size into steps of 0.01
ROWS = 4
ADAPTERS: Rules = ((r".*\.weight\.(a|b|magnitude)", True),)
EPS = 1e-3  # Adam: a smaller one would amplify gradients that are pure rounding (key biases)

LARGE: dict[str, Any] = {"head_dim": 32, "intermediate_size": 256, "hidden_size": 64}
SQUARE = {"intermediate_size": 256, "hidden_size": 256}
SIZES: dict[str, dict[str, Any]] = {  # every shard holds whole groups of 32
    **dict.fromkeys(FAMILIES, SQUARE),
    **dict.fromkeys(("llama", "qwen3", "gemma2", "gemma3_text"), LARGE),
    **dict.fromkeys(("glm4", "seed_oss", "ernie4_5", "gpt_oss", "ministral3"), LARGE),
    "gpt2": WIDE["gpt2"],
    "qwen3_moe": {**SQUARE, "moe_intermediate_size": 256},
    "glm4_moe": {**LARGE, "moe_intermediate_size": 256},
    "phi3": {"intermediate_size": 256},  # head dim 6
}
# Changes for pipeline stages: layer patterns of published models, which stages cut.
IN_STAGES: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 3},
    "glm4_moe": {"first_k_dense_replace": 0},
    "qwen3_moe": {"mlp_only_layers": []},  # layers with and without experts cannot be stacked
}
UNEVEN = ("gemma2", "gemma3_text", "smollm3", "qwen2")  # one more layer than stages


@cache
def model_of(family: str, precision: str, layers: int, staged: bool) -> tuple[Any, Params]:
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    changes = {**SIZES[family], name: layers, **(IN_STAGES.get(family, {}) if staged else {})}
    return make_model(family, PRECISIONS[precision], **changes)


def logits(model: Any, params: Params) -> np.ndarray:
    return np.asarray(jaxllm.forward(model, params, None, tokens(ROWS, 9)).logits)


def generated(model: Any, params: Params) -> Any:
    return jaxllm.generate(model, params, tokens(ROWS, 5), max_new_tokens=8).token_BT


def sampled(model: Any, params: Params) -> Any:
    sampler = jaxllm.make_sampler(temperature=0.9, top_p=0.9)
    options: Any = {"max_new_tokens": 8, "sampler": sampler, "seed": 3}
    return jaxllm.generate(model, params, tokens(ROWS, 5), **options).token_BT


def served(model: Any, params: Params) -> Any:
    requests = [
        jaxllm.Request(id=i, prompt=tokens(1, 3 + i)[0], max_new_tokens=6, seed=i) for i in range(3)
    ]
    events = [*jaxllm.serve(model, params, requests, rows=2, capacity=16)]
    return [[e.token for e in events if e.id == i] for i in range(3)]


def texts(rows: int = ROWS, width: int = 9, seed: int = 0) -> Rows:
    """Return rows of unequal lengths, so that a mean of device means is not the token mean."""
    ids = tokens(rows, width, seed).astype(np.int32)
    label = np.full_like(ids, IGNORED)
    for row in range(rows):
        end = width - row % (width - 2)
        label[row, : end - 1] = ids[row, 1:end]
    position = np.broadcast_to(np.arange(width, dtype=np.int32), ids.shape)
    return Rows(ids, label, position, np.zeros_like(ids))


def trained(model: Any, params: Params) -> dict[str, np.ndarray]:
    """After a step: all weights, or an adapter beside those that are integers."""
    rules, whole = ALL_PARAMS, params
    if model.precision.quantize is not None:
        lora = LoraConfig(r=3, target_modules="all-linear")
        adapter = init_adapter(model.config, params, lora, jax.random.key(1))
        rules = ADAPTERS
        whole = attach_adapter(model, params, make_attacher(model.config, adapter))
    return train_once(model, whole, texts(), rules)[0]


def train_once(
    model: Any, params: Params, rows: Rows, rules: Rules = ALL_PARAMS
) -> tuple[dict[str, np.ndarray], Metrics]:
    """Return the trained weights after an AdamW step, in one device's form, and its metrics."""
    some, rest = partition(params, rules, None, model.unsharded_paths)
    setup = Setup(model, NextToken(), Optimizer(steps=2, lr=0.01, eps=EPS))
    args = init_state(some, setup), rest, None, jax.tree.map(lambda x: x[None], rows)
    state, metrics = train_step(*args, jax.random.key(7), setup=setup)
    layout = StateLayout.from_model(model, rest)
    return load_weights(layout.gather_lazy(state.trained)), metrics


@cache
def expected(family: str, precision: str, layers: int, staged: bool) -> dict[str, Any]:
    """Return the single-device results."""
    model, params = model_of(family, precision, layers, staged)
    return {f.__name__: f(model, params) for f in (logits, generated, sampled, served, trained)}


def check_cell(family: str, mesh: str, precision: str) -> None:
    """Check that logits and a train step are within rounding, and that all tokens are equal."""
    stages = parse_mesh(mesh).stage
    layers = max(2, stages + (stages > 1 and family in UNEVEN))
    given = family, precision, layers, stages > 1
    over, shared = shard_model(*model_of(*given), mesh)
    wanted = expected(*given)
    assert largest_difference(logits(over, shared), wanted["logits"]) < CLOSE
    mine = trained(over, shared)
    assert mine.keys() == wanted["trained"].keys()
    for path, x in wanted["trained"].items():
        assert largest_difference(mine[path], x) < TRAINED, path
    for f in (generated, sampled, served):
        np.testing.assert_array_equal(f(over, shared), wanted[f.__name__], f.__name__)
