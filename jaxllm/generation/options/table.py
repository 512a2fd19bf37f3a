"""Option table: the type, valid values, effect and decoding modes of every option."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.generation.completion import Decoder, LanguageModel, StoppingCriterion
from jaxllm.generation.decoders import DECODERS, BeamSearch, PlainGeneration
from jaxllm.generation.loops.finish import MAX_TOKENS
from jaxllm.generation.loops.overflow import OVERFLOWS, OverflowPolicy
from jaxllm.generation.options.validators import (
    Ids,
    Lists,
    Numbers,
    ScoreFunction,
    check_acceptance,
    check_bool,
    check_criteria,
    check_early_stopping,
    check_edits,
    check_ids,
    check_overflow,
    check_processors,
    check_seed,
    check_texts,
    instance_checker,
    int_checker,
    number_checker,
    per_prompt_checker,
)
from jaxllm.generation.sampling.options import PROCESSORS, check_option_value
from jaxllm.generation.sampling.sampler import Processor, Sampler
from jaxllm.grammar.grammar import KINDS, Grammar, as_grammar
from jaxllm.runtime.docstrings import split_docstring
from jaxllm.steps import EditMap

Kind = Literal["generate", "stream", "serve"]  # the methods of LM that take options
Function = TypeVar("Function", bound=Callable[..., Any])
OverflowName = Literal["refuse", "slide", "sinks", "heavy", "segments", "pooled", "pooled-by-use"]
SAMPLERS = tuple(decoder for decoder in DECODERS if decoder.samples)


class Option(NamedTuple):
    """One option.

    check: returns the normalized value; raises TypeError or ValueError for an invalid one. meaning:
    the valid values. default: the neutral or usual value. per_row: whether a list
    with one value per prompt is accepted. from_file: whether generation_config.json may set it.
    decoders: the decoders that take it; by default all, or those that have it as a field.
    selects_decoder: whether any value but the default selects its decoder. calls: the methods that
    take it.
    """

    check: Callable[[Any], Any]
    meaning: str
    default: Any = None
    per_row: bool = False
    from_file: bool = True
    decoders: tuple[type[Decoder], ...] = ()
    selects_decoder: bool = False
    calls: tuple[Kind, ...] = ("generate", "stream", "serve")

    def is_taken_by(self, decoder: type[Decoder], kind: Kind) -> bool:
        """Return whether a call that uses this decoder takes the option."""
        return decoder in self.decoders and kind in self.calls


class GenerateOptions(TypedDict, total=False):
    """Options of `LM.generate`, `LM.stream` and `LM.serve`; their docstrings list them, too.

    Attributes:
        max_new_tokens: maximum number of new tokens (the checkpoint's, else 256, in the context).
        eos_token_id: token ids that end the text; included in the tokens.
        stop_strings: strings that end the text; the text excludes them.
        stopping_criteria: Python functions (text, ids) -> bool, called after every token; True ends
            the text.
        do_sample: sample tokens; the default is greedy, unless a temperature is given.
        seed: random seed; the same seed gives the same text.
        logit_bias: biases added to the scores of tokens, as in OpenAI's API.
        sequence_bias: biases added to the scores of tokens that complete these sequences.
        repetition_penalty: penalty for tokens already in the text, including the prompt (CTRL).
        presence_penalty: subtracted once from the scores of tokens already generated, as in
            OpenAI's API.
        frequency_penalty: subtracted once per time that a token was generated, as in OpenAI's API.
        dry_multiplier: DRY: strength of the penalty for extending a repetition.
        dry_base: DRY: base of the penalty's exponential growth with the repetition's length.
        dry_allowed_length: DRY: length from which repetitions are penalized.
        dry_penalty_last_n: DRY: number of last tokens to search for repetitions.
        dry_sequence_breakers: DRY: tokens that repetitions do not extend across.
        no_repeat_ngram_size: ban repeated n-grams of this many tokens, including the prompt.
        bad_words_ids: banned token sequences.
        suppress_tokens: banned tokens.
        begin_suppress_tokens: tokens banned at the first step.
        min_length: minimum length of the text in tokens, including the prompt.
        min_new_tokens: minimum number of new tokens.
        forced_bos_token_id: forced second token after a prompt of one token.
        forced_eos_token_id: forced last token if max_new_tokens ends the text.
        temperature: divides the logits; setting it enables sampling.
        top_n_sigma: keep tokens within this many standard deviations of the best score.
        top_k: keep the k best tokens; in contrastive search, the number of candidates.
        top_p: keep the best tokens whose probabilities add up to p.
        min_p: keep tokens with at least this fraction of the best token's probability.
        typical_p: keep the most typical tokens whose probabilities add up to p.
        epsilon_cutoff: keep tokens with at least this probability.
        eta_cutoff: like epsilon_cutoff, but less strict if the entropy is high.
        xtc_probability: XTC: probability of excluding the top choices at a step.
        xtc_threshold: XTC: exclude all but the least likely of the tokens with at least this
            probability.
        mirostat_tau: mirostat: target surprisal.
        mirostat_eta: mirostat: learning rate.
        regex: the text must match this regular expression as a whole, in Python's syntax.
        choice: the text must be one of these.
        json_schema: the text must be JSON that this schema describes.
        lark: the text must be one of this Lark grammar, as llguidance reads it.
        gbnf: the text must be one of this grammar in llama.cpp's form.
        grammar: the text must be one of this grammar.
        fast_forward: run the tokens that a grammar forces in one pass; the text is the same. It
            compiles up to three more programs: worth it for many calls.
        sampler: a custom sampler, instead of all sampling options.
        logits_processor: more processors, applied before temperature and the ones after it.
        num_return_sequences: number of texts per prompt.
        num_beams: beam search: number of beams.
        length_penalty: beam search: values above 0 favor long texts.
        early_stopping: beam search: when to stop.
        assistant_model: speculative decoding: a smaller draft model with the same vocabulary.
        num_assistant_tokens: speculative decoding: tokens that assistant_model drafts per step.
        prompt_lookup_num_tokens: speculative decoding: tokens drafted per step by lookup in the
            text itself.
        acceptance: speculative decoding: "text": the text is the same as without it;
            "distribution": sampled text has the same distribution, and more drafts are accepted.
        max_matching_ngram_size: speculative decoding: longest n-gram to look up, in tokens.
        penalty_alpha: contrastive search: weight of the penalty for similarity to the text.
        guidance_scale: classifier-free guidance: strength of the push away from negative_prompt.
        negative_prompt: classifier-free guidance: the prompt to steer away from.
        top_logprobs: number of likeliest tokens to report per step.
        overflow: when the context is full: refuse, restart from the recent half (slide), keep the
            first tokens and a window (sinks) or recent and most attended ones (heavy), keep sinks
            and recent ones and merge older ones four to a slot (pooled; pooled-by-use), or drop
            finished segments that the model's memory holds (segments).
        cache: a cache of one row; a prefix shared with the prompt is not recomputed.
        edits: changes of activations (`jaxllm.inside`), of the prompt and all new tokens. Rows are
            the prompts, in order.
        chunk: prefill chunk, in tokens (256; 2,048 on a GPU or TPU).
        adapter: name of a loaded adapter; "base" for none; the default is the first.
        batch_invariant: run each prompt separately, so that rounding does not depend on the other
            prompts.
        pad_token_id: accepted but ignored: padding is marked by position -1, not by an id.
    """

    max_new_tokens: Ids | None
    eos_token_id: Ids | None
    stop_strings: str | Sequence[str] | None
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] | None
    do_sample: bool | None
    seed: Ids | Literal["random"] | None
    logit_bias: Mapping[Any, float] | Lists | None
    sequence_bias: Mapping[Any, float] | Lists | None
    repetition_penalty: Numbers | None
    presence_penalty: Numbers | None
    frequency_penalty: Numbers | None
    dry_multiplier: Numbers | None
    dry_base: Numbers | None
    dry_allowed_length: Numbers | None
    dry_penalty_last_n: Numbers | None
    dry_sequence_breakers: Lists | None
    no_repeat_ngram_size: Numbers | None
    bad_words_ids: Lists | None
    suppress_tokens: Lists | None
    begin_suppress_tokens: Lists | None
    min_length: Numbers | None
    min_new_tokens: Numbers | None
    forced_bos_token_id: Ids | None
    forced_eos_token_id: Ids | None
    temperature: Numbers | None
    top_n_sigma: Numbers | None
    top_k: Numbers | None
    top_p: Numbers | None
    min_p: Numbers | None
    typical_p: Numbers | None
    epsilon_cutoff: Numbers | None
    eta_cutoff: Numbers | None
    xtc_probability: Numbers | None
    xtc_threshold: Numbers | None
    mirostat_tau: Numbers | None
    mirostat_eta: Numbers | None
    regex: str | None
    choice: Sequence[str] | None
    json_schema: Any
    lark: str | None
    gbnf: str | None
    grammar: Grammar | None
    fast_forward: bool | None
    sampler: Sampler | None
    logits_processor: Sequence[Processor | ScoreFunction] | None
    num_return_sequences: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    assistant_model: LanguageModel | None
    num_assistant_tokens: int | None
    prompt_lookup_num_tokens: int | None
    acceptance: Literal["text", "distribution"] | None
    max_matching_ngram_size: int | None
    penalty_alpha: float | None
    guidance_scale: float | None
    negative_prompt: str | Sequence[int] | None
    top_logprobs: int | None
    overflow: OverflowName | OverflowPolicy | None
    cache: KVCache | None
    edits: EditMap | None
    chunk: int | None
    adapter: str | Sequence[str | None] | None
    batch_invariant: bool | None
    pad_token_id: int | None


_plain_option = partial(
    Option, from_file=False, decoders=(PlainGeneration,), calls=("generate", "stream")
)
_COUNT = int_checker(1), "a whole number from 1 up"
_ROWS: dict[str, Option] = {
    "max_new_tokens": Option(
        per_prompt_checker(lambda n: n if n is None else int_checker(1, MAX_TOKENS)(n)),
        f"a whole number from 1 to {MAX_TOKENS}, or one for each prompt",
        per_row=True,
    ),
    "eos_token_id": Option(check_ids, "a token id or a list of them"),
    "stop_strings": Option(check_texts, "a text or a list of them, none empty", ()),
    "stopping_criteria": Option(
        check_criteria, "a function of (text, token ids) so far, or a list of them", from_file=False
    ),
    "do_sample": Option(check_bool, "true or false", decoders=SAMPLERS),
    "seed": Option(
        per_prompt_checker(check_seed),
        'a whole number from 0 to 2**64 - 1, "random", or one for each prompt',
        0,
        per_row=True,
        from_file=False,
    ),
    **{
        name: Option(partial(as_grammar, kind=name), meaning, from_file=False)
        for name, meaning in KINDS.items()
    },
    "grammar": Option(instance_checker(Grammar), "a jaxllm.Grammar", from_file=False),
    "fast_forward": _plain_option(check_bool, "true or false", False),
    "sampler": Option(
        instance_checker(Sampler), "a jaxllm.Sampler", from_file=False, decoders=SAMPLERS
    ),
    "logits_processor": Option(
        check_processors,
        "a list of Processors and functions of (scores [B, V], Context) in JAX",
        from_file=False,
        decoders=SAMPLERS,
    ),
    "num_return_sequences": Option(
        *_COUNT, 1, decoders=(PlainGeneration, BeamSearch), calls=("generate",)
    ),
    "num_beams": Option(*_COUNT, 1, selects_decoder=True),
    "length_penalty": Option(number_checker(), "a finite number", 1.0),
    "early_stopping": Option(check_early_stopping, 'false, true or "never"', False),
    "assistant_model": Option(
        instance_checker(LanguageModel), "a jaxllm.LM", from_file=False, selects_decoder=True
    ),
    "num_assistant_tokens": Option(*_COUNT, 4),
    "prompt_lookup_num_tokens": Option(*_COUNT, selects_decoder=True),
    "acceptance": Option(check_acceptance, '"text" or "distribution"', "text"),
    "max_matching_ngram_size": Option(*_COUNT, 3),
    "penalty_alpha": Option(number_checker(0, 1), "a number from 0 to 1", selects_decoder=True),
    "guidance_scale": Option(
        number_checker(), "a finite number, 1 is off", 1.0, selects_decoder=True
    ),
    "negative_prompt": Option(
        instance_checker(str | Sequence | np.ndarray), "a text or token ids", from_file=False
    ),
    "top_logprobs": _plain_option(
        int_checker(0), "a whole number from 0 (off) up", 0, calls=("generate", "stream", "serve")
    ),
    "overflow": _plain_option(
        check_overflow,
        f"one of {', '.join(OVERFLOWS)}, or a policy of jaxllm.generation.loops.overflow",
    ),
    "cache": _plain_option(instance_checker(KVCache), "a jaxllm.KVCache"),
    "edits": _plain_option(
        check_edits,
        "a dict from names of sites to edits of jaxllm.inside",
        calls=("generate", "stream", "serve"),
    ),
    "chunk": Option(*_COUNT, None, from_file=False),
    "adapter": Option(
        per_prompt_checker(lambda name: name if name is None else instance_checker(str)(name)),
        "a text, or one for each prompt",
        per_row=True,
        from_file=False,
    ),
    "batch_invariant": Option(check_bool, "true or false", False, from_file=False),
    "pad_token_id": Option(int_checker(-1), "a token id"),
}


def _sampling_option(name: str) -> Option:
    """Convert a row of `PROCESSORS` to a row of this table."""
    row, check = PROCESSORS[name], partial(check_option_value, name)
    return Option(check, row.meaning, per_row=not row.is_list, decoders=SAMPLERS)


def _add_decoders(name: str, option: Option) -> Option:
    """Fill in the decoders that have the option as a field."""
    owners = tuple(d for d in DECODERS if name in {f.name for f in dataclasses.fields(d)})
    return option._replace(decoders=option.decoders + owners or DECODERS)


OPTIONS: dict[str, Option] = {
    name: _add_decoders(name, _sampling_option(name) if name in PROCESSORS else _ROWS[name])
    for name in GenerateOptions.__annotations__
}


def document_options(function: Function) -> Function:
    """Replace OPTIONS in the function's docstring by the table, and add the option names to the
    signature that `help` and editors show.
    """
    effects = split_docstring(GenerateOptions)[1]
    rows = (
        f"{name}{'' if row.default in (None, ()) else f' ({row.default})'}: {effects[name]}"
        f" {row.meaning[0].upper()}{row.meaning[1:]}."
        for name, row in OPTIONS.items()
    )
    docstring = function.__doc__ or ""
    place = re.search(r"^ +(?=OPTIONS$)", docstring, re.MULTILINE)
    indent = "" if place is None else place[0]  # Python 3.13 removes what all lines have
    wrapper = textwrap.TextWrapper(
        width=100,
        initial_indent=indent,
        subsequent_indent=indent + " " * 4,
        break_long_words=False,
    )
    lines = map(wrapper.fill, rows)
    if place is not None:
        function.__doc__ = docstring.replace(f"{indent}OPTIONS", "\n".join(lines))
    named = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    named += [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=None) for x in OPTIONS]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return function
