"""The layerwise calibration loop: runs the calibration data through one layer at a time.

Memory is bounded by one layer: the inputs of all rows `[N, T, D]` on the host, a batch of them on
the device. Within a layer, groups of linears with the same input are compressed in order, each
calibrated on the outputs of the compressed ones before it (GPTQ's `true_sequential`). Then the
layer runs once more to produce the next layer's inputs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import models
from jaxllm.compress.input_stats import InputStats, check_finite
from jaxllm.compress.recipe import ModelState, StepContext, match_paths, shapes_by_path
from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.files import release_pages
from jaxllm.models.family import LinearGroup
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.formats import Weight, as_weight
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, first_match, flatten, map_leaves
from jaxllm.weights.types.base import WeightBase

BATCH = 1 << 11  # tokens per batch

Change = Callable[["LayerInputs"], Params]  # returns the new parameters of a layer


@dataclasses.dataclass(frozen=True, eq=False)
class LayerInputs:
    """A layer and its inputs for all calibration rows.

    path: path of the layer's parameters, such as `layers.3`. params: the original parameters.
    x_NTD: the inputs, float32.
    """

    model: Model
    number: int
    path: str
    params: Params
    x_NTD: np.ndarray

    @property
    def sites(self) -> tuple[LinearGroup, ...]:
        """The layer's linears grouped by their inputs, in the order they run, without experts."""
        groups = models.get_family(self.model.config.model_type).linear_groups
        return tuple(
            g._replace(linears=tuple(x for x in g.linears if has_weight(self.params, x)))
            for g in groups
            if has_weight(self.params, g.linears[0])
        )

    def input_stats(self, params: Params, site: LinearGroup) -> InputStats:
        """Return the input statistics of a site's linears, given the layer's parameters.

        Raises NonFiniteError if an input is NaN or infinite.
        """
        columns = get_module(params, site.linears[0])["weight"].shape[1]
        stats = self.fold(params, _add_stats, site.input, InputStats.empty(columns))
        return check_finite(stats, f"{self.path}.{site.linears[0]}")

    def fold(self, params: Params, function: Callable[..., Any], name: str, state: Any) -> Any:
        """Fold `state = function(state, x)` over batches `[b, T, ...]` of the array at a site."""
        run = partial(
            _fold_batch, self.model, self._program_layer, function, name, self.dense(params)
        )
        for x_BTD in self.batches():
            state = run(state, x_BTD)
        return state

    def trace_entry(self, params: Params, name: str, rows: int | None = None) -> np.ndarray:
        """Return the array at a site for the first `rows` rows (None: all), `[N, T, ...]`."""
        run = partial(_entry, self.model, self._program_layer, name, self.dense(params))
        return np.concatenate([np.asarray(run(x_BTD)) for x_BTD in self.batches(rows)])

    def batches(self, rows: int | None = None) -> Iterator[jax.Array]:
        """Return the inputs of the first `rows` rows in batches of equal size."""
        return _iter_batches(self.x_NTD[:rows])

    def dense(self, params: Params) -> Params:
        """Dequantize the weights, so that one compiled program runs the layer in any format.

        Plain arrays are returned unchanged.
        """
        dtype = self.model.precision.activations
        return map_leaves(
            lambda _, x: x.to_dense(dtype) if isinstance(x, WeightBase) else x, params
        )

    @property
    def _program_layer(self) -> int:
        number: int = self.model.config.first_equal_layer(self.number)
        return number


def map_layers(
    model: Model,
    params: Params,
    token_NT: np.ndarray,
    change: Change,
    *,
    name: str,
    load_finished: Callable[[int], Params | None] = lambda _: None,
    show_progress: bool | None = None,
) -> Params:
    """Return the parameters with `change` applied to every layer, from first to last.

    Args:
        token_NT: int32 ids, rows of equal length.
        name: Label of the progress bar.
        load_finished: Returns a layer's parameters if an earlier run finished it, else None.

    Raises:
        NonFiniteError: If a layer's output is NaN or infinite.
    """
    family = models.get_family(model.config.model_type)
    x_NTD = np.concatenate(
        [np.asarray(_embeddings(model, params, x)) for x in _iter_batches(token_NT)]
    )
    changed = dict(params)
    with steps_bar(name, model.config.num_hidden_layers, show_progress) as advance:
        for number in range(model.config.num_hidden_layers):
            path = f"{family.layers}.{number}"
            layer = LayerInputs(model, number, path, params[path], x_NTD)
            finished = load_finished(number)
            changed[path] = change(layer) if finished is None else finished
            x_NTD = layer.trace_entry(changed[path], "resid_post")
            _release_pages(params[path])
            if not np.isfinite(x_NTD).all():
                raise NonFiniteError(f"{path} returned NaN or infinity for the calibration data")
            advance()
    return changed


def run_layerwise(context: StepContext[Any], name: str, change: Change) -> ModelState:
    """Change each layer once, and save it in the store as soon as it is finished."""

    def change_and_save(layer: LayerInputs) -> Params:
        params = change(layer)
        context.store.put(f"layer{layer.number}", params)
        return params

    params = map_layers(
        context.state.model,
        context.state.params,
        context.token_NT,
        change_and_save,
        name=name,
        load_finished=lambda number: context.store.get(f"layer{number}"),
        show_progress=context.show_progress,
    )
    return dataclasses.replace(context.state, params=params)


