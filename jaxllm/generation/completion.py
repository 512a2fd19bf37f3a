"""Completions: what a decoder gets (`LanguageModel`, `GenerationConfig`) and returns."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.cache.prefix_reuse import reuse_prefix
from jaxllm.errors import (
    CacheMismatchError,
    GrammarError,
    NonFiniteError,
    SamplingError,
    TokenError,
)
from jaxllm.generation.loops.draft import DraftStats
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.generate import GenerateKwargs, GenerateResult
from jaxllm.generation.loops.overflow import OverflowPolicy
from jaxllm.generation.sampling.sampler import Sampler, row_keys
from jaxllm.grammar.grammar import Matcher
from jaxllm.models.inputs import CheckedPrompts
from jaxllm.ops.padding import pad_rows
from jaxllm.steps import EditMap
from jaxllm.text.detokenizer import StreamDecoder
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

FINISH_REASONS = {
    Finish.EOS: "eos",
    Finish.LENGTH: "length",
    Finish.STOP: "stop",
    Finish.CANCELLED: "cancelled",
}

# (text, token ids) of a continuation so far -> whether it ends here
StoppingCriterion = Callable[[str | None, list[int]], bool]
TopLogprobs = list[tuple[int, float]]  # one step's token ids and log-probabilities, best first


@runtime_checkable
class LanguageModel(Protocol):
    """The part of `jaxllm.LM` that decoders use."""

    @property
    def model(self) -> Model: ...
    @property
    def params(self) -> Params: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    def adapter_index(self, name: str | None) -> int: ...
    def with_row_adapters(self, names: Sequence[str | None]) -> Self: ...


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Options of one call of `LM.generate` or `LM.stream`; most fields have the options' names.

    Attributes:
        max_new_tokens: A number, or one per sequence.
        seed: Likewise; "random" is replaced by the number drawn for it.
        adapter: A name, or one per prompt; None means the default adapter.
        matcher: The state of the grammar at the beginning of a text; None without a grammar.
        edits: For all rows, as for `generate`.
    """

    decoder: "Decoder"
    max_new_tokens: int | list[int]
    sampler: Sampler
    seed: int | list[int]
    eos_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    stopping_criteria: tuple[StoppingCriterion, ...]
    top_logprobs: int
    overflow: OverflowPolicy | None
    num_return_sequences: int
    chunk: int | None
    cache: KVCache | None
    batch_invariant: bool
    adapter: str | list[str | None] | None
    matcher: Matcher | None
    fast_forward: bool
    edits: EditMap | None

    @property
    def checks_every_token(self) -> bool:
        """Return whether Python must decide after each token whether to continue."""
        return bool(self.stop_strings or self.stopping_criteria)

    def can_fast_forward(self, rows: int) -> bool:
        """Return whether to run tokens that the grammar forces in one pass."""
        if self.matcher is None or not self.fast_forward or rows > 1 or self.overflow is not None:
            return False
        return self.matcher.can_force


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        text: without special tokens; None if the checkpoint has no tokenizer.
        tokens: ids, including the end-of-text token.
        logprobs: each token's log-probability under the model, before any sampler; only with plain
            generation and speculative decoding.
        finish_reason: "eos", "length", "stop" (a stop string, which the text excludes, or a
            stopping criterion) or "cancelled" (only with `LM.serve`).
        cache: the cache of the whole call, one row per prompt. It holds the prompt and the
            continuation without its last token.
        top_logprobs: the likeliest tokens of each step, if requested.
        score: the score of a beam.
        draft_stats: with speculative decoding, the numbers of proposed and of accepted tokens, and
            of drafts.
        seed: the seed used, which reproduces a result of seed="random".
        grammar_complete: whether the text is one of the grammar, None without one. A text that
            ends by its limit of tokens, a stop string or a criterion may be only a beginning.
        cached_tokens: prompt tokens that came from the prefix cache of `LM.serve`.
        sites: what a request of `LM.serve` read, by site, as in `GenerateResult.sites`.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
    cache: KVCache | None = dataclasses.field(default=None, repr=False, compare=False)
    top_logprobs: list[TopLogprobs] | None = None
    score: float | None = None
    draft_stats: DraftStats | None = None
    seed: int = dataclasses.field(default=0, compare=False)
    grammar_complete: bool | None = None
    cached_tokens: int = dataclasses.field(default=0, compare=False)
    sites: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """One token of a stream; `str(piece)` is its text.

    Attributes:
        text: the text that this token completes; "" in the middle of a character.
        token: its id.
        logprob: its log-probability under the model, before any sampler.
        finish_reason: None until the last piece.
        tokens_per_second: measured from the second token on, because the first step compiles.
        cache: the cache of the text before this token. The next step overwrites it; the cache of
            the last piece stays valid. None if several requests share a batch.
        top_logprobs: the likeliest tokens of this step, if requested.
        seed: the seed of the call.
        grammar_complete: whether the text so far is one of the grammar, None without one.
        sites: what a request of `LM.serve` read in the step that predicted this token.
    """

    text: str
    token: int
    logprob: float
    finish_reason: str | None
    tokens_per_second: float
    cache: KVCache | None = dataclasses.field(repr=False)
    top_logprobs: TopLogprobs | None = None
    seed: int = 0
    grammar_complete: bool | None = None
    sites: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        """Return the text, so that `print(piece, end="")` prints the stream."""
        return self.text


