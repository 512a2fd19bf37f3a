"""Parameters by name: a nested dict of leaves, addressed by dotted paths, changed by ordered rules.

A path is the Hugging Face name without its model prefix: `layers.3.self_attn.q_proj.weight`.

Rules are rows `(regex, value)`, the same for precision, quantization and whatever else goes by
path. A regex names a parameter or a module by its whole path, and a module stands for all that is
in it: `layers\\.0` is all of layer 0, `.*mlp\\.down_proj` one linear of each layer,
`lm_head\\.weight` one parameter. The first row that names a path or something that it lies in wins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern

Params = dict[str, Any]
V = TypeVar("V")

# Told an array's path, and the array, says where it is to be: a device, a sharding, or None for
# where it is. A quantized weight has several, `....weight.data` and so on.
Place = Callable[[str, jax.Array], Any]


class Placed:
    """A model that says where the arrays of its caches are to be.

    writer: what writes new entries into a cache's tail, as `cache.write.at_cursor` does, where that
    would not do; compared by value.
    """

    writer: Callable[..., Any] | None = None

    def place(self, path: str, array: Any) -> jax.sharding.Sharding:
        """Of the one at `path`, whose shape `array` has."""
        raise NotImplementedError

    def splits(self, columns: int) -> bool:
        """Whether devices each have some of so many columns."""
        raise NotImplementedError

    def names(self, path: str) -> tuple[str | None, ...]:
        """The paths, in a model of one device, of what the parameter at `path` holds: one, or of a
        pipeline one for each stage, None for a stage that has nothing there.
        """
        raise NotImplementedError

    def later(self, params: Params) -> Params:
        """Parameters as a model of one device has them, each to be had when it is wanted."""
        raise NotImplementedError

    def whole(self, params: Params) -> Params:
        """The same on the host, all of them; of several processes on the host of each."""
        return map_leaves(lambda _, leaf: leaf.read(), self.later(params))

    def shared(self, params: Params) -> Params:
        """Parameters that are whole, as this model takes them."""
        raise NotImplementedError

    def everywhere(self, tree: V) -> V:
        """Arrays that are none of its parameters (a prompt that is trained), all of each where any
        of it runs.
        """
        raise NotImplementedError

    def like(self, config: Any) -> Any:
        """A model of another configuration that is spread as this one is.

        Raises ConfigError where it cannot be.
        """
        raise NotImplementedError

    def beside(self, params: Params, around: Callable[[str, Any], Any]) -> Params:
        """Parameters with something new beside them (an adapter), which goes where it is to be.

        around: the leaf that stands for one at a path of a model of one device; that itself where
        nothing is beside it. Raises ConfigError where it has no place.
        """
        raise NotImplementedError

    def with_parallel_logits(self) -> Any:
        """The same, whose logits stay divided over the vocabulary where it is divided, for what
        makes sums over it; itself where sums are to be made in the order of one device.
        """
        raise NotImplementedError

    def among(self, rows: int) -> int:
        """How many devices have rows of their own, of so many."""
        raise NotImplementedError

    def check_rows(self, rows: int) -> None:
        """Raises ConfigError for a batch to be trained on whose rows do not divide."""
        raise NotImplementedError

    def plain(self) -> Any:
        """The model of one device."""
        raise NotImplementedError

    def kept(self) -> tuple[int, int]:
        """How many arrays of keys a cache of it has, and of how many key/value heads each is."""
        raise NotImplementedError

    def stacks(self) -> tuple[tuple[int | None, ...], ...]:
        """Of a pipeline the numbers of each stage's layers, in the order of a cache's arrays; None
        where there is none; empty where each array is one layer's.
        """
        raise NotImplementedError

    def by_layer(self, kept: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of arrays as a cache of it has them, `[B, S, K, H]`, those of each layer."""
        raise NotImplementedError


def of_one_device(model: Any, params: Params) -> Params:
    """A model's parameters as a model of one device has them: on the host, where it is placed."""
    return model.whole(params) if isinstance(model, Placed) else params


