"""Rotary settings as GGUF has them: a base, a kind of scaling, divisors of pairs in a tensor."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config import Rope
from jaxllm.errors import ConfigError
from jaxllm.ops.rope import inverse_frequencies

FREQS = "rope_freqs.weight"
_SCALING = "rope.scaling."
_FACTOR, _CONTEXT = f"{_SCALING}factor", f"{_SCALING}original_context_length"
_YARN = {"beta_fast": f"{_SCALING}yarn_beta_fast", "beta_slow": f"{_SCALING}yarn_beta_slow"}
# Of every model that scales so, but for the factor.
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Keys that may only have these values: others change yarn in ways that are not Hugging Face's.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    f"{_SCALING}attn_factor": (1.0,),
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
    data: Mapping[str, Any], freqs: np.ndarray | None, begins: str, complaints: list[str]
) -> Rope | None:
    """The settings. freqs: divisors of each pair's frequency. begins: of keys, in complaints."""
    theta, kind = data.get("rope.freq_base", 10000.0), data.get(f"{_SCALING}type", "none")
    factor = data.get(_FACTOR, data.get("rope.scale_linear"))
    if kind == "none" and "rope.scale_linear" in data and factor != 1.0:
        kind = "linear"
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(theta)}
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
        if not (np.isfinite(freqs).all() and (freqs > 0).all()):
            complaints.append(f"{FREQS} holds divisors that are not above 0")
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
    rope: Rope, head_dim: int, complaints: list[str]
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Keys and values, and the divisors that a file needs beside them."""
    settings: dict[str, Any] = {"rope.freq_base": float(rope.rope_theta)}
    match rope.rope_type:
        case "default":
            return settings, None
        case "linear":
            scaling = {f"{_SCALING}type": "linear", _FACTOR: rope.factor}
            return {**settings, **scaling}, None
        case "llama3" | "divisors":
            exact = rope.divisors if rope.rope_type == "divisors" else _divisors(rope, head_dim)
            return settings, np.asarray(exact, np.float32)
        case "yarn":
            magnitude = rope.attention_factor or (rope.mscale and rope.mscale_all_dim)
            if magnitude or rope.truncate is False:
                complaints.append("yarn's attention_factor, mscale and truncate")
            scaling = {f"{_SCALING}type": "yarn", _FACTOR: rope.factor}
            scaling[_CONTEXT] = rope.original_max_position_embeddings
            yarn = {key: getattr(rope, ours) for ours, key in _YARN.items()}
            return {**settings, **scaling, **yarn}, None
    complaints.append(f"rotary settings of type {rope.rope_type!r}")
    return settings, None


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


def _number(value: Any) -> Any:
    """A whole number where a file has one in a float's place, as the float that it is."""
    return float(value) if type(value) is int else value