@dataclasses.dataclass(frozen=True)
class Decoder(ABC):
    """A decoding method: a frozen dataclass. Its fields are the options that only it takes.

    name: for messages. samples: whether it takes a sampler and sampling options. mixes_adapters:
    whether prompts may have different adapters.
    """

    name: ClassVar[str]
    samples: ClassVar[bool] = True
    mixes_adapters: ClassVar[bool] = False

    @abstractmethod
    def run(
        self, lm: LanguageModel, prompts: list[list[int]], config: GenerationConfig
    ) -> list[Completion]:
        """Return `num_return_sequences` completions per prompt, in order."""

    def rows_per_prompt(self, num_return_sequences: int) -> int:
        """Return the number of batch rows that decode one prompt."""
        return num_return_sequences


def select_adapters(lm: LanguageModel, prompts: int, config: GenerationConfig) -> LanguageModel:
    """Return the model with the adapters that a call asks for, one or one per prompt."""
    adapter = config.adapter
    if isinstance(adapter, list):
        _check_row_adapters(adapter, prompts, config.decoder)
    if adapter is None:
        return lm
    return lm.with_row_adapters([adapter] if isinstance(adapter, str) else adapter)


def _check_row_adapters(names: list[str | None], prompts: int, decoder: Decoder) -> None:
    if len(names) != prompts:
        raise SamplingError(
            f"adapter must be a name, or one for each of {prompts} prompts, got {names!r:.60}"
        )
    if not decoder.mixes_adapters and len(set(names)) > 1:
        raise SamplingError(f"{decoder.name} requires the same adapter for all prompts")


def generation_args(
    prompts: list[list[int]], config: GenerationConfig
) -> tuple[CheckedPrompts, GenerateKwargs]:
    """Return the prompts and keyword arguments of `generate`."""
    cache = config.cache
    if cache is not None:
        if len(prompts) > 1:
            raise CacheMismatchError("a cache holds one prompt. Fork it for several")
        cache, rest = reuse_prefix(cache, prompts[0], int(np.max(config.max_new_tokens)))
        prompts = [rest]
    return pad_prompts(prompts), {
        "max_new_tokens": config.max_new_tokens,
        "sampler": config.sampler,
        "seed": seed_keys(config.seed, len(prompts)),
        "eos_token_ids": config.eos_token_ids,
        "chunk": config.chunk,
        "cache": cache,
        "overflow": config.overflow,
        "top_logprobs": config.top_logprobs,
        "edits": config.edits,
    }


