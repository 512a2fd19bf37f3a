"""Flags of a command: the parameters of its function, and the fields of dataclasses.

The name, type and default of a flag are those of the parameter or field, its bounds those of
`msgspec.Meta` in the annotation. Its help is a line of the docstring (Args or Attributes), or else
Meta's description. All other settings are typer's: `Annotated[int, typer.Option("-n")]`.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

from jaxllm.runtime.docstrings import split_docstring


class Flags:
    """Fields as flags: `Annotated[dict[str, Any], Flags(LoraConfig, "use_dora", r="--rank -r")]`.

    The parameter is a dict of their values. One of a dataclass type has all fields as flags.

    Args:
        kind: The dataclass.
        names: Fields with a flag of the same name. Without `names` and `spelled`, all fields.
        spelled: Fields with other flags, and these flags.
    """

    def __init__(self, kind: Any, *names: str, **spelled: str) -> None:
        self.kind, self.names, self.spelled = kind, (*names, *spelled), spelled

    def parts(self) -> Iterator[tuple[inspect.Parameter, Any, "Flags | None"]]:
        """Yield each chosen field with its annotation, and the flags of one that has several."""
        hints = get_type_hints(self.kind, include_extras=True)
        for name, parameter in inspect.signature(self.kind).parameters.items():
            hint = hints[name]
            inner = next((x for x in get_args(hint) if isinstance(x, Flags)), None)
            if not self.names or name in self.names:
                yield parameter, hint, Flags(hint) if dataclasses.is_dataclass(hint) else inner

    def gather(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the dataclass, or function, from the values of all flags."""
        fields: dict[str, Any] = {}
        for parameter, hint, inner in self.parts():
            made = values[parameter.name] if inner is None else inner.gather(values)
            fields[parameter.name] = hint(**made) if inner and hint is inner.kind else made
        return fields


def add_command(
    app: typer.Typer,
    function: Callable[..., None],
    example: str,
    check: Callable[[dict[str, Any]], None],
    listed: bool = False,
) -> None:
    """Add a command with a flag for each parameter of a function and each chosen field.

    Args:
        example: The end of --help.
        check: Takes the values of all flags before the function runs.
        listed: Leave out the flags, for the help of the program.
    """
    flags = Flags(function)

    def command(**values: Any) -> None:
        check(values)
        function(**flags.gather(values))

    parameters = [] if listed else [*read_flags(flags)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    app.command(function.__name__, help=split_docstring(function)[0], epilog=example)(command)


def read_flags(chosen: Flags) -> Iterator[inspect.Parameter]:
    """Yield the flags of a dataclass or function, annotated for typer."""
    texts, kinds = dict[str, str](), get_type_hints(chosen.kind)
    for part in getattr(chosen.kind, "__mro__", [chosen.kind]):  # a dataclass inherits fields
        texts = split_docstring(part)[1] | texts
    for parameter, hint, inner in chosen.parts():
        if inner is not None:
            yield from read_flags(inner)
            continue
        name, notes = parameter.name, [*_notes(hint)]
        usual = f"--{name.replace('_', '-')}" if kinds[name] is bool else ""  # and no --no-NAME
        option: Any = next((copy.copy(x) for x in notes if isinstance(x, ParameterInfo)), None)
        option = option or typer.Option(*chosen.spelled.get(name, usual).split())
        for note in notes:
            option.min = getattr(note, "ge", None) if option.min is None else option.min
            option.max = getattr(note, "le", None) if option.max is None else option.max
            option.help = option.help or getattr(note, "description", None)
        option.help = texts.get(name) or option.help
        kind: Any = kinds[name]
        annotation = Annotated[kind, option]
        yield parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=annotation)


def _notes(hint: Any) -> Iterator[Any]:
    """Yield all parts of an annotation, types included."""
    for part in get_args(hint):
        yield from (part, *_notes(part))
