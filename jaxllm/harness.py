"""jaxllm as a model of EleutherAI's lm-evaluation-harness (`pip install 'jaxllm[eval]'`).

The harness finds models in a registry that an import fills, so the command is its own, run from
here: everything after `python -m jaxllm.harness` is lm_eval's.

    python -m jaxllm.harness --model jaxllm --model_args path=demo:llama --tasks ... --batch_size 8

From Python, `register()` comes before `lm_eval.simple_evaluate(model="jaxllm", ...)`. The rules for
text (prefix token, split of a pair, truncation) are those of the harness's own `hf` model.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from jaxllm.complete import Completion
from jaxllm.errors import CapacityError, ConfigError, JaxllmError, TemplateError, TokenError
from jaxllm.evaluate.likelihood.continuations import continuation_likelihoods, document_logprobs
from jaxllm.evaluate.likelihood.score import default_batch
from jaxllm.loading import load
from jaxllm.progress import steps_bar
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer

NAME = "jaxllm"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # no part in greedy decoding
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Answers:
    """The harness's three requests, answered by an `LM`; a request is anything with `args`.

    Special tokens that a text spells out are read as such, as transformers' tokenizers do. Where
    the checkpoint asks for a begin-of-text token, texts get one unless they begin with it already.
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
        """path, or in its place pretrained: as for `jaxllm.load`, likewise dtype and quantize.

        max_length: tokens of input, by default the model's context. batch_size: rows, or "auto".
        prefix_token_id: what stands before a text that has nothing before it; by default the
        begin-of-text token, or else end-of-text. max_batch_size, device: not
        read; the harness passes them to every model, and JAX chooses its device (JAX_PLATFORMS).
        """
        super().__init__()
        if (path is None) == (pretrained is None):
            raise ConfigError("model_args: give path=..., a directory, demo:llama or hf:owner/name")
        self.lm = load(str(path or pretrained), dtype=dtype, quantize=quantize)
        if self.lm.tokenizer is None:
            raise TokenError(f"{self.lm.path} has no tokenizer, which the harness needs")
        self.tokens: Tokenizer = self.lm.tokenizer
        context = self.lm.config.context_length
        usual = self.lm.config.usual_capacity
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
            raise ConfigError(f"batch_size must be at least 1 or auto, got {batch_size}")
        self.adds_bos = self.tokens.adds_bos if add_bos_token is None else bool(add_bos_token)
        self._prefix = prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on."""
        for found in (self._prefix, self.tokens.bos_id, self.tokens.eos_id):
            if found is not None:
                return int(found)
        raise TokenError(f"{self.lm.path} has neither bos nor eos token: give prefix_token_id")

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Of each `(context, continuation)`: log-probability, and whether greedy would make it."""
        pairs = [self._pair(*request.args) for request in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        each = continuation_likelihoods(
            self.lm.model,
            self.lm.params,
            pairs,
            max_length=self.max_length,
            batch=self.batch_size,
            show_progress=False if disable_tqdm else None,
        )
        for number, likelihood in each:
            found[number] = (likelihood.logprob, likelihood.greedy)
            self._keep("loglikelihood", requests[number].args, found[number])
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each `(text,)`, after the prefix token, in windows."""
        found = document_logprobs(
            self.lm.model,
            self.lm.params,
            [[self.prefix_token_id, *self.encode(request.args[0])] for request in requests],
            max_length=self.max_length,
            batch=self.batch_size,
            show_progress=False if disable_tqdm else None,
        )
        for request, total in zip(requests, found, strict=True):
            self._keep("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each `(context, options)` before the first of its `until` strings.

        The requests join and leave a batch of `batch_size` rows as they finish.
        """
        found = [""] * len(requests)
        asked = [self._request(n, *request.args) for n, request in enumerate(requests)]
        stops = [_stops(request.args[1]) for request in requests]
        answers = self.lm.serve(asked, rows=self.batch_size, capacity=self.max_length)
        with steps_bar("generating", len(asked), False if disable_tqdm else None) as done:
            for number, answer in answers:
                if not isinstance(answer, Completion):
                    raise answer
                text = self.tokens.decode(answer.tokens)
                for stop in stops[number]:
                    text = text.split(stop)[0]
                found[number] = text
                self._keep("generate_until", requests[number].args, text)
                done()
        return found

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Token ids as the harness's `hf` model has them; bos None: as the checkpoint wants it."""
        ids = self.tokens.encode(text, parse_special=True)
        if bos is None:
            bos = self.adds_bos and ids[:1] != [self.tokens.bos_id]
        return ids if not bos or self.tokens.bos_id is None else [self.tokens.bos_id, *ids]

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the checkpoint's chat template spells it.

        Without a generation prompt it ends with the last message, for the model to go on with.
        """
        text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        final = chat_history[-1]["content"]
        for spelled in (final, final.strip()):
            before, found, _ = text.rpartition(spelled)
            if found:
                return before + found
        raise TemplateError("the chat template does not spell out the message to continue")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template itself, for the harness's records."""
        return self._template.source if chat_template else None

    @property
    def _template(self) -> ChatTemplate:
        if isinstance(self.lm.chat_template, JaxllmError):
            raise self.lm.chat_template
        return self.lm.chat_template

    @property
    def tokenizer_name(self) -> str:
        return self.tokens.name

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, split where the context's end; spaces at its end go with what follows."""
        if not context:
            ids = self.encode(continuation, bos=False)
            if ids[:1] == [self.prefix_token_id]:
                return ids[:1], ids[1:]
            return [self.prefix_token_id], ids
        kept = context.rstrip()
        whole, before = self.encode(context + continuation), self.encode(kept)
        return before, whole[len(before) :]

    def _request(self, number: int, context: str, options: Mapping[str, Any]) -> dict[str, Any]:
        options = {**options}
        limits = [options.pop(name, None) for name in _TOKEN_LIMITS]
        new = int(next((limit for limit in limits if limit is not None), self.max_gen_toks))
        if not 1 <= new < self.max_length:
            raise CapacityError(
                f"{new} tokens to generate leave no room for a prompt in {self.max_length}"
            )
        stops = _stops(options)
        options.pop("until", None)
        if not options.setdefault("do_sample", float(options.get("temperature", 0)) > 0):
            options = {k: v for k, v in options.items() if k not in _SAMPLING}
        return {
            "id": number,
            "prompt": self.encode(context)[-(self.max_length - new) :] or [self.prefix_token_id],
            "max_new_tokens": new,
            "stop_strings": stops,
            "eos_token_id": self.lm.generation.get("eos_token_id", self.tokens.eos_id),
            "seed": number,
            **options,
        }

    def _keep(self, kind: str, args: tuple[Any, ...], answer: Any) -> None:
        """Told of each answer as it is made; the harness's own class stores it."""


def register() -> type:
    """Add the model "jaxllm" to lm_eval's registry, once; returns its class.

    Raises ConfigError where lm_eval is not installed.
    """
    try:
        base: Any = import_module("lm_eval.api.model").LM
        registry: Any = import_module("lm_eval.api.registry")
        import_module("lm_eval.models")  # before ours, or it is not filled at all
    except ImportError as error:
        raise ConfigError(f"lm_eval is missing ({error}): pip install 'jaxllm[eval]'") from None
    if NAME in registry.model_registry:
        return registry.get_model(NAME)

    class JaxllmLM(Answers, base):
        def _keep(self, kind: str, args: tuple[Any, ...], answer: Any) -> None:
            self.cache_hook.add_partial(kind, args, answer)

    registry.register_model(NAME)(JaxllmLM)
    return JaxllmLM


def main(arguments: Sequence[str] | None = None) -> None:
    """lm_eval's command, its registry knowing the model "jaxllm"."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        register()
        sys.argv = ["lm_eval", *given]
        import_module("lm_eval.__main__").cli_evaluate()
    except JaxllmError as error:
        sys.stderr.write(f"jaxllm: {error}\n")
        sys.exit(1)


def _stops(options: Mapping[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


if __name__ == "__main__":
    main()
