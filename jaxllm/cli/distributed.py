"""`jaxllm --distributed`: one command in several processes, with one model on all devices."""

import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from jaxllm.errors import ConfigError
from jaxllm.runtime import multihost, signals, supervisor
from jaxllm.runtime.plugins import find_plugins

# Commands whose model can be on a mesh, and whose result all processes compute together. A command
# of another package is one of them if its module has DISTRIBUTED = True.
COMMANDS = (
    "generate", "chat", "embed", "classify", "perplexity", "sensitivity", "verify",
    "vectors", "bench", "train full", "train lora", "train prompt",
)  # fmt: skip
_RUN_ONCE = "runs in a single process: leave out --distributed"
# Why other commands run in one process, and what to do.
SINGLE_PROCESS = {
    "batch": "runs in one process: use --ray ADDRESS for many machines",
    "compress": "processes whole layers on one device: leave out --distributed",
    "serve": "runs its model in one process: start several, or Ray Serve with replicas=N",
    "export": "writes programs for one device: leave out --distributed",
    **dict.fromkeys(("convert", "quantize", "merge", "lens", "steer"), _RUN_ONCE),
    **dict.fromkeys(("info", "doctor"), "runs no model: leave out --distributed"),
}

Address = Annotated[
    str | None,
    typer.Option(
        "--distributed",
        metavar="HOST:PORT",
        envvar="JAXLLM_DISTRIBUTED",
        help="Address of process 0, to run as one of several processes; auto: from the cluster's"
        f" environment. With --mesh, for {', '.join(COMMANDS)}.",
    ),
]
Processes = Annotated[
    int | None, typer.Option(envvar="JAXLLM_PROCESSES", help="Number of processes.")
]
Process = Annotated[
    int | None, typer.Option(envvar="JAXLLM_PROCESS", help="Index of this process, from 0.")
]


def enter_group(
    command: str | None,
    arguments: Sequence[str],
    address: str,
    process_count: int | None,
    process_index: int | None,
) -> int | None:
    """Join a group of processes and return None; or supervise a child that does, and return the
    exit status.

    Raises ConfigError for an invalid group, for a command of one process, and if the processes have
    different versions, environments or commands.
    """
    group = multihost.parse_group(address, process_count, process_index)
    given = [] if command is None else arguments[arguments.index(command) :]
    name, plugins = command, find_plugins("commands")
    if command == "train":
        name, plugins = " ".join(given[:2]), find_plugins("train_commands")
    plugin = plugins.get(str(name).removeprefix("train "))
    together = plugin is not None and getattr(plugin.load(), "DISTRIBUTED", False)
    if name not in COMMANDS and not together:
        why = f"; {name} {SINGLE_PROCESS[name]}" if name in SINGLE_PROCESS else ""
        raise ConfigError(f"--distributed does not support {name}, only {', '.join(COMMANDS)}{why}")
    if not signals.is_supervised():
        return supervisor.run_supervised(arguments, group)
    multihost.join_group(group)
    multihost.check_processes_agree(_collect_facts(given))
    return None


def _collect_facts(command: Sequence[str]) -> dict[str, Any]:
    """Return all that determines a run besides files; it must be equal in all processes."""
    import jax

    from jaxllm import __version__
    from jaxllm.ops import native

    versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    switches = {k: v for k, v in sorted(os.environ.items()) if k == "XLA_FLAGS"}
    return {
        "jaxllm": __version__,
        **versions,
        "platform": jax.default_backend(),
        "kernels": native.isa() if native.is_enabled() else "none",
        "environment": switches,
        "command": " ".join(command),
    }
