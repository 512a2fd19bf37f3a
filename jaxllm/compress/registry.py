"""The table of methods that a line of a recipe can name.

Packages add rows by entry points of the group `jaxllm.compress_methods`.
"""

from jaxllm.compress.methods import (
    awq,
    formats,
    gptq,
    rtn,
    smoothquant,
)
from jaxllm.compress.recipe import StepSpec
from jaxllm.runtime.plugins import load_plugins

STEPS: tuple[StepSpec, ...] = (
    rtn.STEP,
    gptq.STEP,
    awq.STEP,
    smoothquant.STEP,
    formats.DYNAMIC_INPUTS,
    formats.STORE,
)


def find_steps() -> tuple[StepSpec, ...]:
    """Return the rows of this table and those of other packages."""
    return (*STEPS, *load_plugins("compress_methods"))
