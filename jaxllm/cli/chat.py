"""`jaxllm chat`: a conversation in a model's chat template."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from jaxllm.cli.console import write
from jaxllm.cli.options import (
    CacheDtype,
    Dtype,
    Model,
    More,
    NewTokens,
    Overflow,
    PrecisionFile,
    Quantize,
    Seed,
    Temperature,
    TopK,
    TopP,
    load_model,
    read_options,
)

EXAMPLE = "Example: jaxllm chat -m ~/models/TinyLlama-1.1B-Chat --temperature 0.7"


def chat(
    model: Model = "demo:llama",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    overflow: Overflow = None,
    more: More = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    cache_dtype: CacheDtype = None,
    quantize: Quantize = None,
    precision: PrecisionFile = None,
) -> None:
    """Talk with a model in its chat template, a line at a time; end with Ctrl-D or /quit."""
    lm = load_model(model, dtype, cache_dtype, quantize=quantize, precision=precision)
    messages = [{"role": "system", "content": system}] if system else []
    lm.chat_prompt([*messages, {"role": "user", "content": "?"}])  # refuse before the first line
    options = read_options(
        more,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        overflow=overflow,
    )
    for turn, line in enumerate(_lines()):
        messages.append({"role": "user", "content": line})
        answer = ""
        for piece in lm.stream(lm.chat_prompt(messages), seed=seed + turn, **options):
            write(piece.text)
            answer += piece.text
        options["cache"] = piece.cache  # the next turn repeats what has been said
        write("\n")
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """What a person types, until the end of input or /quit."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return
        if line.strip():
            yield line.rstrip("\n")
