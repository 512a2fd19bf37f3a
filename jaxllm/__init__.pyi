"""The public names of jaxllm, each once; `__init__.py` imports them lazily."""

from . import errors as errors
from .cache.commit import commit as commit
from .cache.kv import (
    Delta as Delta,
    KVCache as KVCache,
    Segment as Segment,
    TreeDelta as TreeDelta,
    init_cache as init_cache,
)
from .cache.prefix_cache import PrefixCache as PrefixCache
from .config.model import (
    ModelConfig as ModelConfig,
    Rope as Rope,
)
from .evaluate.likelihood.divergence import divergence as divergence
from .evaluate.likelihood.perplexity import perplexity as perplexity
from .evaluate.likelihood.sensitivity import measure_sensitivity as measure_sensitivity
from .evaluate.parity.activations import activations as activations
from .evaluate.verify import verify as verify
from .export import FixedShapeRunner as FixedShapeRunner
from .generation.batching.requests import Request as Request
from .generation.batching.scheduler import serve as serve
from .generation.completion import (
    Completion as Completion,
    StreamChunk as StreamChunk,
)
from .generation.embeddings import embeddings as embeddings
from .generation.loops.beam import (
    BeamResult as BeamResult,
    beam_search as beam_search,
)
from .generation.loops.draft import PromptLookup as PromptLookup
from .generation.loops.finish import Finish as Finish
from .generation.loops.generate import (
    GenerateResult as GenerateResult,
    generate as generate,
    stream as stream,
)
from .generation.loops.speculative import (
    SpeculativeResult as SpeculativeResult,
    speculative_generate as speculative_generate,
)
from .generation.recompute import (
    insert as insert,
    recompute as recompute,
)
from .generation.sampling.options import make_sampler as make_sampler
from .generation.sampling.sampler import (
    GREEDY as GREEDY,
    Processor as Processor,
    Sampler as Sampler,
    row_keys as row_keys,
    sample as sample,
)
from .generation.search import (
    Branch as Branch,
    best_first as best_first,
    best_of as best_of,
    mcts as mcts,
)
from .grammar import (
    Grammar as Grammar,
    Matcher as Matcher,
)
from .lm import (
    LM as LM,
    load as load,
)
from .models import (
    build as build,
    param_shapes as param_shapes,
)
from .models.gpt2 import GPT2Config as GPT2Config
from .models.llama import LlamaConfig as LlamaConfig
from .steps import (
    Output as Output,
    StepOutput as StepOutput,
    decode_step as decode_step,
    forward as forward,
    prefill as prefill,
)
from .weights.precision import (
    Override as Override,
    Precision as Precision,
    cast as cast,
)
from .weights.quantize import (
    dequantize as dequantize,
    quantize as quantize,
)
from .weights.types.int_weight import IntWeight as IntWeight
from .weights.types.packed_bf16 import PackedBf16Weight as PackedBf16Weight

__version__: str
