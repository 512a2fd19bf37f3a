"""Training checkpoints: a killed run resumes bit for bit from its saved state.

One file holds the state between steps, and is replaced when the next one is complete. Its digest
covers the model, the data and the settings: a run with others does not find it. The settings in
`FREE` may differ: a run can be prolonged, or resumed at a lower rate. With several processes the
first one holds the file; arrays are gathered and broadcast one at a time.
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
from jaxllm.compress.journal import Journal
from jaxllm.distributed import fetched, from_first, told
from jaxllm.errors import CheckpointError
from jaxllm.train.spread import Form
from jaxllm.train.step import Setup, TrainState
from jaxllm.train.trained import Trained
from jaxllm.weights.later import Later, leaf_of, now
from jaxllm.weights.paths import Params, Placed, named_arrays

_STATE, _BEST = "state", "best"
_EARLIER = "earlier"  # the state before the last one, until a step from the last one was finite


# Settings that a resumed run may change; the state of a step does not depend on them.
FREE = frozenset({"steps", "lr", "eval_steps", "save_steps", "patience"})
_LONGEST = 40  # characters of a setting that a message shows


def settings_of(setup: Setup, plan: Any, **more: object) -> dict[str, str]:
    """Return the settings that a run depends on, by name, as text.

    Args:
      setup: its model is taken without its mesh, since a state can be resumed on any mesh.
      plan: a `loop.Plan`. Like the optimizer it is compared field by field.
      more: other settings by name, such as the digests of the data.
    """
    model = setup.model.plain() if isinstance(setup.model, Placed) else setup.model
    named = {"model": model, "objective": setup.objective, "constraint": setup.constraint}
    named["optimizer"] = type(setup.optimizer).__name__
    named["keep_best"] = plan.patience is not None
    for part in (setup.optimizer, plan):
        assert dataclasses.is_dataclass(part), "an optimizer is compared field by field"
        named |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {"version": __version__} | {name: repr(value) for name, value in (named | more).items()}


def journal_of(params: Params, given: Any, settings: Mapping[str, str], directory: Path) -> Journal:
    """Return the journal of a run's states. Reads all weights once.

    Args:
      params, given: the parameters at the start, and the arrays of the objective.
      settings: as `settings_of` returns them; those in `FREE` are not part of the digest.
      directory: holds the files.
    """
    fixed = [f"{name}={value}" for name, value in settings.items() if name not in FREE]
    parts = [fingerprint(params), fingerprint({"given": given}), *fixed]
    return Journal(directory, hashlib.sha256("\n".join(parts).encode()).hexdigest())


def differences(before: Mapping[str, str], now: Mapping[str, str], *, free: bool) -> list[str]:
    """Return the changed settings as text: those in `FREE`, or the others."""
    found = []
    for name in (n for n in {**before, **now} if (n in FREE) == free):
        pair = before.get(name, "missing"), now.get(name, "missing")
        if pair[0] != pair[1]:
            short = max(map(len, pair)) <= _LONGEST
            found.append("{} was {}, is {}".format(name, *pair) if short else f"{name} differs")
    return found


def check_unused(journal: Journal, settings: Mapping[str, str]) -> None:
    """Raise CheckpointError if the directory holds the state of a run with other settings."""

    def complaint() -> str:
        if not journal.parts():
            return ""
        there = (journal.facts(_STATE) or {}).get("settings")
        what = differences(there, settings, free=False) if there else ["its file is not readable"]
        return "; ".join(what or ["the weights at the start differ"])

    if what := told(complaint):
        raise CheckpointError(
            f"{journal.directory} holds the state of another run: {what}. Use the same settings"
            f" (only {', '.join(sorted(FREE))} may change), write elsewhere, or remove it."
        )


def keep(journal: Journal, state: TrainState, facts: dict[str, Any], form: Form) -> None:
    """Save a state, and facts as JSON. Raises CheckpointError if they cannot be written.

    The previous state stays until `confirm` or `fall_back`.
    """
    journal.move(_STATE, _EARLIER)
    floats, whole = {}, {}
    for path, array in named_arrays(form.map(form.later, state))[0]:
        if jnp.issubdtype(leaf_of(array).dtype, jnp.floating):
            floats[path] = array
        else:  # counters
            whole[path] = np.asarray(fetched(now(array))).tolist()
    journal.put(_STATE, floats, {**facts, "whole": whole})


def confirm(journal: Journal) -> None:
    """Remove the previous state: a step from the last one was finite."""
    journal.remove(_EARLIER)


def fall_back(journal: Journal) -> None:
    """Replace the last state by the previous one: no learning rate makes its next step finite."""
    if not journal.move(_EARLIER, _STATE):
        journal.remove(_STATE)


def kept(
    journal: Journal, blank: TrainState, form: Form
) -> tuple[TrainState, dict[str, Any]] | None:
    """Load the saved state and its facts; None if there is none.

    blank: a state with the same shapes and shardings.
    """
    found = _kept(journal, _STATE) or _kept(journal, _EARLIER)
    if found is None:
        return None
    floats, facts = found
    whole = facts.pop("whole")
    named, structure = named_arrays(form.map(form.blank, blank))
    arrays = [floats[path] if path in floats else np.asarray(whole[path]) for path, _ in named]
    there: TrainState = jax.tree.unflatten(structure, arrays)
    return form.spread(there, blank), facts


def keep_best(journal: Journal, trained: Trained, form: Form) -> None:
    """Save the best trained arrays so far."""
    journal.put(_BEST, form.later(trained))


def kept_best(journal: Journal, blank: TrainState, form: Form) -> Trained | None:
    """Load the best trained arrays; None if none are saved."""
    found = _kept(journal, _BEST)
    return None if found is None else form.spread(found[0], blank.trained)


def _kept(journal: Journal, key: str) -> tuple[dict[str, Later], dict[str, Any]] | None:
    """Return the arrays in the first process's file, to be read by all processes together, and the
    facts; None if there is no file.
    """
    there: dict[str, Any] = {}

    def said() -> str:
        if (found := journal.tensors(key)) is None:
            return "null"
        there.update(found[0])
        forms = {name: (x.shape, x.dtype.name) for name, x in there.items()}
        return json.dumps((forms, found[1].facts))

    about = json.loads(told(said))
    if about is None:
        return None
    forms = {name: jax.ShapeDtypeStruct(*form) for name, form in about[0].items()}

    def read(name: str) -> np.ndarray:
        form = forms[name]
        return from_first(there[name].read() if there else np.zeros(form.shape, form.dtype))

    return {name: Later(partial(read, name), form) for name, form in forms.items()}, about[1]
