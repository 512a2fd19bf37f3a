"""The options of `LM.generate`, `LM.stream` and `LM.serve`, each written once.

`GenerateOptions` has what each option does, its type, default and valid values, and who takes it.
Everything else comes from it: checks (`generation.options`), samplers (`sampling.options`), the
docstrings of `LM`, command line flags and the fields of the server.

Commands read it without JAX, so types that need it are names in quotes.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypedDict,
    TypeVar,
)

from jaxllm.runtime.docstrings import split_docstring
from jaxllm.runtime.plugins import find_plugins

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.cache.kv import KVCache
    from jaxllm.generation.completion import LanguageModel, StoppingCriterion
    from jaxllm.generation.loops.overflow import OverflowPolicy
    from jaxllm.generation.sampling.sampler import Processor, Sampler, ScoreFunction
    from jaxllm.grammar.grammar import Grammar
    from jaxllm.steps import EditMap

Function = TypeVar("Function", bound=Callable[..., Any])
Call = Literal["generate", "stream", "serve"]  # the methods of LM that take options
OVERFLOW_NAMES = ("refuse", "slide", "sinks", "heavy")  # `overflow_names` has all
MAX_TOKENS = 1 << 30  # positions are int32
MAX_SEED = (1 << 64) - 1

Numbers: TypeAlias = "float | Sequence[float] | np.ndarray | None"  # one, or one for each prompt
Ids: TypeAlias = "int | Sequence[int] | np.ndarray | None"
Lists: TypeAlias = "Sequence[Any] | np.ndarray | None"
Biases: TypeAlias = "Mapping[Any, float] | Sequence[Any] | None"


class Option(NamedTuple):
    """An option.

    Attributes:
        default: The neutral or usual value; a tuple if the option takes several values.
        expected: The valid values in words, if they are no number.
        ge, gt, le, lt: Bounds of a number, as in msgspec.
        off: The number that changes nothing.
        note: The meaning of other special numbers.
        whole: Whether the number is an integer.
        per_row: Whether a list with one value for each prompt is accepted.
        from_file: Whether generation_config.json may set it.
        decoders: The decoders that take it; "": decoders with a field of this name, else all.
        selects_decoder: Whether any value but the default selects its decoder.
        calls: The methods that take it.
        clients: Whether clients of the server may set it.
        served: Its range for them, if that is narrower.
        effect: A sentence on its effect.
    """

    default: Any = None
    expected: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    off: float | None = None
    note: str = ""
    whole: bool = False
    per_row: bool = False
    from_file: bool = True
    decoders: Literal["", "plain", "plain or beams", "samplers"] = ""
    selects_decoder: bool = False
    calls: tuple[Call, ...] = ("generate", "stream", "serve")
    clients: bool = True
    served: tuple[float, float] | None = None
    effect: str = ""

    @property
    def remark(self) -> str:
        """What special numbers mean."""
        return self.note or ("" if self.off is None else f"{self.off} is off")

    @property
    def meaning(self) -> str:
        """The valid values in words."""
        low = "" if self.ge is None else f" from {self.ge}"
        low += "" if self.gt is None else f" above {self.gt}"
        high = "" if self.le is None else f" to {self.le}"
        high += "" if self.lt is None else f" to below {self.lt}"
        high = high or " up" * (self.ge is not None)
        kind = "whole " * self.whole or "finite " * (not low)
        words = [self.expected or f"a {kind}number{low}{high}", self.remark]
        return ", ".join([*filter(None, words), *["or one for each prompt"] * self.per_row])


_count = partial(Option, ge=1, whole=True)
_switch = partial(Option, expected="true or false")
_object = partial(Option, from_file=False, clients=False)
_custom = partial(Option, from_file=False, clients=False, decoders="samplers")
_plain = partial(Option, from_file=False, decoders="plain", calls=("generate", "stream"))
_structure = partial(Option, from_file=False)  # a grammar
_sampling = partial(Option, decoders="samplers", per_row=True)
_list = partial(Option, decoders="samplers")
_TOKENS = "a list of token ids, or one such list per prompt"


class GenerateOptions(TypedDict, total=False):
    """Options of `LM.generate`, `LM.stream` and `LM.serve`; their docstrings list them, too.

    Processors run in the order of their options.

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
        repetition_penalty: penalty for tokens already in the text or prompt, as in CTRL.
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
        temperature: sampling temperature, which divides the logits; setting it enables sampling.
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
            first tokens and a window (sinks) or recent and most attended ones (heavy), or what a
            policy of another package does.
        cache: a cache of one row; a prefix shared with the prompt is not recomputed.
        edits: changes of activations (`jaxllm.inside`), of the prompt and all new tokens. Rows are
            the prompts, in order.
        chunk: prefill chunk, in tokens (256; 2,048 on a GPU or TPU).
        adapter: name of a loaded adapter; "base" for none; the default is the first.
        batch_invariant: run each prompt separately, so that rounding does not depend on the other
            prompts.
        pad_token_id: accepted but ignored: padding is marked by position -1, not by an id.
    """

    max_new_tokens: Annotated[
        "int | Sequence[int | None] | np.ndarray | None", _count(le=MAX_TOKENS, per_row=True)
    ]
    eos_token_id: Annotated[Ids, Option((), "a token id or a list of them", ge=0, le=MAX_TOKENS)]
    stop_strings: Annotated[
        str | Sequence[str] | None, Option((), "a text or a list of them, none empty")
    ]
    stopping_criteria: Annotated[
        "StoppingCriterion | Sequence[StoppingCriterion] | None",
        _object((), "a function of (text, token ids) so far, or a list of them"),
    ]
    do_sample: Annotated[bool | None, _switch(decoders="samplers")]
    seed: Annotated[
        "int | Literal['random'] | Sequence[int | Literal['random']] | np.ndarray | None",
        Option(
            0, 'a whole number from 0 to 2**64 - 1, "random"', ge=0, per_row=True, from_file=False
        ),
    ]
    logit_bias: Annotated[
        Biases, _list(None, "a table from token ids to biases of -100 to 100, or one per prompt")
    ]
    sequence_bias: Annotated[
        Biases, _list(None, "a table from sequences of ids to finite biases, or one per prompt")
    ]
    repetition_penalty: Annotated[Numbers, _sampling(gt=0, off=1)]
    presence_penalty: Annotated[Numbers, _sampling(0, off=0, served=(-10, 10))]
    frequency_penalty: Annotated[Numbers, _sampling(0, off=0, served=(-10, 10))]
    dry_multiplier: Annotated[Numbers, _sampling(0, ge=0, off=0)]
    dry_base: Annotated[Numbers, _sampling(1.75, ge=1)]
    dry_allowed_length: Annotated[Numbers, _sampling(2, ge=1, whole=True)]
    dry_penalty_last_n: Annotated[
        Numbers, _sampling(-1, ge=-1, whole=True, note="-1 is all, 0 is off")
    ]
    dry_sequence_breakers: Annotated[Lists, _list((), _TOKENS)]
    no_repeat_ngram_size: Annotated[Numbers, _sampling(ge=0, whole=True, off=0)]
    bad_words_ids: Annotated[
        Lists, _list(None, "a list of lists of token ids, or one such list per prompt")
    ]
    suppress_tokens: Annotated[Lists, _list(None, _TOKENS)]
    begin_suppress_tokens: Annotated[Lists, _list(None, _TOKENS)]
    min_length: Annotated[Numbers, _sampling(0, ge=0, whole=True, off=0)]
    min_new_tokens: Annotated[Numbers, _sampling(0, ge=0, whole=True, off=0)]
    forced_bos_token_id: Annotated[Ids, _sampling(-1, ge=-1, whole=True, off=-1)]
    forced_eos_token_id: Annotated[Ids, _list(None, f"a token id, {_TOKENS}")]
    temperature: Annotated[
        Numbers, _sampling(1.0, ge=0, off=1, note="0 is greedy", served=(0, 100))
    ]
    top_n_sigma: Annotated[Numbers, _sampling(ge=0, off=0)]
    top_k: Annotated[Numbers, _sampling(0, ge=0, whole=True, off=0)]
    top_p: Annotated[Numbers, _sampling(1.0, ge=0, le=1, off=1, served=(0, 1))]
    min_p: Annotated[Numbers, _sampling(ge=0, le=1, off=0)]
    typical_p: Annotated[Numbers, _sampling(gt=0, le=1, off=1)]
    epsilon_cutoff: Annotated[Numbers, _sampling(ge=0, lt=1, off=0)]
    eta_cutoff: Annotated[Numbers, _sampling(ge=0, lt=1, off=0)]
    xtc_probability: Annotated[Numbers, _sampling(0, ge=0, le=1, off=0)]
    xtc_threshold: Annotated[Numbers, _sampling(0.1, ge=0, le=1)]
    mirostat_tau: Annotated[Numbers, _sampling(0, ge=0, off=0)]
    mirostat_eta: Annotated[Numbers, _sampling(0.1, ge=0)]
    regex: Annotated[str | None, _structure(None, "a regular expression")]
    choice: Annotated[
        Sequence[str] | None,
        _structure(None, "a list of texts, or a text with commas between them"),
    ]
    json_schema: Annotated[
        Any, _structure(None, "a JSON schema: a mapping, its JSON text, or a pydantic model")
    ]
    lark: Annotated[str | None, _structure(None, "a Lark grammar")]
    gbnf: Annotated[str | None, _structure(None, "a GBNF grammar")]
    grammar: Annotated["Grammar | None", _object(None, "a jaxllm.Grammar")]
    fast_forward: Annotated[bool | None, _plain(False, "true or false")]
    sampler: Annotated["Sampler | None", _custom(None, "a jaxllm.Sampler")]
    logits_processor: Annotated[
        "Sequence[Processor | ScoreFunction] | None",
        _custom((), "a list of Processors and functions of (scores [B, V], Context) in JAX"),
    ]
    num_return_sequences: Annotated[
        int | None, _count(1, decoders="plain or beams", calls=("generate",))
    ]
    num_beams: Annotated[int | None, _count(1, selects_decoder=True)]
    length_penalty: Annotated[float | None, Option(1.0)]
    early_stopping: Annotated[
        bool | Literal["never"] | None, Option(False, 'false, true or "never"')
    ]
    assistant_model: Annotated[
        "LanguageModel | None", _object(None, "a jaxllm.LM", selects_decoder=True)
    ]
    num_assistant_tokens: Annotated[int | None, _count(4)]
    prompt_lookup_num_tokens: Annotated[int | None, _count(selects_decoder=True)]
    acceptance: Annotated[
        Literal["text", "distribution"] | None, Option("text", '"text" or "distribution"')
    ]
    max_matching_ngram_size: Annotated[int | None, _count(3)]
    penalty_alpha: Annotated[float | None, Option(ge=0, le=1, selects_decoder=True)]
    guidance_scale: Annotated[float | None, Option(1.0, off=1, selects_decoder=True)]
    negative_prompt: Annotated[
        "str | Sequence[int] | np.ndarray | None",
        Option(None, "a text or token ids", from_file=False),
    ]
    top_logprobs: Annotated[
        int | None,
        _object(0, ge=0, off=0, whole=True, decoders="plain"),
    ]
    overflow: Annotated[
        "str | OverflowPolicy | None",
        _plain(
            None,
            f"one of {', '.join(OVERFLOW_NAMES)}, a name of another package, or an"
            " `OverflowPolicy`",
            clients=False,
        ),
    ]
    cache: Annotated["KVCache | None", _plain(None, "a jaxllm.KVCache", clients=False)]
    edits: Annotated[
        "EditMap | None",
        _object(None, "a dict from names of sites to edits of jaxllm.inside", decoders="plain"),
    ]
    chunk: Annotated[int | None, _count(from_file=False, clients=False)]
    adapter: Annotated[str | Sequence[str | None] | None, _object(None, "a text", per_row=True)]
    batch_invariant: Annotated[bool | None, _switch(False, from_file=False)]
    pad_token_id: Annotated[int | None, Option(None, "a token id", ge=-1, whole=True)]


_EFFECTS = split_docstring(GenerateOptions)[1]
OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0]._replace(effect=_EFFECTS[name])
    for name, hint in GenerateOptions.__annotations__.items()
}

# Names of other libraries -> ours.
ALIASES = {
    **dict.fromkeys(("stop", "stop_sequences", "stops", "stop_words"), "stop_strings"),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_gen_len", "n_predict", "num_predict"),
        "max_new_tokens",
    ),
    **dict.fromkeys(("n", "num_samples", "best_of"), "num_return_sequences"),
    **dict.fromkeys(("stop_token_ids", "eos_id", "eos_token", "eos_token_ids"), "eos_token_id"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    **dict.fromkeys(("logprobs", "top_n_tokens", "n_probs"), "top_logprobs"),
    **dict.fromkeys(("beam_size", "beam_width"), "num_beams"),
    **dict.fromkeys(("past_key_values", "kv_cache", "prompt_cache"), "cache"),
    **dict.fromkeys(("draft_model", "draft"), "assistant_model"),
    **dict.fromkeys(("logits_processors", "processors"), "logits_processor"),
    **dict.fromkeys(("random_seed", "generator", "rng", "key"), "seed"),
    "temp": "temperature",
    "typical": "typical_p",
    "min_tokens": "min_new_tokens",
    "mirostat": "mirostat_tau",
    "cfg_scale": "guidance_scale",
    "prompt_lookup": "prompt_lookup_num_tokens",
    "prefill_step_size": "chunk",
}
HINTS: dict[str, str] = {theirs: f"use {ours}" for theirs, ours in ALIASES.items()} | {
    "max_length": "use max_new_tokens, the length without the prompt",
    "ignore_eos": "use eos_token_id=[]",
    "streamer": "use LM.stream",
    "stream": "use LM.stream",
    "attention_mask": "pass prompts without padding, as a list for a batch",
    "use_cache": "the cache is always used",
    "prefix_allowed_tokens_fn": "compiled steps cannot call Python; write it as a JAX"
    " function of (scores, Context) for logits_processor",
    "diversity_penalty": "diverse beam search is not supported",
    "num_beam_groups": "diverse beam search is not supported",
    "constraints": "constrained beam search is not supported",
    "force_words_ids": "constrained beam search is not supported",
    "generation_config": "pass its fields as options",
}


def overflow_names() -> tuple[str, ...]:
    """Return the names of policies for a full cache, those of other packages last."""
    return (*OVERFLOW_NAMES, *find_plugins("overflow_policies"))


def document_options(function: Function) -> Function:
    """Replace OPTIONS in the function's docstring by the table, and add the option names to the
    signature that `help` and editors show.
    """
    rows = (
        f"{name}{'' if row.default in (None, ()) else f' ({row.default})'}: {row.effect}"
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
