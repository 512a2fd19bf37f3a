"""Parameters by name: a nested dict of weights, addressed by dotted paths.

A path is the Hugging Face name without its model prefix: `layers.3.self_attn.q_proj.weight`.

Rules are rows `(regex, value)`, the same for precision, quantization and all other settings by
path. A regex matches the whole path of a parameter or of a module, and a module stands for all its
parameters: `layers\\.0` is all of layer 0, `.*mlp\\.down_proj` one linear of each layer,
`lm_head\\.weight` one parameter. The first row that matches a path or one of its modules wins.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import jax

from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern

Params = dict[str, Any]
V = TypeVar("V")

# Of a path and its array, returns where to put it: a device, a sharding, or None to leave it. A
# quantized weight has several arrays, `....weight.data` and so on.
Placement = Callable[[str, jax.Array], Any]


def flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)` for every leaf, in the order of the dict."""
    for name, value in params.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def map_leaves(
    function: Callable[[str, Any], Any], params: Mapping[str, Any], prefix: str = ""
) -> Params:
    """Return a dict with the same keys whose leaves are `function(path, leaf)`.

    prefix: what each path begins with.
    """
    return {
        name: map_leaves(function, value, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else function(f"{prefix}{name}", value)
        for name, value in params.items()
    }


def list_arrays(
    tree: Any, prefix: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    """List the arrays of any pytree with their dotted paths, and return its structure too.

    Args:
        is_leaf: marks other objects that count as arrays.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    named = [(".".join([prefix, *map(_key_name, path)]).strip("."), leaf) for path, leaf in leaves]
    return named, structure


def check_params(params: Any) -> None:
    """Raise ConfigError for anything but a dict of parameters."""
    if not isinstance(params, Mapping):
        got = type(params).__name__ if hasattr(params, "apply") else f"{params!r:.60}"
        raise ConfigError(f"params must be a dict of arrays, got {got}. For an LM pass lm.params")
    if params.keys() == {"params"}:
        raise ConfigError(
            'params must be the parameters alone, got {"params": ...}. Pass the value of "params"'
        )


def check_place(place: Any) -> None:
    """Raise ConfigError for anything but a `Placement` or None."""
    if place is not None and not callable(place):
        raise ConfigError(f"place must be a function of (path, array), got {place!r:.60}")


def put(tree: V, place: Placement | None, prefix: str = "") -> V:
    """Put each array of a tree where `place` returns. `prefix` precedes each path."""
    check_place(place)
    if place is None:
        return tree
    named, structure = list_arrays(tree, prefix)
    placed = [x if (to := place(path, x)) is None else jax.device_put(x, to) for path, x in named]
    result: V = jax.tree.unflatten(structure, placed)
    return result


def _key_name(key: Any) -> str:
    """Return one key of a path: of a dict, a dataclass or a sequence."""
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def first_match(rules: Iterable[tuple[str, V]], path: str) -> V | None:
    """Return the value of the first rule that matches `path` or one of its modules, or None.

    Takes time linear in both, for any regex. Raises ConfigError for an invalid one.
    """
    names = path.split(".")
    around = [".".join(names[:n]) for n in range(len(names), 0, -1)]
    for regex, value in rules:
        text = _literal_text(regex)
        if any(map(compile_pattern(regex).fullmatch, around)) if text is None else text in around:
            return value
    return None


@cache
def _literal_text(regex: str) -> str | None:
    """Return the one text that `re.escape` made this regex of, or None."""
    text = re.sub(r"\\(.)", r"\1", regex) if isinstance(regex, str) else ""
    return text if text and re.escape(text) == regex else None
