"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face's Llama.

Angles are always float32: bfloat16 has eight bits, and would round position 257 to 256.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config.model import Rope


def rope_angles(
    rope: Rope,
    position_BT: jax.Array,
    length_B: jax.Array,
    *,
    head_dim: int,
    max_position_embeddings: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines for `rotate`, each float32 `[B, T, F]`, F = width // 2.

    Args:
        position_BT: int32; empty slots (-1) get finite angles.
        length_B: Length of the whole text
        of each row; only `dynamic_inputs` and `longrope` depend on it.
    """
    width, magnitude = rope.rotary_dim(head_dim), 1.0
    if rope.rope_type == "dynamic":
        inverse_BF = _dynamic_frequencies(rope, length_B, width, max_position_embeddings)
    elif rope.rope_type == "longrope":
        short_F, long_F = (
            _divide_frequencies(rope, divisors, width)
            for divisors in (rope.short_factor, rope.long_factor)
        )
        border = _require(rope.original_max_position_embeddings)
        inverse_BF = jnp.where(length_B[:, None] > border, long_F[None], short_F[None])
        magnitude = longrope_magnitude(rope, max_position_embeddings)
    else:
        inverse_F, magnitude = inverse_frequencies(rope, head_dim=head_dim)
        inverse_BF = jnp.asarray(inverse_F)[None]
    angle_BTF = position_BT.astype(jnp.float32)[:, :, None] * inverse_BF[:, None, :]
    return jnp.cos(angle_BTF) * magnitude, jnp.sin(angle_BTF) * magnitude


def rotate(x_BTNH: jax.Array, cos_BTF: jax.Array, sin_BTF: jax.Array) -> jax.Array:
    """Rotate each pair `(x[i], x[i + F])` by its angle, i < F; channels beyond 2 F stay.

    float32 inside, x's dtype out.
    """
    F = cos_BTF.shape[-1]
    first, second, rest = jnp.split(x_BTNH.astype(jnp.float32), (F, 2 * F), axis=-1)
    cos, sin = cos_BTF[:, :, None, :], sin_BTF[:, :, None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:  # x may be shared by rows with different angles
        turned.append(jnp.broadcast_to(rest, (*turned[0].shape[:-1], rest.shape[-1])))
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def rerotate(x_BSKH: jax.Array, by_BS: jax.Array, rope: Rope, *, head_dim: int) -> jax.Array:
    """Rotate rotated keys at positions p on to positions p + by; float32.

    Rotations in a plane add up, so this is `rotate` by the difference alone; the keys already
    contain its magnitude. Not for settings that depend on the text's length.
    """
    inverse_F, _ = inverse_frequencies(rope, head_dim=head_dim)
    angle_BSF = by_BS.astype(jnp.float32)[:, :, None] * jnp.asarray(inverse_F)[None, None]
    return rotate(x_BSKH.astype(jnp.float32), jnp.cos(angle_BSF), jnp.sin(angle_BSF))


def inverse_frequencies(rope: Rope, *, head_dim: int) -> tuple[np.ndarray, float]:
    """Return radians per position of each rotary pair, and the factor on cosines and sines.

    With W the rotated width:

    `default`: theta^(-2i/W). `linear`: positions divided by the factor (Chen et al. 2023).
    `llama3`: long wavelengths divided by the factor, short ones unchanged, a linear blend between
    (Meta's Llama 3.1 reference). `yarn`: the blend by number of rotations, and the attention
    factor, of Peng et al. 2023 (sections 3.2, 3.4). `divisors`: a divisor for each pair.
    `proportional`: zero from the rotated fraction of the pairs on (Gemma 4).

    Returns:
        float32 `[W // 2]`, and a float.
    """
    width, magnitude = rope.rotary_dim(head_dim), 1.0
    if rope.rope_type == "divisors":
        return _divide_frequencies(rope, rope.divisors, width), magnitude
    inverse = _frequencies(rope, width)
    if rope.rope_type == "linear":
        inverse = inverse / _require(rope.factor)
    elif rope.rope_type == "proportional":
        turned = int((rope.partial_rotary_factor or 1.0) * head_dim // 2)
        inverse = np.where(np.arange(width // 2) < turned, inverse, 0.0) / (rope.factor or 1.0)
    elif rope.rope_type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.rope_type == "yarn":
        inverse, magnitude = _yarn(rope, inverse, width), _yarn_magnitude(rope)
    return inverse.astype(np.float32), magnitude


def _frequencies(rope: Rope, width: int) -> np.ndarray:
    """Return theta^(-2i/W), float64 `[W // 2]`."""
    frequencies: np.ndarray = rope.rope_theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    return frequencies


def _divide_frequencies(rope: Rope, divisors: tuple[float, ...] | None, width: int) -> np.ndarray:
    """Return the frequencies, each divided by its divisor; float32."""
    assert divisors is not None
    return (_frequencies(rope, width) / np.asarray(divisors)).astype(np.float32)


def longrope_magnitude(rope: Rope, max_position_embeddings: int) -> float:
    """Return sqrt(1 + ln(f) / ln(L)), f = context / original length L (Ding et al. 2024)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    original = _require(rope.original_max_position_embeddings)
    factor = rope.factor or max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(rope: Rope, inverse: np.ndarray) -> np.ndarray:
    factor, low, high = (
        _require(rope.factor),
        _require(rope.low_freq_factor),
        _require(rope.high_freq_factor),
    )
    turns = _require(rope.original_max_position_embeddings) * inverse / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / factor


def _yarn(rope: Rope, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    context = _require(rope.original_max_position_embeddings)

    def pair_index(times: float) -> float:
        return (
            head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))
        )

    low = pair_index(rope.beta_fast or 32.0)
    high = pair_index(rope.beta_slow or 1.0)
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as published, for a ramp of zero width
    interpolate = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return interpolate * inverse / _require(rope.factor) + (1 - interpolate) * inverse


def _yarn_magnitude(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude_at(scale: float) -> float:
        factor = _require(rope.factor)
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude_at(rope.mscale) / magnitude_at(rope.mscale_all_dim)
    return magnitude_at(1.0)


def _dynamic_frequencies(
    rope: Rope, length_B: jax.Array, head_dim: int, max_position_embeddings: int
) -> jax.Array:
    """NTK-aware scaling with a base that grows with the text, as `dynamic_inputs` in
    transformers.
    """
    factor = _require(rope.factor)
    length = jnp.maximum(length_B, max_position_embeddings).astype(jnp.float32)
    stretch = (factor * length / max_position_embeddings) - (factor - 1)
    base_B = rope.rope_theta * stretch ** (head_dim / (head_dim - 2))
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return 1.0 / (base_B[:, None] ** exponent[None, :])


def _require(value: float | None) -> float:
    assert value is not None  # checked by Rope
    return value
