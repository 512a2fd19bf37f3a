"""Usage errors as one line: what was written, what was expected, which --help has more."""

from typing import Any

import typer
from typer.core import TyperOption

from jaxllm.errors import suggest_name

# What a value must be, by the type of typer's complaint and its bounds.
_EXPECTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "greater_than_equal": "{ge:g} or more",
    "less_than_equal": "{le:g} or less",
}
# Old and foreign names of options, and what to use instead; the first that a command has.
_RENAMED = {
    "--rate": "--lr", "--learning-rate": "--lr", "--decay": "--weight-decay",
    "--clip": "--max-grad-norm", "--eval": "--eval-data", "--prompts": "--data",
    "--num-generations": "--group-size", "--loss-type": "--loss",
    "--max-completion-length": "--max-new-tokens", "--held-out": "--eval-split",
    "--evaluate-every": "--eval-steps", "--save-every": "--save-steps",
    "--batch": "--batch-size", "--per-device-train-batch-size": "--batch-size",
    "--accumulate": "--gradient-accumulation-steps",
    "--grad-accum": "--gradient-accumulation-steps", "--remat": "--gradient-checkpointing",
    "--max-steps": "--steps", "--num-train-epochs": "--epochs", "--warmup-ratio": "--warmup",
    "--max-length": "--length", "--target": "--target-modules",
    "--alpha": "--lora-alpha", "--dropout": "--lora-dropout", "--layers": "--layers-to-transform",
    "-m": "MODEL", "--model": "MODEL",
}  # fmt: skip


def describe_error(error: typer.TyperException, name: str) -> str:
    """Return a usage error of a command, or of the program `name`, as one line."""
    context: Any = getattr(error, "ctx", None)
    message = error.format_message()
    if type(error).__name__ == "NoSuchOption":  # not exported by typer
        option = str(getattr(error, "option_name", ""))
        message = f"No such option: {option}"
        message += _suggest_option(option, context.command.params) if context else ""
    elif isinstance(error, typer.BadParameter) and error.param is not None:
        message = _describe_value(error) or message
    return f"{message} (see {context.command_path if context else name} --help)"


def _suggest_option(option: str, params: list[Any]) -> str:
    """Return a suggestion for an option that a command does not have."""
    flags = [name for p in params for name in p.opts if isinstance(p, TyperOption)]
    instead = _RENAMED.get(option, "")
    if instead in flags or instead.lower() in (p.name for p in params):
        return f": use {instead}" if instead in flags else f": give {instead} without it"
    close = suggest_name(option, [name for name in flags if name.startswith("--")])
    if close or "--option" not in flags:
        return close
    from jaxllm.generation.option_table import ALIASES, OPTIONS

    name = option.lstrip("-").replace("-", "_")
    known = ALIASES.get(name, name)
    if (flag := f"--{known.replace('_', '-')}") in flags:
        return f": use {flag}"
    return f": use -o {known}=VALUE" if known in OPTIONS else ""


def _describe_value(error: typer.BadParameter) -> str:
    """Return a message for one value of the wrong type, out of bounds or no choice, else ""."""
    complaints: list[Any] = getattr(error.__cause__, "errors", list)()
    if len(complaints) != 1 or error.param is None:
        return ""
    (complaint,), name = complaints, max(error.param.opts, key=len)
    if (expected := _EXPECTED.get(complaint["type"])) is None:
        return f"{name}: {complaint['msg'].removeprefix('Value error, ').rstrip('.')}"
    bound = expected.format(**complaint.get("ctx", {}))
    return f"{name} must be {bound}, got {complaint['input']!r:.60}"
