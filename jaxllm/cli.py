"""The command `jaxllm`: text to stdout, everything about it to stderr, reasons for failures."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert import command
from jaxllm.errors import CacheMismatchError, CheckpointError, JaxllmError, SamplingError

if TYPE_CHECKING:
    from jaxllm.api import LM, Piece
    from jaxllm.cache import KVCache

app = typer.Typer(
    help="Language-model inference as pure functions in JAX and Flax.",
    epilog="Example: jaxllm generate -p 'Once upon a time' --temperature 0.8 --seed 1",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A directory, demo:llama, demo:gpt2, or hf:owner/name."),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; by default the checkpoint's.")
]
NewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", help="Default: 256, or what fits.")
]
CacheDtype = Annotated[
    str | None,
    typer.Option(help="Of keys and values: as --dtype, or int8; by default as the activations."),
]
Temperature = Annotated[
    float | None, typer.Option(help="Sample at this temperature; 0 and by default: greedy.")
]
TopK = Annotated[int | None, typer.Option(help="Sample among the k best tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the best tokens of mass p.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given more than once.")
]
Overflow = Annotated[
    str | None, typer.Option(help="When the context is full: refuse (default), slide or sinks.")
]
More = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Any other option of LM.generate, its value as JSON: -o min_p=0.05 -o num_beams=4",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the random numbers: the same seed, the same text.")]


@app.command(epilog="Example: echo 'Once upon a time' | jaxllm generate -m demo:gpt2 -p - -n 80")
def generate(
    model: Model = "demo:llama",
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text to continue; - reads stdin.")
    ] = "",
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    stop: Stop = None,
    overflow: Overflow = None,
    more: More = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    cache_dtype: CacheDtype = None,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(help="Keep the text's cache in this file; what it has is not run again."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="A smaller model of the same vocabulary that proposes tokens."),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Answer each line of this JSON-lines file instead; - reads stdin."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write --batch's answers here; by default to stdout.")
    ] = None,
    rows: Annotated[int, typer.Option(help="How many of --batch's prompts run at once.")] = 8,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text, tokens and timings.")
    ] = False,
) -> None:
    """Continue a text. It streams to stdout; progress, speed and errors go to stderr."""
    options = _options(
        more,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_strings=stop,
        overflow=overflow,
        seed=seed,
    )
    if batch is not None:
        return _batch(model, dtype, cache_dtype, batch, out, rows, options)
    text = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    start = time.perf_counter()
    lm = _load(model, dtype, cache_dtype)
    if prompt_cache:
        options["cache"] = _read_cache(lm, text, prompt_cache)
    loaded = time.perf_counter()
    if echo and not as_json:
        _write(text)
    if draft:
        options["assistant_model"] = _load(draft, dtype, cache_dtype)
    if not _streams(options):
        return _several(lm, text, options, as_json)
    pieces: list[Piece] = []
    with _waiting("compiling and reading the prompt") as ready:
        for piece in lm.stream(text, **options):
            if not pieces:
                first = time.perf_counter()
                ready()
            pieces.append(piece)
            if not as_json:
                # Without a tokenizer there is no text: the ids are the output.
                _write(piece.text if lm.tokenizer else f"{piece.token} ")
    if prompt_cache:
        _keep_cache(lm, pieces[-1].cache, prompt_cache)
    if as_json:
        _print_json(lm, text, pieces, loaded - start, first - loaded)
    elif sys.stdout.isatty():
        _write("\n")
    _note(
        f"{len(pieces)} tokens ({pieces[-1].finish_reason}), {pieces[-1].tokens_per_second:.1f}"
        f" tokens/s; loaded in {loaded - start:.1f} s, first token after {first - loaded:.1f} s"
    )


@app.command(epilog="Example: jaxllm chat -m ~/models/TinyLlama-1.1B-Chat --temperature 0.7")
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
) -> None:
    """Talk with a model in its chat template, a line at a time; end with Ctrl-D or /quit."""
    lm = _load(model, dtype, cache_dtype)
    messages = [{"role": "system", "content": system}] if system else []
    lm.chat_prompt([*messages, {"role": "user", "content": "?"}])  # refuse before the first line
    options = _options(
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
            _write(piece.text)
            answer += piece.text
        options["cache"] = piece.cache  # the next turn repeats what has been said
        _write("\n")
        messages.append({"role": "assistant", "content": answer})


@app.command(epilog="Example: jaxllm info -m ~/models/TinyLlama-1.1B")
def info(
    model: Annotated[str, typer.Argument(help="As --model of generate.")] = "demo:llama",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a checkpoint is: architecture, parameters, bytes, cache. Reads no weights."""
    import jax

    from jaxllm.api import open_checkpoint
    from jaxllm.cache import init_cache
    from jaxllm.checkpoint import is_native
    from jaxllm.text.tokenizer import has_tokenizer

    opened = open_checkpoint(model)
    config = opened.config
    count = sum(t.nbytes // t.dtype.itemsize for t in opened.tensors.values())
    size = sum(t.nbytes for t in opened.tensors.values())
    token = init_cache(config, 1, 1, dtype=opened.precision.cache).tail
    facts = {
        "path": str(opened.directory),
        "form": "jaxllm" if is_native(opened.directory) else "Hugging Face",
        **config.to_dict(),
        "parameters": count,
        "bytes": size,
        "dtype": opened.precision.weights,
        "cache_bytes_per_token": sum(x.nbytes for x in jax.tree.leaves((token.k, token.v))),
        "tokenizer": has_tokenizer(opened.directory),
    }
    if as_json:
        _write(json.dumps(facts) + "\n")
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if type(value) is int else value
        if isinstance(value, dict):
            shown = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        _write(f"{name:{width}}  {shown}\n")


app.command(epilog=command.EXAMPLES)(command.convert)


def main() -> None:
    """The entry point: run the command; a failure is one line and a non-zero exit."""
    _run(app)


def run_command(function: Callable[..., None], name: str, epilog: str) -> None:
    """Run one command as a program of its own, with the same manners."""
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    single.command(epilog=epilog)(function)
    _run(lambda: single(prog_name=name))


def _run(program: Callable[[], Any]) -> None:
    try:
        program()
    except JaxllmError as error:
        _note(f"jaxllm: {error}")
        sys.exit(1)


def _load(model: str, dtype: str | None, cache_dtype: str | None) -> "LM":
    from jaxllm.api import load, open_checkpoint
    from jaxllm.weights.precision import Precision

    if cache_dtype is None:
        return load(model, dtype=dtype)
    precision = Precision.uniform(dtype) if dtype else open_checkpoint(model).precision
    return load(model, dtype=dataclasses.replace(precision, cache=cache_dtype))


def _read_cache(lm: "LM", text: str, file: Path) -> "KVCache | None":
    """The cache in a file, if there is one; it must have the beginning of the text in common."""
    from jaxllm.cache import load_cache
    from jaxllm.decode.reuse import shared_prefix

    if not file.exists():
        return None
    cache, tokens = load_cache(file, lm.model, lm.params), lm.encode(text)
    held, shared = len(cache.tokens()), shared_prefix(cache, tokens)
    if shared < min(held, len(tokens), 2):  # nothing, or a begin-of-text token alone
        raise CacheMismatchError(f"{file} holds another text; name another file, or remove it")
    _note(f"{file}: {shared} of the prompt's {len(tokens)} tokens are there, of {held} in all")
    return cache


def _keep_cache(lm: "LM", cache: "KVCache", file: Path) -> None:
    from jaxllm.cache import save_cache

    save_cache(file, cache, lm.model, lm.params)
    _note(f"{file}: {len(cache.tokens())} tokens written")


def _options(more: list[str] | None, **named: Any) -> dict[str, Any]:
    """Options of `LM.generate`: those given. Whoever names a top-k or top-p wants to sample."""
    options = {name: value for name, value in named.items() if value not in (None, [])}
    for item in more or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise SamplingError(f"--option takes NAME=VALUE, got {item!r}")
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.replace("-", "_")] = value  # a text without its quotes
    if options.keys() & {"top_k", "top_p"}:
        options.setdefault("do_sample", True)
    return options


