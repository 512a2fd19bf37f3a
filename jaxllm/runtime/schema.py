"""Schemas: values, such as those of files, are checked against the annotations of their type.

A schema is any annotation that msgspec supports, with bounds: `Annotated[int, Meta(ge=1)]`.
"""

import dataclasses
import re
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import msgspec

from jaxllm.errors import CheckpointError, ConfigError, JaxllmError

# msgspec's types in the words of the author of a JSON file.
_WORDS = {
    "int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip


def as_schema(
    value: Any, schema: Any, where: str, error: type[JaxllmError] = CheckpointError
) -> Any:
    """Convert a JSON value to `schema`: a msgspec.Struct, a TypedDict, or any annotation.

    Nothing is coerced: a string is not a number, a bool not an integer. Unknown fields of a
    dataclass are an error, unless they are null. A class that is none of these reads the value by
    its `from_json`. Raises `error` with `where`, the path of the wrong field, and its value.
    """
    try:
        fitting = msgspec.convert(
            value, schema, strict=True, dec_hook=lambda kind, given: kind.from_json(given)
        )
    except msgspec.ValidationError as problem:
        raise error(f"{where}: {describe_problem(problem, value)}") from None
    if unknown := _unknown_names(value, fitting):
        raise error(f"{where}: unknown {', '.join(unknown)}")
    return fitting


def check_fields(instance: Any, prefix: str = "") -> None:
    """Raise ConfigError if dataclass fields violate their annotations; NumPy's numbers become
    Python's.
    """
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if getattr(value, "ndim", None) == 0:
            object.__setattr__(instance, field.name, value.item())
    if complaints := field_errors(instance):
        raise ConfigError(prefix + "; ".join(complaints))


def field_errors(instance: Any) -> list[str]:
    """Return messages for dataclass fields that violate their annotations: "size must be ..."."""
    errors = []
    for name, hint in get_type_hints(type(instance), include_extras=True).items():
        if get_origin(hint) is ClassVar:
            continue
        value = getattr(instance, name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint):
            continue
        errors += value_errors(value, hint, name)
    return errors


def value_errors(value: Any, hint: Any, name: str) -> list[str]:
    """Return a message if a value violates an annotation, else nothing."""
    try:
        msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError as problem:
        either = [h for h in (hint, *get_args(hint)) if get_origin(h) is Literal]
        if either:
            known = ", ".join(map(str, get_args(either[0])))
            return [f"{name} must be one of {known}, got {value!r:.60}"]
        return [describe_problem(problem, value, name)]
    return []


def describe_problem(problem: msgspec.ValidationError, value: Any, name: str = "") -> str:
    """Translate msgspec's message for the author of the file: "rope.factor must be ..., got 0".

    Args:
        value: the value that was checked.
        name: its name, which precedes the path within it.
    """
    message, _, within = str(problem).partition(" - at ")
    is_key, _, path = within.strip("`").rpartition("` in `")
    path = path.removeprefix("$")
    where = f"{'a name in ' if is_key else ''}{f'{name}{path}'.removeprefix('.')}"
    expected = re.fullmatch(r"Expected `(.*?)`(.*?)(?:, got .*)?", message)
    if expected is None:
        message = message.replace("`", "").removeprefix("Object ")
        return f"{where}: {message}" if where else message
    names = expected[1].split(" | ")
    kinds = [_WORDS.get(k, k) for k in names if k != "int" or "float" not in names]
    got = ""
    if not is_key and "[...]" not in path:  # msgspec does not name the item
        for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[key]
        got = f", got {value!r:.60}"
    return f"{where} must be {' or '.join(kinds)}{expected[2]}{got}".lstrip()


def _unknown_names(value: Any, converted: Any) -> list[str]:
    """Return the names in a value that the dataclasses it was converted to lack."""
    if dataclasses.is_dataclass(converted) and isinstance(value, dict):
        names = {field.name for field in dataclasses.fields(converted)}
        within = [(value[name], getattr(converted, name)) for name in value.keys() & names]
        here = [str(n) for n, given in value.items() if n not in names and given is not None]
    elif isinstance(converted, dict) and isinstance(value, dict):
        here, within = [], [(value.get(name), part) for name, part in converted.items()]
    elif isinstance(converted, list | tuple) and isinstance(value, list | tuple):
        here, within = [], list(zip(value, converted, strict=True))
    else:
        return []
    return here + [name for pair in within for name in _unknown_names(*pair)]
