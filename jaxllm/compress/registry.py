"""The table of methods that a line of a recipe can name."""

from jaxllm.compress.methods import (
    awq,
    formats,
    gptq,
    layer_pruning,
    low_rank,
    magnitude,
    rtn,
    smoothquant,
    sparsegpt,
    static_activations,
    structured_pruning,
    wanda,
)
from jaxllm.compress.recipe import StepSpec

STEPS: tuple[StepSpec, ...] = (
    rtn.STEP,
    gptq.STEP,
    awq.STEP,
    smoothquant.STEP,
    static_activations.STEP,
    formats.DYNAMIC_INPUTS,
    magnitude.STEP,
    wanda.STEP,
    sparsegpt.STEP,
    low_rank.SVD,
    low_rank.ASVD,
    low_rank.SVD_LLM,
    layer_pruning.STEP,
    structured_pruning.HEADS,
    structured_pruning.CHANNELS,
    formats.STORE,
)
