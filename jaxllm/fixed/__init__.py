"""The forward pass with static shapes, for static-graph compilers: one program for any length.

step: the step on named arrays; slots: the static cache between steps; runner: runs inputs of any
length; given: parses its inputs. export writes steps as StableHLO; exported runs them without the
model code.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.fixed.runner import FixedOutput, FixedShapeRunner
    from jaxllm.fixed.slots import Past
    from jaxllm.fixed.step import Form, fixed_step, input_shapes

__all__ = ["FixedOutput", "FixedShapeRunner", "Form", "Past", "fixed_step", "input_shapes"]

# Imported lazily, so that exported steps run without the models.
_HOMES = {"Past": "slots", "Form": "step", "fixed_step": "step", "input_shapes": "step"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'runner')}"), name)
