"""Adapter for EleutherAI's lm-evaluation-harness (`pip install 'jaxllm[eval]'`).

The harness finds models in a registry that is filled on import, so this module wraps its command:
all arguments after `python -m jaxllm.evaluate.lm_eval` are those of lm_eval.

    python -m jaxllm.evaluate.lm_eval --model jaxllm --model_args path=demo:llama --tasks ...
    --batch_size 8

From Python, call `register()` before `lm_eval.simple_evaluate(model="jaxllm", ...)`. Prefix token,
splitting of pairs and truncation follow the harness's own `hf` model. Likelihoods are scored
longest text first, so that batches have few different shapes.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import CapacityError, ConfigError, JaxllmError, TemplateError, TokenError
from jaxllm.evaluate.likelihood.data import Loader, Span, rolling_spans
from jaxllm.evaluate.likelihood.score import check_loader, default_batch, score
from jaxllm.generation.completion import Completion
from jaxllm.lm import load
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import as_token_array
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

NAME = "jaxllm"
# Ignored in greedy decoding.
_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


ContextAndContinuation = tuple[Sequence[int], Sequence[int]]


class Likelihood(NamedTuple):
    """The log-probability of some tokens, and whether greedy decoding generates all of them."""

    logprob: float
    greedy: bool


def continuation_likelihoods(
    model: Model,
    params: Params,
    pairs: Sequence[ContextAndContinuation],
    *,
    max_length: int,
    batch: int = 8,
    show_progress: bool | None = None,
) -> Iterator[tuple[int, Likelihood]]:
    """Yield `(index of the pair, Likelihood)` of each continuation given its context.

    Pairs are yielded as they are computed, not in the given order.

    Args:
        pairs: Token ids of context and continuation, each with at least one token.
        max_length: Maximum number of input tokens; longer ones are truncated on the left.

    Raises:
        TokenError: For an empty context or continuation, or ids outside the vocabulary.
        CapacityError: For a continuation longer than `max_length`, or a `max_length` beyond the
            model's context.
    """
    documents, spans = [], []
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise TokenError(f"pair {number}: context and continuation must not be empty")
        if len(continuation) > max_length:
            raise CapacityError(
                f"pair {number}: continuation is too long: got {len(continuation)} tokens, expected"
                f" at most {max_length}"
            )
        parts = [as_token_array(f"pair {number}", part) for part in (context, continuation)]
        ids = np.concatenate(parts)[-(max_length + 1) :]
        documents.append(ids)
        spans.append(Span(number, 0, len(ids), len(ids) - len(continuation)))
    return _score_spans(model, params, documents, spans, max_length, batch, show_progress)


def document_logprobs(
    model: Model,
    params: Params,
    documents: Sequence[Sequence[int]],
    *,
    max_length: int,
    batch: int = 8,
    show_progress: bool | None = None,
) -> list[float]:
    """Return the log-probability of each document, in windows of `max_length` tokens.

    documents: token ids; the first is a prefix token, which is conditioned on but not scored. Every
    other token is scored once (`rolling_spans`). Raises as
    `continuation_likelihoods`.
    """
    arrays = [as_token_array(f"document {number}", ids) for number, ids in enumerate(documents)]
    spans = [
        s for n, ids in enumerate(arrays) for s in rolling_spans(len(ids), max_length + 1, 0, n)
    ]
    total_D = np.zeros(len(arrays))
    each = _score_spans(model, params, arrays, spans, max_length, batch, show_progress)
    for number, likelihood in each:
        total_D[spans[number].document] += likelihood.logprob
    return total_D.tolist()


def _score_spans(
    model: Model,
    params: Params,
    documents: list[np.ndarray],
    spans: list[Span],
    max_length: int,
    batch: int,
    show_progress: bool | None,
) -> Iterator[tuple[int, Likelihood]]:
    loader = Loader(
        documents=documents,
        spans=spans,
        batch=batch,
        width=max_length + 1,
        by_length=True,
    )
    check_loader(model, loader)

    def run() -> Iterator[tuple[int, Likelihood]]:
        with steps_bar("likelihoods", len(loader), show_progress) as done:
            for rows in loader.batches():
                logprob_BT, greedy_BT = score(model, params, rows)
                logprob_B = logprob_BT.sum(axis=1, dtype=np.float64)
                greedy_B = (greedy_BT == rows.scored_BT).all(axis=1)
                for b in np.flatnonzero(rows.span_B >= 0):
                    yield int(rows.span_B[b]), Likelihood(float(logprob_B[b]), bool(greedy_B[b]))
                done()

    return run()


class JaxLM:
    """lm_eval model on top of an `LM`; requests are objects with `args`.

    Special tokens spelled out in a text are parsed, as transformers' tokenizers do. If the
    checkpoint requests a begin-of-text token, it is prepended unless a text already begins with it.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        pretrained: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = "auto",
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Load the model.

        Args:
            path: as for `jaxllm.load`, as are dtype and quantize.
            pretrained: alternative name of `path`.
            max_length: maximum input length in tokens; by default the model's context.
            max_gen_toks: default limit of new tokens per request.
            batch_size: rows, or "auto".
            prefix_token_id: precedes a text without context; by default the begin-of-text token,
                else end-of-text.
            add_bos_token: prepend the begin-of-text token; by default as the checkpoint requests.
            max_batch_size, device: ignored. The harness passes them to every model; JAX chooses
                the device (JAX_PLATFORMS).
        """
        super().__init__()
        if (path is None) == (pretrained is None):
            raise ConfigError(
                "model_args requires path=... (a directory, demo:llama or hf:owner/name)"
            )
        self.lm = load(str(path or pretrained), dtype=dtype, quantize=quantize)
        if self.lm.tokenizer is None:
            raise TokenError(f"{self.lm.path} has no tokenizer, which the harness requires")
        self.tokenizer: Tokenizer = self.lm.tokenizer
        context = self.lm.config.context_length
        usual = self.lm.config.default_cache_size
        self.max_length = usual if max_length is None else int(max_length)
        if not 1 <= self.max_length <= context:
            raise CapacityError(f"max_length must be from 1 to {context}, got {max_length}")
        self.max_gen_toks = int(max_gen_toks)
        automatic = str(batch_size).startswith("auto")
        vocab_size = self.lm.config.vocab_size
        self.batch_size = (
            default_batch(vocab_size, self.max_length) if automatic else int(batch_size)
        )
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, or auto, got {batch_size}")
        self.adds_bos = self.tokenizer.adds_bos if add_bos_token is None else bool(add_bos_token)
        self._prefix = prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that a text without context is conditioned on."""
        for found in (self._prefix, self.tokenizer.bos_id, self.tokenizer.eos_id):
            if found is not None:
                return int(found)
        raise TokenError(f"{self.lm.path} has neither bos nor eos token. Set prefix_token_id")

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether greedy decoding generates it."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        each = continuation_likelihoods(
            self.lm.model,
            self.lm.params,
            pairs,
            max_length=self.max_length,
            batch=self.batch_size,
            show_progress=False if disable_tqdm else None,
        )
        for number, likelihood in each:
            answers[number] = (likelihood.logprob, likelihood.greedy)
            self._cache_answer("loglikelihood", requests[number].args, answers[number])
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each `(text,)` after the prefix token, using windows."""
        totals = document_logprobs(
            self.lm.model,
            self.lm.params,
            [[self.prefix_token_id, *self.encode(request.args[0])] for request in requests],
            max_length=self.max_length,
            batch=self.batch_size,
            show_progress=False if disable_tqdm else None,
        )
        for request, total in zip(requests, totals, strict=True):
            self._cache_answer("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each `(context, options)` up to its first `until` string.

        The requests run with continuous batching in `batch_size` rows.
        """
        texts = [""] * len(requests)
        asked = [self._make_request(n, *request.args) for n, request in enumerate(requests)]
        stops = [_stop_strings(request.args[1]) for request in requests]
        answers = self.lm.serve(asked, rows=self.batch_size, capacity=self.max_length)
        with steps_bar("generating", len(asked), False if disable_tqdm else None) as done:
            for number, answer in answers:
                if not isinstance(answer, Completion):
                    raise answer
                text = self.tokenizer.decode(answer.tokens)
                for stop in stops[number]:
                    text = text.split(stop)[0]
                texts[number] = text
                self._cache_answer("generate_until", requests[number].args, text)
                done()
        return texts

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Return token ids as the harness's `hf` model does. bos None: as in the checkpoint."""
        ids = self.tokenizer.encode(text, parse_special=True)
        if bos is None:
            bos = self.adds_bos and ids[:1] != [self.tokenizer.bos_id]
        return ids if not bos or self.tokenizer.bos_id is None else [self.tokenizer.bos_id, *ids]

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the checkpoint's chat template.

        Without a generation prompt it ends with the last message, for the model to continue.
        """
        text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        final = chat_history[-1]["content"]
        for spelled in (final, final.strip()):
            before, found, _ = text.rpartition(spelled)
            if found:
                return before + found
        raise TemplateError("the chat template does not render the message to continue verbatim")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's source, for the harness's log."""
        return self._template.source if chat_template else None

    @property
    def _template(self) -> ChatTemplate:
        if isinstance(self.lm.chat_template, JaxllmError):
            raise self.lm.chat_template
        return self.lm.chat_template

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both, split at the end of the context without its trailing spaces."""
        if not context:
            ids = self.encode(continuation, bos=False)
            if ids[:1] == [self.prefix_token_id]:
                return ids[:1], ids[1:]
            return [self.prefix_token_id], ids
        kept = context.rstrip()
        whole, before = self.encode(context + continuation), self.encode(kept)
        # A token may span the border: "Once" after "Onc". Then the continuation is encoded alone.
        rest = whole[len(before) :] or self.encode(context[len(kept) :] + continuation, bos=False)
        return before or [self.prefix_token_id], rest

    def _make_request(
        self, number: int, context: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        options = {**options}
        limits = [options.pop(name, None) for name in _TOKEN_LIMITS]
        new = int(next((limit for limit in limits if limit is not None), self.max_gen_toks))
        if not 1 <= new < self.max_length:
            raise CapacityError(
                f"{new} new tokens leave no room for a prompt: max_length is {self.max_length}"
            )
        stops = _stop_strings(options)
        options.pop("until", None)
        if not options.setdefault("do_sample", float(options.get("temperature", 0)) > 0):
            options = {k: v for k, v in options.items() if k not in _SAMPLING_OPTIONS}
        return {
            "id": number,
            "prompt": self.encode(context)[-(self.max_length - new) :] or [self.prefix_token_id],
            "max_new_tokens": new,
            "stop_strings": stops,
            "eos_token_id": self.lm.generation.get("eos_token_id", self.tokenizer.eos_id),
            "seed": number,
            **options,
        }

    def _cache_answer(self, kind: str, args: tuple[Any, ...], answer: Any) -> None:
        """Record an answer; the class made by `register` passes it to the harness's cache."""


