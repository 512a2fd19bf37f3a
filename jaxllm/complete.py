"""From prompts and settings to completions: which decoder runs, and what came of it as text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.cache.prefix import reuse
from jaxllm.decode.beam import beam_search
from jaxllm.decode.contrastive import contrastive_search
from jaxllm.decode.generate import Finish, Generated, generate
from jaxllm.decode.guidance import guided_generate
from jaxllm.decode.sampling import row_keys
from jaxllm.decode.speculative import PromptLookup, speculative_generate
from jaxllm.errors import CacheMismatchError, NonFiniteError, SamplingError, TokenError
from jaxllm.settings import Settings
from jaxllm.text.reader import Reader
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.paths import Params

FINISH_REASONS = {Finish.EOS: "eos", Finish.LENGTH: "length", Finish.STOP: "stop"}

TopLogprobs = list[tuple[int, float]]  # of one step: token ids and log-probabilities, best first


class Parts(NamedTuple):
    """What a language model is made of."""

    model: nn.Module
    params: Params
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continuation.

    text: without special tokens (None where the checkpoint has no tokenizer). tokens: ids, the
    end-of-text token included. logprobs: of each token under the model, before any sampler; only
    plain generation has them. finish_reason: "eos", "length" or "stop" (a stop string, before
    which the text ends). cache: of the whole call, a row a prompt; it holds prompt and continuation
    but for the last token. top_logprobs: each step's likeliest tokens, if asked for. score: of a
    beam. drafted: tokens proposed by speculation, and how many of them were accepted.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
    cache: KVCache | None = dataclasses.field(default=None, repr=False, compare=False)
    top_logprobs: list[TopLogprobs] | None = None
    score: float | None = None
    drafted: tuple[int, int] | None = None


def complete(lm: Parts, prompts: list[list[int]], settings: Settings) -> list[Completion]:
    """`num_return_sequences` completions of each prompt, in order, by the decoder asked for.

    Raises SamplingError where two decoders are asked for, or one for what it does not take.
    """
    asked = [d for d in DECODERS if d.asked(settings)]
    if len(asked) > 1:
        names = " and ".join(d.name for d in asked)
        raise SamplingError(f"{names} cannot be had at once")
    if not asked:
        n = settings.num_return_sequences
        return _generated(lm, [p for p in prompts for _ in range(n)], settings)
    decoder = asked[0]
    neutral = Settings(max_new_tokens=1, sampler=settings.sampler)
    for field in set(_RARE) - set(decoder.takes):
        if getattr(settings, field) != getattr(neutral, field):
            raise SamplingError(f"{decoder.name} takes no {field}")
    return decoder.run(lm, prompts, settings)


def generation(prompts: list[list[int]], settings: Settings) -> tuple[np.ndarray, dict[str, Any]]:
    """Tokens and options for `decode.generate`."""
    cache, new = settings.cache, settings.max_new_tokens
    if cache is not None:
        if len(prompts) > 1:
            raise CacheMismatchError("a cache serves one prompt; fork it for several")
        cache, rest = reuse(cache, prompts[0], int(np.max(new)))
        prompts = [rest]
    return _padded(prompts), {
        "max_new_tokens": new,
        "lengths_B": _lengths(prompts),
        "sampler": settings.sampler,
        "seed": _keys(settings.seed, len(prompts)),
        "eos_token_ids": settings.eos_token_ids,
        "chunk": settings.chunk,
        "cache": cache,
        "overflow": settings.overflow,
        "top_logprobs": settings.top_logprobs,
    }


def reader_of(lm: Parts, prompt: list[int], settings: Settings) -> Reader:
    """What reads a prompt's continuation. Raises TokenError for stop strings without tokenizer."""
    if lm.tokenizer is None and settings.stop_strings:
        raise TokenError("the checkpoint has no tokenizer: stop_strings need one")
    return Reader(lm.tokenizer, prompt, settings.stop_strings)