class StopTracker:
    """Incremental decoder of a continuation, up to a stop string or a stopping criterion.

    Raises TokenError for stop strings without a tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], config: GenerationConfig
    ) -> None:
        if tokenizer is None and config.stop_strings:
            raise TokenError("the checkpoint has no tokenizer, which stop_strings require")
        self._decoder = StreamDecoder(tokenizer, prompt, config.stop_strings)
        self._criteria = config.stopping_criteria
        self._text: str | None = None if tokenizer is None else ""
        self._tokens: list[int] = []
        self._matcher = config.matcher
        self._count = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Add one token; return the text that is now final.

        Raises GrammarError for one that the grammar does not allow: no other was left.
        """
        self._count += 1
        piece = self._decoder.push(token)
        self._matcher = _follow_grammar(self._matcher, token)
        if self._criteria:
            self._tokens.append(token)
            self._text = None if self._text is None else self._text + piece
            self.stopped = any(map(self._meets, self._criteria))
        self.stopped |= self._decoder.has_stopped
        return piece

    def _meets(self, criterion: StoppingCriterion) -> bool:
        """Return whether a stopping criterion ends the text. Raises SamplingError if it fails."""
        try:
            return bool(criterion(self._text, [*self._tokens]))
        except (TypeError, AttributeError, ValueError) as error:
            raise SamplingError(
                "stopping_criteria must be functions (text, token ids) -> bool; one raised"
                f" {type(error).__name__}: {error!s:.200}"
            ) from error

    def push_all(self, tokens: Sequence[int]) -> None:
        """Push the tokens that are new since the last call."""
        for token in tokens[self._count :]:
            self.push(token)

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces after the pushed ones."""
        return [] if self._matcher is None else self._matcher.forced()

    @property
    def grammar_complete(self) -> bool | None:
        """Whether the text is one of the grammar; None without one."""
        return None if self._matcher is None else self._matcher.complete

    def flush(self) -> str:
        """Return the rest of the text after the last token."""
        return self._decoder.flush()

    def decode_all(self, tokens: Sequence[int]) -> str | None:
        """Return the text of all tokens, pushed before or not; None without a tokenizer."""
        return self._decoder.decode_all(tokens)


def _follow_grammar(matcher: Matcher | None, token: int) -> Matcher | None:
    if matcher is None:
        return None
    try:
        return matcher.take(token)
    except GrammarError as error:
        allowed_V = matcher.allowed()
        if token < allowed_V.size and allowed_V[token]:
            raise  # the grammar's parser failed
        raise GrammarError(
            f"no token was left after {len(matcher.tokens)} new ones: the grammar allows"
            f" {int(allowed_V.sum())}, and other options ban these ({error})"
        ) from None


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


def make_completion(
    lm: LanguageModel,
    prompt: list[int],
    tokens: list[int],
    finish_reason: str | None,
    config: GenerationConfig,
) -> Completion:
    """Convert finished token ids to a completion, truncated at a stop string or criterion."""
    tracker, count = StopTracker(lm.tokenizer, prompt, config), 0
    while count < len(tokens) and not tracker.stopped:
        tracker.push(tokens[count])
        count += 1
    tokens = tokens[:count]
    finish_reason = "stop" if tracker.stopped else finish_reason or "length"
    return Completion(
        tracker.decode_all(tokens),
        tokens,
        [],
        finish_reason,
        len(prompt),
        grammar_complete=tracker.grammar_complete,
    )


def make_completions(
    lm: LanguageModel,
    prompts: list[list[int]],
    token_BT: Any,
    length_B: Any,
    finish_B: Any,
    config: GenerationConfig,
) -> list[Completion]:
    """Convert rows of finished token ids to completions."""
    rows = zip(np.asarray(token_BT), np.asarray(length_B), np.asarray(finish_B), strict=True)
    completions = []
    for row, (prompt, (token_T, length, finish)) in enumerate(zip(prompts, rows, strict=True)):
        reason = to_finish_reason(Finish(int(finish)), row, int(length))
        tokens = token_T[:length].tolist()
        completions.append(make_completion(lm, prompt, tokens, reason, config))
    return completions


def per_prompt(value: int | Sequence[int], count: int) -> list[int]:
    """Return one value for each of `count` prompts."""
    return list(value) if isinstance(value, Sequence) else [value] * count


def pad_prompts(prompts: list[list[int]]) -> CheckedPrompts:
    """Return prompts of ids that `LM.encode` has checked."""
    return CheckedPrompts(pad_rows(prompts), np.array([len(p) for p in prompts], np.int32))


def seed_keys(seed: int | Sequence[int], rows: int) -> int | jax.Array:
    """Return one seed for all rows, or one random key per row if each row has a seed."""
    if not isinstance(seed, Sequence):
        return seed
    if len(seed) != rows:
        raise SamplingError(f"seed must be a number, or one for each of {rows} rows, got {seed}")
    return jnp.concatenate([row_keys(s, 1) for s in seed])
