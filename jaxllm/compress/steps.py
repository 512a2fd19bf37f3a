"""The table of steps: what a line of a recipe can name."""

from jaxllm.compress import formats, layers
from jaxllm.compress.formats import Everywhere
from jaxllm.compress.layers import Awq, Gptq, Magnitude, Smooth, SparseGpt
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
    Step("activations", "dynamic", formats.int8_inputs, "round inputs to int8", calibrated=False),
    Step("store", "", formats.store, "the same numbers in another format", FORMAT, On, False),
)
