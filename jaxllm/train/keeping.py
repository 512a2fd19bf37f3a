"""A run's state on disk, so that a killed run goes on bit for bit where it was.

One file with all that goes from step to step, replaced when the next one is complete. What it
belongs to is in its digest: another model, other data or another setting finds nothing there. Of
several processes the first has the file; both ways an array at a time goes through all of them.
"""

import hashlib
import json
from collections.abc import Sequence
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
from jaxllm.train.spread import Form
from jaxllm.train.step import TrainState
from jaxllm.train.trained import Trained
from jaxllm.weights.later import Later, leaf_of, now
from jaxllm.weights.paths import Params, named_arrays

_STATE, _BEST = "state", "best"


def journal_of(params: Params, given: Any, facts: Sequence[object], directory: Path) -> Journal:
    """Where a run keeps what is finished. facts: values whose `repr` says what the run is.

    Reads all weights once.
    """
    whose = [__version__, fingerprint(params), fingerprint({"given": given}), *map(repr, facts)]
    return Journal(directory, hashlib.sha256("\n".join(whose).encode()).hexdigest())


def keep(journal: Journal, state: TrainState, facts: dict[str, Any], form: Form) -> None:
    """Keep a state, and facts that JSON can hold. Raises CheckpointError where that cannot be."""
    floats, whole = {}, {}
    for path, array in named_arrays(form.map(form.later, state))[0]:
        if jnp.issubdtype(leaf_of(array).dtype, jnp.floating):
            floats[path] = array
        else:  # counters
            whole[path] = np.asarray(fetched(now(array))).tolist()
    journal.put(_STATE, floats, {**facts, "whole": whole})


def kept(
    journal: Journal, blank: TrainState, form: Form
) -> tuple[TrainState, dict[str, Any]] | None:
    """The state that was kept, and the facts; None where there is none. blank: one of its form, on
    the same devices.
    """
    found = _kept(journal, _STATE)
    if found is None:
        return None
    floats, facts = found
    whole = facts.pop("whole")
    named, structure = named_arrays(form.map(form.blank, blank))
    arrays = [floats[path] if path in floats else np.asarray(whole[path]) for path, _ in named]
    there: TrainState = jax.tree.unflatten(structure, arrays)
    return form.spread(there, blank), facts


def keep_best(journal: Journal, trained: Trained, form: Form) -> None:
    """Keep what is best so far."""
    journal.put(_BEST, form.later(trained))


def kept_best(journal: Journal, blank: TrainState, form: Form) -> Trained | None:
    """What was best when it was kept last."""
    found = _kept(journal, _BEST)
    return None if found is None else form.spread(found[0], blank.trained)


def _kept(journal: Journal, key: str) -> tuple[dict[str, Later], dict[str, Any]] | None:
    """The arrays that the first process has in a file, to be read by all together, and the facts;
    None where it has none.
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
