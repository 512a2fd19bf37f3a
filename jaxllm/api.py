"""The front door: load a checkpoint, turn text into text. Everything it does, the steps can do."""

import dataclasses
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import flax.linen as nn
import numpy as np

from jaxllm import checkpoint, models
from jaxllm.cache.kv import KVCache
from jaxllm.complete import (
    DECODERS,
    FINISH_REASONS,
    Completion,
    Parts,
    TopLogprobs,
    complete,
    generation,
    reader_of,
    reason,
    top_logprobs,
)
from jaxllm.config import ModelConfig
from jaxllm.decode.generate import Finish, stream
from jaxllm.decode.sampling import GREEDY
from jaxllm.decode.serve import Request, serve
from jaxllm.embed import embeddings
from jaxllm.errors import (
    CheckpointError,
    JaxllmError,
    NonFiniteError,
    SamplingError,
    TokenError,
)
from jaxllm.files import is_there
from jaxllm.settings import UNSUPPORTED, Settings, read_settings, row_options
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.reader import Reader
from jaxllm.text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.precision import Precision, freeze
from jaxllm.weights.quantize import Rules
from jaxllm.weights.stored import count as weights_in

# What a request to `serve` cannot ask for.
UNSERVED = (
    "assistant_model",
    "cache",
    "guidance_scale",
    "num_beams",
    "num_return_sequences",
    "overflow",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "top_logprobs",
)
DEMOS = Path(__file__).parent / "demo"
Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token of a stream: the text it completes ("" in the middle of a character), and more.

    cache: of the text before this token. The next step writes over it; the last one is yours.
    finish_reason: None until the last piece. tokens_per_second: since the second token, the first
    whose step had been compiled.
    """

    text: str
    token: int
    logprob: float
    finish_reason: str | None
    tokens_per_second: float
    cache: KVCache = dataclasses.field(repr=False)
    top_logprobs: TopLogprobs | None = None


@dataclasses.dataclass(frozen=True)
class LM:
    """A language model and what its checkpoint brought with it; nothing here ever changes.

    generation: generation_config.json. tokenizer: None where the checkpoint has none.
    """

    config: ModelConfig
    model: nn.Module
    params: Params
    tokenizer: Tokenizer | None
    generation: Mapping[str, Any]
    path: Path

    @property
    def parts(self) -> Parts:
        """What decoding takes."""
        return Parts(self.model, self.params, self.tokenizer)

    @overload
    def generate(self, prompt: str, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: list[str], **options: Any) -> list[Completion]: ...
    @overload
    def generate(self, prompt: Sequence[int] | Sequence[Sequence[int]], **options: Any) -> Any: ...

    def generate(self, prompt: Any, **options: Any) -> Any:
        """Continue a prompt, or each of a list of prompts in one batch.

        prompt: text, token ids, or a list of either. A text is encoded without special tokens;
        before it goes the begin-of-text token if the checkpoint asks for one (and always before
        an empty text). Token ids are taken as they are.

        options, in Hugging Face's spelling; generation_config.json gives the defaults:

        max_new_tokens (256, or what fits), eos_token_id (an id or several), stop_strings: the end.
        do_sample, seed (0), and everything in `decode.options.PROCESSORS`: the choice of tokens.
        Greedy unless do_sample=True or a temperature is given. Numbers may be one a prompt.
        num_return_sequences (1), num_beams (1), length_penalty (1.0), early_stopping (False).
        assistant_model (an LM) or prompt_lookup_num_tokens: speculative decoding, with
        num_assistant_tokens (4) or max_matching_ngram_size (3).
        penalty_alpha, with top_k (4): contrastive search. guidance_scale, negative_prompt (text or
        token ids): classifier-free guidance.
        top_logprobs (0): how many of each step's likeliest tokens to report.
        overflow: "refuse" a text that exceeds the context; "slide": begin again from the context's
        recent half; "sinks": keep the first tokens and a window.
        cache: a KVCache of one row; what the prompt shares with its text is not run again.
        chunk (256): tokens of a prompt that are run at once.
        batch_invariant (False): a row's last bits may depend on how many rows run with it; True
        runs each prompt by itself, which gives up what batching gains. Where a prompt's place in
        the list must not matter either, give each its own seed: seed=[3, 7]; with one seed, equal
        prompts draw equal texts.

        Returns a Completion, or a list of them, for num_return_sequences above 1 a list for each
        prompt. Raises TokenError for ids outside the vocabulary, CapacityError when prompt and new
        tokens exceed the context, SamplingError for an unknown or impossible option,
        NonFiniteError when the model returns NaN.
        """
        prompts, single = self._prompts(prompt)
        if options.get("negative_prompt") is not None:
            options["negative_prompt"] = self.encode(options["negative_prompt"])
        settings = read_settings(self.config, self.generation, prompts, options)
        if settings.batch_invariant and len(prompts) > 1:
            return [
                self.generate(p, **row_options(options, row, len(prompts)))
                for row, p in enumerate(prompts)
            ]
        n, each = settings.num_return_sequences, complete(self.parts, prompts, settings)
        if n == 1:
            return each[0] if single else each
        groups = [each[i : i + n] for i in range(0, len(each), n)]
        return groups[0] if single else groups

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """As `generate` for one prompt, a `Piece` at a time; equal options give equal tokens."""
        prompts, single = self._prompts(prompt)
        if not single:
            raise TokenError("stream takes one prompt; use generate for a list of them")
        settings = read_settings(self.config, self.generation, prompts, options)
        if settings.num_return_sequences > 1 or any(d.asked(settings) for d in DECODERS):
            raise SamplingError("stream gives one text as it is decoded; use generate")
        tokens_BT, arguments = generation(prompts, settings)
        reader, pieces, start = reader_of(self.parts, prompts[0], settings), [""], 0.0

        def ends(token_B: np.ndarray) -> np.ndarray:
            pieces.append(reader.push(int(token_B[0])))
            return np.array([reader.stopped])

        arguments["until"] = ends
        for count, step in enumerate(stream(self.model, self.params, tokens_BT, **arguments)):
            finish = reason(Finish(int(step.finish_B[0])), 0, int(step.length_B[0]))
            now = time.perf_counter()
            start = now if count <= 1 else start
            piece = pieces.pop() + (reader.flush() if finish else "")
            rate = (count - 1) / (now - start) if count > 1 else 0.0
            yield Piece(
                piece,
                int(step.token_BT[0, 0]),
                float(step.logprob_BT[0, 0]),
                finish,
                rate,
                step.cache,
                top_logprobs(step, 0, 1)[0] if settings.top_logprobs else None,
            )

    def serve(
        self, requests: Iterable[Mapping[str, Any]], *, rows: int = 8, capacity: int | None = None
    ) -> Iterator[tuple[Any, Completion | JaxllmError]]:
        """Answer requests by continuous batching: they join and leave while others run.

        requests: each a mapping with `prompt` (text or token ids), `id` (by default its number) and
        options of `generate`, of which beams, several sequences, overflow, a cache and top_logprobs
        are not served. rows: how many run at once, in a cache of `capacity` tokens a row (by
        default the model's context). Asked for the next request whenever a row is free.

        Yields `(id, Completion)` as they finish, with the tokens that `generate` gives each alone,
        or `(id, error)` for one that cannot be answered; the others go on.
        """
        readers: dict[Any, tuple[Reader, int, list[int], list[float]]] = {}
        refused: list[tuple[Any, JaxllmError]] = []

        def read() -> Iterator[Request | None]:
            for number, request in enumerate(requests):
                options = {**request}
                name, prompt = options.pop("id", number), options.pop("prompt", None)
                try:
                    made, reader = self._request(name, prompt, options)
                except JaxllmError as error:
                    refused.append((name, error))
                    yield None  # so that the refusal is told now
                    continue
                readers[name] = (reader, len(made.prompt), [], [])
                yield made

        capacity = self.config.context_length if capacity is None else capacity
        for event in serve(self.model, self.params, read(), rows=rows, capacity=capacity):
            while refused:
                yield refused.pop(0)
            if event.error is not None:
                yield event.id, event.error
                continue
            reader, length, tokens, logprobs = readers[event.id]
            if event.token is not None and event.logprob is not None:
                tokens.append(event.token)
                logprobs.append(event.logprob)
            if event.finish == Finish.NON_FINITE:
                yield event.id, NonFiniteError("the model returned NaN or infinite logits")
            elif event.finish is not None:
                finish = FINISH_REASONS[event.finish]
                yield event.id, Completion(reader.whole(tokens), tokens, logprobs, finish, length)
        yield from refused

    def embed(self, texts: Sequence[Prompt], **options: Any) -> np.ndarray:
        """One vector a text, float32 `[N, D]`: the hidden states of a layer, pooled.

        texts: text or token ids each, as `generate` takes them. options, and what is raised: those
        of `jaxllm.embed.embeddings` (layer, pooling, normalize, batch).
        """
        if isinstance(texts, str):
            raise TokenError("embed takes a list of texts, got one text")
        return embeddings(self.model, self.params, [self.encode(t) for t in texts], **options)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The token ids of a conversation, as the checkpoint's chat template spells it.

        messages: `{"role": ..., "content": ...}` each. Special tokens are recognised in the whole
        rendered text, so one that a message spells out counts as one: do not pass on strangers'
        messages unread. Raises TemplateError if there is no template or it refuses them,
        TokenError where the checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise TokenError(f"{self.path} has no tokenizer: give token ids to generate")
        text = ChatTemplate.from_directory(self.path).render(messages, **variables)
        return self.tokenizer.encode(text, parse_special=True)

    def __repr__(self) -> str:
        total = sum(weights_in(leaf) for _, leaf in flatten(self.params))
        precision = self.model.precision
        named = precision.quantize if isinstance(precision.quantize, str) else "quantized"
        return (
            f"LM({self.path.name}: {self.config.model_type}, {total / 1e6:.1f} M parameters,"
            f" {precision.weights}{f' {named}' if precision.quantize else ''},"
            f" context {self.config.context_length})"
        )

    def _prompts(self, prompt: Any) -> tuple[list[list[int]], bool]:
        """Token ids of each prompt, and whether there was just one."""
        single = isinstance(prompt, str) or (len(prompt) > 0 and _is_id(prompt[0]))
        each = [prompt] if single or len(prompt) == 0 else list(prompt)
        prompts = [self.encode(p) for p in each]
        return prompts, single

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids that `generate` runs for a prompt; raises TokenError for what is none."""
        bos = self.generation.get("bos_token_id")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                if prompt:
                    raise TokenError(f"{self.path} has no tokenizer: give token ids, not text")
                ids = []
            else:
                ids = self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)
                bos = self.tokenizer.bos_id if bos is None else bos
        elif isinstance(prompt, Sequence | np.ndarray) and all(map(_is_id, prompt)):
            ids = [int(token) for token in prompt]
        else:
            raise TokenError(f"a prompt is text or token ids, got {prompt!r:.60}")
        if not ids:
            if bos is None:
                raise TokenError("the prompt is empty and the checkpoint names no bos token")
            ids = [int(bos)]
        return ids

    def _request(
        self, name: Any, prompt: Any, options: Mapping[str, Any]
    ) -> tuple[Request, Reader]:
        """One request of `serve`, and what reads its tokens."""
        ids = self.encode(prompt)
        settings = read_settings(self.config, self.generation, [ids], options)
        plain = Settings(max_new_tokens=1, sampler=GREEDY)
        for field in UNSERVED:
            if getattr(settings, field) != getattr(plain, field):
                raise SamplingError(f"a request to serve takes no {field}")
        reader = reader_of(self.parts, ids, settings)

        def stops(token: int) -> bool:
            reader.push(token)
            return reader.stopped

        request = Request(
            id=name,
            prompt=ids,
            max_new_tokens=int(np.max(settings.max_new_tokens)),
            sampler=settings.sampler,
            seed=settings.seed,  # type: ignore[arg-type]
            eos_token_ids=settings.eos_token_ids,
            until=stops if settings.stop_strings else None,
        )
        return request, reader