def _streams(options: dict[str, Any]) -> bool:
    """Whether these options give one text that grows, and not the outcome of something else."""
    whole = {"assistant_model", "prompt_lookup_num_tokens", "penalty_alpha", "guidance_scale"}
    several = any(options.get(name, 1) != 1 for name in ("num_beams", "num_return_sequences"))
    return not several and not whole & options.keys()


def _batch(
    model: str,
    dtype: str | None,
    cache_dtype: str | None,
    file: str,
    out: Path | None,
    rows: int,
    options: dict[str, Any],
) -> None:
    """Answer the lines of a file, with a progress bar on a terminal; failures are counted."""
    from jaxllm.batchfile import answer
    from jaxllm.progress import steps_bar

    if out is not None and out.exists():
        raise CheckpointError(f"{out} exists; name another file, so that no answers are lost")
    if file != "-" and not Path(file).is_file():
        raise CheckpointError(f"--batch: {file} is not a file")
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    lines = text.splitlines()
    lm = _load(model, dtype, cache_dtype)
    start = time.perf_counter()
    with open(out, "w", encoding="utf-8") if out else nullcontext() as target:

        def write(line: str) -> None:
            if target is None:
                return _write(line)
            target.write(line)
            target.flush()

        with steps_bar(f"answering {file}", sum(map(bool, lines))) as done:
            count, failed = answer(lm, lines, options, rows=rows, write=write, done=done)
    where = f" in {out}" if out else ""
    _note(f"{count} answers{where}, {failed} of them errors; {time.perf_counter() - start:.1f} s")
    if failed:
        sys.exit(1)


