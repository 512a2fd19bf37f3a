"""`LM`, the high-level interface: a language model that continues text; `load` opens one."""

import contextlib
import dataclasses
import functools
import sys
import textwrap
import time
import warnings
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import jax
import numpy as np

from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.cache.prefix_cache import PrefixCache
from jaxllm.checkpoints import native
from jaxllm.config.attention_kind import AttentionKind
from jaxllm.config.model import ModelConfig
from jaxllm.convert.registry import open_checkpoint, open_tokenizer_files, read_text_assets
from jaxllm.errors import (
    CheckpointError,
    ConfigError,
    JaxllmError,
    TemplateError,
    TokenError,
    suggest_name,
)
from jaxllm.files import as_path
from jaxllm.generation.completion import (
    Completion,
    GenerationConfig,
    StopTracker,
    StreamChunk,
    generation_args,
    per_prompt,
    select_adapters,
    to_finish_reason,
    top_logprobs,
)
from jaxllm.generation.embeddings import embeddings, log_probs
from jaxllm.generation.heads import RERANK_TEMPLATE, Classification, classify, rerank
from jaxllm.generation.loops.draft import PromptLookup
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.generate import stream
from jaxllm.generation.options import (
    Call,
    GenerateOptions,
    check_options,
    document_options,
    row_options,
)
from jaxllm.generation.options.resolve import UNSUPPORTED, resolve_options
from jaxllm.generation.prompts import Prompt, encode_prompt, split_prompts, token_list
from jaxllm.models import FAMILIES, build
from jaxllm.ops import compile_cache
from jaxllm.ops.target import is_accelerator
from jaxllm.runtime import multihost
from jaxllm.runtime.validation import Dtype, check_token_ids
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.embedding_settings import EmbeddingSettings
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.formats import as_weight, for_accelerator
from jaxllm.weights.load import NotLocal
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, Placement, flatten, map_leaves
from jaxllm.weights.precision import Precision, freeze_rules, match_precision
from jaxllm.weights.quantize import Rules
from jaxllm.weights.render import render_params
from jaxllm.weights.replica_check import check_replicas
from jaxllm.weights.types.lora import LoraWeight, adapter_index, choose_adapters

if TYPE_CHECKING:  # imported where they are used: most processes do without
    from jaxllm.adapters.multi_lora import AdapterPaths
    from jaxllm.generation.background import BackgroundServer
    from jaxllm.generation.batching.compile_ahead import LoopQuery
    from jaxllm.generation.serve import PreparedRequest
    from jaxllm.sharding import MeshSpec

# Options of `embeddings`.
_EMBED_OPTIONS = ("layer", "pooling", "normalize", "batch", "show_progress")