def load(
    path: str | Path,
    *,
    dtype: str | Precision | None = None,
    quantize: Rules | None = None,
    show_progress: bool | None = None,
) -> LM:
    """Load a checkpoint: a Hugging Face directory (Llama family, GPT-2) or jaxllm's own form.

    path: a directory; "demo:llama" or "demo:gpt2" for the checkpoints that jaxllm brings; or
    "hf:owner/name", the only spelling for which anything is downloaded. dtype: "float32",
    "bfloat16", "float16" for weights, activations and cache alike, or a `Precision`; by default as
    the checkpoint keeps its weights. quantize: a format ("int8", "int4", "bf16-packed", ...) or
    ordered rules, as `jaxllm.quantize` takes them, applied tensor by tensor while loading.
    show_progress: by default where stderr is a terminal.

    Raises CheckpointError or ConfigError with everything that is wrong with the files.
    """
    opened = open_checkpoint(path)
    precision = dtype if isinstance(dtype, Precision) else opened.precision
    if isinstance(dtype, str):
        precision = precision.in_dtype(dtype)
    if quantize is not None:
        precision = dataclasses.replace(precision, quantize=freeze(quantize))
    directory = opened.directory
    for name, neutral in UNSUPPORTED.items():
        if opened.generation.get(name, neutral) not in (neutral, None):
            warnings.warn(f"generation_config.json: {name} is not supported yet", stacklevel=2)
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer(directory) else None
    return LM(
        config=opened.config,
        model=models.build(opened.config, precision),
        params=checkpoint.load_params(opened, precision, show_progress=show_progress),
        tokenizer=tokenizer,
        generation=opened.generation,
        path=directory,
    )