def register() -> type:
    """Add the model "jaxllm" to lm_eval's registry, once; return its class.

    Raises ConfigError if lm_eval is not installed.
    """
    try:
        base: Any = import_module("lm_eval.api.model").LM
        registry: Any = import_module("lm_eval.api.registry")
        import_module("lm_eval.models")  # first, because lm_eval fills only an empty registry
    except ImportError as error:
        raise ConfigError(f"lm_eval is missing ({error}): pip install 'jaxllm[eval]'") from None
    if NAME in registry.model_registry:
        return registry.get_model(NAME)

    class JaxllmLM(JaxLM, base):
        def _cache_answer(self, kind: str, args: tuple[Any, ...], answer: Any) -> None:
            self.cache_hook.add_partial(kind, args, answer)

    registry.register_model(NAME)(JaxllmLM)
    return JaxllmLM


def main(arguments: Sequence[str] | None = None) -> None:
    """Run lm_eval's command with the model "jaxllm" registered."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        register()
        sys.argv = ["lm_eval", *given]
        import_module("lm_eval.__main__").cli_evaluate()
    except JaxllmError as error:
        sys.stderr.write(f"jaxllm: {error}\n")
        sys.exit(1)


def _stop_strings(options: Mapping[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


if __name__ == "__main__":
    main()
