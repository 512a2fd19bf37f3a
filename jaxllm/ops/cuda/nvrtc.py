"""CUDA C++ to machine code, without a GPU, by the NVRTC that `jax[cuda]` brings."""

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from jaxllm.errors import ConfigError

_SYMBOLS = (
    *("nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcDestroyProgram", "nvrtcVersion"),
    *("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"),
)


@cache
def load_nvrtc() -> ctypes.CDLL | None:
    """Return NVRTC: of the packages of NVIDIA that are installed, else the system's; or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [str(file) for folder in folders for file in folder.glob("*/lib/libnvrtc.so.*")]
    for name in (*sorted(files, reverse=True), ctypes.util.find_library("nvrtc")):
        try:
            loaded = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if loaded is not None and all(hasattr(loaded, symbol) for symbol in _SYMBOLS):
            return loaded
    return None


def find_version() -> tuple[int, int] | None:
    """Return NVRTC's version; None without it."""
    if (nvrtc := load_nvrtc()) is None:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """Return the machine code of CUDA C++. options: NVRTC's, nearly those of nvcc.

    Raises:
        ConfigError: without NVRTC, and with the compiler's message if it refuses.
    """
    nvrtc = load_nvrtc()
    if nvrtc is None:
        raise ConfigError("kernels for a GPU need NVRTC: pip install nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"variant.cu", 0, None, None)
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(words), words):
            message = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise ConfigError(
                "a kernel for a GPU does not compile (JAXLLM_GPU_KERNELS=0 does without):"
                f" {message.rstrip(bytes(1)).decode(errors='replace')[:2000]}"
            )
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(measure: Callable[..., int], copy: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    measure(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    copy(program, text)
    return text.raw
