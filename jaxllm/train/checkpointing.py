"""Training checkpoints: a killed run resumes bit for bit from its saved state.

One file holds the state between steps, and is replaced when the next one is complete. Its digest
covers the model, the data and the settings: a run with others does not find it. The settings in
`CHANGEABLE` may differ: a run can be prolonged, or resumed at a lower rate. With several processes
the first one holds the file; arrays are gathered and broadcast one at a time.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import __version__
from jaxllm.cache.files import fingerprint
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.errors import CheckpointError
from jaxllm.runtime.multihost import broadcast_array, broadcast_from_zero, to_host
from jaxllm.sharding.sharded_model import unshard_model
from jaxllm.train.partition import TrainedParams
from jaxllm.train.sharded_state import StateLayout
from jaxllm.train.step import Setup, TrainState
from jaxllm.weights.lazy_gather import LazyWeight, load_weight, peek_weight
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
    return {"version": __version__} | {name: repr(value) for name, value in (named | extra).items()}


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
        floats, counters = {}, {}
        for path, array in list_arrays(self.layout.map_trained(self.layout.gather_lazy, state))[0]:
            if jnp.issubdtype(peek_weight(array).dtype, jnp.floating):
                floats[path] = array
            else:
                counters[path] = np.asarray(to_host(load_weight(array))).tolist()
        self.store.put(_STATE, floats, {**facts, "settings": self.settings, "whole": counters})

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
        saved = self._load_arrays(_STATE) or self._load_arrays(_PREVIOUS)
        if saved is None:
            return None
        floats, facts = saved
        counters = facts.pop("whole")
        named, structure = list_arrays(self.layout.map_trained(self.layout.template, template))
        arrays = [
            floats[path] if path in floats else np.asarray(counters[path]) for path, _ in named
        ]
        state: TrainState = jax.tree.unflatten(structure, arrays)
        return self.layout.shard(state, template), facts

    def save_best(self, trained: TrainedParams) -> None:
        """Save the best trained arrays so far."""
        self.store.put(_BEST, self.layout.gather_lazy(trained))

    def load_best(self, template: TrainState) -> TrainedParams | None:
        """Load the best trained arrays; None if none are saved."""
        saved = self._load_arrays(_BEST)
        return None if saved is None else self.layout.shard(saved[0], template.trained)

    def _load_arrays(self, key: str) -> tuple[dict[str, LazyWeight], dict[str, Any]] | None:
        """Return the arrays in the first process's file, to be read by all processes together, and
        the facts; None if there is no file.
        """
        tensors: dict[str, Any] = {}

        def describe_arrays() -> str:
            if (part := self.store.open_tensors(key)) is None:
                return "null"
            tensors.update(part[0])
            forms = {name: (x.shape, x.dtype.name) for name, x in tensors.items()}
            return json.dumps((forms, part[1].facts))

        about = json.loads(broadcast_from_zero(describe_arrays))
        if about is None:
            return None
        forms = {name: jax.ShapeDtypeStruct(*form) for name, form in about[0].items()}

        def read(name: str) -> np.ndarray:
            form = forms[name]
            local = tensors[name].read() if tensors else np.zeros(form.shape, form.dtype)
            return broadcast_array(local)

        lazy = {name: LazyWeight(partial(read, name), form) for name, form in forms.items()}
        return lazy, about[1]
