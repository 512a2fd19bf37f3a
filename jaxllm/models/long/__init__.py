"""Attention for texts longer than a window: kinds that `LongAttention` names, beside the dense one.

dilated: LongNet's. infini: Infini-attention. Each says here what the arithmetic in `jaxllm.ops` is
told; `KINDS` is the table that `layers.attend` looks in.
"""

from collections.abc import Callable
from typing import Any

from jaxllm.models.long import dilated, infini

# kind -> `(kind, scope, q_BTNH, parts, scale=, cap=) -> (heads [B, T, N, H], mass or None)`.
KINDS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "dilated": dilated.attend,
    "infini": infini.attend,
}
