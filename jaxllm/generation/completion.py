"""Completions of prompts: runs the decoder that the settings select, returns its result as text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.cache.prefix_reuse import reuse_prefix
from jaxllm.errors import CacheMismatchError, NonFiniteError, SamplingError, TokenError
from jaxllm.generation.config import GenerationConfig
from jaxllm.generation.loops.beam import beam_search
from jaxllm.generation.loops.contrastive import contrastive_search
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.generate import GenerateResult, generate
from jaxllm.generation.loops.guidance import generate_with_guidance
from jaxllm.generation.loops.prompt_lookup import PromptLookup
from jaxllm.generation.loops.speculative import speculative_generate
from jaxllm.generation.options import StoppingCriterion
from jaxllm.generation.options.table import (
    BEAM_SEARCH,
    CONTRASTIVE_SEARCH,
    GUIDANCE,
    PLAIN,
    SPECULATIVE,
)
from jaxllm.generation.sampling.sampler import row_keys
from jaxllm.ops.padding import pad_rows
from jaxllm.text.stream_decoder import StreamDecoder
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.paths import Params
from jaxllm.weights.types.lora import adapter_index, choose_adapters

FINISH_REASONS = {
    Finish.EOS: "eos",
    Finish.LENGTH: "length",
    Finish.STOP: "stop",
    Finish.CANCELLED: "cancelled",
}

TopLogprobs = list[tuple[int, float]]  # one step's token ids and log-probabilities, best first


class ModelBundle(NamedTuple):
    """The parts of a language model that decoding needs. adapters: names, in the order of the
    parameters; adapter: the default.
    """

    model: nn.Module
    params: Params
    tokenizer: Tokenizer | None
    adapters: tuple[str, ...] = ()
    adapter: str | None = None

    def adapter_index(self, name: str | None) -> int:
        """Return an adapter's index; None means the default. Raises ConfigError if unknown."""
        return adapter_index(self.adapter if name is None else name, self.adapters)

    def with_adapter(self, name: str | Sequence[str | None] | None) -> "ModelBundle":
        """Return a copy that uses this adapter, or one per batch row; None changes nothing."""
        if name is None:
            return self
        names = [name] if isinstance(name, str) else name
        numbers = list(map(self.adapter_index, names))
        if len(set(numbers)) == 1:  # one adapter serves any number of rows
            numbers = numbers[:1]
        choice_B = jax.device_put(np.array(numbers, np.int32))
        return self._replace(params=choose_adapters(self.params, choice_B))


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        text: without special tokens; None if the checkpoint has no tokenizer.
        tokens: ids, including the end-of-text token.
        logprobs: each token's log-probability under the model, before any sampler; only with plain
            generation.
        finish_reason: "eos", "length", "stop" (a stop string, which the text excludes, or a
            stopping criterion) or "cancelled" (only with `LM.serve`).
        cache: the cache of the whole call, one row per prompt. It holds the prompt and the
            continuation without its last token.
        top_logprobs: the likeliest tokens of each step, if requested.
        score: the score of a beam.
        draft_stats: with speculative decoding, the numbers of proposed and of accepted tokens.
        seed: the seed used, which reproduces a result of seed="random".
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
    cache: KVCache | None = dataclasses.field(default=None, repr=False, compare=False)
    top_logprobs: list[TopLogprobs] | None = None
    score: float | None = None
    draft_stats: tuple[int, int] | None = None
    seed: int = dataclasses.field(default=0, compare=False)


Decoder = Callable[[ModelBundle, list[list[int]], GenerationConfig], list[Completion]]


def complete_prompts(
    lm: ModelBundle, prompts: list[list[int]], settings: GenerationConfig
) -> list[Completion]:
    """Return `num_return_sequences` completions per prompt, in order, from the selected decoder."""
    _check_adapters(prompts, settings)
    found = _DECODERS[settings.mode](lm.with_adapter(settings.adapter), prompts, settings)
    seeds = settings.seed if isinstance(settings.seed, list) else [settings.seed] * len(found)
    return [dataclasses.replace(c, seed=s) for c, s in zip(found, seeds, strict=True)]


def _check_adapters(prompts: list[list[int]], settings: GenerationConfig) -> None:
    given = settings.adapter
    if given is None or isinstance(given, str):
        return
    if len(given) != len(prompts):
        raise SamplingError(
            f"adapter must be a name, or one for each of {len(prompts)} prompts, got {given!r:.60}"
        )
    if settings.mode not in (PLAIN, BEAM_SEARCH) and len(set(given)) > 1:
        raise SamplingError(f"{settings.mode} requires the same adapter for all prompts")


