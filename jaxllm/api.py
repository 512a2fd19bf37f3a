"""The front door: a language model turns text into text. Everything it does, the steps can do."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import flax.linen as nn
import jax
import numpy as np

from jaxllm import checkpoint
from jaxllm.cache.kv import KVCache, init_cache
from jaxllm.complete import (
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
from jaxllm.decode.loops.generate import stream
from jaxllm.decode.loops.text import Finish
from jaxllm.embed import embeddings, log_probs
from jaxllm.errors import (
    CheckpointError,
    ConfigError,
    JaxllmError,
    TemplateError,
    TokenError,
    nearest,
)
from jaxllm.files import as_path
from jaxllm.forms import texts_files
from jaxllm.options import GenerateOptions, Kind, check_options, described, row_options
from jaxllm.prompts import Prompt, each_of, encode, token_list
from jaxllm.serving import answers
from jaxllm.settings import Settings, read_settings
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.formats import as_leaf
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.paths import Params, Placed, flatten, map_leaves
from jaxllm.weights.precision import exactly

_EMBED = ("layer", "pooling", "normalize", "batch", "show_progress")  # options of `embeddings`


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token of a stream: the text it completes ("" in the middle of a character), which is also
    its `str`, and more.

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
    seed: int = 0

    def __str__(self) -> str:
        """Return the text, so that `print(piece, end="")` writes the story."""
        return self.text


@dataclasses.dataclass(frozen=True)
class LM:
    """A language model and what its checkpoint brought with it; nothing here ever changes.

    generation: generation_config.json. tokenizer: None where the checkpoint has none.
    chat_template: itself, or the reason why there is none, which is raised when it is needed.
    recipe: the steps that made it smaller (`jaxllm.compress`), a line each.
    adapters: the names of those that were loaded beside it; adapter: the one that is taken where
    none is named, which is what `params` compute. Another one is `using`.
    """

    config: ModelConfig
    model: nn.Module
    params: Params
    tokenizer: Tokenizer | None
    generation: Mapping[str, Any]
    path: Path
    chat_template: ChatTemplate | JaxllmError = dataclasses.field(
        default=TemplateError("this model has no chat template. Generate from plain text"),
        repr=False,
    )
    recipe: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    adapters: tuple[str, ...] = ()
    adapter: str | None = None

    @property
    def parts(self) -> Parts:
        """What decoding takes."""
        return Parts(self.model, self.params, self.tokenizer, self.adapters, self.adapter)

    def using(self, adapter: str | None) -> "LM":
        """The same model with another adapter where none is named; "base": with none. None: as is.

        A cache is that of the adapter it was made with: save and load it with this model's
        `params`. Raises ConfigError for a name that none of `adapters` has.
        """
        if adapter is None:
            return self
        if not isinstance(adapter, str):
            raise ConfigError(f"adapter must be the name of one, got {adapter!r:.60}")
        return dataclasses.replace(self, params=self.parts.using(adapter).params, adapter=adapter)

    def self_extended(self, *, group_size: int, neighbor_window: int) -> "LM":
        """The same model for longer texts, by Self-Extend (Jin et al. 2024, arXiv 2401.01325).

        Nothing is trained: tokens within `neighbor_window` are seen where they are, farther ones at
        positions divided by `group_size`. `config.context_length` says how far that reaches. A
        cache is that of the model it was made with. Raises ConfigError for a model without rotary
        positions, or whose angles follow the text's length, and for numbers that collide.
        """
        config = self.config.self_extended(group_size, neighbor_window)
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

    @described
    def generate(self, prompt: Any, **options: Unpack[GenerateOptions]) -> Any:
        """Continue a prompt, or each of a list of prompts in one batch.

        prompt: text, token ids (a list, or an array of numpy or JAX), or a list of either. A text
        is encoded without special tokens; before it goes the begin-of-text token if the checkpoint
        asks for one (and always before an empty text). Token ids are taken as they are. No prompts
        have no completions.

        options, in Hugging Face's spelling; generation_config.json gives the defaults, and None is
        the default. Greedy unless do_sample=True or a temperature is given. Where a row's last bits
        or its place in the list must not matter, ask for batch_invariant and give each prompt a
        seed of its own: with one seed, equal prompts draw equal texts.

        OPTIONS

        Returns a Completion, or a list of them, for num_return_sequences above 1 a list for each
        prompt. Raises TokenError for ids outside the vocabulary, CapacityError when prompt and new
        tokens exceed the context, SamplingError for an unknown or impossible option,
        NonFiniteError when the model returns NaN.
        """
        given, single = each_of(prompt)
        prompts = [self.encode(p) for p in given]
        if not prompts:
            check_options(options)
            return []
        settings = self._settings(prompts, options)
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

    @described
    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Iterator[Piece]:
        """As `generate` for one prompt, a `Piece` at a time; equal options give equal tokens.

        Bad input is refused now, the prompt runs when the first piece is asked for:
        `for piece in lm.stream("Once"): print(piece, end="")`.
        """
        given, single = each_of(prompt)
        if not single:
            raise TokenError("stream takes one prompt; use generate for a list of them")
        prompts = [self.encode(given[0])]
        settings = self._settings(prompts, options, "stream")
        adapter: Any = settings.adapter  # of a list `using` says what is wrong
        return self.using(adapter)._pieces(prompts, settings)

    def _pieces(self, prompts: list[list[int]], settings: Settings) -> Iterator[Piece]:
        tokens_BT, arguments = generation(prompts, settings)
        reader, pieces, start = reader_of(self.parts, prompts[0], settings), [""], 0.0

        def ends(token_B: np.ndarray) -> np.ndarray:
            pieces.append(reader.push(int(token_B[0])))
            return np.array([reader.stopped])

        arguments["until"] = ends
        for count, step in enumerate(stream(self.model, self.params, tokens_BT, **arguments)):
            ended, length = np.asarray(step.finish_B)[0], np.asarray(step.length_B)[0]
            finish = reason(Finish(int(ended)), 0, int(length))
            now = time.perf_counter()
            start = now if count <= 1 else start
            piece = pieces.pop() + (reader.flush() if finish else "")
            rate = (count - 1) / (now - start) if count > 1 else 0.0
            yield Piece(
                piece,
                int(np.asarray(step.token_BT)[0, 0]),
                float(np.asarray(step.logprob_BT)[0, 0]),
                finish,
                rate,
                step.cache,
                top_logprobs(step, 0, 1)[0] if settings.top_logprobs else None,
                settings.seed if isinstance(settings.seed, int) else settings.seed[0],
            )

    def serve(
        self,
        requests: Iterable[Mapping[str, Any] | None],
        *,
        rows: int = 8,
        capacity: int | None = None,
    ) -> Iterator[tuple[Any, Completion | JaxllmError]]:
        """Answer requests by continuous batching: they join and leave while others run.

        requests: each a mapping with `prompt` (text or token ids) and options of `generate`, of
        which beams, several sequences, overflow, a cache and top_logprobs are not served; None for
        nothing at the moment. Asked for the next one whenever a row is free. `id`: anything; by
        default the request's number, or the next that no earlier request has taken. Requests with
        equal ids are answered apart, each under its id. `cancelled`: a function that says whether
        nobody waits for the answer any more (`threading.Event().is_set`, say); it then ends with
        what it has, its finish_reason "cancelled". `heard`: told the text piece by piece as it
        becomes certain; together the pieces are the completion's text.

        rows: how many run at once, in a cache of `capacity` tokens a row (by default the model's
        context).

        Yields `(id, Completion)` as they finish, with the tokens that `generate` gives each alone,
        or `(id, error)` for one that cannot be answered; the others go on.
        """
        capacity = self.config.usual_capacity if capacity is None else capacity

        def read(prompt: Any, options: Mapping[str, Any]) -> tuple[list[int], Settings]:
            ids = self.encode(prompt)
            return ids, self._settings([ids], options, "serve")

        return answers(self.parts, requests, read, rows=rows, capacity=capacity)

    def embed(
        self, texts: Sequence[Prompt], *, adapter: str | None = None, **options: Any
    ) -> np.ndarray:
        """One vector a text, float32 `[N, D]`: the hidden states of a layer, pooled.

        texts: text or token ids each, as `generate` takes them. adapter: as there. options, and
        what is raised: those of `jaxllm.embed.embeddings` (layer, pooling, normalize, batch,
        show_progress); ConfigError for another.
        """
        for name in options.keys() - set(_EMBED):
            raise ConfigError(f"embed has no option {name}{nearest(name, _EMBED)}")
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise TokenError(f"embed takes a list of texts, got {texts!r:.60}. Give [text]")
        params = self.using(adapter).params
        return embeddings(self.model, params, [self.encode(t) for t in texts], **options)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The token ids of a conversation, as the checkpoint's chat template spells it.

        messages: `{"role": ..., "content": ...}` each. Special tokens are recognised in the whole
        rendered text, so one that a message spells out counts as one: do not pass on strangers'
        messages unread. Raises TemplateError if there is no template or it refuses them,
        TokenError where the checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise TokenError(f"{self.path} has no tokenizer: give token ids to generate")
        if isinstance(self.chat_template, JaxllmError):
            raise self.chat_template
        text = self.chat_template.render(messages, **variables)
        return self.tokenizer.encode(text, parse_special=True)

    def init_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """An empty cache in this model's format; by default of one row with room for its context.

        Raises what `jaxllm.init_cache` raises.
        """
        return init_cache(
            self.model, batch, self.config.usual_capacity if capacity is None else capacity
        )

    def log_probs(self, text: Prompt) -> np.ndarray:
        """The log-probability of each token of `encode(text)` but the first, which nothing
        predicts: float32 `[T - 1]`, given the tokens before it.

        Raises TokenError for what is no prompt, CapacityError for one longer than the context,
        NonFiniteError when the model returns NaN.
        """
        return log_probs(self.model, self.params, [self.encode(text)])[0]

    def save(self, directory: str | Path, *, show_progress: bool | None = None) -> None:
        """Write the model in jaxllm's own form, tokenizer and all; `load` reads it.

        What changed is written as it is: `dataclasses.replace(lm, params=trained).save(path)`.
        Raises CheckpointError where `directory` already holds a checkpoint, and for a model with
        adapters beside it, which a checkpoint has no place for.
        """
        directory = as_path(directory)
        if any(isinstance(leaf, Adapted) for _, leaf in flatten(self.params)):
            raise CheckpointError(
                f"{directory}: a checkpoint has no place for adapters: merge one into the weights"
                " (jaxllm merge, jaxllm.adapters.merged), or write it by itself"
                " (jaxllm.adapters.write_adapter)"
            )
        precision, params = self.model.precision, self.params
        if isinstance(self.model, Placed):
            params = self.model.later(params)  # shares of nf4 have scales of another form
            precision = exactly(map_leaves(lambda _, x: x.form, params), precision)
        opened = checkpoint.Checkpoint(
            self.path, self.config, {}, self.generation, precision, recipe=self.recipe
        )
        with texts_files(self.path) as files:
            checkpoint.save(
                directory,
                checkpoint.in_memory(opened, params, precision),
                files=files,
                show_progress=show_progress,
            )

    def __repr__(self) -> str:
        total = sum(as_leaf(leaf).size for _, leaf in flatten(self.params))
        precision = self.model.precision
        named = precision.quantize if isinstance(precision.quantize, str) else "quantized"
        return (
            f"LM({self.path.name}: {self.config.model_type}, {total / 1e6:.1f} M parameters,"
            f" {precision.weights}{f' {named}' if precision.quantize else ''},"
            f" context {self.config.context_length}"
            f"{', adapters ' * bool(self.adapters)}{', '.join(self.adapters)})"
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids that `generate` runs for a prompt; raises TokenError for other things."""
        bos = self.generation.get("bos_token_id")
        return encode(prompt, self.config.vocab_size, self.tokenizer, bos)

    def decode(self, tokens: Sequence[int] | np.ndarray | jax.Array) -> str:
        """Return the text of token ids, without special tokens.

        Raises TokenError for other things, and where the checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise TokenError(f"{self.path} has no tokenizer, which decode needs")
        return self.tokenizer.decode(token_list(tokens))

    def _settings(
        self, prompts: list[list[int]], options: Mapping[str, Any], kind: Kind = "generate"
    ) -> Settings:
        if options.get("negative_prompt") is not None:
            options = {**options, "negative_prompt": self.encode(options["negative_prompt"])}
        dtype = self.model.precision.cache
        return read_settings(self.config, self.generation, prompts, options, kind, dtype)
