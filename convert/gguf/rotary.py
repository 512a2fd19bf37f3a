"""Rotary settings as GGUF has them: a base, a kind of scaling, divisors of pairs in a tensor."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config import Rope
from jaxllm.errors import ConfigError
from jaxllm.ops.rope import inverse_frequencies, longrope_magnitude

FREQS = "rope_freqs.weight"
# LongRoPE's: of texts within the context that a model was first trained on, and of longer ones.
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
DIVISORS = (FREQS, SHORT, LONG)
_SCALING = "rope.scaling."
_FACTOR, _CONTEXT = f"{_SCALING}factor", f"{_SCALING}original_context_length"
_MAGNITUDE = f"{_SCALING}attn_factor"
_YARN = {"beta_fast": f"{_SCALING}yarn_beta_fast", "beta_slow": f"{_SCALING}yarn_beta_slow"}
# Of every model that scales so, but for the factor.
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Keys that may only have these values: others change yarn in ways that are not Hugging Face's.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    _MAGNITUDE: (1.0,),
    f"{_SCALING}yarn_attn_factor": (1.0,),
    f"{_SCALING}yarn_ext_factor": (-1.0, 1.0),
    f"{_SCALING}yarn_log_multiplier": (0.0,),
}
ROPE_KEYS = frozenset(
    {
        "rope.freq_base",
        "rope.scale_linear",  # how files said `linear` before there were types
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
    begins: str,
    complaints: list[str],
    turned: tuple[Any, int],
) -> Rope | None:
    """The settings. divisors: of each pair's frequency, by tensor. begins: of keys, in complaints.
    turned: how many numbers of a head's; None: all.
    """
    for name, vector in divisors.items():
        if not (np.isfinite(vector).all() and (vector > 0).all()):
            complaints.append(f"{name} holds divisors that are not above 0")
            return None
    freqs = divisors.get(FREQS)
    theta, kind = data.get("rope.freq_base", 10000.0), data.get(f"{_SCALING}type", "none")
    factor = data.get(_FACTOR, data.get("rope.scale_linear"))
    if kind == "none" and "rope.scale_linear" in data and factor != 1.0:
        kind = "linear"
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(theta)}
    count, width = turned
    if count is not None and count != width:
        if type(count) is not int or not 0 < count < width or count % 2:
            complaints.append(f"{begins}rope.dimension_count is {count!r:.20}, a head has {width}")
            return None
        fields["partial_rotary_factor"] = count / width
    if SHORT in divisors or LONG in divisors:
        if {SHORT, LONG} - set(divisors) or kind not in ("none", "longrope") or freqs is not None:
            complaints.append(f"{SHORT} and {LONG} go together, and with no other scaling")
            return None
        fields |= _longrope(data, divisors)
        kind = "none"
    if kind == "linear" and factor not in (None, 1.0):
        fields |= {"rope_type": "linear", "factor": _number(factor)}
    elif kind == "yarn":
        yarn = {ours: _number(data[key]) for ours, key in _YARN.items() if key in data}
        context = data.get(_CONTEXT, data.get("context_length"))
        fields |= {"rope_type": "yarn", "factor": _number(factor), **yarn}
        fields["original_max_position_embeddings"] = context
        complaints += [
            f"{begins}{key} must be {' or '.join(map(repr, known))}, got {data[key]!r:.40}"
            for key, known in _NEUTRAL.items()
            if data.get(key, known[0]) not in known
        ]
    elif kind not in ("none", "linear"):
        complaints.append(f"{begins}{_SCALING}type {kind!r:.40} is not supported")
        return None
    if freqs is not None and (freqs != 1).any():
        if fields["rope_type"] != "default":
            complaints.append(f"{FREQS} beside {_SCALING}type {kind!r} is not supported")
            return None
        fields |= _llama3(fields["rope_theta"], freqs) or {
            "rope_type": "divisors",
            "divisors": tuple(float(x) for x in freqs),
        }
    try:
        return Rope(**fields)
    except ConfigError as error:
        complaints.append(str(error))
        return None


def write_rope(
    rope: Rope, head_dim: int, context: int, complaints: list[str]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and values, and the tensors of divisors that a file needs beside them. context: how long
    texts may be.
    """
    settings: dict[str, Any] = {"rope.freq_base": float(rope.rope_theta)}
    if rope.extended:
        complaints.append("Self-Extend (group_size, neighbor_window)")
    match rope.rope_type:
        case "default":
            return settings, {}
        case "linear":
            scaling = {f"{_SCALING}type": "linear", _FACTOR: rope.factor}
            return {**settings, **scaling}, {}
        case "llama3" | "divisors":
            exact = rope.divisors if rope.rope_type == "divisors" else _divisors(rope, head_dim)
            return settings, {FREQS: np.asarray(exact, np.float32)}
        case "yarn":
            magnitude = rope.attention_factor or (rope.mscale and rope.mscale_all_dim)
            if magnitude or rope.truncate is False:
                complaints.append("yarn's attention_factor, mscale and truncate")
            scaling = {f"{_SCALING}type": "yarn", _FACTOR: rope.factor}
            scaling[_CONTEXT] = rope.original_max_position_embeddings
            yarn = {key: getattr(rope, ours) for ours, key in _YARN.items()}
            return {**settings, **scaling, **yarn}, {}
        case "longrope":
            scaling = {_CONTEXT: rope.original_max_position_embeddings}
            scaling[_MAGNITUDE] = float(longrope_magnitude(rope, context))
            factors = {SHORT: rope.short_factor, LONG: rope.long_factor}
            vectors = {name: np.asarray(x, np.float32) for name, x in factors.items()}
            return {**settings, **scaling}, vectors
    complaints.append(f"rotary settings of type {rope.rope_type!r}")
    return settings, {}


