"""The command `jaxllm`: one module a subcommand, which imports what is heavy when it runs."""

import sys
from collections.abc import Callable
from typing import Any

import typer

from jaxllm.cli import (
    bench,
    chat,
    convert,
    embed,
    export,
    generate,
    info,
    perplexity,
    quantize,
    sensitivity,
    vectors,
    verify,
)
from jaxllm.cli.console import note
from jaxllm.errors import JaxllmError

# Name: the function that runs, and the example below its --help.
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "generate": (generate.generate, generate.EXAMPLE),
    "chat": (chat.chat, chat.EXAMPLE),
    "info": (info.info, info.EXAMPLE),
    "perplexity": (perplexity.perplexity, perplexity.EXAMPLE),
    "sensitivity": (sensitivity.sensitivity, sensitivity.EXAMPLE),
    "verify": (verify.verify, verify.EXAMPLE),
    "vectors": (vectors.vectors, vectors.EXAMPLE),
    "embed": (embed.embed, embed.EXAMPLE),
    "export": (export.export, export.EXAMPLE),
    "bench": (bench.bench, bench.EXAMPLE),
    "convert": (convert.convert, convert.EXAMPLES),
    "quantize": (quantize.quantize, quantize.EXAMPLE),
}

app = typer.Typer(
    help="Language-model inference as pure functions in JAX and Flax.",
    epilog="Example: jaxllm generate -p 'Once upon a time' --temperature 0.8 --seed 1",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, (function, epilog) in COMMANDS.items():
    app.command(name, epilog=epilog)(function)


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
        note(f"jaxllm: {error}")
        sys.exit(1)
