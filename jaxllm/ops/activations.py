"""Activation functions by their name in checkpoints."""

from collections.abc import Callable
from functools import partial

import jax

_ERF = partial(jax.nn.gelu, approximate=False)  # the exact error-function form
_TANH = partial(jax.nn.gelu, approximate=True)  # Hendrycks & Gimpel's tanh form
_TANH_NAMES = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    **dict.fromkeys(("gelu", "gelu_python"), _ERF),
    **dict.fromkeys(_TANH_NAMES, _TANH),
    "relu": jax.nn.relu,
}
