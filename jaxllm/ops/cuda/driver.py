"""Kernels in the memory of a GPU, through CUDA's driver, which JAX has started."""

import ctypes
import threading
from functools import cache

import jax

from jaxllm.errors import ConfigError
from jaxllm.ops import native
from jaxllm.ops.cuda.launch import Launch

_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_lock = threading.Lock()
_loaded: dict[int, ctypes.c_void_p] = {}


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def load_driver() -> ctypes.CDLL | None:
    """Return the driver, if it knows kernels without a context (CUDA 12); else None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuLibraryLoadData") else None


def load_kernel(key: int, machine_code: bytes, shared_bytes: int) -> ctypes.c_void_p:
    """Load a kernel, once, for programs to find under `key`; return the driver's name of it.

    shared_bytes: what a block may have at most.

    Raises:
        ConfigError: if the driver refuses it.
    """
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(key, machine_code, shared_bytes)
        return _loaded[key]


def _load(key: int, machine_code: bytes, shared_bytes: int) -> ctypes.c_void_p:
    driver, kernels = load_driver(), native.load_kernels()
    assert driver is not None and kernels is not None
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    no_options = (None, None, 0)
    _check(driver.cuLibraryLoadData(ctypes.byref(library), machine_code, *no_options, *no_options))
    _check(driver.cuLibraryGetKernel(ctypes.byref(kernel), library, b"jaxllm_product"))
    for device in jax.local_devices():
        index = device.local_hardware_id
        _check(driver.cuKernelSetAttribute(_MAX_SHARED_BYTES, shared_bytes, kernel, index))
    function = ctypes.cast(driver.cuLaunchKernelEx, ctypes.c_void_p)
    kernels.jaxllm_cuda_add(ctypes.c_int64(key), kernel, function)
    return kernel


def count_clusters(kernel: ctypes.c_void_p, launch: Launch) -> int:
    """Return how many clusters of a launch a GPU runs at the same time.

    With blocks that fill a multiprocessor an H100 runs 15 clusters of 8 on its 132.
    """
    driver = load_driver()
    assert driver is not None
    size = _Attribute(_CLUSTER, 0, (ctypes.c_uint * 16)(launch.cluster, 1, 1))
    grid, block = (launch.cluster, 1, 1), (launch.threads, 1, 1)
    config = Config(grid, block, launch.shared_bytes, None, ctypes.pointer(size), 1)
    context, count = ctypes.c_void_p(), ctypes.c_int()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(driver.cuCtxPushCurrent_v2(context))
    try:
        _check(
            driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), kernel, ctypes.byref(config))
        )
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    return count.value


def _check(result: int) -> None:
    """Raise ConfigError unless a call of the driver succeeded."""
    if result:
        raise ConfigError(
            f"CUDA's driver refuses a kernel (error {result}); JAXLLM_GPU_KERNELS=0 does without"
        )
