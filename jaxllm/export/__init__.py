"""The forward pass with static shapes, for static-graph compilers: one program for any length.

step: the step on named arrays; static_cache: the static cache between steps; runner: runs inputs of
any length. command_line writes steps as StableHLO; runtime runs them without the model code.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.export.runner import FixedOutput, FixedShapeRunner
    from jaxllm.export.static_cache import StaticCache
    from jaxllm.export.step import StepSignature, input_shapes, make_step

__all__ = [
    "FixedOutput",
    "FixedShapeRunner",
    "StaticCache",
    "StepSignature",
    "input_shapes",
    "make_step",
]

# Imported lazily, so that exported steps run without the models.
_HOMES = {
    "StaticCache": "static_cache",
    "StepSignature": "step",
    "make_step": "step",
    "input_shapes": "step",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'runner')}"), name)


def __dir__() -> list[str]:
    return __all__
