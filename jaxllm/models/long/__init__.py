"""Long-context attention: the kinds of `LongAttention`.

dilated: LongNet. infini: Infini-attention. Each prepares the arguments of its arithmetic in
`jaxllm.ops`; `layers.attend` dispatches through `ATTENTION_KINDS`.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.models.long import dilated, infini

# kind -> `(kind, context, site, q_BTNH, parts, memory, scale=, cap=)`, which returns the heads
# `[B, T, N, H]` in q's dtype, the attention mass if requested, and the new memory, or None.
# kind: `ModelConfig.long_attention` of the layer. parts: the cache's, then the new tokens.
# beside: further inputs for a kind with a memory. Other arguments: see `layers.attend`.
ATTENTION_KINDS: dict[str, Callable[..., tuple[jax.Array, jax.Array | None, Any]]] = {
    "dilated": dilated.attend,
    "infini": infini.attend,
}
