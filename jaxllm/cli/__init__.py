"""The command `jaxllm`: one module per subcommand, which defers heavy imports until it runs.

Subcommands: generate, chat, serve, batch, embed, classify; convert, quantize, merge, compress,
upcycle, infini, export; info, bench, plan, doctor; verify, vectors, perplexity, recall,
sensitivity; lens, steer; train (one command per training method). Shared: options (single flags),
option_groups (sampling, loading), eval_data (evaluation text), calibration (calibration data of a
recipe), command (flags of a function, MODEL in two spellings, usage errors), train_common (flags of
every training command), lora (adapter modules and patterns), console (stdin, stdout, stderr),
terminal and conversation (input and state of chat), distributed (several processes).
"""

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from jaxllm import __version__
from jaxllm.cli import (
    batch,
    bench,
    chat,
    classify,
    compress,
    convert,
    distributed,
    doctor,
    embed,
    export,
    generate,
    infini,
    info,
    lens,
    merge,
    perplexity,
    plan,
    quantize,
    recall,
    sensitivity,
    serve,
    steer,
    train,
    upcycle,
    vectors,
    verify,
)
from jaxllm.cli.command import Command, describe_error, make_command
from jaxllm.cli.console import log, write, write_stderr
from jaxllm.errors import ConfigError, JaxllmError, UnusedSettingsWarning
from jaxllm.runtime import multihost, signals, supervisor

# Command name -> function, and the example at the end of its --help.
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "generate": (generate.generate, generate.EXAMPLE),
    "batch": (batch.batch, batch.EXAMPLE),
    "chat": (chat.chat, chat.EXAMPLE),
    "serve": (serve.serve, serve.EXAMPLE),
    "info": (info.info, info.EXAMPLE),
    "doctor": (doctor.doctor, doctor.EXAMPLE),
    "perplexity": (perplexity.perplexity, perplexity.EXAMPLES),
    "recall": (recall.recall, recall.EXAMPLE),
    "sensitivity": (sensitivity.sensitivity, sensitivity.EXAMPLE),
    "verify": (verify.verify, verify.EXAMPLE),
    "vectors": (vectors.vectors, vectors.EXAMPLE),
    "embed": (embed.embed, embed.EXAMPLE),
    "classify": (classify.classify, classify.EXAMPLE),
    "lens": (lens.lens, lens.EXAMPLE),
    "steer": (steer.steer, steer.EXAMPLE),
    "export": (export.export, export.EXAMPLE),
    "bench": (bench.bench, bench.EXAMPLE),
    "plan": (plan.plan, plan.EXAMPLE),
    "convert": (convert.convert, convert.EXAMPLES),
    "quantize": (quantize.quantize, quantize.EXAMPLE),
    "merge": (merge.merge, merge.EXAMPLE),
    "compress": (compress.compress, compress.EXAMPLES),
    "upcycle": (upcycle.upcycle, upcycle.EXAMPLE),
    "infini": (infini.infini, infini.EXAMPLE),
}

app = typer.Typer(
    epilog="Example: jaxllm generate -p 'Once upon a time' --temperature 0.8 --seed 1",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, (function, epilog) in COMMANDS.items():
    app.command(name, epilog=epilog, cls=Command)(make_command(function))
app.add_typer(train.app, name="train")


def _version(requested: bool) -> None:
    if requested:
        write(f"jaxllm {__version__}\n")
        raise typer.Exit


@app.callback()
def _apply_global_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, help="Print the version and exit.")
    ] = False,
    address: distributed.Address = None,
    processes: distributed.Processes = None,
    process: distributed.Process = None,
) -> None:
    """Language-model inference as pure functions in JAX and Flax."""
    if address is None:
        if processes is not None or process is not None:
            raise ConfigError("--processes and --process require --distributed HOST:PORT")
        return
    asked = context.invoked_subcommand, context.obj or ()
    if (status := distributed.enter_group(*asked, address, processes, process)) is not None:
        raise typer.Exit(status)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a `jaxllm` command, by default from `sys.argv`; a failure prints one line and exits."""
    # Importing makes a million objects that stay: searching them for garbage took 0.1 s of a start.
    gc.set_threshold(100_000, 20, 50)
    given = sys.argv[1:] if arguments is None else arguments
    _run(app, "jaxllm", given or ["--help"])


def run_command(function: Callable[..., None], name: str, epilog: str) -> None:
    """Run one command as a separate program, with the same error handling."""
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    single.command(epilog=epilog, cls=Command)(function)
    _run(single, name, sys.argv[1:])


def _run(program: typer.Typer, name: str, arguments: Sequence[str]) -> None:
    try:
        with _log_unread_warnings():
            status = program(args=arguments, prog_name=name, standalone_mode=False, obj=arguments)
        write("")  # flushes, for example, the rest of a --help
    except JaxllmError as error:
        status = _report_failure(str(error))
    except typer.TyperException as error:
        status = _report_failure(describe_error(error, name), status=2)
    except OSError as error:
        status = _report_failure(_describe_os_error(error))
    except (ValueError, RuntimeError) as error:  # what JAX raises
        if not (signals.is_supervised() and multihost.is_connection_lost(error)):
            raise
        supervisor.exit_on_lost_peer(error)
    multihost.leave_group(status or 0)
    sys.exit(status)


@contextlib.contextmanager
def _log_unread_warnings() -> Iterator[None]:
    """Print each `UnusedSettingsWarning` once, as a line on stderr."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def log_warning(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UnusedSettingsWarning):
                log(f"jaxllm: {message}")
            else:
                show(message, category, *where, **more)

        warnings.simplefilter("default", UnusedSettingsWarning)
        warnings.showwarning = log_warning
        yield


def _describe_os_error(error: OSError) -> str:
    """Return an OSError as one line with its file name."""
    try:
        write("")
    except OSError as again:  # stdout failed: this error names it
        error = again
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _report_failure(message: str, status: int = 1) -> int:
    write_stderr(f"jaxllm: {message}")
    return status
