"""Backends of the parity check, and the cases that they run.

A backend is this library with weights in some format, or another implementation
(`transformers_backend`). All return numpy arrays with the same layouts and names.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.config.model import ModelConfig
from jaxllm.errors import TokenError
from jaxllm.evaluate.parity.activations import activations, check_tokens
from jaxllm.models.inputs import check_longrope_limit
from jaxllm.ops.kv_quant import dequantize
from jaxllm.ops.padding import pad_texts
from jaxllm.runtime.multihost import to_host
from jaxllm.steps import decode_step, prefill
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True)
class ParityCase:
    """Token ids and absolute positions, int32 `[B, T]`; -1 is padding, anywhere in a row.

    num_cached: number of leading columns that are run first and put into the cache; activations are
    those of the remaining columns. Both pieces have a token that is not padding in every row.
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
        cut = [0, self.num_cached] if self.num_cached else [0]
        return [
            (self.token_BT[:, a:b], self.position_BT[:, a:b])
            for a, b in zip(cut, [*cut[1:], None], strict=True)
        ]

    def check(self, config: ModelConfig, new_tokens: int = 0) -> None:
        """Raise TokenError unless the model can run this and `new_tokens` more; CapacityError if
        they cross LongRoPE's original context length.
        """
        check_tokens(config, self.token_BT, self.position_BT)
        if not all((position >= 0).any(axis=1).all() for _, position in self.pieces):
            raise TokenError(
                "every row of a case needs a token that is not padding, before and after `cached`"
            )
        last = int(self.position_BT.max()) + new_tokens
        if last > config.position_limit:
            raise TokenError(
                f"text is too long: got {last - new_tokens + 1} tokens and {new_tokens} new ones,"
                f" the model's context is {config.position_limit}"
            )
        length_B = self.position_BT.max(axis=1) + 1
        check_longrope_limit(length_B, length_B + new_tokens, config)


class DecodeOutput(NamedTuple):
    """The output of decoding N tokens through a cache.

    logits_BNV: logits of each step. token_BN: int, the argmax of each step. k, v: final cache
    entries by position, one `[B, P, K, H]` per layer. held_BP: which positions the cache holds.
    """

    logits_BNV: np.ndarray
    token_BN: np.ndarray
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    held_BP: np.ndarray


class Backend(Protocol):
    """A backend: runs cases. name: for reports. dtype: of the activations."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    def activations(self, case: ParityCase) -> dict[str, np.ndarray]:
        """Return every activation by name, `[B, T, ...]` of the columns after `num_cached`."""
        ...

    def decode(
        self, case: ParityCase, steps: int, forced_BN: np.ndarray | None = None
    ) -> DecodeOutput:
        """Decode `steps` tokens after the case: greedily, or feeding the tokens of `forced_BN`."""
        ...


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
        with jax.default_matmul_precision("highest"):
            cache = self._prefill(case, case.pieces[:-1], 0)[1] if case.num_cached else None
            tokens_BT, position_BT = case.pieces[-1]
            arrays = activations(
                self.model, self.params, cache, tokens_BT, positions_BT=position_BT
            )
        return {name: np.asarray(to_host(x)) for name, x in arrays.items()}

    def decode(
        self, case: ParityCase, steps: int, forced_BN: np.ndarray | None = None
    ) -> DecodeOutput:
        """Run `prefill`, then a `decode_step` for each new token after the first."""
        with jax.default_matmul_precision("highest"):
            logits_BV, cache = self._prefill(case, case.pieces, steps)
            logits = [np.asarray(to_host(logits_BV))]
            for n in range(1, steps):
                before = logits[-1].argmax(axis=1) if forced_BN is None else forced_BN[:, n - 1]
                logits_BV, cache = decode_step(
                    self.model, self.params, cache, before.astype(np.int32), donate=True
                )
                logits.append(np.asarray(to_host(logits_BV)))
        logits_BNV = np.stack(logits, axis=1)
        position_BS = np.asarray(to_host(cache.position_BS))
        k, v = (
            tuple(
                to_positions(x, position_BS)
                for x in cache.unstack_layers([np.asarray(to_host(dequantize(x))) for x in entries])
            )
            for entries in (cache.tail.k, cache.tail.v)
        )
        return DecodeOutput(
            logits_BNV, logits_BNV.argmax(axis=2), k, v, filled_positions(position_BS)
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


def pad_case(texts: Sequence[Sequence[int]], side: str = "left") -> ParityCase:
    """Return a case of texts of any lengths, padded on the left or on the right."""
    return ParityCase(*pad_texts(texts, left=side == "left"))


def to_positions(x_BSX: np.ndarray, position_BS: np.ndarray) -> np.ndarray:
    """Rearrange entries by slot `[B, S, ...]` to `[B, P, ...]` by position; missing ones are 0."""
    row, slot = np.nonzero(position_BS >= 0)
    shape = (len(x_BSX), int(position_BS.max()) + 1, *x_BSX.shape[2:])
    out_BPX = np.zeros(shape, x_BSX.dtype)
    out_BPX[row, position_BS[row, slot]] = x_BSX[row, slot]
    return out_BPX


def filled_positions(position_BS: np.ndarray) -> np.ndarray:
    """Return which positions the slots hold, bool `[B, P]`."""
    return to_positions(np.ones(position_BS.shape, bool), position_BS)
