"""Decoders: a frozen dataclass per decoding method, which runs its loop and returns text.

The fields of a decoder are its own options, checked by their rows in `option_table.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.errors import SamplingError
from jaxllm.generation.completion import (
    Completion,
    Decoder,
    GenerationConfig,
    LanguageModel,
    StopTracker,
    generation_args,
    make_completion,
    make_completions,
    pad_prompts,
    per_prompt,
    seed_keys,
    to_finish_reason,
    top_logprobs,
)
from jaxllm.generation.loops.beam import beam_search
from jaxllm.generation.loops.contrastive import contrastive_search
from jaxllm.generation.loops.draft import (
    Acceptance,
    DraftStats,
    PromptLookup,
    check_draft_vocabulary,
)
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.generate import generate
from jaxllm.generation.loops.guidance import generate_with_guidance
from jaxllm.generation.loops.speculative import speculative_generate
from jaxllm.generation.sampling.grammar_mask import only_masks

Prompts = list[list[int]]


@dataclasses.dataclass(frozen=True)
class PlainGeneration(Decoder):
    """Greedy decoding or sampling."""

    name = "plain generation"
    mixes_adapters = True

    def run(
        self, lm: LanguageModel, prompts: Prompts, config: GenerationConfig
    ) -> list[Completion]:
        prompts = [p for p in prompts for _ in range(config.num_return_sequences)]
        tokens_BT, arguments = generation_args(prompts, config)
        trackers = [StopTracker(lm.tokenizer, p, config) for p in prompts]
        forces = not lm.model.config.has_state and config.can_fast_forward(len(prompts))
        if config.checks_every_token or forces:

            def check_stop(token_B: np.ndarray) -> np.ndarray:
                for tracker, token in zip(trackers, token_B.tolist(), strict=True):
                    if token >= 0:
                        tracker.push(token)
                return np.array([tracker.stopped for tracker in trackers])

            arguments["until"] = check_stop
            arguments["forced"] = trackers[0].forced if forces else None
        result = generate(lm.model, lm.params, tokens_BT, **arguments)
        completions = []
        for row, (prompt, tracker) in enumerate(zip(prompts, trackers, strict=True)):
            length = int(result.length_B[row])
            reason = to_finish_reason(Finish(int(result.finish_B[row])), row, length)
            assert reason is not None
            tokens = np.asarray(result.token_BT)[row, :length].tolist()
            if config.matcher is not None:
                tracker.push_all(tokens)
            completions.append(
                Completion(
                    tracker.decode_all(tokens),
                    tokens,
                    np.asarray(result.logprob_BT)[row, :length].tolist(),
                    reason,
                    len(prompt),
                    result.cache,
                    top_logprobs(result, row, length) if config.top_logprobs else None,
                    grammar_complete=tracker.grammar_complete,
                )
            )
        return completions


@dataclasses.dataclass(frozen=True)
class BeamSearch(Decoder):
    """Beam search; the sampler's processors change the scores, and nothing is drawn."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]

    name = "beam search"
    mixes_adapters = True

    def run(
        self, lm: LanguageModel, prompts: Prompts, config: GenerationConfig
    ) -> list[Completion]:
        if len(set(per_prompt(config.max_new_tokens, len(prompts)))) > 1:
            raise SamplingError("beam search requires the same max_new_tokens for all prompts")
        result = beam_search(
            lm.model,
            lm.params,
            pad_prompts(prompts),
            max_new_tokens=int(np.max(config.max_new_tokens)),
            num_beams=self.num_beams,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            num_return_sequences=config.num_return_sequences,
            eos_token_ids=config.eos_token_ids,
            sampler=config.sampler,
            chunk=config.chunk,
        )
        prompts = [p for p in prompts for _ in range(config.num_return_sequences)]
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.device_get(result))
        rows = flat.token_BNT, flat.length_BN, flat.finish_BN
        return [
            dataclasses.replace(c, score=float(score))
            for c, score in zip(
                make_completions(lm, prompts, *rows, config), flat.score_BN, strict=True
            )
        ]

    def rows_per_prompt(self, num_return_sequences: int) -> int:
        return max(num_return_sequences, self.num_beams)


