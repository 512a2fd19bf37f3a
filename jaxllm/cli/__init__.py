"""The command `jaxllm`: one module per subcommand, which defers heavy imports until it runs.

Subcommands: generate, chat, serve, batch, embed, classify; convert, quantize, merge, compress,
export; info, bench, doctor; verify, vectors, perplexity, sensitivity; lens, steer; train (one
command per training method); and the entry points of the group `jaxllm.commands`.
Shared: fields (flags from annotations), usage (errors of usage), options (single flags),
option_groups (sampling, loading), eval_data (evaluation text), train_run (flags and run of every
training command), console (stdin, stdout, stderr), terminal and conversation (input and state of
chat), distributed (several processes).
"""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Annotated, Any

import typer

from jaxllm import __version__
from jaxllm.cli import distributed
from jaxllm.cli.console import log, write, write_stderr
from jaxllm.cli.fields import add_command
from jaxllm.cli.options import check_paths
from jaxllm.cli.usage import describe_error
from jaxllm.errors import ConfigError, JaxllmError, LargerWeightsWarning, UnusedSettingsWarning
from jaxllm.runtime import multihost, signals, supervisor
from jaxllm.runtime.device_memory import describe_full_memory
from jaxllm.runtime.plugins import find_plugins

# In the order of --help. Each is a module here, with a function of that name and an EXAMPLE, which
# ends its --help. The last command, train, has subcommands.
COMMANDS = (
    "generate", "batch", "chat", "serve", "info", "doctor", "perplexity", "sensitivity",
    "verify", "vectors", "embed", "classify", "lens", "steer", "export", "bench",
    "convert", "quantize", "merge", "compress",
)  # fmt: skip
TRAIN = "train"


def import_command(name: str) -> ModuleType:
    """Import the module of a command, which has a function of that name and an EXAMPLE."""
    if name in (*COMMANDS, TRAIN):
        return importlib.import_module(f"jaxllm.cli.{name}")
    module: ModuleType = find_plugins("commands")[name].load()
    return module


def make_app(names: Iterable[str] | None = None, *, listed: bool = False) -> typer.Typer:
    """Return the program with these commands, by default all; only their modules are imported.

    Args:
        listed: Leave out the flags of the commands, for the help of the program.
    """
    app = typer.Typer(
        epilog="Example: jaxllm generate -p 'Once upon a time' --temperature 0.8 --seed 1",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name in (*COMMANDS, *find_plugins("commands"), TRAIN) if names is None else names:
        module = import_command(name)
        if name == TRAIN:
            app.add_typer(module.make_app(listed), name=name)
            continue
        add_command(app, getattr(module, name), module.EXAMPLE, check_paths, listed)
    app.callback()(_apply_global_options)
    return app


def _version(requested: bool) -> None:
    if requested:
        write(f"jaxllm {__version__}\n")
        raise typer.Exit


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
    group = (context.invoked_subcommand, context.obj or (), address, processes, process)
    if (status := distributed.enter_group(*group)) is not None:
        raise typer.Exit(status)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a `jaxllm` command, by default from `sys.argv`; a failure prints one line and exits."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    others = () if given[0] in (*COMMANDS, TRAIN) else find_plugins("commands")
    known = next((word for word in given if word in (*COMMANDS, TRAIN, *others)), None)
    listed = "_JAXLLM_COMPLETE" not in os.environ  # a shell completes flags, too
    app = make_app(listed=listed) if known is None else make_app([known])
    _run(app, "jaxllm", given)


def run_command(function: Callable[..., None], name: str, epilog: str) -> None:
    """Run one command as a separate program, with the same error handling."""
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    single.command(epilog=epilog)(function)
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
        full = describe_full_memory(error)
        if full is not None:
            status = _report_failure(full)
        elif not (signals.is_supervised() and multihost.is_connection_lost(error)):
            raise
        else:
            supervisor.exit_on_lost_peer(error)
    multihost.leave_group(status or 0)
    sys.exit(status)


@contextlib.contextmanager
def _log_unread_warnings() -> Iterator[None]:
    """Print each warning of a checkpoint once, as a line on stderr."""
    lines = UnusedSettingsWarning, LargerWeightsWarning
    with warnings.catch_warnings():
        show = warnings.showwarning

        def log_warning(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, lines):
                log(f"jaxllm: {message}")
            else:
                show(message, category, *where, **more)

        for category in lines:
            warnings.simplefilter("default", category)
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
