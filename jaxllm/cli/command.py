"""Commands: flags from a function, MODEL as an argument or as `-m MODEL`, readable usage errors.

A missing model is an error before the command runs, hence before JAX is imported.
"""

import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from jaxllm.errors import CheckpointError, suggest_name
from jaxllm.runtime.docstrings import split_docstring

MODEL = "model"  # the argument that -m and --model can set
_OPTION = "-m"  # the key of their value in the parser; not a parameter name
# What a value must be, by the type of pydantic's error and its context.
_EXPECTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
}


def make_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose flags are the parameters of a function.

    The Args of the function's docstring are the help of its flags. Each parameter of a dataclass
    type is replaced by that dataclass's fields, in their order.
    """
    hints = get_type_hints(function)
    groups: dict[str, Any] = {
        x: kind for x, kind in hints.items() if dataclasses.is_dataclass(kind)
    }

    @functools.wraps(function)
    def command(**flags: Any) -> None:
        options = {
            name: kind(**{field.name: flags.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        function(**flags, **options)

    flags = _read_flags(function)
    command.__doc__ = split_docstring(function)[0]
    command.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return command


def _read_flags(source: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or dataclass, annotated with their flags and help."""
    help_texts: dict[str, str] = {}
    for part in getattr(source, "__mro__", [source]):  # a dataclass inherits fields
        help_texts = split_docstring(part)[1] | help_texts
    hints, flags = get_type_hints(source, include_extras=True), []
    for parameter in inspect.signature(source).parameters.values():
        name, hint = parameter.name, hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            flags += _read_flags(hint)
            continue
        if name in help_texts:
            hint = _add_help(name, hint, help_texts[name])
        flags.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))
    return flags


def _add_help(name: str, hint: Any, text: str) -> Any:
    """Return a flag's annotation with its help; a plain bool gets no second flag `--no-NAME`."""
    if get_origin(hint) is Annotated:
        hint, option = hint.__origin__, copy.copy(hint.__metadata__[0])
    else:
        names = [f"--{name.replace('_', '-')}"] if hint is bool else []
        option = typer.Option(*names)
    option.help = text
    return Annotated[hint, option]


class Command(TyperCommand):
    """A command whose argument `model` can also be set by -m or --model."""

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, in which the value of -m replaces MODEL."""
        parser: Any = super().make_parser(ctx)
        arguments = {p.name: p for p in self.params if isinstance(p, TyperArgument)}
        if MODEL not in arguments:
            return parser
        names, place = list(arguments), list(arguments).index(MODEL)
        parser.add_option(arguments[MODEL], [_OPTION, "--model"], _OPTION)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
            values, rest, order = parse(args)
            if _OPTION in values:
                words = [values[name] for name in names if values.get(name) is not None] + rest
                words += [None] * (place - len(words))
                words.insert(place, values.pop(_OPTION))
                values |= dict(zip(names, words, strict=False))
                rest = words[len(names) :]
            return values, rest, order

        parser.parse_args = parse_args
        return parser

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises CheckpointError if the model or an adapter is missing."""
        takes_model = any(p.name == MODEL and isinstance(p, TyperArgument) for p in self.params)
        if takes_model and not ctx.params.get("server"):  # a server has its own
            check_model(ctx.params)
        check_adapters(ctx.params.get("adapter"))
        return super().invoke(ctx)


def check_model(params: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a command's model is neither a file nor a directory.

    A Hugging Face repository (`hf:`) is not checked: that would download it.
    """
    from jaxllm.checkpoints.resolve import resolve_path

    if params[MODEL].startswith("hf:"):
        return
    try:
        resolve_path(params[MODEL])
    except CheckpointError as error:
        hint = ""
        if "prompt" in params and not params["prompt"]:
            hint = " Give a prompt after the model, or with -p."
        raise CheckpointError(f"{error}{hint}") from None


def check_adapters(adapters: Any) -> None:
    """Raise CheckpointError if an adapter is neither a file nor a directory.

    Args:
      adapters: the value of --adapter: one or several of DIR or NAME=DIR, or None.
    """
    for item in adapters if isinstance(adapters, list) else [adapters] if adapters else []:
        path = str(item).partition("=")[2] or str(item)
        if not os.path.exists(path):
            raise CheckpointError(f"--adapter: {path} does not exist")


def describe_error(error: typer.TyperException, name: str) -> str:
    """Return a usage error as one line: what was written, what was expected, which --help."""
    context = getattr(error, "ctx", None)
    where = context.command_path if context else name
    message = error.format_message()
    if type(error).__name__ == "NoSuchOption":  # not exported by typer
        message = f"No such option: {(option := str(getattr(error, 'option_name', '')))}"
        message += _suggest_option(option, context.command.params) if context else ""
    elif isinstance(error, typer.BadParameter) and (expected := _describe_bad_value(error)):
        message = expected
    return f"{message} (see {where} --help)"


def _suggest_option(option: str, params: list[Any]) -> str:
    """Return a suggestion for an option that a command does not have."""
    flags = {name: p for p in params if isinstance(p, TyperOption) for name in p.opts}
    close = suggest_name(option, [name for name in flags if name.startswith("--")])
    if close or "--option" not in flags:
        return close
    from jaxllm.generation.option_table import ALIASES, OPTIONS

    name = option.lstrip("-").replace("-", "_")
    ours = ALIASES.get(name, name)
    if (flag := f"--{ours.replace('_', '-')}") in flags:
        return f": use {flag}"
    return f": use -o {ours}=VALUE" if ours in OPTIONS else ""


def _describe_bad_value(error: typer.BadParameter) -> str:
    """Return a message for a value of the wrong type, "" for any other error."""
    complaints: list[Any] = getattr(error.__cause__, "errors", list)()
    if len(complaints) != 1 or complaints[0]["type"] not in _EXPECTED or error.param is None:
        return ""
    (complaint,) = complaints
    name = max(error.param.opts, key=len)
    expected = _EXPECTED[complaint["type"]].format(**complaint.get("ctx", {}))
    return f"{name} must be {expected}, got {complaint['input']!r:.60}"
