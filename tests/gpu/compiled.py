"""Programs compiled for an H100 by a machine that has none, and what their compiled text says.

`pip install jaxllm[gpu-check]` brings the compiler; a description of the card stands for the card.
Kernels are chosen without timing them, so a real card may split or merge some.
"""

import collections
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.ops import flash
from jaxllm.ops.target import trace_for

WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13")
_NO_KERNELS = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota"}
_OPERATION = re.compile(r"\s+(?:ROOT )?%\S+ = (\([^=]*?\)|\S+) ([\w\-]+)\(")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


@cache
def missing() -> str | None:
    """Return what is missing to compile for a GPU; None if nothing is."""
    for wheel in WHEELS:
        try:
            version(wheel)
        except PackageNotFoundError:
            return f"{wheel} is not installed (pip install 'jaxllm[gpu-check]')"
    if description() is None:
        return "the description of a card (JAXLLM_TEST_DATA/gpu/h100_sxm.txtpb)"
    return None


def description() -> str | None:
    """Return the text that describes an H100 to XLA."""
    folder = os.environ.get("JAXLLM_TEST_DATA")
    path = None if folder is None else Path(folder, "gpu", "h100_sxm.txtpb")
    return path.read_text() if path is not None and path.exists() else None


@cache
def _device() -> NamedSharding:
    from jax.experimental import topologies

    card = topologies.get_topology_desc(
        platform="cuda", target_config=description(), topology="1x1x1"
    )
    return NamedSharding(topologies.make_mesh(card, (1,), ("x",)), PartitionSpec())


@contextmanager
def for_gpu() -> Iterator[None]:
    """Trace for a CUDA device, as a process that has one does."""
    flash.find_problem.cache_clear()
    with trace_for("cuda"):
        yield
    flash.find_problem.cache_clear()


def on_card(tree: Any) -> Any:
    """Return the shapes of arrays as those of arrays on the card."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_device()), tree)


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    text: XLA's, after all passes. temporary: bytes of arrays between the first and last operation.
    """

    text: str
    temporary: int

    @cached_property
    def computations(self) -> dict[str, list[tuple[str, str]]]:
        """For each computation, the type and name of its operations that do something."""
        found = {}
        for block in re.split(r"\n(?=%|ENTRY)", self.text):
            head, *lines = block.split("\n")
            name = "ENTRY" if head.startswith("ENTRY") else head.split(" ")[0]
            found[name] = [o for line in lines if (o := _read_operation(line)) is not None]
        return found

    @cached_property
    def loops(self) -> list[str]:
        """The bodies of its loops."""
        return re.findall(r"while\(.*?body=(%[\w.\-]+)", self.text)

    def kernels(self, where: str = "ENTRY") -> collections.Counter[str]:
        """Count the kernels of one computation, by kind."""
        return collections.Counter(kind for _, kind in self.computations[where])

    @property
    def step(self) -> collections.Counter[str]:
        """The kernels of its first loop's body, or of the program if it has none."""
        return self.kernels(self.loops[0] if self.loops else "ENTRY")

    def largest(self, where: str = "ENTRY", kind: str = "") -> int:
        """Return the bytes of the largest array that a kernel of this kind writes."""
        sizes = [_bytes(form) for form, name in self.computations[where] if kind in name]
        return max(sizes, default=0)


def compile_for_gpu(
    function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None
) -> Compiled:
    """Compile a jitted function for the card; arrays may be shapes. Inside `for_gpu`."""
    program = function.lower(*args).compile(compiler_options=options)
    memory = program.memory_analysis()
    return Compiled(program.as_text(), 0 if memory is None else memory.temp_size_in_bytes)


def _read_operation(line: str) -> tuple[str, str] | None:
    match = _OPERATION.match(re.sub(r"/\*index=\d+\*/", "", line))
    if match is None or match[2] in _NO_KERNELS:
        return None
    kind = match[2]
    if kind == "fusion":
        named = re.search(r'"kind":"(\w+)"', line) or re.search(r"kind=(k\w+)", line)
        kind = named[1] if named else kind
    elif kind == "custom-call":
        named = re.search(r'custom_call_target="([^"]+)"', line)
        kind = named[1] if named else kind
    return match[1], kind


def _bytes(form: str) -> int:
    """Return the bytes of a type, as "bf16[64,128]{1,0}"; of a tuple's largest."""
    sizes = [
        _BYTES.get(name, 4) * int(np.prod([int(n) for n in shape.split(",") if n] or [1]))
        for name, shape in re.findall(r"(\w+)\[([\d,]*)\]", form)
    ]
    return max(sizes, default=0)