def later(model: Any, params: Params) -> Params:
    """The same with a `Later` in the place of each, where the model is placed: one after the other
    they take no more room than the largest.
    """
    return model.later(params) if isinstance(model, Placed) else params


def by_layer(model: Any, kept: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of what a model's cache keeps, `[B, S, K, H]`, what each layer does."""
    return model.by_layer(kept) if isinstance(model, Placed) else list(kept)


def for_sums(model: Any) -> Any:
    """A model of whose logits only sums over the vocabulary are wanted: no device need have all."""
    return model.with_parallel_logits() if isinstance(model, Placed) else model


def among_of(model: Any, rows: int) -> int:
    """How many devices have rows of their own, of so many that a model is given."""
    return model.among(rows) if isinstance(model, Placed) else 1


def own_name(path: str) -> tuple[str | None, ...]:
    """The names of a parameter of one device's model."""
    return (path,)


def names_of(model: Any) -> Callable[[str], tuple[str | None, ...]]:
    """Of the path of a model's parameter, those in a model of one device of what it holds."""
    return model.names if isinstance(model, Placed) else own_name


class InRounds:
    """A model in stages, through which groups of rows go one behind the other.

    stages: how many, and how many groups.
    """

    @property
    def stages(self) -> int:
        raise NotImplementedError

    def groups(self, rows: int) -> np.ndarray | None:
        """The group of each of so many rows, `[B]`; None: they do not divide, and go together."""
        raise NotImplementedError

    def flight(self, rows: int) -> jax.Array:
        """What is on its way between stages, before anything is."""
        raise NotImplementedError

    def tick(
        self,
        params: Params,
        segments: Any,
        flight: jax.Array,
        number: jax.Array,
        start: jax.Array,
        token_B: jax.Array,
        position_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Each stage's layers of its group, at tick `number`: logits `[B, V]`, of which those of
        the group that has gone through are some, what is on its way, and the last segment with new
        keys and values.

        start: the slot of each row's first token. token_B: of the group that enters, its newest
        ones. position_B: of each row's token that is on its way, -1: none.
        """
        raise NotImplementedError


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


def named_arrays(
    tree: Any, prefix: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    """The arrays of any pytree by dotted path, in order, and the tree they hang on.

    is_leaf: what counts as an array, too.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    named = [(".".join([prefix, *map(_word, path)]).strip("."), leaf) for path, leaf in found]
    return named, structure


def check_params(params: Any) -> None:
    """Raise ConfigError for what is no dict of parameters."""
    if not isinstance(params, Mapping):
        got = type(params).__name__ if hasattr(params, "apply") else f"{params!r:.60}"
        raise ConfigError(f"params must be a dict of arrays, got {got}. Of an LM give lm.params")
    if params.keys() == {"params"}:
        raise ConfigError(
            'params must be the parameters alone, got {"params": ...}. Give what is under "params"'
        )


def check_place(place: Any) -> None:
    """Raise ConfigError for what is no `Place`, nor None."""
    if place is not None and not callable(place):
        raise ConfigError(f"place must be a function of (path, array), got {place!r:.60}")


def put(tree: V, place: Place | None, prefix: str = "") -> V:
    """The tree with each of its arrays where `place` says. prefix: what comes before each path."""
    check_place(place)
    if place is None:
        return tree
    named, structure = named_arrays(tree, prefix)
    placed = [x if (to := place(path, x)) is None else jax.device_put(x, to) for path, x in named]
    result: V = jax.tree.unflatten(structure, placed)
    return result


def _word(key: Any) -> str:
    """One key of a path: of a dict, a dataclass or a sequence."""
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def first_match(rules: Iterable[tuple[str, V]], path: str) -> V | None:
    """The value of the first rule that names `path` or a module that it lies in, or None.

    In time linear in both, whatever the regex. Raises ConfigError for a broken one.
    """
    names = path.split(".")
    around = [".".join(names[:n]) for n in range(len(names), 0, -1)]
    for regex, value in rules:
        if any(map(compile_pattern(regex).fullmatch, around)):
            return value
    return None
