"""`jaxllm generate`: continue a text."""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import log, read_stdin, spinner, write, write_json
from jaxllm.cli.option_groups import LoadingOptions, SamplingOptions, draw_seed
from jaxllm.cli.options import (
    AsJson,
    Model,
    NewFile,
    Overflow,
    Steer,
    Stop,
    load_model,
    read_options,
    read_steering,
    steering_options,
)
from jaxllm.errors import CacheMismatchError, ConfigError, JaxllmError, TokenError
from jaxllm.runtime import early_imports, multihost

if TYPE_CHECKING:
    from jaxllm.cache import KVCache
    from jaxllm.lm import LM, StreamChunk

EXAMPLE = "Example: echo 'Once upon a time' | jaxllm generate demo:gpt2 -p - -n 80"


def generate(
    model: Model = "demo:llama",
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT")] = None,
    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--file", "-f")] = None,
    stop: Stop = None,
    overflow: Overflow = None,
    steer: Steer = None,
    prompt_cache: NewFile = None,
    draft: str | None = None,
    echo: bool = False,
    chat: bool = False,
    special_tokens: Annotated[bool, typer.Option("--special-tokens/--no-special-tokens")] = True,
    as_json: AsJson = False,
    *,
    sampling: SamplingOptions,
    loading: LoadingOptions,
) -> None:
    """Continue a text. It streams to stdout; progress, speed and errors go to stderr.

    Args:
        prompt: Text to continue; - reads stdin.
        prompt_option: Text to continue, as an option.
        prompt_file: File with the text to continue.
        prompt_cache: Cache file of prompt and answer: read if it exists, to reuse a shared prefix,
            and written at the end.
        draft: Draft model for speculative decoding: smaller, with the same vocabulary.
        echo: Print the prompt before its continuation.
        chat: Apply the model's chat template to the prompt.
        special_tokens: Read special tokens in the prompt, as in '<|fim_prefix|>', instead of their
            letters.
        as_json: Print one JSON object with text, tokens and timings.
    """
    start = time.perf_counter()
    text = _read_prompt(prompt, prompt_option, prompt_file)
    for string in stop or ():
        if any(escape in string for escape in ("\\n", "\\t", "\\r")):
            log(f"--stop {string} is taken literally; for a line break, write --stop $'\\n'")
    with spinner("starting"):  # JAX is imported
        early_imports.import_jax()
    options = read_options(
        sampling.more,
        stop_strings=stop,
        overflow=overflow,
        seed=sampling.draw_seed(),
        **sampling.options,
    )
    if options["seed"] == "random":  # -o seed=random
        options["seed"] = draw_seed()
    if multihost.is_multiprocess():
        for option, value in ("--prompt-cache", prompt_cache), ("--draft", draft):
            if value:
                raise ConfigError(f"{option} cannot be combined with --distributed: leave one out")
    vector = read_steering(steer)
    waited = time.perf_counter()
    text = read_stdin().rstrip("\n") if text == "-" else text
    start += time.perf_counter() - waited  # typing does not count as load time
    lm = loading.load(model).with_adapter(options.pop("adapter", None))
    from jaxllm.cache import save_cache
    from jaxllm.generation.decoders import PlainGeneration
    from jaxllm.generation.options import select_decoder
    from jaxllm.generation.options.resolve import uses_sampling
    from jaxllm.ops.compile_cache import has_compile_cache, time_compiling

    options |= steering_options(vector, lm)
    tokens = _encode_prompt(lm, text, chat, special_tokens)
    if prompt_cache:
        options["cache"] = _read_cache(lm, tokens, prompt_cache)
    draws = uses_sampling(options, lm.generation) and options.get("temperature") != 0
    seed = options["seed"] if draws else None
    loaded = time.perf_counter()
    if echo and not as_json:
        write(text)
    if draft:
        options["assistant_model"] = load_model(draft, loading.dtype, loading.cache_dtype)
    plain = select_decoder(options) is PlainGeneration
    if not plain or options.get("num_return_sequences", 1) != 1:
        return _print_completions(lm, text, tokens, options, seed, as_json)
    pieces: list[StreamChunk] = []
    with spinner("compiling and reading the prompt") as ready, time_compiling() as compiling:
        for piece in lm.stream(tokens, **options):
            if not pieces:
                first, compiled = time.perf_counter() - loaded, compiling()
                ready()
            pieces.append(piece)
            if not as_json:
                # Without a tokenizer there is no text: the ids are the output.
                write(piece.text if lm.tokenizer else f"{piece.token} ")
    last = pieces[-1]
    if prompt_cache:
        assert last.cache is not None  # this request has its own
        save_cache(prompt_cache, last.cache, lm.model, lm.params)
        log(f"{prompt_cache}: {len(last.cache.tokens())} tokens written")
    if as_json:
        report = {
            "prompt": text,
            "text": "".join(p.text for p in pieces) if lm.tokenizer else None,
            "tokens": [p.token for p in pieces],
            "logprobs": [round(p.logprob, 6) for p in pieces],
            "finish_reason": last.finish_reason,
            "grammar_complete": last.grammar_complete,
            "seed": seed,
            "load_s": round(loaded - start, 3),
            "first_token_s": round(first, 3),
            "compile_s": round(compiled, 3),
            "tokens_per_second": round(last.tokens_per_second, 2) or None,
        }
        write_json(report)
    elif sys.stdout.isatty():
        write("\n")
    if last.grammar_complete is False:
        log("the text ends before the grammar does: give it more tokens (-n)")
    drawn = "" if seed is None else f"; seed {seed}"
    rate = last.tokens_per_second  # 0 for too few tokens to measure it
    reused = "; the next run reuses the programs" if has_compile_cache() else ""
    compiling_time = f" ({compiled:.1f} s of it compiling{reused})" if compiled >= 0.1 else ""
    log(
        f"{len(pieces)} tokens ({last.finish_reason}){f', {rate:.1f} tokens/s' if rate else ''}"
        f"{drawn}; loaded in {loaded - start:.1f} s, first token after {first:.1f}"
        f" s{compiling_time}"
    )


