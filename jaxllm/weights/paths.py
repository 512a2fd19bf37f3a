"""Parameters by name: a nested dict of leaves, addressed by dotted paths, changed by ordered rules.

A path is the Hugging Face name without its model prefix: `layers.3.self_attn.q_proj.weight`. One
mechanism serves conversion, precision, quantization and inspection: `(regex, value)` rows, the
first row whose regex matches the whole path wins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jaxllm.files import compile_pattern

Params = dict[str, Any]
V = TypeVar("V")


def flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)` for every leaf, in the order of the dict."""
    for name, value in params.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def map_leaves(function: Callable[[str, Any], Any], params: Mapping[str, Any]) -> Params:
    """A dict of the same form whose leaves are `function(path, leaf)`."""

    def visit(node: Mapping[str, Any], prefix: str) -> Params:
        return {
            name: visit(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else function(f"{prefix}{name}", value)
            for name, value in node.items()
        }

    return visit(params, "")


def first_match(rules: Iterable[tuple[str, V]], path: str) -> V | None:
    """The value of the first rule whose regex matches all of `path`, or None.

    In time linear in both, whatever the regex. Raises ConfigError for one that is none.
    """
    return next((value for regex, value in rules if compile_pattern(regex).fullmatch(path)), None)
