"""A run's state on disk, so that a killed run goes on bit for bit where it was.

One file with all that goes from step to step, replaced when the next one is complete. What it
belongs to is in its digest: another model, other data or another setting finds nothing there. Of
several processes the first has the file, and gives the others their shares of what is in it.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import __version__, process
from jaxllm.cache.files import fingerprint
from jaxllm.compress.journal import Journal
from jaxllm.distributed import at_first, several, told
from jaxllm.train.spread import Form
from jaxllm.train.step import TrainState
from jaxllm.train.trained import Trained
from jaxllm.weights.paths import Params, named_arrays

_STATE, _BEST = "state", "best"


def journal_of(params: Params, given: Any, facts: Sequence[object], directory: Path) -> Journal:
    """Where a run keeps what is finished. facts: values whose `repr` says what the run is.

    Reads all weights once. Of several processes the first keeps.
    """
    if not process.leads():
        return Journal()
    whose = [__version__, fingerprint(params), fingerprint({"given": given}), *map(repr, facts)]
    return Journal(directory, hashlib.sha256("\n".join(whose).encode()).hexdigest())


def keep(journal: Journal, state: TrainState, facts: dict[str, Any], form: Form) -> None:
    """Keep a state, and facts that JSON can hold. Raises CheckpointError where that cannot be."""
    floats, whole = {}, {}
    for path, array in named_arrays(form.map(form.whole, state))[0]:
        if jnp.issubdtype(array.dtype, jnp.floating):
            floats[path] = at_first(array)
        else:  # counters
            whole[path] = at_first(array).tolist()
    journal.put(_STATE, floats, {**facts, "whole": whole})


def kept(
    journal: Journal, blank: TrainState, form: Form
) -> tuple[TrainState, dict[str, Any]] | None:
    """The state that was kept, and the facts; None where there is none. blank: one of its form, on
    the same devices.
    """
    found = _told(journal.get_with(_STATE))
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
    journal.put(_BEST, form.whole(trained))


def kept_best(journal: Journal, blank: TrainState, form: Form) -> Trained | None:
    """What was best when it was kept last."""
    found = _told(journal.get_with(_BEST))
    return None if found is None else form.spread(found[0], blank.trained)


def _told(found: tuple[Params, dict[str, Any]] | None) -> tuple[Params, dict[str, Any]] | None:
    """What the first process found, of which the others have shapes and formats, and the facts."""
    if not several():
        return found

    def said() -> str:
        if found is None:
            return "null"
        forms = {path: (x.shape, str(x.dtype)) for path, x in found[0].items()}
        return json.dumps((forms, found[1]))

    about = json.loads(told(said))
    if about is None or process.leads():
        return found
    forms, facts = about
    return {n: jax.ShapeDtypeStruct(shape, kind) for n, (shape, kind) in forms.items()}, facts
