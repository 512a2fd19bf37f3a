"""The front door: load a checkpoint, turn text into text. Everything it does, the steps can do."""

import dataclasses
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import flax.linen as nn
import jax
import numpy as np

from jaxllm import checkpoint, models
from jaxllm.cache.kv import KVCache
from jaxllm.config import ModelConfig
from jaxllm.decode.generate import Finish, Generated, generate, stream
from jaxllm.decode.options import PROCESSORS, make_sampler
from jaxllm.decode.reuse import reuse
from jaxllm.decode.sampling import GREEDY, Sampler
from jaxllm.errors import (
    CacheMismatchError,
    CapacityError,
    CheckpointError,
    NonFiniteError,
    SamplingError,
    TokenError,
)
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision

DEMOS = Path(__file__).parent / "demo"
DEFAULT_NEW_TOKENS = 256
FINISH_REASONS = {Finish.EOS: "eos", Finish.LENGTH: "length"}

Prompt = str | Sequence[int]

# generation_config.json's fields that change which tokens come out, and the value without effect.
_UNSUPPORTED = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "min_p": None,
    "num_beams": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "penalty_alpha": None,
}


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continuation.

    text: without special tokens (None where the checkpoint has no tokenizer). tokens: ids, the
    end-of-text token included. logprobs: of each token under the model, before any sampler.
    finish_reason: "eos" or "length". cache: of the whole call, a row a prompt; it holds prompt and
    continuation but for the last token.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
    cache: KVCache = dataclasses.field(repr=False, compare=False)


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
        max_new_tokens (256, or what fits), do_sample, temperature, top_k, top_p (each a number, or
        one a prompt), eos_token_id (an id or several), seed (0), chunk (256), the tokens of a
        prompt that are run at once, and cache, a KVCache of one row: what the prompt shares with
        its text is not run again. Greedy unless do_sample=True or a temperature is given.

        Returns a Completion, or a list of them. Raises TokenError for ids outside the vocabulary,
        CapacityError when prompt and new tokens exceed the context, SamplingError for an unknown
        or impossible option, NonFiniteError when the model returns NaN.
        """
        prompts, single = self._prompts(prompt)
        tokens_BT, arguments = self._arguments(prompts, options)
        result = generate(self.model, self.params, tokens_BT, **arguments)
        completions = [self._completion(result, row, p) for row, p in enumerate(prompts)]
        return completions[0] if single else completions

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """As `generate` for one prompt, a `Piece` at a time; equal options give equal tokens."""
        prompts, single = self._prompts(prompt)
        if not single:
            raise TokenError("stream takes one prompt; use generate for a list of them")
        tokens_BT, arguments = self._arguments(prompts, options)
        text = Detokenizer(self.tokenizer, prompt=prompts[0]) if self.tokenizer else None
        start = 0.0
        for count, step in enumerate(stream(self.model, self.params, tokens_BT, **arguments)):
            finish = self._finish(step, row=0)
            token = int(step.token_BT[0, 0])
            now = time.perf_counter()
            start = now if count <= 1 else start
            piece = text.push(token) if text else ""
            if finish and text:
                piece += text.flush()
            rate = (count - 1) / (now - start) if count > 1 else 0.0
            yield Piece(piece, token, float(step.logprob_BT[0, 0]), finish, rate, step.cache)

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
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return (
            f"LM({self.path.name}: {self.config.model_type}, {count / 1e6:.1f} M parameters,"
            f" {self.model.precision.weights}, context {self.config.context_length})"
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

    def _arguments(
        self, prompts: list[list[int]], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """What `decode.generate` takes, from the caller's options and the checkpoint's defaults."""
        known = {"max_new_tokens", "do_sample", "eos_token_id", "seed", "chunk", "cache"}
        known |= set(PROCESSORS)
        if unknown := sorted(set(options) - known):
            raise SamplingError(
                f"no option {', '.join(unknown)} (known: {', '.join(sorted(known))})"
            )
        settings = {**self.generation, **{k: v for k, v in options.items() if v is not None}}
        eos = settings.get("eos_token_id")
        new = self._budget(prompts, settings)
        cache = options.get("cache")
        if cache is not None:
            if len(prompts) > 1:
                raise CacheMismatchError("a cache serves one prompt; fork it for several")
            cache, rest = reuse(cache, prompts[0], new)
            prompts = [rest]
        return _padded(prompts), {
            "max_new_tokens": new,
            "lengths_B": np.array([len(p) for p in prompts], np.int32),
            "sampler": self._sampler(settings, options),
            "seed": settings.get("seed", 0),
            "eos_token_ids": [] if eos is None else [eos] if isinstance(eos, int) else list(eos),
            "chunk": settings.get("chunk", 256),
            "cache": cache,
        }

    def _budget(self, prompts: list[list[int]], settings: Mapping[str, Any]) -> int:
        longest = max(map(len, prompts))
        room = self.config.context_length - longest
        asked = settings.get("max_new_tokens")
        new = min(DEFAULT_NEW_TOKENS, room) if asked is None else asked
        if isinstance(new, bool) or not isinstance(new, int) or (asked is not None and new < 1):
            raise SamplingError(f"max_new_tokens must be a whole number from 1 up, got {new!r}")
        if room < max(new, 1):
            raise CapacityError(
                f"a prompt of {longest} tokens and {max(new, 1)} new ones exceed the model's"
                f" context of {self.config.context_length}. Shorten the prompt or max_new_tokens"
            )
        return new

    def _sampler(self, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Sampler:
        do_sample = options.get("do_sample")
        if do_sample is None:
            asked = options.get("temperature") is not None
            do_sample = asked or bool(self.generation.get("do_sample"))
        if not do_sample:
            return GREEDY
        return make_sampler(**{k: settings[k] for k in PROCESSORS if settings.get(k) is not None})

    def _completion(self, result: Generated, row: int, prompt: list[int]) -> Completion:
        finish = self._finish(result, row)
        assert finish is not None
        length = int(result.length_B[row])
        tokens = np.asarray(result.token_BT)[row, :length].tolist()
        logprobs = np.asarray(result.logprob_BT)[row, :length].tolist()
        text = None
        if self.tokenizer:
            pieces = Detokenizer(self.tokenizer, prompt=prompt)
            text = "".join(map(pieces.push, tokens)) + pieces.flush()
        return Completion(text, tokens, logprobs, finish, len(prompt), result.cache)

    def _finish(self, result: Generated, row: int) -> str | None:
        finish = Finish(int(result.finish_B[row]))
        if finish == Finish.NON_FINITE:
            raise NonFiniteError(
                f"the model returned NaN or infinite logits in row {row},"
                f" after {int(result.length_B[row])} new tokens"
            )
        return FINISH_REASONS.get(finish)


def load(
    path: str | Path,
    *,
    dtype: str | Precision | None = None,
    show_progress: bool | None = None,
) -> LM:
    """Load a checkpoint: a Hugging Face directory (Llama family, GPT-2) or jaxllm's own form.

    path: a directory; "demo:llama" or "demo:gpt2" for the checkpoints that jaxllm brings; or
    "hf:owner/name", the only spelling for which anything is downloaded. dtype: "float32",
    "bfloat16", "float16" for weights, activations and cache alike, or a `Precision`; by default as
    the checkpoint keeps its weights. show_progress: by default where stderr is a terminal.

    Raises CheckpointError or ConfigError with everything that is wrong with the files.
    """
    opened = open_checkpoint(path)
    precision = Precision.uniform(dtype) if isinstance(dtype, str) else dtype
    precision = precision or opened.precision
    directory = opened.directory
    for name, neutral in _UNSUPPORTED.items():
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
    from convert.engine import open_hf  # the one reach upwards: convert builds on this package

    directory = resolve(path)
    if checkpoint.is_native(directory):
        return checkpoint.open_native(directory)
    return open_hf(directory)


def resolve(path: str | Path) -> Path:
    """The directory that a path or a name of `load` stands for; downloads only for "hf:..."."""
    text = str(path)
    if text.startswith("demo:") and (DEMOS / text[5:] / "config.json").is_file():
        return DEMOS / text[5:]
    if text.startswith("hf:"):
        return _download(text[3:])
    directory = Path(path)
    if directory.is_dir():
        return directory
    hint = f" To download from the hub, write hf:{text}" if re.fullmatch(_REPO, text) else ""
    raise CheckpointError(f"{text} is not a directory.{hint}")


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


def _padded(prompts: list[list[int]]) -> np.ndarray:
    tokens_BT = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens_BT


def _is_id(token: Any) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool)