def generation_args(
    prompts: list[list[int]], settings: GenerationConfig
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the tokens `[B, T]` and keyword arguments of `generate` for these prompts."""
    cache, new = settings.cache, settings.max_new_tokens
    if cache is not None:
        if len(prompts) > 1:
            raise CacheMismatchError("a cache holds one prompt. Fork it for several")
        cache, rest = reuse_prefix(cache, prompts[0], int(np.max(new)))
        prompts = [rest]
    return pad_rows(prompts), {
        "max_new_tokens": new,
        "lengths_B": _lengths(prompts),
        "sampler": settings.sampler,
        "seed": _row_keys(settings.seed, len(prompts)),
        "eos_token_ids": settings.eos_token_ids,
        "chunk": settings.chunk,
        "cache": cache,
        "overflow": settings.overflow,
        "top_logprobs": settings.top_logprobs,
    }


def make_tracker(lm: ModelBundle, prompt: list[int], settings: GenerationConfig) -> "StopTracker":
    """Return the `StopTracker` of a prompt. Raises TokenError for stop strings without a
    tokenizer.
    """
    if lm.tokenizer is None and settings.stop_strings:
        raise TokenError("the checkpoint has no tokenizer, which stop_strings require")
    return StopTracker(lm.tokenizer, prompt, settings)


class StopTracker:
    """Incremental decoder of a continuation, up to a stop string or a stopping criterion."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], settings: GenerationConfig
    ) -> None:
        self._reader = StreamDecoder(tokenizer, prompt, settings.stop_strings)
        self._criteria = settings.stopping_criteria
        self._text: str | None = None if tokenizer is None else ""
        self._tokens: list[int] = []
        self.stopped = False

    def push(self, token: int) -> str:
        """Add one token; return the text that is now final."""
        piece = self._reader.push(token)
        if self._criteria:
            self._tokens.append(token)
            self._text = None if self._text is None else self._text + piece
            self.stopped = any(map(self._meets, self._criteria))
        self.stopped |= self._reader.has_stopped
        return piece

    def _meets(self, ends: StoppingCriterion) -> bool:
        """Return whether a stopping criterion ends the text. Raises SamplingError if it fails."""
        try:
            return bool(ends(self._text, [*self._tokens]))
        except (TypeError, AttributeError, ValueError) as error:
            raise SamplingError(
                "stopping_criteria must be functions (text, token ids) -> bool; one raised"
                f" {type(error).__name__}: {error!s:.200}"
            ) from error

    def flush(self) -> str:
        """Return the rest of the text after the last token."""
        return self._reader.flush()

    def decode_all(self, tokens: Sequence[int]) -> str | None:
        """Return the text of all tokens, pushed before or not; None without a tokenizer."""
        return self._reader.decode_all(tokens)


def to_finish_reason(finish: Finish, row: int, length: int) -> str | None:
    """Return the finish reason, None while running. Raises NonFiniteError for NaN logits."""
    if finish == Finish.NON_FINITE:
        raise NonFiniteError(
            f"the model returned NaN or infinite logits in row {row}, after {length} new tokens"
        )
    return FINISH_REASONS.get(finish)


def top_logprobs(step: GenerateResult, row: int, length: int) -> list[TopLogprobs]:
    """Return the likeliest tokens of each of a row's first `length` steps."""
    tokens = np.asarray(step.top_token_BTN)[row, :length].tolist()
    logprobs = np.asarray(step.top_logprob_BTN)[row, :length].tolist()
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, logprobs, strict=True)]


def _generate(
    lm: ModelBundle, prompts: list[list[int]], settings: GenerationConfig
) -> list[Completion]:
    prompts = [p for p in prompts for _ in range(settings.num_return_sequences)]
    tokens_BT, arguments = generation_args(prompts, settings)
    readers = [make_tracker(lm, p, settings) for p in prompts]
    if settings.checks_every_token:

        def check_stop(token_B: np.ndarray) -> np.ndarray:
            for reader, token in zip(readers, token_B.tolist(), strict=True):
                if token >= 0:
                    reader.push(token)
            return np.array([reader.stopped for reader in readers])

        arguments["until"] = check_stop
    result = generate(lm.model, lm.params, tokens_BT, **arguments)
    completions = []
    for row, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
        length = int(result.length_B[row])
        finish = to_finish_reason(Finish(int(result.finish_B[row])), row, length)
        assert finish is not None
        tokens = np.asarray(result.token_BT)[row, :length].tolist()
        completions.append(
            Completion(
                reader.decode_all(tokens),
                tokens,
                np.asarray(result.logprob_BT)[row, :length].tolist(),
                finish,
                len(prompt),
                result.cache,
                top_logprobs(result, row, length) if settings.top_logprobs else None,
            )
        )
    return completions


def _search_beams(
    lm: ModelBundle, prompts: list[list[int]], settings: GenerationConfig
) -> list[Completion]:
    if len(set(_per_prompt(settings.max_new_tokens, prompts))) > 1:
        raise SamplingError("beam search requires the same max_new_tokens for all prompts")
    n = settings.num_return_sequences
    result = beam_search(
        lm.model,
        lm.params,
        pad_rows(prompts),
        lengths_B=_lengths(prompts),
        max_new_tokens=int(np.max(settings.max_new_tokens)),
        num_return_sequences=n,
        eos_token_ids=settings.eos_token_ids,
        sampler=settings.sampler,
        chunk=settings.chunk,
        **settings.mode_options,
    )
    prompts = [prompt for prompt in prompts for _ in range(n)]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.device_get(result))
    found = _make_completions(lm, prompts, flat.token_BNT, flat.length_BN, flat.finish_BN, settings)
    return [
        dataclasses.replace(c, score=float(score))
        for c, score in zip(found, flat.score_BN, strict=True)
    ]


