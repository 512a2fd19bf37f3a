"""Pure functions on arrays, independent of caches and parameters.

attention: blockwise, over segments; extended: Self-Extend; masked: under an explicit mask;
dilated/: LongNet's. entries: keys and values as a cache stores them, int8 or not. rope, norms,
activations. pooling: sentence embeddings. compressive: Infini-attention's memory; buckets: tokens
grouped by segment. varying: varying axes of `shard_map`. likelihood: token log-probabilities.
native/: C++ kernels; pallas: a GPU kernel.
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
