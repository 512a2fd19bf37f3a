"""Run inputs of any length through one static-shape program: split, pad and mask on the host."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxllm import ops
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, ConfigError, TokenError
from jaxllm.export.static_cache import StaticCache, assign_slots, empty_cache, make_past, pad_cache
from jaxllm.export.step import Mask, StepSignature, check_signature, run_step
from jaxllm.models.inputs import as_vectors, check_model, check_shape
from jaxllm.ops.padding import pad_rows
from jaxllm.runtime.validation import check_int, check_token_ids, is_number
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


class RunnerInput(NamedTuple):
    """Token ids int32 `[B, L]`, or embeddings float32 `[B, L, D]` instead.

    mask_BL: bool, True for real tokens; padding has id 0.
    """

    token_BL: np.ndarray
    vector_BLD: np.ndarray | None
    mask_BL: np.ndarray

    @property
    def batch(self) -> int:
        return self.mask_BL.shape[0]

    @property
    def length(self) -> int:
        return self.mask_BL.shape[1]


@dataclasses.dataclass(frozen=True, eq=False)
class FixedOutput:
    """Result of a runner.

    Attributes:
        logits: float32 `[B, L, V]` on the host; undefined for padding.
        past: for the next call.
        mask: bool `[B, L]`, True for real tokens.
    """

    logits: np.ndarray
    past: StaticCache
    mask: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class FixedShapeRunner:
    """Runs a model on exactly `num_tokens` tokens against `max_tokens - num_tokens` cache slots.

    Longer inputs are split, shorter ones padded on the left or right. Each batch size compiles one
    program, whatever the lengths (a second one for embeddings, if both are used). Results equal
    those of `jaxllm.forward`.

    Use an additive mask only if a graph requires it. A mask_value of -50, common in quantized
    graphs, is wrong if a real score is 50 or more below a masked one, and a query without a visible
    token, such as padding, attends to all tokens. In float16 a value below -65504 is -inf, and such
    a query yields NaN.

    Attributes:
        rotary: Pass the RoPE cosines and sines as inputs of the step.
        mask: "positions", or a combined causal and padding mask ("boolean" or "additive") as an
            input of the step.
        mask_value: Added to masked scores by an additive mask.
        step: Runs instead of the model, `inputs -> outputs` as for `make_step`: an exported step,
            or another compiler's session.

    Raises:
        ConfigError: For invalid lengths, names or values.
    """

    model: Model
    params: Params
    num_tokens: int
    max_tokens: int
    tokenizer: Tokenizer | None = None
    padding: Literal["left", "right"] = "left"
    rotary: bool = False
    mask: Mask = "positions"
    mask_value: float = -50.0
    step: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        check_model(self.model, self.params)
        check_lengths(self.model, self.num_tokens, self.max_tokens)
        if self.padding not in ("left", "right"):
            raise ConfigError(f"padding must be 'left' or 'right', got {self.padding!r:.40}")
        if not (is_number(self.mask_value) and -np.inf < self.mask_value < 0):
            raise ConfigError(
                f"mask_value must be finite and negative, got {self.mask_value!r:.40}"
            )
        check_signature(self.model, self.signature(embeddings=False))

    @property
    def capacity(self) -> int:
        """Number of cache slots: the maximum number of tokens before a call's last piece."""
        return self.max_tokens - self.num_tokens

    def signature(self, *, embeddings: bool) -> StepSignature:
        """Return the signature of the step."""
        return StepSignature(embeddings=embeddings, rotary=self.rotary, mask=self.mask)

    def __call__(
        self,
        *,
        text: str | Sequence[str] | None = None,
        tokens: Any = None,
        embeddings: Any = None,
        mask: Any = None,
        past: StaticCache | None = None,
    ) -> FixedOutput:
        """Run an input of any length L: exactly one of text, tokens and embeddings.

        Args:
            text: One or several texts; a begin-of-text token is added if the tokenizer adds one.
            tokens: Ids `[B, L]`, or lists of unequal lengths.
            embeddings: `[B, L, D]` in place of rows of the embedding table.
            mask: `[B, L]`, 1 for real tokens; padding may be anywhere.
            past: From an earlier call, or other keys and values in at most `capacity` slots.

        Raises:
            TokenError: For an invalid input.
            CapacityError: If the text exceeds `max_tokens`.
            CacheMismatchError: If `past` belongs to another model or batch size.
        """
        config = self.model.config
        source = read_input(config, self.tokenizer, self.padding, text, tokens, embeddings, mask)
        nothing = empty_cache(config, self.model.precision.cache, source.batch, self.capacity)
        past = nothing if past is None else pad_cache(past, nothing, self.padding)
        form = self.signature(embeddings=source.vector_BLD is not None)
        position_BL = _positions(past, source.mask_BL)
        length_B = position_BL.max(axis=1, initial=-1) + 1
        self._check_room(past, position_BL)
        pieces = []
        for columns in self._chunk_columns(source.length):
            inputs, after_BS, missing = self._make_inputs(
                source, past, position_BL, columns, length_B
            )
            if self.step is not None:
                outputs = self.step(inputs)
            else:
                outputs = _STEP(self.model, form, self.params, inputs)
            past = make_past(past, outputs, after_BS, missing)
            pieces.append(np.asarray(outputs["logits"])[:, self._step_columns(columns)])
        return FixedOutput(np.concatenate(pieces, axis=1), past, source.mask_BL)

    def _chunk_columns(self, length: int) -> Iterator[slice]:
        """Yield the columns of each piece, the short one first: the last piece needs no slots."""
        stop = (length - 1) % self.num_tokens + 1
        yield slice(0, stop)
        for start in range(stop, length, self.num_tokens):
            yield slice(start, start + self.num_tokens)

    def _step_columns(self, columns: slice) -> slice:
        """Return the step's columns for a piece's columns."""
        width = columns.stop - columns.start
        start = self.num_tokens - width if self.padding == "left" else 0
        return slice(start, start + width)

    def _make_inputs(
        self,
        source: RunnerInput,
        past: StaticCache,
        position_BL: np.ndarray,
        columns: slice,
        length_B: np.ndarray,
    ) -> tuple[dict[str, Any], np.ndarray, int]:
        """Return a piece's inputs, the slots' positions after it, and the tokens without a slot."""
        at, config = self._step_columns(columns), self.model.config

        def pad_columns(x_BL: np.ndarray, fill: int) -> np.ndarray:
            x_BT = np.full((x_BL.shape[0], self.num_tokens, *x_BL.shape[2:]), fill, x_BL.dtype)
            x_BT[:, at] = x_BL[:, columns]
            return x_BT

        position_BT = pad_columns(position_BL, -1)
        slot_BT, after_BS, missing = assign_slots(past.position_BS, position_BT)
        inputs: dict[str, Any] = {"slots": slot_BT}
        if source.vector_BLD is not None:
            dtype = self.model.precision.activations
            inputs["inputs_embeds"] = pad_columns(source.vector_BLD, 0).astype(dtype)
        else:
            inputs["input_ids"] = pad_columns(source.token_BL, 0)
        if self.mask == "positions" or not self.rotary:
            inputs["position_ids"] = position_BT
        if self.rotary:
            cos_BTF, sin_BTF = _ROPE(
                config.ropes[0],
                position_BT,
                length_B,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
            )
            inputs["cos"], inputs["sin"] = cos_BTF[:, None], sin_BTF[:, None]
        elif config.rope_depends_on_length:
            inputs["length"] = length_B
        if self.mask == "positions":
            inputs["past_position_ids"] = past.position_BS
        else:
            seen_BTS = self._attention_mask(past.position_BS, position_BT)[:, None]
            value = np.float32(self.mask_value)
            inputs["attention_mask"] = (
                seen_BTS if self.mask == "boolean" else np.where(seen_BTS, np.float32(0), value)
            )
        for i, (k, v) in enumerate(zip(past.k, past.v, strict=True)):
            inputs[f"past_key_values.{i}.key"], inputs[f"past_key_values.{i}.value"] = k, v
        return inputs, after_BS, missing

    def _attention_mask(self, past_BS: np.ndarray, position_BT: np.ndarray) -> np.ndarray:
        """Return the combined mask, bool `[B, T, S + T]`: cache slots, then new tokens."""
        all_BS: Any = np.concatenate([past_BS, position_BT], axis=1)
        queries: Any = position_BT
        return np.asarray(ops.visible(queries, all_BS, window=self.model.config.window(0)))

    def _check_room(self, past: StaticCache, position_BL: np.ndarray) -> None:
        """Raise CapacityError if more tokens precede the last piece than there are slots."""
        limit = self.model.config.position_limit
        if position_BL.max(initial=-1) >= limit:
            raise TokenError(
                f"position {position_BL.max()} is too large, expected less than {limit}"
            )
        last = max(position_BL.shape[1] - self.num_tokens, 0)
        held_B = (past.position_BS >= 0).sum(axis=1)
        before_B = held_B + (position_BL[:, :last] >= 0).sum(axis=1)
        if (before_B > self.capacity).any():
            row = int(before_B.argmax())
            count = int((position_BL[row] >= 0).sum())
            raise CapacityError(
                f"row {row}: {held_B[row]} past and {count} new tokens do not fit: at most"
                f" {self.capacity} may precede the last {self.num_tokens}"
                f" (max_tokens {self.max_tokens})"
            )


