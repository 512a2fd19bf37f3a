"""The table of steps: what a line of a recipe can name."""

from jaxllm.compress import activations, factoring, formats, layers, parts
from jaxllm.compress.activations import StaticInputs
from jaxllm.compress.factoring import SIZE, Asvd, Factor
from jaxllm.compress.formats import Everywhere
from jaxllm.compress.layers import Awq, Gptq, Magnitude, Smooth, SparseGpt
from jaxllm.compress.parts import PART, Cut, CutLayers
from jaxllm.compress.recipe import FORMAT, PATTERN, QUANTIZED, Argument, On, Step

_INTEGERS = Argument("FORMAT", layers.integers)

STEPS: tuple[Step, ...] = (
    Step("quantize", "rtn", formats.rtn, "round to nearest", QUANTIZED, Everywhere, False),
    Step("quantize", "gptq", layers.gptq, "integers, errors compensated", _INTEGERS, Gptq),
    Step("quantize", "awq", layers.awq, "integers, channels scaled", _INTEGERS, Awq),
    Step("smooth", "smoothquant", layers.smoothquant, "even out activations", options=Smooth),
    Step(
        "prune",
        "magnitude",
        layers.magnitude,
        "zero the smallest weights",
        PATTERN,
        Magnitude,
        False,
        layers.check_magnitude,
    ),
    Step(
        "prune",
        "wanda",
        layers.wanda,
        "zero the least of weight times input",
        PATTERN,
        On,
        check=layers.check_pattern,
    ),
    Step(
        "prune",
        "sparsegpt",
        layers.sparsegpt,
        "zero what costs least, errors compensated",
        PATTERN,
        SparseGpt,
        check=layers.check_sparsegpt,
    ),
    Step(
        "factor",
        "svd",
        factoring.svd,
        "two thin matrices for one, nearest in weights",
        SIZE,
        Factor,
        False,
        factoring.check,
    ),
    Step(
        "factor",
        "asvd",
        factoring.asvd,
        "the same, weights counted by their inputs",
        SIZE,
        Asvd,
        check=factoring.check,
    ),
    Step(
        "factor",
        "svd-llm",
        factoring.svd_llm,
        "two thin matrices for one, nearest in outputs",
        SIZE,
        Factor,
        check=factoring.check,
    ),
    Step("cut", "heads", parts.heads, "fewer heads, in whole key/value groups", PART, Cut),
    Step("cut", "channels", parts.channels, "fewer channels of the MLPs", PART, Cut),
    Step("cut", "layers", parts.layers, "fewer layers", PART, CutLayers),
    Step(
        "activations",
        "static",
        activations.static,
        "round inputs of int8 weights to int8 on a grid found beforehand",
        options=StaticInputs,
        check=activations.check_static,
    ),
    Step("activations", "dynamic", formats.int8_inputs, "round inputs to int8", calibrated=False),
    Step("store", "", formats.store, "the same numbers in another format", FORMAT, On, False),
)