@dataclasses.dataclass(frozen=True)
class SpeculativeDecoding(Decoder):
    """Speculative decoding with a draft model, or by lookup in the text itself."""

    assistant_model: LanguageModel | None
    num_assistant_tokens: int
    acceptance: Acceptance
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int

    name = "speculative decoding"

    def run(
        self, lm: LanguageModel, prompts: Prompts, config: GenerationConfig
    ) -> list[Completion]:
        assistant = self.assistant_model
        if assistant is not None:
            check_draft_vocabulary(lm, assistant)
        result = speculative_generate(
            lm.model,
            lm.params,
            pad_prompts(prompts),
            draft=PromptLookup(ngram=self.max_matching_ngram_size)
            if assistant is None
            else (assistant.model, assistant.params),
            num_draft_tokens=self.prompt_lookup_num_tokens or self.num_assistant_tokens,
            acceptance=self.acceptance,
            max_new_tokens=config.max_new_tokens,
            sampler=config.sampler,
            seed=seed_keys(config.seed, len(prompts)),
            eos_token_ids=config.eos_token_ids,
            chunk=config.chunk,
        )
        rows = result.token_BT, result.length_B, result.finish_B
        logprob_BT = np.asarray(result.logprob_BT)
        return [
            dataclasses.replace(
                c,
                logprobs=logprob_T[: len(c.tokens)].tolist(),
                draft_stats=DraftStats(*map(int, counts)),
            )
            for c, logprob_T, *counts in zip(
                make_completions(lm, prompts, *rows, config),
                logprob_BT,
                np.asarray(result.proposed_B),
                np.asarray(result.accepted_B),
                np.asarray(result.drafts_B),
                strict=True,
            )
        ]


@dataclasses.dataclass(frozen=True)
class ContrastiveSearch(Decoder):
    """Contrastive search, one prompt after the other. top_k: the number of candidates."""

    penalty_alpha: float
    top_k: int | None

    name = "contrastive search"
    samples = False

    def run(
        self, lm: LanguageModel, prompts: Prompts, config: GenerationConfig
    ) -> list[Completion]:
        options: dict[str, Any] = {"penalty_alpha": self.penalty_alpha, "top_k": self.top_k or 4}
        options["sampler"] = only_masks(config.sampler)
        return _decode_serially(contrastive_search, options, lm, prompts, config)


@dataclasses.dataclass(frozen=True)
class Guidance(Decoder):
    """Classifier-free guidance, one prompt after the other. negative_prompt: token ids."""

    guidance_scale: float
    negative_prompt: Sequence[int] | None

    name = "guidance"

    def run(
        self, lm: LanguageModel, prompts: Prompts, config: GenerationConfig
    ) -> list[Completion]:
        seeds = per_prompt(config.seed, len(prompts))
        options = {**dataclasses.asdict(self), "sampler": config.sampler}
        return _decode_serially(generate_with_guidance, options, lm, prompts, config, seeds)


def _decode_serially(
    decode: Callable[..., list[int]],
    options: dict[str, Any],
    lm: LanguageModel,
    prompts: Prompts,
    config: GenerationConfig,
    seeds: list[int] | None = None,
) -> list[Completion]:
    """Decode each prompt, with its own limit of new tokens, and its seed if there are seeds."""
    completions = []
    for row, (prompt, max_new_tokens) in enumerate(
        zip(prompts, per_prompt(config.max_new_tokens, len(prompts)), strict=True)
    ):
        tokens = decode(
            lm.model,
            lm.params,
            prompt,
            max_new_tokens=max_new_tokens,
            eos_token_ids=config.eos_token_ids,
            **options,
            **({} if seeds is None else {"seed": seeds[row]}),
        )
        reason = "eos" if tokens and tokens[-1] in config.eos_token_ids else "length"
        completions.append(make_completion(lm, prompt, tokens, reason, config))
    return completions


DECODERS: tuple[type[Decoder], ...] = (
    PlainGeneration,
    BeamSearch,
    SpeculativeDecoding,
    ContrastiveSearch,
    Guidance,
)
