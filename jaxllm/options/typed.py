"""The options by name and type: what an editor completes and mypy checks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.decode.loops.overflow import Overflow
from jaxllm.decode.sampling.sampler import Context, Processor, Sampler

Numbers = float | Sequence[float] | np.ndarray
Ids = int | Sequence[int] | np.ndarray
Lists = Sequence[Any] | np.ndarray
Scores = Callable[[Any, Context], Any]  # (float32 [B, V], the text so far) -> float32 [B, V]
Ends = Callable[[str | None, list[int]], bool]  # (text, ids) of a continuation so far -> end here


@runtime_checkable
class Assistant(Protocol):
    """A smaller model of the same vocabulary: an `LM`."""

    @property
    def model(self) -> Any: ...
    @property
    def params(self) -> Any: ...


class GenerateOptions(TypedDict, total=False):
    """What `LM.generate`, `LM.stream` and `LM.serve` take; `OPTIONS` says what each must be."""

    assistant_model: Assistant | None
    bad_words_ids: Lists | None
    batch_invariant: bool | None
    begin_suppress_tokens: Lists | None
    cache: KVCache | None
    chunk: int | None
    do_sample: bool | None
    dry_allowed_length: Numbers | None
    dry_base: Numbers | None
    dry_multiplier: Numbers | None
    dry_penalty_last_n: Numbers | None
    dry_sequence_breakers: Lists | None
    early_stopping: bool | Literal["never"] | None
    eos_token_id: Ids | None
    epsilon_cutoff: Numbers | None
    eta_cutoff: Numbers | None
    forced_bos_token_id: Ids | None
    forced_eos_token_id: Ids | None
    frequency_penalty: Numbers | None
    guidance_scale: float | None
    length_penalty: float | None
    logit_bias: Mapping[Any, float] | Lists | None
    logits_processor: Sequence[Processor | Scores] | None
    max_matching_ngram_size: int | None
    max_new_tokens: Ids | None
    min_length: Numbers | None
    min_new_tokens: Numbers | None
    min_p: Numbers | None
    mirostat_eta: Numbers | None
    mirostat_tau: Numbers | None
    negative_prompt: str | Sequence[int] | None
    no_repeat_ngram_size: Numbers | None
    num_assistant_tokens: int | None
    num_beams: int | None
    num_return_sequences: int | None
    overflow: Literal["refuse", "slide", "sinks", "heavy"] | Overflow | None
    pad_token_id: int | None
    penalty_alpha: float | None
    presence_penalty: Numbers | None
    prompt_lookup_num_tokens: int | None
    repetition_penalty: Numbers | None
    sampler: Sampler | None
    seed: Ids | Literal["random"] | None
    sequence_bias: Mapping[Any, float] | Lists | None
    stop_strings: str | Sequence[str] | None
    stopping_criteria: Ends | Sequence[Ends] | None
    suppress_tokens: Lists | None
    temperature: Numbers | None
    top_k: Numbers | None
    top_logprobs: int | None
    top_n_sigma: Numbers | None
    top_p: Numbers | None
    typical_p: Numbers | None
    xtc_probability: Numbers | None
    xtc_threshold: Numbers | None
