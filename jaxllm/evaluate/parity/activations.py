"""Named activations, and the cases and backends that they are compared in.

Names are dotted paths, in the order of computation: `embed_tokens`, then for each layer
`layers.0.input_layernorm`, `.q`, `.k`, `.v`, `.heads`, `.attention`, `.post_attention_layernorm`,
`.mlp.down_proj.input`, `.mlp` and the layer's output `layers.0`, then `norm` and `logits`. GPT-2
has its own names (`models.FAMILIES`). The input of every linear is among them. An MoE layer has the
router scores, `.mlp.gate`, instead of the MLP's last input.

A backend runs cases: this library with weights in some format, or another implementation
(`transformers_backend`). All return numpy arrays with the same names and layouts.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import jax
import numpy as np

from jaxllm.cache.kv import KVCache, Segment, check_usable, init_cache
from jaxllm.config.model import ModelConfig
from jaxllm.errors import TokenError
from jaxllm.models import get_family
from jaxllm.models.family import Family
from jaxllm.models.inputs import (
    check_longrope_limit,
    check_model,
    check_shape,
    check_token_ranges,
)
from jaxllm.models.layers import Trace
from jaxllm.ops.kv_quant import dequantize
from jaxllm.ops.padding import pad_texts
from jaxllm.runtime.multihost import broadcast_arrays, broadcast_from_zero, to_host
from jaxllm.runtime.validation import check_int, check_int_array
from jaxllm.steps import decode_step, prefill, run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

LOGITS = "decoded logits"
HEADS = ("q", "k", "v", "heads")
_HEAD_SITES = {"q": "attn.rot_q", "heads": "attn.z"}
_SITES = ("attn_norm", "attn.rot_q", "attn.z", "mlp_norm", "mlp.post", "router", "mlp.output")


def activation_names(
    model_type: str,
    layers: int,
    has_experts: Callable[[int], bool] = lambda layer: False,
    heads: Callable[[int], tuple[str, ...]] = lambda layer: HEADS,
) -> list[str]:
    """Return the names of all activations, in the order of computation.

    has_experts, heads: return whether a layer is MoE, and the names of its heads' arrays, which are
    `HEADS` or fewer. Raises ConfigError for an unknown family.
    """
    f = get_family(model_type)
    names = [f.embeddings]
    for i in range(layers):
        path, last = f"{f.layers}.{i}", f.router if has_experts(i) else f"{f.mlp_down}.input"
        within = (f.attention_norm, *heads(i), f.attention, f.mlp_norm, last, "mlp")
        names += [*(f"{path}.{part}" for part in within if part), path]
    return [*names, f.norm, "logits"]


def head_names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Return the names of a layer's arrays of heads: all of `HEADS`, or fewer.

    A layer that reads an earlier one's keys has no k and v; latent attention has only the heads.
    """
    if config.kv_source(layer) != layer:
        return ("q", "heads")
    if not config.kv_heads(layer):
        return ()
    return HEADS if config.value_heads(layer) else HEADS[-1:]


def activations(
    model: Model,
    params: Params,
    cache: KVCache | None,
    tokens_BT: Any,
    *,
    positions_BT: Any = None,
) -> dict[str, jax.Array]:
    """Run tokens against a cache, and return every activation by name, in order of computation.

    Most activations are `[B, T, D]`; q (after RoPE) and heads (attention-weighted values, before
    the output projection) are `[B, T, N, H]`; k and v, as read back from the cache, are
    `[B, T, K, H]`; logits are `[B, T, V]` float32. Values at padding are meaningless.

    Args:
        tokens_BT: Token ids.
        positions_BT: int32, -1 for padding; by default each row continues where the cache ends.

    Raises:
        TokenError: For ids, positions or shapes that do not fit the model.
    """
    check_model(model, params)
    tokens_BT = check_int_array("tokens", tokens_BT, TokenError)
    if cache is not None:
        check_usable(cache)
    if positions_BT is None:
        check_shape(tokens_BT)
        start_B = np.zeros(len(tokens_BT), np.int32)
        start_B = start_B if cache is None else np.asarray(cache.next_position_B)
        positions_BT = start_B[:, None] + np.arange(np.shape(tokens_BT)[-1], dtype=np.int32)[None]
    token_BT, position_BT = check_tokens(model.config, tokens_BT, positions_BT)
    past = ((), ()) if cache is None else (cache.segments, cache.state)
    trace = _trace(model, params, *past, token_BT, position_BT)
    routed = ["router" in layer.sites for layer in trace.layers]
    names = activation_names(
        model.config.model_type,
        len(routed),
        routed.__getitem__,
        lambda i: head_names(model.config, i),
    )
    arrays = _trace_arrays(trace, model.config, get_family(model.config.model_type))
    return dict(zip(names, arrays, strict=True))


