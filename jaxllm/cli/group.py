"""`jaxllm --distributed`: one command in several processes, one model over all their devices."""

import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from jaxllm import distributed, guard, process
from jaxllm.errors import ConfigError

# The commands whose model can be on a mesh, and whose outcome all processes come to together.
COMMANDS = (
    "generate", "chat", "embed", "perplexity", "recall", "sensitivity", "verify", "vectors",
    "bench", "train full", "train lora", "train prompt", "train qat", "train distill",
)  # fmt: skip
_FILES = "makes files of files: run it once, without --distributed"
# Why others are work of one process, and what to do.
ALONE = {
    "batch": "has processes of its own: --workers N, or --ray ADDRESS over machines",
    "compress": "looks at whole layers on one device: run it once, without --distributed",
    "export": "writes a program of one device: run it once, without --distributed",
    **dict.fromkeys(("convert", "quantize", "merge", "upcycle", "infini"), _FILES),
    **dict.fromkeys(("info", "plan"), "runs no model: leave --distributed out"),
}

Address = Annotated[
    str | None,
    typer.Option(
        "--distributed",
        metavar="HOST:PORT",
        envvar="JAXLLM_DISTRIBUTED",
        help="Be one of several processes that meet there, where process 0 is; auto: as the cluster"
        f" says. For {', '.join(COMMANDS)}, with --mesh.",
    ),
]
Processes = Annotated[
    int | None, typer.Option(envvar="JAXLLM_PROCESSES", help="How many there are.")
]
Process = Annotated[
    int | None, typer.Option(envvar="JAXLLM_PROCESS", help="Which of them this is, from 0.")
]


def enter(
    command: str | None,
    arguments: Sequence[str],
    address: str,
    count: int | None,
    number: int | None,
) -> int | None:
    """Become a process of a group, or the guard of one: then the status to end with.

    Raises ConfigError for what is no group, for a command of one process, and where processes run
    different versions or are asked for different things.
    """
    group = distributed.group_of(address, count, number)
    command = _named(command, arguments)
    if command not in COMMANDS:
        why = f", and {ALONE[command]}" if command in ALONE else ""
        raise ConfigError(
            f"--distributed goes with {', '.join(COMMANDS)}; {command} is work of one process{why}"
        )
    if not process.guarded():
        return guard.run(arguments, group)
    distributed.join(group)
    distributed.agree(_facts(arguments))
    return None


def _named(command: str | None, arguments: Sequence[str]) -> str | None:
    """A command with the name of its own command, where it has some."""
    known = {name.partition(" ")[0] for name in COMMANDS if " " in name}
    if command not in known:
        return command
    after = arguments[arguments.index(command) + 1 :]
    return " ".join([command, *after[:1]])


def _facts(arguments: Sequence[str]) -> dict[str, Any]:
    """What decides about a run beside files: all processes must have the same of it."""
    import jax

    from jaxllm import __version__
    from jaxllm.ops import native

    versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    switches = {k: v for k, v in sorted(os.environ.items()) if k in ("XLA_FLAGS", "JAXLLM_PALLAS")}
    return {
        "jaxllm": __version__,
        **versions,
        "platform": jax.default_backend(),
        "devices of a process": jax.local_device_count(),
        "kernels": native.isa() if native.enabled() else "none",
        "environment": switches,
        "command": " ".join(without_number(arguments)),
    }


def without_number(arguments: Sequence[str]) -> list[str]:
    """The arguments without the one in which processes differ."""
    found: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before != "--process" and not re.match(r"--process(=|$)", argument):
            found.append(argument)
    return found