@dataclasses.dataclass(frozen=True)
class LM:
    """A language model with its tokenizer, chat template and generation defaults; immutable.

    Attributes:
        params: the weights, with `adapter` selected.
        tokenizer: None if the checkpoint has none.
        generation: the contents of generation_config.json.
        path: the directory or file that it was loaded from.
        chat_template: the template, or the error to raise if one is needed.
        embedding: the defaults of `embed`, likewise.
        recipe: the compression steps applied so far (`jaxllm.compress`), one line per step.
        adapters: the names of the loaded adapters.
        adapter: the default adapter; `with_adapter` returns a model with another.
    """

    config: ModelConfig
    model: Model
    params: Params
    tokenizer: Tokenizer | None
    generation: Mapping[str, Any]
    path: Path
    chat_template: ChatTemplate | JaxllmError = dataclasses.field(
        default=TemplateError("this model has no chat template. Generate from plain text"),
        repr=False,
    )
    embedding: EmbeddingSettings | JaxllmError = dataclasses.field(
        default=EmbeddingSettings(), repr=False
    )
    recipe: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    adapters: tuple[str, ...] = ()
    adapter: str | None = None

    def with_adapter(self, adapter: str | None) -> "LM":
        """Return this model with another default adapter; "base" selects none, None keeps it.

        A cache belongs to the adapter that made it: save and load it with this model's `params`.

        Raises:
            ConfigError: For a name that is not in `adapters`.
        """
        if adapter is None:
            return self
        if not isinstance(adapter, str):
            raise ConfigError(f"adapter must be a name, got {adapter!r:.60}")
        return dataclasses.replace(self.with_row_adapters([adapter]), adapter=adapter)

    def with_row_adapters(self, names: Sequence[str | None]) -> "LM":
        """Return this model with an adapter for each row of a batch; None means the default one.

        Raises:
            ConfigError: For a name that is not in `adapters`.
        """
        indices = [self.adapter_index(name) for name in names]
        if len(set(indices)) == 1:  # one adapter serves any number of rows
            indices = indices[:1]
        choice_B = jax.device_put(np.array(indices, np.int32))
        return dataclasses.replace(self, params=choose_adapters(self.params, choice_B))

    def adapter_index(self, name: str | None) -> int:
        """Return an adapter's index in `adapters`; None means the default one."""
        return adapter_index(self.adapter if name is None else name, self.adapters)

    def with_attention(self, kind: AttentionKind) -> "LM":
        """Return this model with another kind of attention and the same parameters.

        A cache belongs to the model that made it. Raises ConfigError if the model cannot attend so.
        """
        config = self.config.with_attention(kind)
        return dataclasses.replace(self, config=config, model=self.model.clone(config=config))

    @overload
    def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    def generate(
        self, prompt: list[str], **options: Unpack[GenerateOptions]
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...

    @document_options
    def generate(self, prompt: Any, **options: Unpack[GenerateOptions]) -> Any:
        """Continue a prompt, or each prompt of a list in one batch.

        Options have Hugging Face's names; their defaults come from generation_config.json, and None
        means the default. Decoding is greedy unless do_sample=True or a temperature is given. If a
        result must not depend on the other rows or on its place in the list, set batch_invariant
        and give each prompt its own seed: with one seed, equal prompts give equal texts.

        Args:
            prompt: text, token ids (a list, or a NumPy or JAX array), or a list of either. Text is
                encoded without special tokens; the begin-of-text token is added if the checkpoint
                requests it (and always to an empty text). Token ids are used unchanged. An empty
                list returns an empty list.
            OPTIONS

        Returns:
            A Completion or a list of them; with num_return_sequences above 1, a list per prompt.

        Raises:
            TokenError: For ids outside the vocabulary.
            CapacityError: If prompt and new tokens exceed the context.
            SamplingError: For an unknown or invalid option.
            NonFiniteError: If the model returns NaN.
        """
        items, single = split_prompts(prompt)
        prompts = [self.encode(item) for item in items]
        if not prompts:
            check_options(options)
            return []
        config = self._resolve_options(prompts, options)
        if config.batch_invariant and len(prompts) > 1:
            return [
                self.generate(p, **row_options(options, row, len(prompts)))
                for row, p in enumerate(prompts)
            ]
        lm, n = select_adapters(self, len(prompts), config), config.num_return_sequences
        completions = config.decoder.run(lm, prompts, config)
        seeds = per_prompt(config.seed, len(completions))
        completions = [
            dataclasses.replace(c, seed=s) for c, s in zip(completions, seeds, strict=True)
        ]
        if n == 1:
            return completions[0] if single else completions
        groups = [completions[i : i + n] for i in range(0, len(completions), n)]
        return groups[0] if single else groups

    @document_options
    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Iterator[StreamChunk]:
        """Generate from one prompt as `generate` does, yielding a `StreamChunk` per token.

        Equal options give the same tokens as `generate`. Invalid input raises immediately; the
        prompt runs when the first piece is requested:
        `for piece in lm.stream("Once"): print(piece, end="")`.
        """
        items, single = split_prompts(prompt)
        if not single:
            raise TokenError("stream takes one prompt; use generate for a list of them")
        prompts = [self.encode(items[0])]
        config = self._resolve_options(prompts, options, "stream")
        adapter: Any = config.adapter  # `with_adapter` rejects a list
        return self.with_adapter(adapter)._stream_chunks(prompts, config)

    def _stream_chunks(
        self, prompts: list[list[int]], config: GenerationConfig
    ) -> Iterator[StreamChunk]:
        tokens_BT, arguments = generation_args(prompts, config)
        tracker, pieces, start = StopTracker(self.tokenizer, prompts[0], config), [""], 0.0

        def check_stop(token_B: np.ndarray) -> np.ndarray:
            pieces.append(tracker.push(int(token_B[0])))
            return np.array([tracker.stopped])

        arguments["until"] = check_stop
        if not self.config.has_state and config.can_fast_forward(1):
            arguments["forced"] = tracker.forced
        for count, step in enumerate(stream(self.model, self.params, tokens_BT, **arguments)):
            ended, length = np.asarray(step.finish_B)[0], np.asarray(step.length_B)[0]
            finish = to_finish_reason(Finish(int(ended)), 0, int(length))
            seconds = time.perf_counter()
            start = seconds if count <= 1 else start
            piece = pieces.pop() + (tracker.flush() if finish else "")
            rate = (count - 1) / (seconds - start) if count > 1 else 0.0
            yield StreamChunk(
                piece,
                int(np.asarray(step.token_BT)[0, 0]),
                float(np.asarray(step.logprob_BT)[0, 0]),
                finish,
                rate,
                step.cache,
                top_logprobs(step, 0, 1)[0] if config.top_logprobs else None,
                config.seed if isinstance(config.seed, int) else config.seed[0],
                tracker.grammar_complete,
            )

    def serve(
        self,
        requests: "Iterable[Mapping[str, Any] | PreparedRequest | LoopQuery | None]",
        *,
        rows: int = 8,
        capacity: int | None = None,
        slots: int | None = None,
        prefix_cache: PrefixCache | None = None,
        shared_prefixes: Sequence[Prompt] = (),
        draft: "LM | PromptLookup | None" = None,
        draft_tokens: int = 4,
    ) -> Iterator[tuple[Any, Completion | JaxllmError]]:
        """Answer requests with continuous batching: requests join and leave while others run.

        Args:
            requests: mappings with `prompt` (text or token ids) and options of `generate`, except
                beams, several sequences, overflow and cache; top_logprobs is at most 20. The
                iterator is read whenever a row is free; None means that no request is waiting.
                Further keys: `id`: any value, by default the request's number or the next unused
                one. Requests with equal ids are answered separately. `is_cancelled`: a function
                without arguments that returns whether to stop this request (for example
                `threading.Event().is_set`). The completion then holds the tokens so far, and its
                finish_reason is "cancelled". `on_chunk`: a function called with a `StreamChunk` for
                each token. Their texts add up to the completion's. `namespace`: a text; requests of
                different namespaces share nothing in `prefix_cache`. `read`, `read_steps`: sites to
                read and the steps in which to read them (`Request`), which come back as
                `Completion.sites` and `StreamChunk.sites`. A request may also be one of
                `prepare_request`.
            rows: the batch size.
            capacity: cache slots per row; by default the model's context.
            slots: cache slots of all rows together, by default `rows * capacity`. With fewer, a
                request waits until its prompt has room; if texts grow beyond all slots, the latest
                request pauses and runs again later. It does not change any result.
            prefix_cache: holds prompts, so that later requests that begin like them run only the
                rest (`Completion.cached_tokens`). It does not change any result. Pass the same one
                to later calls to keep it.
            shared_prefixes: texts or token ids that many prompts begin with, such as a system
                message. They run once, and all requests without adapter and edits read their keys
                and values in place. They do not change any result.
            draft: speculation in every row, by a smaller LM with the same vocabulary or by lookup
                in the text, `jaxllm.PromptLookup()`. It does not change any result, and is used
                while no row has prompt tokens to run (`Completion.draft_stats`).
            draft_tokens: tokens that it proposes per row and pass.

        Yields `(id, Completion)` as requests finish, with the tokens that `generate` returns for
        each alone, or `(id, error)` for a request that fails; the others continue.
        """
        from jaxllm.generation.serve import answer_requests

        capacity = self.config.default_cache_size if capacity is None else capacity
        return answer_requests(
            self, requests, self._read_request, rows=rows, capacity=capacity, slots=slots,
            prefix_cache=prefix_cache, draft=draft, draft_tokens=draft_tokens,
            shared_prefixes=[self.encode(text) for text in shared_prefixes],
        )  # fmt: skip

    def prepare_request(self, request: Mapping[str, Any]) -> "PreparedRequest":
        """Encode and check a request of `serve` ahead, in any thread: long texts, grammars.

        Raises what makes `serve` answer a request with an error, apart from its length.
        """
        from jaxllm.generation.serve import prepare_request

        return prepare_request(request, self._read_request)

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generate from one prompt as `generate` does, without blocking the event loop.

        All coroutines of this model share one batch of 8 rows (`BackgroundServer`), so many run at
        the cost of few. Cancelling the task frees its row. Options and errors are those of a
        request of `serve`.
        """
        items = self._background.stream({"prompt": prompt, **options})
        *_, completion = [item async for item in items]
        assert isinstance(completion, Completion)
        return completion

    async def astream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[StreamChunk]:
        """Yield a `StreamChunk` per token as `stream` does, without blocking the event loop.

        Leaving the loop early ends the request; see `agenerate`.
        `async for piece in lm.astream("Once"): print(piece, end="")`.
        """
        items = self._background.stream({"prompt": prompt, **options})
        async with contextlib.aclosing(items):  # else it would end only when collected
            async for item in items:
                if isinstance(item, StreamChunk):
                    yield item

    @functools.cached_property
    def _background(self) -> "BackgroundServer":
        """The server of `agenerate` and `astream`; frees its cache soon after the last call."""
        from jaxllm.generation.background import BackgroundServer

        return BackgroundServer(self, idle_seconds=1.0)

    def _read_request(
        self, prompt: Any, options: Mapping[str, Any]
    ) -> tuple[list[int], GenerationConfig]:
        ids = self.encode(prompt)
        return ids, self._resolve_options([ids], options, "serve")

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        instruction: str | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Return one vector per text, float32 `[N, D]`: the pooled hidden states of a layer.

        `texts` are text or token ids, and `adapter` is a name, as for `generate`. The tokenizer's
        end token is appended to a text, and a prompt is put in front of it: the checkpoint's prompt
        `prompt_name` ("query"), or, with an `instruction`, the form of Qwen3-Embedding's queries.
        Token ids are used unchanged.

        Options and errors are those of `jaxllm.generation.embeddings.embeddings` (layer, pooling,
        normalize, batch, show_progress); any other option raises ConfigError. The defaults of
        pooling, normalize and prompt_name are those of sentence-transformers' files in the
        checkpoint; CheckpointError is raised for what these require and jaxllm lacks.
        """
        for name in options.keys() - set(_EMBED_OPTIONS):
            raise ConfigError(f"embed has no option {name}{suggest_name(name, _EMBED_OPTIONS)}")
        ids = self.encode_texts(texts, prompt_name=prompt_name, instruction=instruction)
        settings: Any = self.embedding  # `encode_texts` raises an error
        options = {"pooling": settings.pooling, "normalize": settings.normalize, **options}
        return embeddings(self.model, self.with_adapter(adapter).params, ids, **options)

    def encode_texts(
        self,
        texts: Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        instruction: str | None = None,
    ) -> list[list[int]]:
        """Return the token ids that `embed` runs. Raises what `embed` raises."""
        if isinstance(self.embedding, JaxllmError):
            raise self.embedding
        prompt = self.embedding.prompt(prompt_name, instruction)
        return self._encode_texts(texts, "embed", prompt)

    def classify(
        self,
        texts: Sequence[Prompt],
        *,
        adapter: str | None = None,
        batch: int = 16,
        show_progress: bool | None = None,
    ) -> Classification:
        """Return the outputs of the checkpoint's score head for each text: classes or rewards.

        Args:
            texts: text or token ids, as for `embed`; a reward model rates a conversation's ids
                (`chat_prompt`). The outputs are those at a text's last token that is not padding
                (`ScoreHead.pad_token_id`), as in transformers' `ForSequenceClassification` classes.

        Raises:
            ConfigError: For a checkpoint without such a head; else what `embed` raises.
        """
        ids = self._encode_texts(texts, "classify")
        return classify(self, ids, adapter=adapter, batch=batch, show_progress=show_progress)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        method: str | None = None,
        instruction: str | None = None,
        template: str = RERANK_TEMPLATE,
        answers: Sequence[str] = ("no", "yes"),
        adapter: str | None = None,
        batch: int = 16,
    ) -> np.ndarray:
        """Return the relevance of each document to a query, float32 `[N]`; higher is better.

        Args:
            method: "yes-no": the probability of the second of two answers after the template, as
                Qwen3-Reranker does. "score": the output of a score head with one label, as
                `classify` scores it, of the same text. "cosine": that of the vectors of `embed`,
                with the prompts "query" and "document" if the checkpoint has them. The default is
                "score" for a checkpoint with such a head, else "yes-no".
            instruction: what the query asks for.
            template: the whole text, with {instruction}, {query} and {document}; special tokens
                spelled out in these stay text.
            answers: the tokens for irrelevant and relevant.

        Raises:
            ConfigError: For a method or a template that the model does not support; else what
                `embed` raises.
        """
        return rerank(
            self, query, documents, method=method, instruction=instruction, template=template,
            answers=answers, adapter=adapter, batch=batch,
        )  # fmt: skip

    def _encode_texts(self, texts: Any, what: str, prompt: str = "") -> list[list[int]]:
        """Return the ids of texts, with a prompt in front and the tokenizer's token at the end."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise TokenError(f"{what} takes a list of texts, got {texts!r:.60}. Give [text]")
        end = None if self.tokenizer is None else self.tokenizer.end_id
        suffix = [] if end is None else [end]
        return [
            [*self.encode(prompt + text), *suffix] if isinstance(text, str) else self.encode(text)
            for text in texts
        ]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the token ids of a conversation, rendered by the checkpoint's chat template.

        Args:
            messages: dicts `{"role": ..., "content": ...}`. Special tokens are parsed in the whole
                rendered text, so a special token spelled out in a message takes effect: check
                messages from untrusted users.

        Raises:
            TemplateError: If there is no template or it rejects the messages.
            TokenError: If the checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise TokenError(f"{self.path} has no tokenizer. Pass token ids to generate")
        if isinstance(self.chat_template, JaxllmError):
            raise self.chat_template
        text = self.chat_template.render(messages, **variables)
        return self.tokenizer.encode(text, parse_special=True)

    def init_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """Return an empty cache in the model's cache dtype.

        By default it has one row and a slot for each position of the context. Raises what
        `jaxllm.init_cache` raises.
        """
        return init_cache(
            self.model, batch, self.config.default_cache_size if capacity is None else capacity
        )

    def log_probs(self, text: Prompt) -> np.ndarray:
        """Return the log-probability of each token of `encode_prompt(text)` except the first.

        The result is float32 `[T - 1]`, each entry conditioned on all tokens before it.

        Raises:
            TokenError: For an invalid prompt.
            CapacityError: If it exceeds the context.
            NonFiniteError: If the model returns NaN.
        """
        return log_probs(self.model, self.params, [self.encode(text)])[0]

    def save(self, directory: str | Path, *, show_progress: bool | None = None) -> None:
        """Write the model and its tokenizer in the native format, which `load` reads.

        Changed weights are written too: `dataclasses.replace(lm, params=trained).save(path)`.

        Raises:
            CheckpointError: If `directory` already holds a checkpoint, and for a model with
                adapters, which this format cannot store.
        """
        directory = as_path(directory)
        if any(isinstance(leaf, LoraWeight) for _, leaf in flatten(self.params)):
            raise CheckpointError(
                f"{directory}: a checkpoint cannot store adapters. Merge one into the weights"
                " (jaxllm merge, jaxllm.adapters.merge_adapter), or write it separately"
                " (jaxllm.adapters.write_adapter)"
            )
        precision, params = self.model.precision, self.params
        if self.model.is_sharded:
            # Shards of nf4 store their scales in another layout.
            params = self.model.gather_lazy(params)
            precision = match_precision(map_leaves(lambda _, x: x.abstract, params), precision)
        opened = native.Checkpoint(
            self.path, self.config, {}, self.generation, precision, recipe=self.recipe
        )
        with open_tokenizer_files(self.path) as files:
            native.save(
                directory,
                native.with_params(opened, params, precision),
                files=files,
                show_progress=show_progress,
            )

    def __repr__(self) -> str:
        total = sum(as_weight(leaf).size for _, leaf in flatten(self.params))
        precision = self.model.precision
        named = precision.quantize if isinstance(precision.quantize, str) else "quantized"
        return (
            f"LM({self.path.name}: {self.config.model_type}, {total / 1e6:.1f} M parameters,"
            f" {precision.weights}{f' {named}' if precision.quantize else ''},"
            f" context {self.config.context_length}"
            f"{', adapters ' * bool(self.adapters)}{', '.join(self.adapters)})"
        )

    def _repr_html_(self) -> str:
        return render_params(repr(self), self.params)

    def encode(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Return the token ids that `generate` runs. Raises TokenError for an invalid prompt.

        Args:
            parse_special: read special tokens in a text, as in `"<|fim_prefix|>"`, instead of their
                letters: not for text of untrusted users.
        """
        bos, size = self.generation.get("bos_token_id"), self.config.vocab_size
        return encode_prompt(prompt, size, self.tokenizer, bos, parse_special=parse_special)

    def decode(self, tokens: Sequence[int] | np.ndarray | jax.Array) -> str:
        """Return the text of token ids, without special tokens.

        Ids that have no token, because the embedding has more rows than the tokenizer has tokens,
        have no text.

        Raises:
            TokenError: For an invalid argument or ids outside the vocabulary, and if the checkpoint
                has no tokenizer.
        """
        if self.tokenizer is None:
            raise TokenError(f"{self.path} has no tokenizer, which decode requires")
        ids = token_list(tokens)
        size = max(self.config.vocab_size, self.tokenizer.vocab_size)
        check_token_ids(np.array(ids, object), size, "decode: ")
        return self.tokenizer.decode(ids)

    def _resolve_options(
        self, prompts: list[list[int]], options: Mapping[str, Any], kind: Call = "generate"
    ) -> GenerationConfig:
        if options.get("negative_prompt") is not None:
            options = {**options, "negative_prompt": self.encode(options["negative_prompt"])}
        dtype = self.model.precision.cache
        return resolve_options(
            self.config, self.generation, prompts, options, kind, dtype, self.tokenizer
        )


