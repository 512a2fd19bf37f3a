"""The forward pass in fixed shapes, for compilers of static graphs: one program, any length.

step: named arrays in and out; slots: the past between two; runner: any text through it, given: what
it is given. export writes steps as StableHLO; exported runs them, without the rest of jaxllm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.fixed.runner import FixedOutput, FixedShapeRunner
    from jaxllm.fixed.slots import Past
    from jaxllm.fixed.step import Form, fixed_step, input_shapes

__all__ = ["FixedOutput", "FixedShapeRunner", "Form", "Past", "fixed_step", "input_shapes"]

# Looked up when used: what was exported runs without the models.
_HOMES = {"Past": "slots", "Form": "step", "fixed_step": "step", "input_shapes": "step"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'runner')}"), name)
