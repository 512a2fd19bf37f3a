"""Attention for texts longer than a window: kinds that `LongAttention` names, beside the dense one.

dilated: LongNet's. infini: Infini-attention. Each says here what the arithmetic in `jaxllm.ops` is
told; `KINDS` is the table that `layers.attend` looks in.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.models.long import dilated, infini

# kind -> `(kind, scope, q_BTNH, parts, beside, scale=, cap=)`, which gives the heads `[B, T, N, H]`
# in q's dtype, the mass where it is asked for, and the memory after these tokens, or None.
# kind: of this layer, `ModelConfig.long_attention`. parts: of the cache, and then the new tokens.
# beside: what a kind that keeps a memory is given besides. The rest: see `layers.attend`.
KINDS: dict[str, Callable[..., tuple[jax.Array, jax.Array | None, Any]]] = {
    "dilated": dilated.attend,
    "infini": infini.attend,
}