def load(
    path: str | Path | native.Checkpoint,
    *,
    dtype: Dtype | Precision | None = None,
    quantize: Rules | None = None,
    int8_inputs: bool = False,
    invariant: bool = False,
    adapters: "AdapterPaths" = (),
    place: Placement | None = None,
    mesh: "str | MeshSpec | None" = None,
    exact: bool = False,
    fsdp: bool = False,
    strict: bool = False,
    keep_programs: bool | str | Path = False,
    show_progress: bool | None = None,
) -> LM:
    """Load a language model from a Hugging Face directory, a GGUF file, or jaxllm's native format.

    FAMILIES

    Args:
        path: a directory, or a GGUF file (any part of a split one); "demo:llama", "demo:gpt2" and
            so on for the bundled checkpoints; "hf:owner/name" or
            "hf:owner/name/file.gguf", which is downloaded; or the result of `open_checkpoint`.
        dtype: of weights, activations and cache: a name ("bfloat16", "bf16"), a dtype of NumPy,
            JAX or PyTorch, or a `Precision`. The default is the checkpoint's.
        quantize: a format ("int8", "int4", "bf16-packed", ...) or ordered rules, as
            `jaxllm.quantize` takes them, applied to each tensor while loading.
        int8_inputs: round the inputs of integer weights to int8, as llama.cpp does: faster, but not
            exact (`Precision`). Warns if no weight is of integers.
        invariant: a text's bits do not depend on what else runs, nor on how it is cut into steps
            (docs/same_bits.md); `serve` always computes so.
        adapters: PEFT directories (LoRA, DoRA) or GGUF files: one, a list, or `{name: directory}`
            with the names that `generate` takes. The first is used by default.
        place: a function of an array's path and the array that returns its device or sharding, or
            None for the default.
        mesh: the device mesh to shard the model over, as "data=2,tensor=4" (`jaxllm.sharding`),
            instead of `place`.
        exact: with `mesh`, compute the same bits as one device, with twice the communication.
        fsdp: with `mesh`, also shard each matrix over `data`, for training.
        strict: raise for unused fields of config.json or keys of a GGUF file, instead of warning.
        keep_programs: keep compiled programs on disk, as commands do, so that the next process
            starts faster: True for the user's cache directory, or a folder
            (`jaxllm.ops.compile_cache.enable_compile_cache`).
        show_progress: show a progress bar; by default on a terminal, and in a notebook after two
            seconds.

    Raises:
        CheckpointError: for invalid files, with all complaints.
        ConfigError: for arguments or a configuration that cannot be used.
    """
    if keep_programs is not False:
        compile_cache.enable_compile_cache(None if keep_programs is True else keep_programs)
        directory = path.directory if isinstance(path, native.Checkpoint) else path
        compile_cache.load_first_programs((str(directory), sys.argv[:2]))
    opened = path if isinstance(path, native.Checkpoint) else open_checkpoint(path, strict=strict)
    precision = dtype if isinstance(dtype, Precision) else opened.precision
    if dtype is not None and not isinstance(dtype, Precision):
        precision = precision.with_dtype(dtype)
    if quantize is not None:
        precision = dataclasses.replace(precision, quantize=freeze_rules(quantize))
    if int8_inputs:
        precision = dataclasses.replace(precision, int8_inputs=True)
    if invariant:
        precision = dataclasses.replace(precision, invariant=True)
    for name, neutral in UNSUPPORTED.items():
        if opened.generation.get(name, neutral) not in (neutral, None):
            warnings.warn(f"generation_config.json: {name} is not supported yet", stacklevel=2)
    multihost.check_processes_agree(
        _describe_checkpoint(opened, precision, quantize, mesh, exact, fsdp)
    )
    check_replicas(opened.tensors, opened.directory, show_progress)
    model, into = build(opened.config, precision), None
    if place is not None or mesh is not None or exact or fsdp or multihost.is_multiprocess():
        from jaxllm.sharding import build_model

        model, into = build_model(opened.config, precision, place, mesh, exact, fsdp)
    with ThreadPoolExecutor(1) as pool:  # a large tokenizer takes as long as the NaN scan
        reading = pool.submit(read_text_assets, opened)
        params = native.load_params(opened, precision, placer=into, show_progress=show_progress)
    if into is None and is_accelerator():
        params = for_accelerator(params)
    texts = reading.result()
    leaves = (leaf for _, leaf in flatten(params))
    if int8_inputs and not any(getattr(x, "supports_int8_inputs", False) for x in leaves):
        warnings.warn(
            'int8_inputs changes nothing: no weight is of integers. Add quantize="int8"',
            stacklevel=2,
        )
    if adapters and any(isinstance(leaf, NotLocal) for _, leaf in flatten(params)):
        raise ConfigError(
            "adapters require all layers on every process, but this mesh splits them into stages."
            " Merge the adapter into the weights first (jaxllm merge), or use a mesh with stage=1"
        )
    names: tuple[str, ...] = ()
    if adapters not in ((), [], {}):
        from jaxllm.adapters.multi_lora import with_loaded_adapters

        params, names = with_loaded_adapters(opened.config, params, adapters)
    if into is not None and names:
        params = map_leaves(into.place_adapter, params)
    if into is not None:
        params = into.finish(params)
    return LM(
        config=opened.config,
        model=model,
        params=params,
        tokenizer=texts.tokenizer,
        generation=opened.generation,
        path=opened.directory,
        chat_template=texts.chat_template,
        embedding=texts.embedding,
        recipe=opened.recipe,
        adapters=names,
        adapter=next(iter(names), None),
    )


