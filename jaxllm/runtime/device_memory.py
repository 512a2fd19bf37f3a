"""What fills a device's memory, for the error of an allocation that fails."""

import re


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
    share = (
        ""
        if limit is None
        else f", of {limit / 1e9:.1f} GB that JAX took (XLA_PYTHON_CLIENT_MEM_FRACTION: its share)"
    )
    return (
        f"the device's memory is full: {wanted} for temporary arrays or a cache, beside"
        f" {cache / 1e9:.2f} GB of caches and {rest / 1e9:.2f} GB of weights and others{share}."
        " Use fewer rows, a smaller capacity or chunk, cache dtype int8, or quantize the weights"
    )