def check_lengths(model: Model, num_tokens: int, max_tokens: int) -> None:
    """Raise ConfigError for invalid lengths."""
    check_int("num_tokens", num_tokens, 1, error=ConfigError)
    check_int("max_tokens", max_tokens, 1, error=ConfigError)
    if max_tokens <= num_tokens:
        raise ConfigError(
            f"max_tokens ({max_tokens}) must exceed num_tokens ({num_tokens}); the rest is cache"
        )
    if max_tokens > model.config.context_length:
        raise ConfigError(
            f"max_tokens ({max_tokens}) exceeds the model's context of"
            f" {model.config.context_length}"
        )


def _positions(past: StaticCache, mask_BL: np.ndarray) -> np.ndarray:
    """Number real tokens after the past, as transformers does; padding is -1."""
    next_B = np.maximum(past.position_BS.max(axis=1), -1) + 1
    count_BL = np.cumsum(mask_BL, axis=1, dtype=np.int32)
    return np.where(mask_BL, next_B[:, None] + count_BL - 1, -1).astype(np.int32)


_STEP = jax.jit(run_step, static_argnums=(0, 1))
_ROPE = partial(jax.jit, static_argnums=0, static_argnames=("head_dim", "max_position_embeddings"))(
    ops.rope_angles
)


