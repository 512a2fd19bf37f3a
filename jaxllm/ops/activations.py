"""The nonlinearities that checkpoints name, one table from name to function."""

from collections.abc import Callable
from functools import partial

import jax

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # the exact error-function form
    "gelu_new": partial(jax.nn.gelu, approximate=True),  # Hendrycks & Gimpel's tanh form
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