def _several(lm: "LM", prompt: str, options: dict[str, Any], as_json: bool) -> None:
    """Print more than one continuation, or the outcome of a search: nothing to stream."""
    with _waiting("generating"):
        found = lm.generate(prompt, **options)
    for number, completion in enumerate(found if isinstance(found, list) else [found]):
        if as_json:
            report = {
                "prompt": prompt,
                "text": completion.text,
                "tokens": completion.tokens,
                "finish_reason": completion.finish_reason,
                "score": completion.score,
                "drafted": completion.drafted,
            }
            _write(json.dumps(report, ensure_ascii=False) + "\n")
            continue
        about = "" if completion.score is None else f" (score {completion.score:.3f})"
        if completion.drafted is not None:
            about = " ({1} of {0} drafted tokens accepted)".format(*completion.drafted)
        _note(f"--- {number + 1}{about}")
        text = completion.text if lm.tokenizer else " ".join(map(str, completion.tokens))
        _write(f"{text}\n")


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


@contextmanager
def _waiting(what: str) -> Iterator[Callable[[], None]]:
    """A spinner on a terminal's stderr; yields the function that takes it away."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


def _print_json(
    lm: "LM", prompt: str, pieces: "list[Piece]", load_s: float, first_token_s: float
) -> None:
    report = {
        "prompt": prompt,
        "text": "".join(p.text for p in pieces) if lm.tokenizer else None,
        "tokens": [p.token for p in pieces],
        "logprobs": [round(p.logprob, 6) for p in pieces],
        "finish_reason": pieces[-1].finish_reason,
        "load_s": round(load_s, 3),
        "first_token_s": round(first_token_s, 3),
        "tokens_per_second": round(pieces[-1].tokens_per_second, 2),
    }
    _write(json.dumps(report, ensure_ascii=False) + "\n")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