def reason(finish: Finish, row: int, length: int) -> str | None:
    """A finish in words, None while it runs. Raises NonFiniteError for a NaN."""
    if finish == Finish.NON_FINITE:
        raise NonFiniteError(
            f"the model returned NaN or infinite logits in row {row}, after {length} new tokens"
        )
    return FINISH_REASONS.get(finish)


def top_logprobs(step: Generated, row: int, length: int) -> list[TopLogprobs]:
    """The likeliest tokens of a row's first steps."""
    tokens = np.asarray(step.top_token_BTN)[row, :length].tolist()
    logprobs = np.asarray(step.top_logprob_BTN)[row, :length].tolist()
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, logprobs, strict=True)]


def _generated(lm: Parts, prompts: list[list[int]], settings: Settings) -> list[Completion]:
    tokens_BT, arguments = generation(prompts, settings)
    readers = [reader_of(lm, p, settings) for p in prompts]
    if settings.stop_strings:

        def ends(token_B: np.ndarray) -> np.ndarray:
            for reader, token in zip(readers, token_B.tolist(), strict=True):
                if token >= 0:
                    reader.push(token)
            return np.array([reader.stopped for reader in readers])

        arguments["until"] = ends
    result = generate(lm.model, lm.params, tokens_BT, **arguments)
    completions = []
    for row, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
        length = int(result.length_B[row])
        finish = reason(Finish(int(result.finish_B[row])), row, length)
        assert finish is not None
        tokens = np.asarray(result.token_BT)[row, :length].tolist()
        completions.append(
            Completion(
                reader.whole(tokens),
                tokens,
                np.asarray(result.logprob_BT)[row, :length].tolist(),
                finish,
                len(prompt),
                result.cache,
                top_logprobs(result, row, length) if settings.top_logprobs else None,
            )
        )
    return completions


def _beams(lm: Parts, prompts: list[list[int]], settings: Settings) -> list[Completion]:
    if len(set(_each(settings.max_new_tokens, prompts))) > 1:
        raise SamplingError("beam search takes one max_new_tokens for all prompts")
    result = beam_search(
        lm.model,
        lm.params,
        _padded(prompts),
        lengths_B=_lengths(prompts),
        num_beams=settings.num_beams,
        max_new_tokens=int(np.max(settings.max_new_tokens)),
        num_return_sequences=settings.num_return_sequences,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early_stopping,  # type: ignore[arg-type]
        eos_token_ids=settings.eos_token_ids,
        sampler=settings.sampler,
        chunk=settings.chunk,
    )
    completions = []
    for row, prompt in enumerate(prompts):
        for n in range(settings.num_return_sequences):
            length = int(result.length_BN[row, n])
            finish = reason(Finish(int(result.finish_BN[row, n])), row, length)
            tokens = np.asarray(result.token_BNT)[row, n, :length].tolist()
            found = _read(lm, prompt, tokens, finish or "length", settings)
            completions.append(dataclasses.replace(found, score=float(result.score_BN[row, n])))
    return completions


def _speculated(lm: Parts, prompts: list[list[int]], settings: Settings) -> list[Completion]:
    assistant, lookup = settings.assistant_model, settings.prompt_lookup_num_tokens
    if assistant is not None and lookup is not None:
        raise SamplingError("give assistant_model or prompt_lookup_num_tokens, not both")
    draft = PromptLookup(ngram=settings.max_matching_ngram_size)
    result = speculative_generate(
        lm.model,
        lm.params,
        _padded(prompts),
        lengths_B=_lengths(prompts),
        draft=draft if assistant is None else (assistant.model, assistant.params),
        num_draft_tokens=lookup or settings.num_assistant_tokens,
        max_new_tokens=settings.max_new_tokens,
        sampler=settings.sampler,
        seed=_keys(settings.seed, len(prompts)),
        eos_token_ids=settings.eos_token_ids,
        chunk=settings.chunk,
    )
    completions = []
    for row, prompt in enumerate(prompts):
        length = int(result.length_B[row])
        finish = reason(Finish(int(result.finish_B[row])), row, length)
        tokens = np.asarray(result.token_BT)[row, :length].tolist()
        found = _read(lm, prompt, tokens, finish or "length", settings)
        drafted = int(result.proposed_B[row]), int(result.accepted_B[row])
        completions.append(dataclasses.replace(found, drafted=drafted))
    return completions


