"""The table of steps: what a line of a recipe can name."""

from jaxllm.compress import formats
from jaxllm.compress.formats import Everywhere
from jaxllm.compress.recipe import FORMAT, QUANTIZED, On, Step

STEPS: tuple[Step, ...] = (
    Step("quantize", "rtn", formats.rtn, "round to nearest", QUANTIZED, Everywhere, False),
    Step("activations", "dynamic", formats.int8_inputs, "round inputs to int8", calibrated=False),
    Step("store", "", formats.store, "the same numbers in another format", FORMAT, On, False),
)