def _speculate(
    lm: ModelBundle, prompts: list[list[int]], settings: GenerationConfig
) -> list[Completion]:
    own = settings.mode_options
    assistant, lookup = own["assistant_model"], own["prompt_lookup_num_tokens"]
    draft = PromptLookup(ngram=own["max_matching_ngram_size"])
    result = speculative_generate(
        lm.model,
        lm.params,
        pad_rows(prompts),
        lengths_B=_lengths(prompts),
        draft=draft if assistant is None else (assistant.model, assistant.params),
        num_draft_tokens=lookup or own["num_assistant_tokens"],
        max_new_tokens=settings.max_new_tokens,
        sampler=settings.sampler,
        seed=_row_keys(settings.seed, len(prompts)),
        eos_token_ids=settings.eos_token_ids,
        chunk=settings.chunk,
    )
    rows = result.token_BT, result.length_B, result.finish_B
    found = _make_completions(lm, prompts, *rows, settings)
    return [
        dataclasses.replace(c, draft_stats=(int(proposed), int(accepted)))
        for c, proposed, accepted in zip(
            found, np.asarray(result.proposed_B), np.asarray(result.accepted_B), strict=True
        )
    ]


def _make_completions(
    lm: ModelBundle,
    prompts: list[list[int]],
    token_BT: Any,
    length_B: Any,
    finish_B: Any,
    settings: GenerationConfig,
) -> list[Completion]:
    """Convert rows of finished token ids to completions."""
    found = []
    rows = zip(np.asarray(token_BT), np.asarray(length_B), np.asarray(finish_B), strict=True)
    for row, (prompt, (token_T, length, finish)) in enumerate(zip(prompts, rows, strict=True)):
        why = to_finish_reason(Finish(int(finish)), row, int(length))
        found.append(
            _make_completion(lm, prompt, token_T[:length].tolist(), why or "length", settings)
        )
    return found


def _make_serial_decoder(decode: Callable[..., list[int]], *, samples: bool) -> Decoder:
    """Return a decoder that runs `decode` per prompt, with a sampler and a seed if it draws."""

    def decode_serially(
        lm: ModelBundle, prompts: list[list[int]], settings: GenerationConfig
    ) -> list[Completion]:
        new_B, seed_B = (
            _per_prompt(settings.max_new_tokens, prompts),
            _per_prompt(settings.seed, prompts),
        )
        found = []
        for prompt, new, seed in zip(prompts, new_B, seed_B, strict=True):
            drawing = {"sampler": settings.sampler, "seed": seed} if samples else {}
            ends = settings.eos_token_ids
            given = {
                "max_new_tokens": new,
                "eos_token_ids": ends,
                **drawing,
                **settings.mode_options,
            }
            tokens = decode(lm.model, lm.params, prompt, **given)
            finish = "eos" if tokens and tokens[-1] in ends else "length"
            found.append(_make_completion(lm, prompt, tokens, finish, settings))
        return found

    return decode_serially


def _make_completion(
    lm: ModelBundle, prompt: list[int], tokens: list[int], finish: str, settings: GenerationConfig
) -> Completion:
    """Convert finished token ids to a completion, truncated at a stop string or criterion."""
    reader, count = make_tracker(lm, prompt, settings), 0
    while count < len(tokens) and not reader.stopped:
        reader.push(tokens[count])
        count += 1
    tokens = tokens[:count]
    finish = "stop" if reader.stopped else finish
    return Completion(reader.decode_all(tokens), tokens, [], finish, len(prompt))


def _per_prompt(value: int | Sequence[int], prompts: list[list[int]]) -> list[int]:
    return list(value) if isinstance(value, Sequence) else [value] * len(prompts)


def _row_keys(seed: int | Sequence[int], rows: int) -> int | jax.Array:
    """Return one seed for all rows, or one random key per row if each row has a seed."""
    if not isinstance(seed, Sequence):
        return seed
    if len(seed) != rows:
        raise SamplingError(f"seed must be a number, or one for each of {rows} rows, got {seed}")
    return jnp.concatenate([row_keys(s, 1) for s in seed])


def _lengths(prompts: list[list[int]]) -> np.ndarray:
    return np.array([len(p) for p in prompts], np.int32)


_DECODERS: dict[str, Decoder] = {
    PLAIN: _generate,
    BEAM_SEARCH: _search_beams,
    SPECULATIVE: _speculate,
    CONTRASTIVE_SEARCH: _make_serial_decoder(contrastive_search, samples=False),
    GUIDANCE: _make_serial_decoder(generate_with_guidance, samples=True),
}
