"""Adapter for EleutherAI's lm-evaluation-harness (`pip install 'jaxllm[eval]'`).

The harness finds models in a registry that is filled on import, so this module wraps its command:
all arguments after `python -m jaxllm.evaluate.lm_eval` are those of lm_eval.

    python -m jaxllm.evaluate.lm_eval --model jaxllm --model_args path=demo:llama --tasks ...
    --batch_size 8

From Python, call `register()` before `lm_eval.simple_evaluate(model="jaxllm", ...)`. Prefix token,
splitting of pairs and truncation follow the harness's own `hf` model.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from jaxllm.errors import CapacityError, ConfigError, JaxllmError, TemplateError, TokenError
from jaxllm.evaluate.likelihood.data import Loader, Span, rolling_spans
from jaxllm.evaluate.likelihood.score import check_loader, default_batch, score
from jaxllm.generation.completion import Completion
from jaxllm.lm import load
from jaxllm.runtime.progress import steps_bar
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer

NAME = "jaxllm"
# Ignored in greedy decoding.
_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


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
        for token in (self._prefix, self.tokenizer.bos_id, self.tokenizer.eos_id):
            if token is not None:
                return int(token)
        raise TokenError(f"{self.lm.path} has neither bos nor eos token. Set prefix_token_id")

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether greedy decoding generates it."""
        documents, spans = [], []
        for number, request in enumerate(requests):
            context, continuation = self._encode_pair(*request.args)
            if not continuation:
                raise TokenError(f"request {number}: the continuation must not be empty")
            if len(continuation) > self.max_length:
                raise CapacityError(
                    f"request {number}: continuation is too long: got {len(continuation)} tokens,"
                    f" expected at most {self.max_length}"
                )
            ids = np.array([*context, *continuation], np.int32)[-(self.max_length + 1) :]
            documents.append(ids)
            spans.append(Span(number, 0, len(ids), len(ids) - len(continuation)))
        answers = [(0.0, False)] * len(requests)
        for number, answer in self._score(documents, spans, disable_tqdm):
            answers[number] = answer
            self._cache_answer("loglikelihood", requests[number].args, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each `(text,)` after the prefix token, using windows."""
        ids = [[self.prefix_token_id, *self.encode(request.args[0])] for request in requests]
        documents = [np.array(each, np.int32) for each in ids]
        width, totals = self.max_length + 1, np.zeros(len(documents))
        spans = [s for n, each in enumerate(ids) for s in rolling_spans(len(each), width, 0, n)]
        for number, (logprob, _) in self._score(documents, spans, disable_tqdm):
            totals[spans[number].document] += logprob
        for request, total in zip(requests, totals.tolist(), strict=True):
            self._cache_answer("loglikelihood_rolling", request.args, total)
        return totals.tolist()

    def _score(
        self, documents: Sequence[np.ndarray], spans: Sequence[Span], disable_tqdm: bool
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield each span's index, log-probability, and whether greedy decoding generates it.

        The longest come first, so that batches have few different shapes.
        """
        width = self.max_length + 1
        loader = Loader(
            documents=documents, spans=spans, batch=self.batch_size, width=width, by_length=True
        )
        check_loader(self.lm.model, loader)
        with steps_bar("likelihoods", len(loader), False if disable_tqdm else None) as done:
            for rows in loader.batches():
                logprob_BT, greedy_BT = score(self.lm.model, self.lm.params, rows)
                logprob_B = logprob_BT.sum(axis=1, dtype=np.float64)
                greedy_B = (greedy_BT == rows.scored_BT).all(axis=1)
                for b in np.flatnonzero(rows.span_B >= 0):
                    yield int(rows.span_B[b]), (float(logprob_B[b]), bool(greedy_B[b]))
                done()

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
            before, match, _ = text.rpartition(spelled)
            if match:
                return before + match
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
