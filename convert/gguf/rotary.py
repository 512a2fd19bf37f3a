"""GGUF's rotary settings: a base, a scaling type, and frequency divisors in tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config.model import Rope
from jaxllm.errors import ConfigError
from jaxllm.ops.rope import inverse_frequencies, longrope_magnitude

FREQS = "rope_freqs.weight"
# LongRoPE's divisors: for texts within the original context, and for longer ones.
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
DIVISOR_TENSORS = (FREQS, SHORT, LONG)
NO_ROTATION = 1e30  # the divisor of frequencies of zero
_SCALING = "rope.scaling."
_FACTOR, _CONTEXT = f"{_SCALING}factor", f"{_SCALING}original_context_length"
_MAGNITUDE = f"{_SCALING}attn_factor"
_YARN = {"beta_fast": f"{_SCALING}yarn_beta_fast", "beta_slow": f"{_SCALING}yarn_beta_slow"}
# Common to all models with this scaling, except for the factor.
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# 1 where an architecture allows it: mscale and mscale_all_dim are 1, and angles keep magnitude 1.
LOG_MULTIPLIER = f"{_SCALING}yarn_log_multiplier"
# Keys that may only have these values: others change YaRN in ways that Hugging Face lacks.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    _MAGNITUDE: (1.0,),
    f"{_SCALING}yarn_attn_factor": (1.0,),
    f"{_SCALING}yarn_ext_factor": (-1.0, 1.0),
    LOG_MULTIPLIER: (0.0,),
}
ROPE_KEYS = frozenset(
    {
        "rope.freq_base",
        "rope.scale_linear",  # older files' `linear`
        f"{_SCALING}type",
        f"{_SCALING}finetuned",  # a fact about training
        _FACTOR,
        _CONTEXT,
        *_YARN.values(),
        *_NEUTRAL,
    }
)


def read_rope(
    data: Mapping[str, Any],
    divisors: Mapping[str, np.ndarray],
    key_prefix: str,
    complaints: list[str],
    rotary_dims: tuple[Any, int],
    allowed: Mapping[str, tuple[Any, ...]],
) -> Rope | None:
    """Read the rotary settings; return None after a complaint.

    Args:
        divisors: The divisors of each pair's frequency, by tensor name.
        key_prefix: The prefix of keys, for complaints.
        rotary_dims: The number of rotated dimensions (None: all), and the head size.
        allowed: The architecture's `allowed_values`.
    """
    for name, vector in divisors.items():
        if not (np.isfinite(vector).all() and (vector > 0).all()):
            complaints.append(f"{name} contains divisors that are not positive")
            return None
    freqs = divisors.get(FREQS)
    theta, kind = data.get("rope.freq_base", 10000.0), data.get(f"{_SCALING}type", "none")
    factor = data.get(_FACTOR, data.get("rope.scale_linear"))
    if kind == "none" and "rope.scale_linear" in data and factor != 1.0:
        kind = "linear"
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": _to_float(theta)}
    count, width = rotary_dims
    if count is not None and count != width:
        if type(count) is not int or not 0 < count < width or count % 2:
            complaints.append(
                f"{key_prefix}rope.dimension_count is {count!r:.20}, head size {width}"
            )
            return None
        fields["partial_rotary_factor"] = count / width
    if SHORT in divisors or LONG in divisors:
        if {SHORT, LONG} - set(divisors) or kind not in ("none", "longrope") or freqs is not None:
            complaints.append(f"{SHORT} and {LONG} must both exist, without other scaling")
            return None
        fields |= _read_longrope(data, divisors)
        kind = "none"
    if kind == "linear" and factor not in (None, 1.0):
        fields |= {"rope_type": "linear", "factor": _to_float(factor)}
    elif kind == "yarn":
        yarn = {name: _to_float(data[key]) for name, key in _YARN.items() if key in data}
        if data.get(LOG_MULTIPLIER) == 1.0:
            yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0}
        context = data.get(_CONTEXT, data.get("context_length"))
        fields |= {"rope_type": "yarn", "factor": _to_float(factor), **yarn}
        fields["original_max_position_embeddings"] = context
        complaints += [
            f"{key_prefix}{key} must be {' or '.join(map(repr, known))}, got {data[key]!r:.40}"
            for key, known in {**_NEUTRAL, **allowed}.items()
            if data.get(key, known[0]) not in known
        ]
    elif kind not in ("none", "linear"):
        complaints.append(f"{key_prefix}{_SCALING}type {kind!r:.40} is not supported")
        return None
    if freqs is not None and (freqs != 1).any():
        if fields["rope_type"] != "default":
            complaints.append(f"{FREQS} with {_SCALING}type {kind!r} is not supported")
            return None
        theta = fields["rope_theta"]
        fields |= (
            _match_proportional(theta, freqs)
            or _match_llama3(theta, freqs)
            or {"rope_type": "divisors", "divisors": tuple(float(x) for x in freqs)}
        )
    try:
        return Rope(**fields)
    except ConfigError as error:
        complaints.append(str(error))
        return None


def write_rope(
    rope: Rope, head_dim: int, context: int, complaints: list[str], unit_magnitude: bool
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return keys with values, and the tensors of divisors. context: the maximum length.

    unit_magnitude: whether the architecture has `LOG_MULTIPLIER`.
    """
    settings: dict[str, Any] = {"rope.freq_base": float(rope.rope_theta)}
    match rope.rope_type:
        case "default":
            return settings, {}
        case "linear":
            scaling = {f"{_SCALING}type": "linear", _FACTOR: rope.factor}
            return {**settings, **scaling}, {}
        case "llama3" | "divisors":
            exact = (
                rope.divisors if rope.rope_type == "divisors" else _llama3_divisors(rope, head_dim)
            )
            return settings, {FREQS: np.asarray(exact, np.float32)}
        case "proportional":
            return settings, {FREQS: _proportional_divisors(rope, head_dim)}
        case "yarn":
            scales = rope.mscale, rope.mscale_all_dim
            is_unit = unit_magnitude and scales == (1, 1)
            if rope.attention_factor or (all(scales) and not is_unit) or rope.truncate is False:
                complaints.append("YaRN's attention_factor, mscale and truncate")
            scaling = {f"{_SCALING}type": "yarn", _FACTOR: rope.factor}
            scaling[_CONTEXT] = rope.original_max_position_embeddings
            yarn = {key: getattr(rope, name) for name, key in _YARN.items()}
            yarn[LOG_MULTIPLIER] = 1.0 if is_unit else None
            return {**settings, **scaling, **yarn}, {}
        case "longrope":
            scaling = {_CONTEXT: rope.original_max_position_embeddings}
            scaling[_MAGNITUDE] = float(longrope_magnitude(rope, context))
            factors = {SHORT: rope.short_factor, LONG: rope.long_factor}
            vectors = {name: np.asarray(x, np.float32) for name, x in factors.items()}
            return {**settings, **scaling}, vectors
    complaints.append(f"rope_type {rope.rope_type!r}")
    return settings, {}


