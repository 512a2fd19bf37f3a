"""The kind of device that programs are traced for, which decides how some things are computed.

It is the process's default backend. A CPU's paths are chosen when a program is lowered, so the same
trace runs there; what a GPU or a TPU computes in another way is chosen here, while tracing.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

_assumed: list[str] = []  # of all threads: programs are also compiled in others


def target() -> str:
    """Return "cpu", "cuda", "rocm" or "tpu"; other backends by their own name."""
    if _assumed:
        return _assumed[-1]
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def is_accelerator() -> bool:
    """Whether a kernel's start costs more than a few numbers, as on a GPU or TPU."""
    return target() != "cpu"


@contextmanager
def trace_for(name: str) -> Iterator[None]:
    """Trace for a device that this process does not have, to compile for it or to look.

    Compiled programs are forgotten before and after, since JAX does not know what they are for.
    """
    jax.clear_caches()
    _assumed.append(name)
    try:
        yield
    finally:
        _assumed.pop()
        jax.clear_caches()


# A loop of steps becomes one graph of the device, so that the host does nothing between tokens; by
# default a loop is none, nor is a program of fewer than five operations.
_LOOP_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",
}
# Groups of integer weights are multiplied as they are stored, not written out as floats first.
_INTEGER_OPTIONS = {"xla_gpu_experimental_enable_subchannel_dequantisation_fusion": "True"}
_INT4, _INT8, _UINT8 = map(jnp.dtype, (jnp.int4, jnp.int8, jnp.uint8))
_NO_TRACE = get_opaque_trace_state(convention="flax")
_own = ContextVar("_own", default=False)


def is_own_program() -> bool:
    """Whether a `Program` is traced that is in no other program: its arguments are those that the
    program is given. A function that JAX may have traced before must not ask.
    """
    return _own.get()


def _mark_own(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def traced(*args: Any) -> Any:
        mark = _own.set(True)
        try:
            return function(*args)
        finally:
            _own.reset(mark)

    return traced


class Program:
    """`jax.jit(function)` with the device's compiler options. Inside another program it has none:
    those of the outer program apply.

    JAXLLM_GPU_OPTIONS=0 leaves XLA's own options, for drivers before CUDA 12.4.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._plain = jax.jit(function, **options)
        self._for_cuda = [
            jax.jit(_mark_own(function), **options, compiler_options=chosen)
            for chosen in (_LOOP_OPTIONS, _LOOP_OPTIONS | _INTEGER_OPTIONS, {})
        ]

    def choose(self, args: tuple[Any, ...]) -> Any:
        """Return the jitted function for these arguments."""
        if target() != "cuda" or get_opaque_trace_state(convention="flax") != _NO_TRACE:
            return self._plain
        if os.environ.get("JAXLLM_GPU_OPTIONS") == "0":
            return self._for_cuda[2]
        dtypes = {getattr(x, "dtype", None) for x in jax.tree.leaves(args)}
        # Levels of nf4, in bytes, take more kernels with these options.
        return self._for_cuda[_INT4 in dtypes or (_INT8 in dtypes and _UINT8 not in dtypes)]

    def __call__(self, *args: Any) -> Any:
        return self.choose(args)(*args)

    def lower(self, *args: Any) -> Any:
        """Return the lowered program for these arguments, or their shapes."""
        return self.choose(args).lower(*args)
