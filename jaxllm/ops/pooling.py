"""One vector for many: pooling over tokens, and length one. Of numpy's arrays as of JAX's."""

from collections.abc import Callable
from typing import Any

Array = Any  # a jax or numpy array


def pool(x_BTD: Array, mask_BT: Array, pooling: str) -> Array:
    """One vector a row, float32 `[B, D]`: the mean over its real tokens, its last, or its first.

    mask_BT: bool, True where a token is real; padding may stand anywhere and hold anything. A row
    without a real token gives zeros. pooling: a name in `COUNTED`.
    """
    counted_BT = COUNTED[pooling](mask_BT)
    sum_BD = x_BTD.astype("float32").sum(axis=1, where=counted_BT[:, :, None])
    return sum_BD / counted_BT.sum(axis=1, keepdims=True).clip(1).astype("float32")


def normalized(x_BD: Array) -> Array:
    """Each row divided by its Euclidean norm; a row of zeros stays one."""
    norm_B1 = (x_BD * x_BD).sum(axis=-1, keepdims=True) ** 0.5
    return x_BD / (norm_B1 + (norm_B1 == 0).astype(norm_B1.dtype))


def _first(mask_BT: Array) -> Array:
    return mask_BT & (mask_BT.cumsum(axis=1) == 1)


# Which of the real tokens count.
COUNTED: dict[str, Callable[[Array], Array]] = {
    "mean": lambda mask_BT: mask_BT,
    "last": lambda mask_BT: _first(mask_BT[:, ::-1])[:, ::-1],
    "cls": _first,
}