def _longrope(data: Mapping[str, Any], divisors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Its fields; the magnitude is left out where it is what Hugging Face's form computes."""
    context = data.get("context_length")
    fields: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": data.get(_CONTEXT, context),
        "short_factor": _decimals(divisors[SHORT]),
        "long_factor": _decimals(divisors[LONG]),
    }
    said, original = _number(data.get(_MAGNITUDE, 1.0)), fields["original_max_position_embeddings"]
    if type(context) is int and type(original) is int and original > 1 and type(said) is float:
        try:
            computed = longrope_magnitude(Rope(rope_theta=1.0, **fields), context)
        except ConfigError:  # which whoever makes it of all of them will say
            return fields
        if abs(said - computed) <= 2e-6 * computed:
            return fields
    return {**fields, "attention_factor": said}


def _llama3(theta: float, freqs: np.ndarray) -> dict[str, Any] | None:
    """The fields of Llama 3.1's scaling where its divisors are these, as they mostly are: what
    Hugging Face's form has a word for.
    """
    fields = {"rope_type": "llama3", **_LLAMA3, "factor": float(freqs.max())}
    made = _divisors(Rope(rope_theta=theta, **fields), 2 * freqs.size)
    return fields if np.allclose(made, freqs, rtol=2e-6, atol=0) else None


def _divisors(rope: Rope, head_dim: int) -> np.ndarray:
    """What llama3's scaling divides each pair's frequency by, float32 `[head_dim / 2]`."""
    plain = rope.rope_theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turned, _ = inverse_frequencies(rope, head_dim=head_dim)
    return (plain / turned).astype(np.float32)


def _decimals(vector: np.ndarray) -> tuple[float, ...]:
    """The shortest decimals of the same float32s: those that config.json had."""
    return tuple(float(str(x)) for x in vector)


def _number(value: Any) -> Any:
    """A whole number where a file has one in a float's place, as the float that it is."""
    return float(value) if type(value) is int else value
