"""jaxllm: language-model inference as pure functions in JAX and Flax.

Names are imported on first use, so that `import jaxllm` (and with it `jaxllm --help`) does not
wait for JAX.

The user interface, from the top: loading (`load`), api (`LM`), serving (continuous batching of
text requests), complete (decoder choice, `Completion`), settings (options over a checkpoint's
defaults), forms (checkpoint formats), located (model name to path), prompts (prompt to token ids).
Built on it: cli/, compress/, fleet/, bench, harness (lm-evaluation-harness), verifying
(`jaxllm.verify`). Below it: steps (`forward`, `prefill`, `decode_step`), inputs (their argument
checks), embed, repair (recompute parts of a cache), checkpoint (the native format), programs
(cache of compiled programs), config (model configurations), longer (sparse and segmented
attention). At the bottom: errors, whole (number checks), shapes (padding), progress (bars), process
(streams and Ctrl-C of a command), distributed and guard (multi-process runs), moved (old names).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm import errors
    from jaxllm.api import LM, Piece, load
    from jaxllm.cache.growth import commit
    from jaxllm.cache.kv import Delta, KVCache, Segment, init_cache
    from jaxllm.complete import Completion
    from jaxllm.config import ModelConfig, Rope
    from jaxllm.decode.batching.requests import Request
    from jaxllm.decode.batching.serve import serve
    from jaxllm.decode.loops.beam import BeamResult, beam_search
    from jaxllm.decode.loops.generate import Generated, generate, stream
    from jaxllm.decode.loops.lookup import PromptLookup
    from jaxllm.decode.loops.speculative import Speculated, speculative_generate
    from jaxllm.decode.loops.text import Finish
    from jaxllm.decode.sampling.options import make_sampler
    from jaxllm.decode.sampling.sampler import GREEDY, Sampler, row_keys, sample
    from jaxllm.embed import embeddings
    from jaxllm.evaluate.equivalence.stages import stages
    from jaxllm.evaluate.likelihood.divergence import divergence
    from jaxllm.evaluate.likelihood.perplexity import perplexity
    from jaxllm.evaluate.likelihood.sensitivity import sensitivity
    from jaxllm.fixed import FixedShapeRunner
    from jaxllm.models import build, param_shapes
    from jaxllm.models.gpt2 import GPT2Config
    from jaxllm.models.llama import LlamaConfig
    from jaxllm.repair import insert, recompute
    from jaxllm.steps import Output, decode_step, forward, prefill
    from jaxllm.verifying import verify
    from jaxllm.weights.leaves.integers import QTensor
    from jaxllm.weights.leaves.packed import Packed
    from jaxllm.weights.precision import Override, Precision, cast
    from jaxllm.weights.quantize import dequantize, quantize

_HOMES = {
    "jaxllm.api": ("LM", "Piece", "load"),
    "jaxllm.cache.growth": ("commit",),
    "jaxllm.cache.kv": ("Delta", "KVCache", "Segment", "init_cache"),
    "jaxllm.complete": ("Completion",),
    "jaxllm.config": ("ModelConfig", "Rope"),
    "jaxllm.decode.loops.beam": ("BeamResult", "beam_search"),
    "jaxllm.decode.loops.generate": ("Generated", "generate", "stream"),
    "jaxllm.decode.loops.text": ("Finish",),
    "jaxllm.decode.sampling.options": ("make_sampler",),
    "jaxllm.decode.sampling.sampler": ("GREEDY", "Sampler", "row_keys", "sample"),
    "jaxllm.decode.batching.requests": ("Request",),
    "jaxllm.decode.batching.serve": ("serve",),
    "jaxllm.decode.loops.lookup": ("PromptLookup",),
    "jaxllm.decode.loops.speculative": ("Speculated", "speculative_generate"),
    "jaxllm.embed": ("embeddings",),
    "jaxllm.evaluate.likelihood.divergence": ("divergence",),
    "jaxllm.evaluate.likelihood.perplexity": ("perplexity",),
    "jaxllm.evaluate.likelihood.sensitivity": ("sensitivity",),
    "jaxllm.evaluate.equivalence.stages": ("stages",),
    "jaxllm.fixed": ("FixedShapeRunner",),
    "jaxllm.models": ("build", "param_shapes"),
    "jaxllm.models.gpt2": ("GPT2Config",),
    "jaxllm.models.llama": ("LlamaConfig",),
    "jaxllm.repair": ("insert", "recompute"),
    "jaxllm.steps": ("Output", "decode_step", "forward", "prefill"),
    "jaxllm.weights.leaves.integers": ("QTensor",),
    "jaxllm.weights.leaves.packed": ("Packed",),
    "jaxllm.weights.precision": ("Override", "Precision", "cast"),
    "jaxllm.verifying": ("verify",),
    "jaxllm.weights.quantize": ("dequantize", "quantize"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "GREEDY",
    "LM",
    "BeamResult",
    "Completion",
    "Delta",
    "Finish",
    "FixedShapeRunner",
    "GPT2Config",
    "Generated",
    "KVCache",
    "LlamaConfig",
    "ModelConfig",
    "Output",
    "Override",
    "Packed",
    "Piece",
    "Precision",
    "PromptLookup",
    "QTensor",
    "Request",
    "Rope",
    "Sampler",
    "Segment",
    "Speculated",
    "beam_search",
    "build",
    "cast",
    "commit",
    "decode_step",
    "dequantize",
    "divergence",
    "embeddings",
    "errors",
    "forward",
    "generate",
    "init_cache",
    "insert",
    "load",
    "make_sampler",
    "param_shapes",
    "perplexity",
    "prefill",
    "quantize",
    "recompute",
    "row_keys",
    "sample",
    "sensitivity",
    "serve",
    "speculative_generate",
    "stages",
    "stream",
    "verify",
]

def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("jaxllm.errors")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