def _read_longrope(data: Mapping[str, Any], divisors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return LongRoPE's fields, without the magnitude if it is Hugging Face's default."""
    context = data.get("context_length")
    fields: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": data.get(_CONTEXT, context),
        "short_factor": _shortest_decimals(divisors[SHORT]),
        "long_factor": _shortest_decimals(divisors[LONG]),
    }
    said, original = (
        _to_float(data.get(_MAGNITUDE, 1.0)),
        fields["original_max_position_embeddings"],
    )
    if type(context) is int and type(original) is int and original > 1 and type(said) is float:
        try:
            computed = longrope_magnitude(Rope(rope_theta=1.0, **fields), context)
        except ConfigError:  # `read_rope` reports it
            return fields
        if abs(said - computed) <= 2e-6 * computed:
            return fields
    return {**fields, "attention_factor": said}


def _match_proportional(theta: float, freqs: np.ndarray) -> dict[str, Any] | None:
    """Return the fields of proportional rotation if it gives these divisors, else None."""
    turned, first = int((freqs < NO_ROTATION / 2).sum()), float(freqs[0])
    if not 0 < turned < freqs.size:
        return None
    fields: dict[str, Any] = {"rope_type": "proportional"}
    fields |= {"partial_rotary_factor": turned / freqs.size}
    fields |= {"factor": first} if first != 1 else {}
    expected = _proportional_divisors(Rope(rope_theta=theta, **fields), 2 * freqs.size)
    return fields if (expected == freqs).all() else None


def _proportional_divisors(rope: Rope, head_dim: int) -> np.ndarray:
    turned, _ = inverse_frequencies(rope, head_dim=head_dim)
    return np.where(turned > 0, rope.factor or 1.0, NO_ROTATION).astype(np.float32)


def _match_llama3(theta: float, freqs: np.ndarray) -> dict[str, Any] | None:
    """Return the fields of Llama 3.1's scaling if they give these divisors, else None.

    Hugging Face's format can express these, but not divisors in general.
    """
    fields = {"rope_type": "llama3", **_LLAMA3, "factor": float(freqs.max())}
    expected = _llama3_divisors(Rope(rope_theta=theta, **fields), 2 * freqs.size)
    return fields if np.allclose(expected, freqs, rtol=2e-6, atol=0) else None


def _llama3_divisors(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the divisors of llama3's scaling, float32 `[head_dim / 2]`."""
    plain = rope.rope_theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turned, _ = inverse_frequencies(rope, head_dim=head_dim)
    return (plain / turned).astype(np.float32)


def _shortest_decimals(vector: np.ndarray) -> tuple[float, ...]:
    """Return the shortest decimals of the float32s, as config.json has them."""
    return tuple(float(str(x)) for x in vector)


def _to_float(value: Any) -> Any:
    """Return an int as a float, since files may store an int for a float key."""
    return float(value) if type(value) is int else value
