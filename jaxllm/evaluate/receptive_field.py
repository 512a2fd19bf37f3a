"""Receptive field: which tokens influence which outputs, layer by layer, measured with JVPs.

This module does not look at masks or segments: it perturbs each token's embedding and measures
which outputs change.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.layers import Trace
from jaxllm.runtime.validation import as_token_array, check_token_ids
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def receptive_field(
    model: Model, params: Params, token_T: Any, key: jax.Array, *, batch: int = 64
) -> np.ndarray:
    """Return the sensitivity of each layer's outputs to each token's embedding.

    An entry is the norm of the output's derivative in one random direction of the embedding. It is
    exactly zero without influence, and with influence it is zero with probability zero.

    Args:
        key: Random key of the directions.
        batch: Number of embeddings to perturb at a time; each needs the memory of a forward pass.

    Returns:
        float32 `[layers, T, T]`: layer, output token, input token.
    """
    config: Any = model.config
    token_T = as_token_array("tokens", token_T)
    check_token_ids(token_T, config.vocab_size)
    token_BT = jnp.asarray(token_T)[None]
    T, D = token_BT.shape[1], config.hidden_size
    position_BT = jnp.arange(T, dtype=jnp.int32)[None]
    normal_TD = jax.random.normal(key, (2, T, D), jnp.float32)

    def outputs(embeddings_BTD: jax.Array) -> jax.Array:
        trace = model.apply(
            {"params": params},
            token_BT,
            position_BT,
            jnp.full((1,), T, jnp.int32),
            embeddings_BTD=embeddings_BTD,
        )
        assert isinstance(trace, Trace)
        return jnp.stack([layer.x[0] for layer in trace.layers]).astype(jnp.float32)

    @jax.jit
    def responses(params: Params) -> jax.Array:
        at = normal_TD[:1]

        def respond_to(place: jax.Array) -> jax.Array:
            here = jnp.arange(T, dtype=jnp.int32)[:, None] == place
            direction = jnp.where(here, normal_TD[1], 0.0)[None]
            return jnp.linalg.norm(jax.jvp(outputs, (at,), (direction,))[1], axis=-1)

        return jax.lax.map(respond_to, jnp.arange(T, dtype=jnp.int32), batch_size=batch)

    return np.moveaxis(np.asarray(responses(params)), 0, 2)