def check_tokens(
    config: ModelConfig, tokens_BT: Any, positions_BT: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return both as int32 `[B, T]`. Raises TokenError if shapes or values are invalid."""
    tokens = check_int_array("tokens", tokens_BT, TokenError)
    positions = check_int_array("positions", positions_BT, TokenError)
    if tokens.ndim != 2 or tokens.size == 0 or positions.shape != tokens.shape:
        raise TokenError(
            "tokens and positions must both be [B, T], with B, T >= 1: got shapes"
            f" {tokens.shape} and {positions.shape}"
        )
    check_token_ranges(config, tokens, positions)
    return tokens.astype(np.int32), positions.astype(np.int32)


@partial(jax.jit, static_argnums=0)
def _trace(
    model: Model,
    params: Params,
    segments: tuple[Segment, ...],
    state: tuple[Any, ...],
    token_BT: jax.Array,
    position_BT: jax.Array,
) -> Trace:
    options: Any = {"state": state, "read": _SITES}
    return run_model(model, params, segments, token_BT, position_BT, **options)[0]


def _trace_arrays(trace: Trace, config: ModelConfig, row: Family) -> Iterator[jax.Array]:
    """Yield the activations of a trace, in the order of `activation_names`."""
    yield trace.embeddings
    for i, layer in enumerate(trace.layers):
        sites, attended = layer.sites, layer.attention
        yield from (sites["attn_norm"],) if row.attention_norm else ()
        for part in head_names(config, i):
            kept = {"k": attended.k, "v": attended.v}.get(part)
            yield sites[_HEAD_SITES[part]] if kept is None else dequantize(kept)
        yield attended.x
        yield from (sites["mlp_norm"],) if row.mlp_norm else ()
        yield sites["router" if "router" in sites else "mlp.post"]
        yield from (sites["mlp.output"], layer.x)
    yield from (trace.norm, trace.logits)


@dataclasses.dataclass(frozen=True)
class ParityCase:
    """Token ids and absolute positions, int32 `[B, T]`; -1 is padding, anywhere in a row.

    The first `num_cached` columns are run first and put into the cache; activations are those of
    the remaining columns. Both pieces have a token that is not padding in every row.
    """

    token_BT: np.ndarray
    position_BT: np.ndarray
    num_cached: int = 0

    @property
    def real_BT(self) -> np.ndarray:
        """Which tokens are compared: without padding and cached columns."""
        return (self.position_BT >= 0) & (np.arange(self.position_BT.shape[1]) >= self.num_cached)

    @property
    def pieces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and positions of the cached columns, if any, and of the remaining ones."""
        cut, both = self.num_cached, (self.token_BT, self.position_BT)
        cached = [(both[0][:, :cut], both[1][:, :cut])] if cut else []
        return [*cached, (both[0][:, cut:], both[1][:, cut:])]

    def check(self, config: ModelConfig, new_tokens: int = 0) -> None:
        """Raise TokenError unless the model can run this and `new_tokens` more; CapacityError if
        they cross LongRoPE's original context length.
        """
        check_tokens(config, self.token_BT, self.position_BT)
        if not all((position >= 0).any(axis=1).all() for _, position in self.pieces):
            raise TokenError(
                "every row of a case needs a token that is not padding, before and after `cached`"
            )
        length_B = self.position_BT.max(axis=1) + 1
        if length_B.max() + new_tokens > config.position_limit + 1:
            raise TokenError(
                f"text is too long: got {length_B.max()} tokens and {new_tokens} new ones,"
                f" the model's context is {config.position_limit}"
            )
        check_longrope_limit(length_B, length_B + new_tokens, config)


def pad_case(texts: Sequence[Sequence[int]], side: str = "left") -> ParityCase:
    """Return a case of texts of any lengths, padded on the left or on the right."""
    return ParityCase(*pad_texts(texts, left=side == "left"))


def example_case(texts: Sequence[int] | None, vocab_size: int, length: int) -> ParityCase:
    """Return a case of two rows padded on the left: `length` tokens, and two thirds as many.

    Args:
        texts: Token ids to use, one row after the other; if None or too short, ids are random, from
            a fixed seed.

    Raises:
        TokenError: For a length below one.
    """
    length = check_int("the length", length, 1, error=TokenError)
    lengths = (length, max(1, 2 * length // 3))
    ids = list(texts or ())
    if len(ids) < sum(lengths):
        ids = np.random.default_rng(0).integers(0, vocab_size, sum(lengths)).tolist()
    return pad_case([ids[:length], ids[length : sum(lengths)]])


class Backend(Protocol):
    """An implementation that runs cases; `dtype` is that of its activations."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    def activations(self, case: ParityCase) -> dict[str, np.ndarray]:
        """Return every activation by name, `[B, T, ...]` of the columns after `num_cached`."""
        ...

    def decode(
        self, case: ParityCase, steps: int, forced_BN: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Decode `steps` tokens after the case: greedily, or feeding the tokens of `forced_BN`.

        Returns what `decoded_arrays` does.
        """
        ...


def decoded_arrays(
    layers: Sequence[str], logits: Sequence[np.ndarray], entries: Sequence[Any], position_BS: Any
) -> dict[str, np.ndarray]:
    """Return the result of decoding by name, with cache entries by position instead of by slot.

    They are `cache {layer}.k` and `.v`, `[B, P, K, H]`, which positions all layers hold, `held`,
    bool `[B, P]`, and the logits of each step, `decoded logits`, `[B, N, V]`.

    Args:
        logits: `[B, V]` of each step.
        entries: Keys and values of each layer, `[B, S, K, H]`; a sliding window has only the last
            slots. Latents are keys without values; a layer without attention has none.
        position_BS: Absolute positions of all slots, negative for empty ones.
    """
    arrays = {}
    for layer, pair in zip(layers, entries, strict=True):
        for part, x_BSX in zip("kv", pair, strict=False):
            arrays[f"cache {layer}.{part}"] = to_positions(x_BSX, position_BS[:, -x_BSX.shape[1] :])
    fewest = min(x_BSX.shape[1] for pair in entries for x_BSX in pair)
    held_BS = position_BS[:, -fewest:]
    arrays["held"] = to_positions(np.ones(held_BS.shape, bool), held_BS)
    return {**arrays, LOGITS: np.stack(logits, axis=1)}


def to_positions(x_BSX: np.ndarray, position_BS: np.ndarray) -> np.ndarray:
    """Rearrange entries by slot `[B, S, ...]` to `[B, P, ...]` by position; missing ones are 0."""
    row, slot = np.nonzero(position_BS >= 0)
    shape = (len(x_BSX), int(position_BS.max()) + 1, *x_BSX.shape[2:])
    out_BPX = np.zeros(shape, x_BSX.dtype)
    out_BPX[row, position_BS[row, slot]] = x_BSX[row, slot]
    return out_BPX


@dataclasses.dataclass(frozen=True)
class JaxBackend:
    """This library, with full float32 precision of matmuls on accelerators too."""

    name: str
    model: Model
    params: Params

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return str(self.model.precision.activations)

    def activations(self, case: ParityCase) -> dict[str, np.ndarray]:
        """Return every activation, using a cache if the case has cached columns."""
        *cached, (token_BT, position_BT) = case.pieces
        with jax.default_matmul_precision("highest"):
            cache = self._prefill(case, cached, 0)[1] if cached else None
            arrays = activations(self.model, self.params, cache, token_BT, positions_BT=position_BT)
        return {name: np.asarray(to_host(x)) for name, x in arrays.items()}

    def decode(
        self, case: ParityCase, steps: int, forced_BN: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Run `prefill`, then a `decode_step` for each new token after the first."""
        with jax.default_matmul_precision("highest"):
            logits_BV, cache = self._prefill(case, case.pieces, steps)
            logits = [np.asarray(to_host(logits_BV))]
            for n in range(1, steps):
                before_B = logits[-1].argmax(axis=1) if forced_BN is None else forced_BN[:, n - 1]
                logits_BV, cache = decode_step(
                    self.model, self.params, cache, before_B.astype(np.int32), donate=True
                )
                logits.append(np.asarray(to_host(logits_BV)))
        k, v = (
            cache.unstack_layers([np.asarray(to_host(dequantize(x))) for x in entries])
            for entries in (cache.tail.k, cache.tail.v)
        )
        path = get_family(self.model.config.model_type).layers
        return decoded_arrays(
            [f"{path}.{layer}" for layer in range(len(k))],
            logits,
            [tuple(x for x in pair if x.shape[2]) for pair in zip(k, v, strict=True)],
            np.asarray(to_host(cache.position_BS)),
        )

    def _prefill(
        self, case: ParityCase, pieces: Sequence[tuple[np.ndarray, np.ndarray]], room: int
    ) -> tuple[Any, KVCache]:
        B, T = case.token_BT.shape
        kept = self.model.precision.cache
        logits_BV, cache = None, init_cache(self.model, B, T + room, dtype=kept)
        for tokens_BT, position_BT in pieces:
            logits_BV, cache = prefill(
                self.model, self.params, cache, tokens_BT, positions_BT=position_BT
            )
        return logits_BV, cache


def on_process_zero(make: Callable[[], Backend]) -> Any:
    """Return a backend that calls `make` and runs only on process 0, which broadcasts its results.

    If `make` raises a JaxllmError, all processes raise one with the same message.
    """
    made: list[Backend] = []

    def describe() -> str:
        made.append(make())
        return json.dumps((made[0].name, made[0].dtype))

    name, dtype = json.loads(broadcast_from_zero(describe))
    return SimpleNamespace(
        name=name,
        dtype=dtype,
        activations=lambda case: broadcast_arrays(lambda: made[0].activations(case)),
        decode=lambda *given: broadcast_arrays(lambda: made[0].decode(*given)),
    )
