"""The use of a device's memory: for the start of a command, and an allocation that fails."""

import re
from pathlib import Path

_HOW = "XLA_PYTHON_CLIENT_MEM_FRACTION changes its share"


def describe_memory() -> str | None:
    """Return how much of a device's memory JAX took, and how to change it; None on a CPU."""
    import jax

    device = jax.devices()[0]
    held = device.memory_stats() or {}
    if "bytes_limit" not in held:
        return None
    limit, used = held["bytes_limit"], held.get("bytes_in_use", 0)
    took = held.get("pool_bytes", limit)
    return (
        f"{device.device_kind}: JAX took {took / 1e9:.1f} GB of its memory and takes at most"
        f" {limit / 1e9:.1f} ({_HOW}, XLA_PYTHON_CLIENT_PREALLOCATE=false takes only what is"
        f" needed); {used / 1e9:.1f} GB are in use"
    )


def process_memory() -> int:
    """Return the bytes that this process holds of its device, of the machine on a CPU."""
    import resource  # not on Windows

    import jax

    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_in_use" in stats:
        return int(stats["bytes_in_use"])
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:  # macOS, in bytes: the most so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()


def describe_full_memory(error: BaseException) -> str | None:
    """Return what an out-of-memory error of JAX is about; None for other errors.

    Arrays with four axes are keys and values, `[B, S, K, H]`; the others are mostly weights.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    import jax

    arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
    cache = sum(x.nbytes for x in arrays if x.ndim == 4)
    rest = sum(x.nbytes for x in arrays if x.ndim != 4)
    asked = re.search(r"allocat\w* (?:a buffer of )?([\d.]+ ?(?:[KMGT]i?B|bytes))", text)
    wanted = f"{asked[1]} could not be had" if asked else "an allocation failed"
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    share = "" if limit is None else f", of {limit / 1e9:.1f} GB that JAX may take ({_HOW})"
    return (
        f"the device's memory is full: {wanted} for temporary arrays or a cache, beside"
        f" {cache / 1e9:.2f} GB of caches and {rest / 1e9:.2f} GB of weights and others{share}."
        " Use fewer rows, a smaller capacity or chunk, cache dtype int8, or quantize the weights"
    )