def match_linears(layer: LayerInputs, rule: str) -> list[tuple[LinearGroup, list[str]]]:
    """Return each site with its linears that match a rule, in the order they run; no routers.

    Raises ConfigError as `check_unwrapped` does, and if the inputs of a matching matrix are
    unknown.
    """
    matches = []
    known = {linear for site in layer.sites for linear in site.linears}
    router = models.get_family(layer.model.config.model_type).router
    for path, leaf in flatten(layer.params):
        linear, named = path.removesuffix(".weight"), f"{layer.path}.{path}"
        if leaf.ndim != 2 or linear == router or not first_match([(rule, True)], named):
            continue
        if linear not in known:
            raise ConfigError(
                f"{named} has unknown inputs, which this step needs: exclude it with on="
            )
    for site in layer.sites:
        paths = {linear: f"{layer.path}.{linear}.weight" for linear in site.linears}
        linears = [linear for linear, path in paths.items() if first_match([(rule, True)], path)]
        for linear in linears:
            check_unwrapped(paths[linear], get_module(layer.params, linear)["weight"])
        matches += [(site, linears)] if linears else []
    return matches


def match_weights(params: Params, rule: str, where: str) -> dict[str, Weight]:
    """Return the matrices that match a rule. Raises ConfigError for none, or as
    `check_unwrapped`.
    """
    leaves = dict(flatten(params))
    matrices = {path: leaves[path] for path in match_paths(shapes_by_path(params), rule, where)}
    for path, leaf in matrices.items():
        check_unwrapped(path, leaf)
    return matrices


def check_unwrapped(path: str, weight: Weight) -> None:
    """Raise ConfigError for a weight composed of others: changing it would make it dense."""
    leaf = as_weight(weight)
    if leaf.is_composite:
        raise ConfigError(
            f"{path} is {leaf.format}, expected a single matrix: put this step before the one that"
            " changed it"
        )


def get_module(params: Params, path: str) -> Params:
    """Return the parameters of the module at a dotted path."""
    for name in path.split("."):
        params = params[name]
    return params


def has_weight(params: Params, path: str) -> bool:
    """Return whether a dotted path names a module with a weight."""
    for name in path.split("."):
        if name not in params:
            return False
        params = params[name]
    return "weight" in params


def replace_leaves(params: Params, path: str, **leaves: Any) -> Params:
    """Return the parameters with some leaves of the module at `path` replaced."""
    first, _, rest = path.partition(".")
    if not first:
        return {**params, **leaves}
    return {**params, first: replace_leaves(params[first], rest, **leaves)}


def _release_pages(params: Params) -> None:
    """Release the memory of a layer's original weights if a file backs it: they are done with.

    Arrays on a GPU or on several devices are left alone.
    """
    for array in jax.tree.leaves(params):
        if [device.platform for device in array.devices()] != ["cpu"]:
            continue
        begin = array.unsafe_buffer_pointer()
        release_pages(begin, begin + array.nbytes)


def _iter_batches(x_NT: np.ndarray) -> Iterator[jax.Array]:
    """Yield rows `[N, T, ...]` in batches of equal size, of about `BATCH` tokens at most."""
    count, most = len(x_NT), max(1, BATCH // x_NT.shape[1])
    size = next(n for n in range(min(count, most), 0, -1) if count % n == 0)
    for begin in range(0, count, size):
        yield jnp.asarray(x_NT[begin : begin + size])


def _row_positions(rows: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the positions `[B, T]` and lengths `[B]` of rows without padding."""
    position_BT = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (rows, tokens))
    return position_BT, jnp.full((rows,), tokens, jnp.int32)


@partial(jax.jit, static_argnums=0)
def _embeddings(model: Model, params: Params, token_BT: jax.Array) -> jax.Array:
    trace: Any = model.apply({"params": params}, token_BT, *_row_positions(*token_BT.shape))
    return trace.embeddings.astype(jnp.float32)  # XLA drops the rest


def _trace_entry(
    model: Model, layer: int, name: str, params: Params, x_BTD: jax.Array
) -> jax.Array:
    x = x_BTD.astype(model.precision.activations)
    rows = _row_positions(*x.shape[:2])
    entry = models.run_layer(model, layer, params, x, *rows, frozenset([name])).sites[name]
    return entry.reshape(*entry.shape[:2], -1)  # concatenate heads


@partial(jax.jit, static_argnums=(0, 1, 2))
def _entry(model: Model, layer: int, name: str, params: Params, x_BTD: jax.Array) -> jax.Array:
    return _trace_entry(model, layer, name, params, x_BTD).astype(jnp.float32)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def _fold_batch(
    model: Model,
    layer: int,
    function: Callable[..., Any],
    name: str,
    params: Params,
    state: Any,
    x_BTD: jax.Array,
) -> Any:
    return function(state, _trace_entry(model, layer, name, params, x_BTD))


def _add_stats(state: InputStats, x_BTI: jax.Array) -> InputStats:
    return state.add(x_BTI.reshape(-1, x_BTI.shape[-1]))
