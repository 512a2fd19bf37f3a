"""Pure mathematics on arrays: knows neither caches nor parameters.

attention: over segments, blockwise; extended: far tokens in groups; masked: under an explicit mask;
dilated/: LongNet's, by gathering. entries: keys and values as they are kept, int8 or not. rope,
norms, activations: what their names say. pooling: one vector for many. compressive: the memory of
Infini-attention; buckets: tokens by the segments that they touch. varying: what differs among
devices. likelihood: log-probabilities of tokens. native/: kernels in C++; pallas: one for GPUs.
"""

from jaxllm.ops.activations import ACTIVATIONS
from jaxllm.ops.attention import Part, attend, capped, visible
from jaxllm.ops.entries import Entries, Int8Entries, cast, dense
from jaxllm.ops.norms import layer_norm, rms_norm
from jaxllm.ops.rope import inverse_frequencies, rope_angles, rotate, turn

__all__ = [
    "ACTIVATIONS",
    "Entries",
    "Int8Entries",
    "Part",
    "attend",
    "capped",
    "cast",
    "dense",
    "inverse_frequencies",
    "layer_norm",
    "rms_norm",
    "rope_angles",
    "rotate",
    "turn",
    "visible",
]
