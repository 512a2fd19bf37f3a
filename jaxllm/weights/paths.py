"""Parameters by name: a nested dict of weights, addressed by dotted paths.

A path is the Hugging Face name without its model prefix: `layers.3.self_attn.q_proj.weight`.

Rules are rows `(regex, value)`, the same for precision, quantization and all other settings by
path. A regex matches the whole path of a parameter or of a module, and a module stands for all its
parameters: `layers\\.0` is all of layer 0, `.*mlp\\.down_proj` one linear of each layer,
`lm_head\\.weight` one parameter. The first row that matches a path or one of its modules wins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern

Params = dict[str, Any]
V = TypeVar("V")

# Of a path and its array, returns where to put it: a device, a sharding, or None to leave it. A
# quantized weight has several arrays, `....weight.data` and so on.
Placement = Callable[[str, jax.Array], Any]


class ShardedModelBase:
    """Interface of a model whose parameters and caches are sharded over devices.

    `cache_writer`, compared by value, writes new entries into a cache's tail in place of
    `cache.write.write_at_cursor`.
    """

    cache_writer: Callable[..., Any] | None = None

    def cache_sharding(self, path: str, array: Any) -> jax.sharding.Sharding:
        """Return the sharding of the cache array at `path`, which has the shape of `array`."""
        raise NotImplementedError

    def splits_tokens(self, columns: int) -> bool:
        """Return whether the devices split the tokens of rows with `columns` columns."""
        raise NotImplementedError

    def unsharded_paths(self, path: str) -> tuple[str | None, ...]:
        """Return the unsharded model's paths of the parameter at `path`.

        That is one path, or in a pipeline one for each stage, None for a stage that has nothing
        there.
        """
        raise NotImplementedError

    def gather_lazy(self, params: Params) -> Params:
        """Return the unsharded model's parameters, each to be gathered when it is read."""
        raise NotImplementedError

    def gather(self, params: Params) -> Params:
        """Gather all parameters to the host; with several processes, to the host of each."""
        return map_leaves(lambda _, leaf: leaf.read(), self.gather_lazy(params))

    def shard(self, params: Params) -> Params:
        """Shard parameters of the unsharded model."""
        raise NotImplementedError

    def replicate(self, tree: V) -> V:
        """Replicate arrays that are not parameters (such as a trained prompt) on all devices."""
        raise NotImplementedError

    def with_config(self, config: Any) -> Any:
        """Return a model of another configuration, sharded as this one is.

        Raises:
            ConfigError: if it cannot be sharded so.
        """
        raise NotImplementedError

    def attach_adapter(self, params: Params, wrap: Callable[[str, Any], Any]) -> Params:
        """Add an adapter to sharded parameters, and place its arrays.

        Args:
            wrap: wraps the weight at a path of the unsharded model; returns a weight without an
                adapter unchanged.

        Raises:
            ConfigError: if an adapter cannot be placed.
        """
        raise NotImplementedError

    def with_sharded_logits(self) -> Any:
        """Return the model with logits that stay sharded over the vocabulary, for sums over it.

        Returns itself if its vocabulary is not sharded, or sums must be in the order of one device.
        """
        raise NotImplementedError

    def num_data_shards(self, rows: int) -> int:
        """Return how many devices split `rows` rows."""
        raise NotImplementedError

    def check_rows(self, rows: int) -> None:
        """Raise ConfigError if a training batch of `rows` rows cannot be split."""
        raise NotImplementedError

    def unsharded(self) -> Any:
        """Return the unsharded model."""
        raise NotImplementedError

    def cache_shape(self) -> tuple[int, int]:
        """Return how many arrays of keys a cache has, and the number of key/value heads in each."""
        raise NotImplementedError

    def stage_layers(self) -> tuple[tuple[int | None, ...], ...]:
        """Return the layer numbers of each pipeline stage, in the order of a cache's arrays.

        None marks an empty place. The result is empty if each array belongs to one layer.
        """
        raise NotImplementedError

    def unstack_layers(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Split cache arrays `[B, S, K, H]` of stacked stages into one array per layer."""
        raise NotImplementedError


def gather_params(model: Any, params: Params) -> Params:
    """Return the unsharded model's parameters: on the host, if the model is sharded."""
    return model.gather(params) if isinstance(model, ShardedModelBase) else params


def gather_lazy(model: Any, params: Params) -> Params:
    """Return the same with a `LazyWeight` for each parameter of a sharded model.

    Read one after the other, they take no more memory than the largest.
    """
    return model.gather_lazy(params) if isinstance(model, ShardedModelBase) else params


def unstack_layers(model: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return one array `[B, S, K, H]` per layer, from the arrays in a model's cache."""
    return model.unstack_layers(arrays) if isinstance(model, ShardedModelBase) else list(arrays)


def with_sharded_logits(model: Any) -> Any:
    """Return the model for sums over the vocabulary: no device needs all logits."""
    return model.with_sharded_logits() if isinstance(model, ShardedModelBase) else model


def num_data_shards(model: Any, rows: int) -> int:
    """Return how many devices split `rows` rows of the model's input."""
    return model.num_data_shards(rows) if isinstance(model, ShardedModelBase) else 1


def identity_path(path: str) -> tuple[str | None, ...]:
    """Return the path of a parameter of an unsharded model, as `ShardedModelBase.unsharded_paths`
    does.
    """
    return (path,)


def unsharded_paths(model: Any) -> Callable[[str], tuple[str | None, ...]]:
    """Return the function from a parameter's path to the unsharded model's paths."""
    return model.unsharded_paths if isinstance(model, ShardedModelBase) else identity_path


class PipelinedDecoder:
    """Interface of a pipelined model that decodes groups of rows, one in each stage."""

    @property
    def num_stages(self) -> int:
        """Number of stages, and of groups."""
        raise NotImplementedError

    def row_groups(self, rows: int) -> np.ndarray | None:
        """Return the group of each row, int32 `[B]`; None: rows are not divisible into groups."""
        raise NotImplementedError

    def empty_pipeline(self, rows: int) -> jax.Array:
        """Return the activations between stages before the first tick."""
        raise NotImplementedError

    def run_tick(
        self,
        params: Params,
        segments: Any,
        in_flight: jax.Array,
        tick: jax.Array,
        start: jax.Array,
        token_B: jax.Array,
        position_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Run each stage's layers on its group, at tick `tick`.

        Args:
            in_flight: the activations between stages.
            start: the slot of each row's first token.
            token_B: the newest tokens; those of the group that enters are used.
            position_B: position of each row's token in the pipeline; -1: none.

        Returns:
            Logits `[B, V]`, valid for the group that leaves the last stage; the activations between
            stages;
            the last segment with the new keys and values.
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
    """Return a dict with the same keys whose leaves are `function(path, leaf)`."""

    def visit(node: Mapping[str, Any], prefix: str) -> Params:
        return {
            name: visit(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else function(f"{prefix}{name}", value)
            for name, value in node.items()
        }

    return visit(params, "")


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
    """Put each array of a tree where `cache_sharding` returns. `prefix` precedes each path."""
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
        if any(map(compile_pattern(regex).fullmatch, around)):
            return value
    return None