def open_checkpoint(path: str | Path) -> checkpoint.Checkpoint:
    """Open a checkpoint in either form, and check all but its numbers; `path` as for `load`."""
    from jaxllm.convert.engine import (
        open_hf,  # the one reach upwards: convert builds on this package
    )

    directory = resolve(path)
    if checkpoint.is_native(directory):
        return checkpoint.open_native(directory)
    return open_hf(directory)


def resolve(path: str | Path) -> Path:
    """The directory that a path or a name of `load` stands for; downloads only for "hf:..."."""
    text = str(path)
    if text.startswith("demo:") and is_there(DEMOS / text[5:] / "config.json"):
        return DEMOS / text[5:]
    if text.startswith("hf:"):
        return _download(text[3:])
    directory = Path(path)
    if is_there(directory) and directory.is_dir():
        return directory
    hint = f" To download from the hub, write hf:{text}" if re.fullmatch(_REPO, text) else ""
    raise CheckpointError(f"{text:.200} is not a directory.{hint}")


_REPO = r"[\w.-]+/[\w.-]+"


def _download(repo: str) -> Path:
    if not re.fullmatch(_REPO, repo):
        raise CheckpointError(f"hf:{repo} does not name a repository (hf:owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(repo, allow_patterns=["*.safetensors", "*.json", *TOKENIZER_FILES])
        )
    except Exception as error:  # whatever the network brings, one line of it is what helps
        raise CheckpointError(f"hf:{repo} could not be downloaded: {error!s:.200}") from error


def _is_id(token: Any) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool)