def _read_prompt(argument: str | None, option: str | None, file: Path | None) -> str:
    """Return the prompt, or "" if none is given. Raises ConfigError if it is given twice."""
    prompts = [way for way in (argument, option, file) if way is not None]
    if len(prompts) > 1:
        raise ConfigError("more than one prompt: give PROMPT, --prompt TEXT or --file FILE")
    if file is not None:
        from jaxllm.files import read_text

        return read_text(file).replace("\r\n", "\n").removesuffix("\n")
    return str(prompts[0]) if prompts else ""


def _encode_prompt(lm: "LM", text: str, chat: bool, parse_special: bool) -> list[int]:
    """Return the prompt's token ids; with `chat`, through the chat template.

    Without a tokenizer the prompt must be a JSON list of ids, else TokenError is raised.
    """
    message = [{"role": "user", "content": text}]
    if chat:
        return lm.chat_prompt(message)
    if lm.tokenizer is None and text:
        from jaxllm.files import parse_json

        with contextlib.suppress(TokenError):
            return lm.encode(parse_json(text, "prompt", TokenError))
        raise TokenError(
            f"{lm.path} has no tokenizer: the prompt must be a list of token ids, as in"
            f" -p '[1, 5]': got {text!r:.40}"
        )
    tokens = lm.encode(text, parse_special=parse_special)
    with contextlib.suppress(JaxllmError):  # there may be no template
        if text and lm.chat_prompt(message) != tokens:
            log("(the model has a chat template: --chat applies it to the prompt)")
    return tokens


def _read_cache(lm: "LM", tokens: list[int], file: Path) -> "KVCache | None":
    """Load the cache file, if it exists; it must share a prefix with the prompt."""
    from jaxllm.cache import load_cache
    from jaxllm.cache.prefix_reuse import prefix_length

    if not file.exists():
        return None
    cache = load_cache(file, lm.model, lm.params)
    held, shared = len(cache.tokens()), prefix_length(cache, tokens)
    if shared < min(held, len(tokens), 2):  # nothing, or only a begin-of-text token
        raise CacheMismatchError(f"{file} caches another text: name another file, or remove it")
    log(
        f"{file}: {shared} of the prompt's {len(tokens)} tokens are cached; the file holds {held},"
        " the last prompt and its answer"
    )
    return cache


def _print_completions(
    lm: "LM",
    prompt: str,
    tokens: list[int],
    options: dict[str, Any],
    seed: int | None,
    as_json: bool,
) -> None:
    """Print several continuations, or the result of a search; neither can be streamed."""
    with spinner("generating"):
        result = lm.generate(tokens, **options)
    for number, completion in enumerate(result if isinstance(result, list) else [result]):
        if as_json:
            report = {
                "prompt": prompt,
                "text": completion.text,
                "tokens": completion.tokens,
                "finish_reason": completion.finish_reason,
                "grammar_complete": completion.grammar_complete,
                "score": completion.score,
                "drafted": completion.draft_stats,
                "seed": seed,
            }
            write_json(report)
            continue
        about = "" if completion.score is None else f" (score {completion.score:.3f})"
        if completion.draft_stats is not None:
            about = " ({1} of {0} drafted tokens accepted)".format(*completion.draft_stats)
        log(f"--- {number + 1}{about}")
        text = completion.text if lm.tokenizer else " ".join(map(str, completion.tokens))
        write(f"{text}\n")
    if seed is not None and not as_json:
        log(f"seed {seed}")
