"""The forward pass in fixed shapes, for compilers of static graphs: one program, any length."""

from jaxllm.fixed.runner import FixedOutput, FixedShapeRunner
from jaxllm.fixed.slots import Past
from jaxllm.fixed.step import Form, fixed_step, input_shapes

__all__ = ["FixedOutput", "FixedShapeRunner", "Form", "Past", "fixed_step", "input_shapes"]
