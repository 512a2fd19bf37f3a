"""Training checkpoints: a killed run resumes bit for bit from its saved state.

One file holds the state between steps, and is replaced when the next one is complete. Its digest
covers the model, the data and the settings: a run with others does not find it. The settings in
`CHANGEABLE` may differ: a run can be prolonged, or resumed at a lower rate. With several processes
the first one holds the file; arrays are gathered and broadcast one at a time.

Orbax keeps the same promises, but a state is two to three times as long in saving (1 GB: 2.7 to
3.1 s, here 0.8 to 1.4 s), and a mesh with other shapes of its arrays would need `StateLayout` too.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm import __version__
from jaxllm.cache.files import fingerprint
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.errors import CheckpointError
from jaxllm.runtime.multihost import (
    broadcast_array,
    broadcast_from_zero,
    is_multiprocess,
    to_host,
)
from jaxllm.sharding.shard_list import ShardList
from jaxllm.sharding.sharded_model import unshard_model
from jaxllm.train.partition import Placeholder, TrainedParams
from jaxllm.train.step import Setup, TrainState
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, list_arrays

_STATE, _BEST = "state", "best"
_PREVIOUS = "earlier"  # the state before the last one, until a step from the last one was finite


# Settings that a resumed run may change; the state of a step does not depend on them.
CHANGEABLE = frozenset({"steps", "lr", "eval_steps", "save_steps", "patience"})
_MAX_SHOWN = 40  # characters of a setting that a message shows


def collect_settings(setup: Setup, plan: Any, **extra: object) -> dict[str, str]:
    """Return the settings that a run depends on, by name, as text.

    Args:
        setup: its model is taken without its mesh, since a state can be resumed on any mesh.
        plan: a `TrainPlan`. Like the optimizer it is compared field by field.
        extra: other settings by name, such as the digests of the data.
    """
    named = {
        "model": unshard_model(setup.model),
        "objective": setup.objective,
        "constraint": setup.constraint,
    }
    named["optimizer"] = type(setup.optimizer).__name__
    named["keep_best"] = plan.patience is not None
    for part in (setup.optimizer, plan):
        assert dataclasses.is_dataclass(part), "an optimizer is compared field by field"
        named |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {"version": __version__, "state_format": "2"} | {
        name: repr(value) for name, value in (named | extra).items()
    }


def open_store(
    params: Params, extra_inputs: Any, settings: Mapping[str, str], directory: Path
) -> TensorStore:
    """Return the store of a run's states. Reads all weights once.

    Args:
        params, extra_inputs: the parameters at the start, and the arrays of the objective.
        settings: as `collect_settings` returns them; the digest is without those in `CHANGEABLE`.
    """
    fixed = [f"{name}={value}" for name, value in settings.items() if name not in CHANGEABLE]
    parts = [fingerprint(params), fingerprint({"given": extra_inputs}), *fixed]
    return TensorStore(directory, hashlib.sha256("\n".join(parts).encode()).hexdigest())


def differences(old: Mapping[str, str], new: Mapping[str, str], *, changeable: bool) -> list[str]:
    """Return the changed settings as text: those in `CHANGEABLE`, or the others."""
    changes = []
    for name in (n for n in {**old, **new} if (n in CHANGEABLE) == changeable):
        pair = old.get(name, "missing"), new.get(name, "missing")
        if pair[0] != pair[1]:
            short = max(map(len, pair)) <= _MAX_SHOWN
            changes.append("{} was {}, is {}".format(name, *pair) if short else f"{name} differs")
    return changes


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Maps a model's trained arrays to those of the same model on one device, and back.

    A saved state has the latter, so it can be resumed on another mesh or on none.

    Attributes:
        names: for each trained path, the single-device paths that it holds
            (`Model.unsharded_paths`).
        uneven_shards: for paths with uneven shards, `ShardList` with a `Placeholder`.
    """

    names: dict[str, tuple[str | None, ...]]
    uneven_shards: dict[str, ShardList]

    @classmethod
    def from_model(cls, model: Model, frozen_params: Params) -> "StateLayout":
        """Return the layout of a model, given its parameters with holes for the trained ones."""
        arrays, _ = list_arrays(
            frozen_params, is_leaf=lambda x: isinstance(x, Placeholder | ShardList)
        )
        uneven = {
            path: x
            for path, x in arrays
            if isinstance(x, ShardList) and isinstance(x.shards, Placeholder)
        }
        paths = [path for path, x in arrays if isinstance(x, Placeholder)] + [*uneven]
        return cls({path: model.unsharded_paths(path) for path in paths}, uneven)

    def gather_lazy(self, trained: TrainedParams) -> dict[str, Any]:
        """Return the arrays of the single-device layout, as lazy tensors that all processes read
        together.
        """
        return {
            name: self._gather_part(path, stage, x) if jax.tree.leaves(x) else x  # masked out
            for path, x in trained.items()
            for stage, name in enumerate(self.names[path])
            if name is not None
        }

    def gather_state(self, state: Any) -> Any:
        """Return a tree with `gather_lazy` of each dict of trained arrays in it."""
        return jax.tree.map(
            lambda x: self.gather_lazy(x) if self._is_trained(x) else x,
            state,
            is_leaf=self._is_trained,
        )

    def shard(self, unsharded: Any, like: Any) -> Any:
        """Shard what `gather_state` made of a tree like `like`, with its shardings."""
        structure: Any
        nodes, structure = jax.tree.flatten(like, is_leaf=self._is_trained)
        leaves = [
            {path: self._join_parts(path, x, each) for path, each in node.items()}
            if self._is_trained(node)
            else _place_like(x.read(), node)
            for x, node in zip(structure.flatten_up_to(unsharded), nodes, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    def _is_trained(self, x: Any) -> bool:
        return isinstance(x, dict) and x.keys() == {*self.names}

    def _gather_part(self, path: str, stage: int, x: jax.Array) -> LazyTensor:
        """Return a stage's part of an array, without the padding of uneven shards."""
        stages, uneven = len(self.names[path]), self.uneven_shards.get(path)
        shape = x.shape if stages == 1 else (x.shape[0] // stages, *x.shape[1:])
        row_index = None if uneven is None else uneven.row_index(x.ndim)
        if row_index is not None:
            shape = (len(row_index), *shape[1:])

        def read() -> np.ndarray:
            array = np.asarray(to_host(x))
            array = array if stages == 1 else np.split(array, stages)[stage]
            return array if row_index is None else array[row_index]

        return LazyTensor(np.dtype(x.dtype), shape, read)

    def _join_parts(self, path: str, unsharded: dict[str, Any], like: jax.Array) -> jax.Array:
        """Return an array like `like` of its parts; padding and missing stages are zeros."""
        if not jax.tree.leaves(like):
            return like
        names, uneven = self.names[path], self.uneven_shards.get(path)
        parts = [unsharded[name].read() for name in names if name is not None]
        if uneven is not None:
            rows = math.prod(uneven.shards.shape[-1 - parts[0].ndim :][:2])
            for i, part in enumerate(parts):
                parts[i] = np.zeros((rows, *part.shape[1:]), part.dtype)
                parts[i][uneven.row_index(part.ndim)] = part
        parts += [np.zeros_like(parts[0])] * (len(names) - len(parts))
        return _place_like(np.concatenate(parts) if len(parts) > 1 else parts[0], like)


def _place_like(array: Any, like: jax.Array) -> jax.Array:
    """Put a host array where `like` is, with its dtype."""
    cast = array.astype(like.dtype)
    if is_multiprocess():
        return jax.make_array_from_callback(cast.shape, like.sharding, lambda index: cast[index])
    where = like.sharding if isinstance(like.sharding, NamedSharding) else None
    placed: jax.Array = jax.device_put(cast, where)
    return placed


@dataclasses.dataclass(frozen=True)
class StateStore:
    """The saved states of a run; nothing is saved if `store` has no directory.

    Attributes:
        layout: of the trained arrays.
        settings: as `collect_settings` returns them.
    """

    store: TensorStore
    layout: StateLayout
    settings: Mapping[str, str]

    def check_unused(self) -> None:
        """Raise CheckpointError if the directory holds the state of a run with other settings."""

        def list_differences() -> str:
            if not self.store.part_paths():
                return ""
            try:
                saved = self.store.read_facts(_STATE)["settings"]
            except (CheckpointError, KeyError):
                return "its file is not readable"
            changes = differences(saved, self.settings, changeable=False)
            return "; ".join(changes or ["the weights at the start differ"])

        if what := broadcast_from_zero(list_differences):
            raise CheckpointError(
                f"{self.store.directory} holds the state of another run: {what}. Use the same"
                f" settings (only {', '.join(sorted(CHANGEABLE))} may change), write elsewhere, or"
                " remove it."
            )

    def save(self, state: TrainState, facts: dict[str, Any]) -> None:
        """Save a state, and facts as JSON. Raises CheckpointError if they cannot be written.

        The previous state stays until `drop_previous` or `restore_previous`.
        """
        self.store.move(_STATE, _PREVIOUS)
        arrays = dict(list_arrays(self.layout.gather_state(state))[0])
        self.store.put_arrays(_STATE, arrays, {**facts, "settings": self.settings})

    def drop_previous(self) -> None:
        """Remove the previous state: a step from the last one was finite."""
        self.store.remove(_PREVIOUS)

    def restore_previous(self) -> None:
        """Replace the last state by the previous one: no learning rate makes its next step
        finite.
        """
        if not self.store.move(_PREVIOUS, _STATE):
            self.store.remove(_STATE)

    def load(self, template: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """Load the saved state and its facts; None if there is none.

        template: a state with the same shapes and shardings.
        """
        saved = self._open_arrays(_STATE) or self._open_arrays(_PREVIOUS)
        if saved is None:
            return None
        arrays, facts = saved
        named, structure = list_arrays(self.layout.gather_state(template))
        state = jax.tree.unflatten(structure, [arrays[path] for path, _ in named])
        return self.layout.shard(state, template), facts

    def save_best(self, trained: TrainedParams) -> None:
        """Save the best trained arrays so far."""
        self.store.put_arrays(_BEST, self.layout.gather_lazy(trained), {})

    def load_best(self, template: TrainState) -> TrainedParams | None:
        """Load the best trained arrays; None if none are saved."""
        saved = self._open_arrays(_BEST)
        return None if saved is None else self.layout.shard(saved[0], template.trained)

    def _open_arrays(self, key: str) -> tuple[dict[str, LazyTensor], dict[str, Any]] | None:
        """Return the arrays in the first process's file, to be read by all processes together, and
        the facts; None if there is no file.
        """
        tensors: dict[str, LazyTensor] = {}

        def describe_arrays() -> str:
            if (part := self.store.open_tensors(key)) is None:
                return "null"
            tensors.update(part[0])
            forms = {name: (x.dtype.name, x.shape) for name, x in tensors.items()}
            return json.dumps((forms, part[1].facts))

        about = json.loads(broadcast_from_zero(describe_arrays))
        if about is None:
            return None

        def read(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
            return broadcast_array(tensors[name].read() if tensors else np.zeros(shape, dtype))

        return {
            name: LazyTensor(np.dtype(dtype), tuple(shape), partial(read, name, dtype, shape))
            for name, (dtype, shape) in about[0].items()
        }, about[1]
