"""Subcommands: MODEL as an argument or as `-m MODEL`, and usage errors in plain words.

A model that is not there is refused before the command runs, so before JAX is imported.
"""

import os
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from jaxllm.errors import CheckpointError, nearest

MODEL = "model"  # the argument that -m and --model may give, too
_OPTION = "-m"  # where the parser keeps what they give: the name of no parameter
# What a value must be, by the kind of pydantic's complaint and its context.
_EXPECTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
}


class Command(TyperCommand):
    """A command of which an argument called `model` may be given as -m or --model."""

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, in which the value of -m takes the place of MODEL."""
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
                given = [values[name] for name in names if values.get(name) is not None] + rest
                given += [None] * (place - len(given))
                given.insert(place, values.pop(_OPTION))
                values |= dict(zip(names, given, strict=False))
                rest = given[len(names) :]
            return values, rest, order

        parser.parse_args = parse_args
        return parser

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises CheckpointError for a model or an adapter that is not there."""
        if any(p.name == MODEL and isinstance(p, TyperArgument) for p in self.params):
            check_model(ctx.params)
        check_adapters(ctx.params.get("adapter"))
        return super().invoke(ctx)


def check_model(given: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the model among a command's arguments is no file and no directory.

    A repository of the hub is not looked for: that is a download.
    """
    from jaxllm.located import resolve

    if given[MODEL].startswith("hf:"):
        return
    try:
        resolve(given[MODEL])
    except CheckpointError as error:
        hint = ""
        if "prompt" in given and not given["prompt"]:
            hint = " A prompt goes after the model, or with -p."
        raise CheckpointError(f"{error}{hint}") from None


def check_adapters(given: Any) -> None:
    """Raise CheckpointError for an adapter that is no file and no directory.

    given: the value of --adapter: DIR or NAME=DIR, one or several, or None.
    """
    for item in given if isinstance(given, list) else [given] if given else []:
        path = str(item).partition("=")[2] or str(item)
        if not os.path.exists(path):
            raise CheckpointError(f"--adapter: {path} is not there")


def describe_error(error: typer.TyperException, name: str) -> str:
    """A usage error in a line: what was written, what was expected, where to look."""
    context = getattr(error, "ctx", None)
    where = context.command_path if context else name
    said = error.format_message()
    if type(error).__name__ == "NoSuchOption":  # which typer does not export
        said = f"No such option: {(option := str(getattr(error, 'option_name', '')))}"
        said += _meant(option, context.command.params) if context else ""
    elif isinstance(error, typer.BadParameter) and (expected := _expected(error)):
        said = expected
    return f"{said} (see {where} --help)"


def _meant(option: str, params: list[Any]) -> str:
    """What to write in place of an option that a command does not have."""
    flags = {name: p for p in params if isinstance(p, TyperOption) for name in p.opts}
    close = nearest(option, [name for name in flags if name.startswith("--")])
    if close or "--option" not in flags:
        return close
    from jaxllm.decode.sampling.spellings import OURS
    from jaxllm.options import OPTIONS

    name = option.lstrip("-").replace("-", "_")
    ours = OURS.get(name, name)
    if (flag := f"--{ours.replace('_', '-')}") in flags:
        return f": it is called {flag} here"
    return f": write -o {ours}=VALUE" if ours in OPTIONS else ""


def _expected(error: typer.BadParameter) -> str:
    """A value of the wrong kind in plain words, or "" for another complaint."""
    complaints: list[Any] = getattr(error.__cause__, "errors", list)()
    if len(complaints) != 1 or complaints[0]["type"] not in _EXPECTED or error.param is None:
        return ""
    (found,) = complaints
    name = max(error.param.opts, key=len)
    expected = _EXPECTED[found["type"]].format(**found.get("ctx", {}))
    return f"{name} must be {expected}, got {found['input']!r:.60}"
