"""Pure mathematics on arrays: knows neither caches nor parameters."""

from jaxllm.ops.activations import ACTIVATIONS
from jaxllm.ops.attention import Part, attend, visible
from jaxllm.ops.norms import layer_norm, rms_norm
from jaxllm.ops.rope import inverse_frequencies, rope_angles, rotate

__all__ = [
    "ACTIVATIONS",
    "Part",
    "attend",
    "inverse_frequencies",
    "layer_norm",
    "rms_norm",
    "rope_angles",
    "rotate",
    "visible",
]
