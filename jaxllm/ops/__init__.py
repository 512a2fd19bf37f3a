"""Pure functions on arrays, independent of caches and parameters.

attention: blockwise, over segments; masked: under an explicit mask.
kv_quant: keys and values as a cache stores them, int8 or not. rope, norms. pooling: sentence
embeddings. buckets: tokens grouped by segment. recurrent: DeltaNet and convolutions. slot_update:
the only code that writes slots.
row_sums: sums and softmaxes of rows. varying_axes: varying axes of `shard_map`. token_logprobs:
token log-probabilities. padding: bucket lengths. compile_cache: compiled programs on disk.
products: sums of products, equally exact on every device; native/: C++ kernels.
"""

from collections.abc import Callable
from functools import partial

import jax

from jaxllm.ops.attention import Part, attend, soft_cap, take_rows, visible
from jaxllm.ops.kv_quant import Entries, Int8Entries, cast, dequantize
from jaxllm.ops.norms import layer_norm, rms_norm
from jaxllm.ops.rope import inverse_frequencies, rerotate, rope_angles, rotate

__all__ = [
    "ACTIVATIONS",
    "Entries",
    "Int8Entries",
    "Part",
    "attend",
    "cast",
    "dequantize",
    "inverse_frequencies",
    "layer_norm",
    "rerotate",
    "rms_norm",
    "rope_angles",
    "rotate",
    "soft_cap",
    "take_rows",
    "visible",
]

_ERF = partial(jax.nn.gelu, approximate=False)  # the exact error-function form
_TANH = partial(jax.nn.gelu, approximate=True)  # Hendrycks & Gimpel's tanh form
_TANH_NAMES = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")
# Activation functions by their name in checkpoints.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    **dict.fromkeys(("gelu", "gelu_python"), _ERF),
    **dict.fromkeys(_TANH_NAMES, _TANH),
    "relu": jax.nn.relu,
}