def _contrasted(lm: Parts, prompts: list[list[int]], settings: Settings) -> list[Completion]:
    assert settings.penalty_alpha is not None
    completions = []
    for prompt, new in zip(prompts, _each(settings.max_new_tokens, prompts), strict=True):
        tokens = contrastive_search(
            lm.model,
            lm.params,
            prompt,
            penalty_alpha=settings.penalty_alpha,
            top_k=settings.contrasted,
            max_new_tokens=new,
            eos_token_ids=settings.eos_token_ids,
        )
        completions.append(_read(lm, prompt, tokens, _end(tokens, settings), settings))
    return completions


def _guided(lm: Parts, prompts: list[list[int]], settings: Settings) -> list[Completion]:
    assert settings.guidance_scale is not None
    completions = []
    new_B, seed_B = _each(settings.max_new_tokens, prompts), _each(settings.seed, prompts)
    for prompt, new, seed in zip(prompts, new_B, seed_B, strict=True):
        tokens = guided_generate(
            lm.model,
            lm.params,
            prompt,
            guidance_scale=settings.guidance_scale,
            negative_prompt=settings.negative_prompt,
            max_new_tokens=new,
            sampler=settings.sampler,
            seed=seed,
            eos_token_ids=settings.eos_token_ids,
        )
        completions.append(_read(lm, prompt, tokens, _end(tokens, settings), settings))
    return completions


def _read(
    lm: Parts, prompt: list[int], tokens: list[int], finish: str, settings: Settings
) -> Completion:
    """Tokens that came all at once as a completion: cut at a stop string, if there is one."""
    reader, count = reader_of(lm, prompt, settings), 0
    while count < len(tokens) and not reader.stopped:
        reader.push(tokens[count])
        count += 1
    tokens = tokens[:count]
    finish = "stop" if reader.stopped else finish
    return Completion(reader.whole(tokens), tokens, [], finish, len(prompt))


def _end(tokens: list[int], settings: Settings) -> str:
    return "eos" if tokens and tokens[-1] in settings.eos_token_ids else "length"


def _each(value: int | Sequence[int], prompts: list[list[int]]) -> list[int]:
    return list(value) if isinstance(value, Sequence) else [value] * len(prompts)


def _keys(seed: int | Sequence[int], rows: int) -> int | jax.Array:
    """A seed for all rows, or a random key for each row from a seed of its own."""
    if not isinstance(seed, Sequence):
        return seed
    if len(seed) != rows:
        raise SamplingError(f"seed must be a number, or one for each of {rows} rows; got {seed}")
    return jnp.concatenate([row_keys(s, 1) for s in seed])


def _lengths(prompts: list[list[int]]) -> np.ndarray:
    return np.array([len(p) for p in prompts], np.int32)


def _padded(prompts: list[list[int]]) -> np.ndarray:
    tokens_BT = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens_BT


class Decoder(NamedTuple):
    """A way of decoding other than plain generation: its name, when it is asked for, what it is,
    and which of the settings that not every decoder takes it takes."""

    name: str
    asked: Callable[[Settings], bool]
    run: Callable[[Parts, list[list[int]], Settings], list[Completion]]
    takes: tuple[str, ...] = ()


_RARE = ("cache", "overflow", "top_logprobs", "num_return_sequences")
DECODERS = (
    Decoder("beam search", lambda s: s.num_beams > 1, _beams, ("num_return_sequences",)),
    Decoder(
        "speculative decoding",
        lambda s: s.assistant_model is not None or s.prompt_lookup_num_tokens is not None,
        _speculated,
    ),
    Decoder("contrastive search", lambda s: s.penalty_alpha is not None, _contrasted),
    Decoder("guidance", lambda s: s.guidance_scale is not None, _guided),
)
