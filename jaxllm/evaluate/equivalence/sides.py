"""What is compared: a case of input, and a side that runs it and shows every stage.

A side is this library with some weights in some format, or another implementation
(`reference.Transformers`). Both hand out numpy arrays in the same layouts, under the same names.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import numpy as np

from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.config import ModelConfig
from jaxllm.distributed import fetched
from jaxllm.errors import TokenError
from jaxllm.evaluate.equivalence.stages import check_tokens, stages
from jaxllm.inputs import check_border
from jaxllm.ops.entries import dense
from jaxllm.shapes import pad_texts
from jaxllm.steps import decode_step, prefill
from jaxllm.weights.paths import Params, by_layer


@dataclasses.dataclass(frozen=True)
class Case:
    """Token ids and absolute positions, int32 `[B, T]`; -1 is padding, anywhere in a row.

    cached: the first so many columns are run first and put into the cache; the stages are those of
    the columns after them. Both pieces have a real token in every row.
    """

    token_BT: np.ndarray
    position_BT: np.ndarray
    cached: int = 0

    @property
    def real_BT(self) -> np.ndarray:
        """Which tokens the stages are compared at: no padding, nothing that was cached before."""
        return (self.position_BT >= 0) & (np.arange(self.position_BT.shape[1]) >= self.cached)

    @property
    def pieces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and positions of what is run before, if anything, and of what is looked at."""
        cut = [0, self.cached] if self.cached else [0]
        return [
            (self.token_BT[:, a:b], self.position_BT[:, a:b])
            for a, b in zip(cut, [*cut[1:], None], strict=True)
        ]

    def check(self, config: ModelConfig, new_tokens: int = 0) -> None:
        """Raise TokenError unless this, and `new_tokens` after it, can be run by the model;
        CapacityError where they cross LongRoPE's border.
        """
        check_tokens(config, self.token_BT, self.position_BT)
        if not all((position >= 0).any(axis=1).all() for _, position in self.pieces):
            raise TokenError("every row of a case needs a real token, before and after `cached`")
        last = int(self.position_BT.max()) + new_tokens
        if last > config.position_limit:
            raise TokenError(
                f"a text of {last - new_tokens + 1} tokens and {new_tokens} new ones exceed the"
                f" model's context of {config.position_limit}"
            )
        length_B = self.position_BT.max(axis=1) + 1
        check_border(length_B, length_B + new_tokens, config)


class Decoded(NamedTuple):
    """What decoding N tokens through a cache gives.

    logits_BNV: what each token was chosen by. token_BN: int, each step's best. k, v: the cache's
    entries afterwards, one `[B, P, K, H]` a layer, by position; held_BP: where there are any.
    """

    logits_BNV: np.ndarray
    token_BN: np.ndarray
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    held_BP: np.ndarray


class Side(Protocol):
    """Whatever can run a case. name: for people. dtype: of the activations."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    def stages(self, case: Case) -> dict[str, np.ndarray]:
        """Every stage of the case by name, `[B, T, ...]` of the columns after `cached`."""
        ...

    def decode(self, case: Case, steps: int, text_BN: np.ndarray | None = None) -> Decoded:
        """`steps` tokens after the case: the best ones, or those of `text_BN`."""
        ...


@dataclasses.dataclass(frozen=True)
class Ours:
    """This library. Float32 products are asked to be float32, on accelerators too."""

    name: str
    model: nn.Module
    params: Params

    @property
    def dtype(self) -> str:
        """Of the activations."""
        return str(self.model.precision.activations)

    def stages(self, case: Case) -> dict[str, np.ndarray]:
        """Every stage, through a cache where the case has one."""
        with jax.default_matmul_precision("highest"):
            cache = self._prefilled(case, case.pieces[:-1], 0)[1] if case.cached else None
            tokens_BT, position_BT = case.pieces[-1]
            found = stages(self.model, self.params, cache, tokens_BT, positions_BT=position_BT)
        return {name: np.asarray(fetched(x)) for name, x in found.items()}

    def decode(self, case: Case, steps: int, text_BN: np.ndarray | None = None) -> Decoded:
        """`prefill`, then a `decode_step` for each token after the first."""
        with jax.default_matmul_precision("highest"):
            logits_BV, cache = self._prefilled(case, case.pieces, steps)
            found = [np.asarray(fetched(logits_BV))]
            for n in range(1, steps):
                before = found[-1].argmax(axis=1) if text_BN is None else text_BN[:, n - 1]
                logits_BV, cache = decode_step(
                    self.model, self.params, cache, before.astype(np.int32), donate=True
                )
                found.append(np.asarray(fetched(logits_BV)))
        logits_BNV = np.stack(found, axis=1)
        position_BS = np.asarray(fetched(cache.position_BS))
        k, v = (
            tuple(
                by_position(x, position_BS)
                for x in by_layer(self.model, [np.asarray(fetched(dense(x))) for x in entries])
            )
            for entries in (cache.tail.k, cache.tail.v)
        )
        return Decoded(logits_BNV, logits_BNV.argmax(axis=2), k, v, held(position_BS))

    def _prefilled(
        self, case: Case, pieces: Sequence[tuple[np.ndarray, np.ndarray]], room: int
    ) -> tuple[Any, KVCache]:
        B, T = case.token_BT.shape
        kept = self.model.precision.cache
        logits_BV, cache = None, init_cache(self.model, B, T + room, dtype=kept)
        for tokens_BT, position_BT in pieces:
            logits_BV, cache = prefill(
                self.model, self.params, cache, tokens_BT, positions_BT=position_BT
            )
        return logits_BV, cache


def padded(texts: Sequence[Sequence[int]], side: str = "left") -> Case:
    """Texts of any lengths as one batch, padded on the left or on the right."""
    return Case(*pad_texts(texts, left=side == "left"))


def by_position(x_BSX: np.ndarray, position_BS: np.ndarray) -> np.ndarray:
    """Entries of slots, `[B, S, ...]`, by their positions, `[B, P, ...]`; zeros where none is."""
    row, slot = np.nonzero(position_BS >= 0)
    shape = (len(x_BSX), int(position_BS.max()) + 1, *x_BSX.shape[2:])
    out_BPX = np.zeros(shape, x_BSX.dtype)
    out_BPX[row, position_BS[row, slot]] = x_BSX[row, slot]
    return out_BPX


def held(position_BS: np.ndarray) -> np.ndarray:
    """Which positions the slots hold, bool `[B, P]`."""
    return by_position(np.ones(position_BS.shape, bool), position_BS)
