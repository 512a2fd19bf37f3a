"""Salience: estimates how much the loss depends on a head or a channel.

A group's salience is the sum of that of its weights, in all linears that it is part of.

magnitude   |w|
inputs      |w| ||x||, with the norm of the weight's input over all tokens (as Wanda, 2306.11695)
first       |w g|, g the gradient of the loss: first-order change (Molchanov et al. 2017)
second      |w g - w F w / 2|, F the mean squared gradient over rows (LLM-Pruner, 2305.11627)

The loss is the mean cross-entropy of next tokens, in nats.
"""

from functools import partial
from math import gcd
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import models
from jaxllm.errors import NonFiniteError
from jaxllm.evaluate.likelihood.score import logits
from jaxllm.models.layers import Trace
from jaxllm.ops.token_logprobs import log_likelihood
from jaxllm.research.pruning.parameter_groups import Groups, group_count, group_slices
from jaxllm.runtime.progress import steps_bar
from jaxllm.steps import run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, map_leaves

Salience = Literal["magnitude", "inputs", "first", "second"]
SALIENCES: tuple[Salience, ...] = ("magnitude", "inputs", "first", "second")
_ROWS = 16  # rows per batch, if no gradient is needed

Arrays = dict[str, Any]  # by path


def measure_salience(
    model: Model,
    params: Params,
    kind: Groups,
    criterion: Salience,
    token_NT: np.ndarray,
    *,
    show_progress: bool | None = None,
) -> np.ndarray:
    """Return the salience of each group in each layer, float64 `[layers, groups]`.

    Memory besides the model: for gradients, two float32 copies of the weights concerned.

    Args:
        token_NT: int32 ids, without padding; "magnitude" ignores them.

    Raises:
        ConfigError: For a quantized weight.
        NonFiniteError: If the model returns NaN or infinity.
    """
    config, name = model.config, models.get_family(model.config.model_type).layers
    table = {
        (number, f"{name}.{number}.{share.module}.{share.name}"): share
        for number in range(config.num_hidden_layers)
        for share in group_slices(config, kind, params[f"{name}.{number}"], f"{name}.{number}")
    }
    weights = {path: share.array for (_, path), share in table.items()}
    salience_LG = np.zeros((config.num_hidden_layers, group_count(config, kind)))
    by_path = _weight_salience(model, params, criterion, weights, token_NT, show_progress)
    for (number, path), share in table.items():
        part = np.take(np.asarray(by_path[path], np.float64), share.index_Gn, axis=share.axis)
        axes = [axis for axis in range(part.ndim) if axis != share.axis]
        salience_LG[number] += part.sum(axis=tuple(axes))
    if not np.isfinite(salience_LG).all():
        raise NonFiniteError(
            f"the model returned NaN or infinity: salience by {criterion} is undefined"
        )
    return salience_LG


def keep_most_salient(salience_LG: np.ndarray, count: int) -> list[np.ndarray]:
    """Return each layer's groups without the `count` least salient; of ties the first go."""
    order = np.argsort(salience_LG, axis=1, kind="stable")
    return [np.sort(layer[count:]) for layer in order]


def _gradient_moments(
    model: Model,
    params: Params,
    weights: Arrays,
    token_NT: np.ndarray,
    show_progress: bool | None,
) -> tuple[Arrays, Arrays]:
    """Return the loss gradient for each of `weights` and its square, float32 means over rows."""
    zeros = {path: jnp.zeros(x.shape, jnp.float32) for path, x in weights.items()}
    sums: tuple[Arrays, Arrays] = (zeros, {path: jnp.zeros_like(x) for path, x in zeros.items()})
    with steps_bar("gradients of the loss", len(token_NT), show_progress) as done:
        for row in token_NT:
            sums = _add_gradients(model, params, weights, jnp.asarray(row)[None], sums)
            done()
    means: tuple[Arrays, Arrays] = jax.tree.map(lambda x: x / len(token_NT), sums)
    return means


def _weight_salience(
    model: Model,
    params: Params,
    criterion: Salience,
    weights: Arrays,
    token_NT: np.ndarray,
    show_progress: bool | None,
) -> Arrays:
    size = {path: jnp.abs(w.astype(jnp.float32)) for path, w in weights.items()}
    if criterion == "magnitude":
        return size
    if criterion == "inputs":
        norms = _input_norms(model, params, token_NT)
        # The input of a bias is 1 for every token.
        ones = np.sqrt(float(token_NT.size))
        return {p: w * (norms[p][None] if w.ndim == 2 else ones) for p, w in size.items()}
    g, squares = _gradient_moments(model, params, weights, token_NT, show_progress)
    if criterion == "first":
        return {path: size[path] * jnp.abs(g[path]) for path in weights}
    wide = {path: w.astype(jnp.float32) for path, w in weights.items()}
    return {p: jnp.abs(w * g[p] - w * squares[p] * w / 2) for p, w in wide.items()}


def _input_norms(model: Model, params: Params, token_NT: np.ndarray) -> Arrays:
    """Return the norm over all tokens of each input `[I]` of every linear in a layer."""
    size = gcd(len(token_NT), _ROWS)
    parts = [
        _input_squares(model, params, jnp.asarray(token_NT[i : i + size]))
        for i in range(0, len(token_NT), size)
    ]
    total: Arrays = jax.tree.map(lambda *x: jnp.sqrt(sum(x)), *parts)
    return total


@partial(jax.jit, static_argnums=0)
def _input_squares(model: Model, params: Params, token_BT: jax.Array) -> Arrays:
    family = models.get_family(model.config.model_type)
    squares: Arrays = {}
    read = frozenset(site.input for site in family.linear_groups)
    ran = run_model(model, params, (), token_BT, _positions(token_BT), read=read)[0]
    for number, layer in enumerate(ran.layers):
        for site in family.linear_groups:
            if (x := layer.sites.get(site.input)) is None:  # an MoE layer has no such linear
                continue
            squared_I = (x.astype(jnp.float32) ** 2).sum(axis=(0, 1)).reshape(-1)
            paths = [f"{family.layers}.{number}.{linear}.weight" for linear in site.linears]
            squares |= dict.fromkeys(paths, squared_I)
    return squares


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _add_gradients(
    model: Model, params: Params, weights: Arrays, token_BT: jax.Array, sums: Any
) -> Any:
    def loss(weights: Arrays) -> jax.Array:
        changed_params = map_leaves(lambda path, x: weights.get(path, x), params)
        logits_BTV = logits(model, changed_params, token_BT, _positions(token_BT))
        return -log_likelihood(logits_BTV, token_BT[:, 1:]).mean()

    g = jax.tree.map(lambda x: x.astype(jnp.float32), jax.grad(loss)(weights))
    first, second = sums
    return jax.tree.map(jnp.add, first, g), jax.tree.map(lambda s, x: s + x * x, second, g)


def trace(model: Model, params: Params, token_BT: jax.Array) -> Trace:
    """Run rows without padding and without a cache, and return the trace."""
    return run_model(model, params, (), token_BT, _positions(token_BT))[0]


def _positions(token_BT: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32)[None], token_BT.shape)