def read_input(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    padding: str,
    text: str | Sequence[str] | None,
    tokens: Any,
    embeddings: Any,
    mask: Any,
) -> RunnerInput:
    """Validate an input, and pad rows of unequal lengths on one side. Raises TokenError."""
    named = {"text": text, "tokens": tokens, "embeddings": embeddings}
    names = [name for name, value in named.items() if value is not None]
    if len(names) != 1:
        got = " and ".join(names) or "none"
        raise TokenError(f"expected exactly one of text, tokens and embeddings; got {got}")
    if embeddings is not None:
        vector_BLD = as_vectors(embeddings, "B, T", config.hidden_size)
        mask_BL = _check_mask(mask, vector_BLD.shape[:2])
        return RunnerInput(
            np.zeros(mask_BL.shape, np.int32), _zero_padding(vector_BLD, mask_BL), mask_BL
        )
    rows = _encode_text(tokenizer, text) if text is not None else tokens
    if text is not None or _is_ragged(rows):
        if mask is not None:
            raise TokenError("mask requires an array [B, T], not text or rows of unequal lengths")
        token_BL, mask_BL = _pad_ids(rows, padding)
    else:
        token_BL = _check_id_array(rows)
        mask_BL = _check_mask(mask, token_BL.shape)
    check_token_ids(token_BL, config.vocab_size, real_X=mask_BL)
    return RunnerInput(np.where(mask_BL, token_BL, 0).astype(np.int32), None, mask_BL)


def _encode_text(tokenizer: Tokenizer | None, text: str | Sequence[str]) -> list[list[int]]:
    if tokenizer is None:
        raise TokenError("text requires a tokenizer. Pass one to the runner, or pass token ids")
    texts = [text] if isinstance(text, str) else list(text)
    return [tokenizer.encode(t, bos=tokenizer.adds_bos) for t in texts]


def _is_ragged(rows: Any) -> bool:
    """Return whether these are lists of unequal lengths."""
    if isinstance(rows, jax.Array | np.ndarray) or not isinstance(rows, Sequence):
        return False
    return len({np.shape(row) for row in rows}) > 1


def _pad_ids(rows: Sequence[Any], padding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of ids as one array, padded on one side, and its mask."""
    lists = [
        _check_id_array([row])[0] if len(row) else _raise_empty_row(r) for r, row in enumerate(rows)
    ]
    if not lists:
        raise TokenError("the input has no rows")
    left, masks = padding == "left", [[1] * len(ids) for ids in lists]
    # int64, because ids have not been checked against the vocabulary yet.
    return pad_rows(lists, left=left, dtype=np.int64), pad_rows(masks, left=left, dtype=bool)


def _raise_empty_row(row: int) -> np.ndarray:
    raise TokenError(f"row {row} has no tokens")


def _check_id_array(tokens: Any) -> np.ndarray:
    token_BL = np.asarray(tokens)
    check_shape(token_BL)
    if token_BL.dtype.kind not in "iu":
        raise TokenError(f"tokens must be integers, got {token_BL.dtype}")
    return token_BL


def _zero_padding(vector_BLD: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
    """Set padding to zero; raise TokenError unless all other vectors are finite."""
    vector_BLD = np.where(mask_BL[:, :, None], vector_BLD, np.float32(0))
    if not np.isfinite(vector_BLD).all():
        row, column = np.argwhere(~np.isfinite(vector_BLD).all(axis=2))[0]
        raise TokenError(f"embeddings must be finite, but row {row}, column {column} is not")
    return vector_BLD


def _check_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    if mask is None:
        return np.ones(shape, bool)
    mask_BL = np.asarray(mask)
    if mask_BL.shape != shape:
        raise TokenError(f"mask must have the input's shape {shape}, got {mask_BL.shape}")
    if not ((mask_BL == 0) | (mask_BL == 1)).all():
        raise TokenError("mask must be 1 for real tokens and 0 for padding, got other values")
    return mask_BL.astype(bool)