load.__doc__ = str(load.__doc__).replace(
    "FAMILIES",
    textwrap.fill(
        f"Families (config.json's `model_type`): {', '.join(sorted(FAMILIES))}.",
        width=92,
        subsequent_indent="    ",
    ),
)


def to_one_device(lm: LM) -> LM:
    """Return the model for one device, with its parameters gathered on the host of each process."""
    from jaxllm.sharding.sharded_model import unshard_model

    return dataclasses.replace(lm, model=unshard_model(lm.model), params=lm.model.gather(lm.params))


def shard_like(lm: LM, other: LM) -> LM:
    """Shard a single-device model like another model, if that is on a mesh."""
    from jaxllm.sharding.sharded_model import shard_model_like

    model = shard_model_like(lm.model, other.model)
    return dataclasses.replace(lm, model=model, params=model.shard(lm.params))


def _describe_checkpoint(opened: native.Checkpoint, *options: Any) -> dict[str, str]:
    """Return what must be equal in all processes: everything about a checkpoint and how it is
    loaded, except the weights' values.
    """
    if not multihost.is_multiprocess():
        return {}
    kept = opened.generation, opened.precision, opened.formats, opened.file_format
    named = [(n, t.shape, str(t.dtype)) for n, t in sorted(opened.tensors.items())]
    return {
        "model's configuration": repr(opened.config),
        "model's precision and settings": repr((kept, options)),
        "weights' names, shapes and formats": repr(named),
    }
