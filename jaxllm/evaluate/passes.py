"""One pass over a loader: numbers for every token that counts, and a journal to go on from.

The journal is a file of JSON lines: first whose it is, then each batch's numbers with the loader's
state after it. Lines are only ever added, so an interrupt costs the batch that was running.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np

from jaxllm import process
from jaxllm.cache.files import fingerprint
from jaxllm.errors import ConfigError
from jaxllm.evaluate.data import Batch, Loader
from jaxllm.progress import steps_bar
from jaxllm.weights.paths import Params

Columns = dict[str, np.ndarray]  # by name, one number for each token that counts, `[N]`
Models = Mapping[str, tuple[nn.Module, Params]]


def over(
    loader: Loader,
    each: Callable[[Batch], Columns],
    *,
    models: Models,
    journal: Path | None = None,
    description: str = "evaluating",
    summary: Callable[[Columns], str] = lambda _: "",
    show_progress: bool | None = None,
) -> Columns:
    """`each(batch)` for every batch of an epoch, joined in the loader's order.

    models: by the part they play; with the data they say whose a journal is. journal: what it has
    is not run again; it is made where there is none. summary: of what there is so far, for whoever
    interrupts a command.

    Raises ConfigError for a journal of other models, other data or another order.
    """
    parts: list[Columns] = []
    state = loader.state()
    if journal is not None:
        owner = _owner(loader, models)
        parts, state = _read(journal, owner, state)

    def so_far() -> str:
        known = summary(_joined(parts[:])) if parts else ""
        on = f"the same command goes on from {journal}" if journal else "--journal FILE keeps them"
        return f"{len(parts)} of {len(loader)} batches done{known and f', {known}'}; {on}"

    with (
        process.saying(so_far),
        steps_bar(description, len(loader), show_progress) as done,
    ):
        for _ in parts:
            done()
        for batch, after in loader.batches(state):
            parts.append(each(batch))
            if journal is not None:
                _append(journal, {"state": after, "columns": _lists(parts[-1])})
            done()
    return _joined(parts)


def _joined(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _owner(loader: Loader, models: Models) -> dict[str, str]:
    """What must be the same: the data, and the weights and formats of every model."""
    weights = {
        name: f"{fingerprint(params)[:16]} {model.precision!r} {model.config!r}"
        for name, (model, params) in models.items()
    }
    return {"data": loader.digest, **weights}


def _read(
    path: Path, owner: dict[str, str], start: dict[str, Any]
) -> tuple[list[Columns], dict[str, Any]]:
    """The parts that a journal has and the state after them; a new journal gets its first line."""
    try:
        if not path.exists():
            _append(path, {"owner": owner})
            return [], start
        whole, newline, _ = path.read_bytes().rpartition(b"\n")  # what an interrupt cut off goes
        first, *lines = [json.loads(line) for line in whole.splitlines()] or [{}]
        found = first["owner"]
        parts = [_arrays(line["columns"]) for line in lines]
        state = lines[-1]["state"] if lines else start
        for name in found.keys() | owner.keys():
            if found.get(name) != owner.get(name):
                raise ConfigError(
                    f"{path} belongs to an evaluation with another {name}: name another file, or"
                    " remove it"
                )
        with open(path, "r+b") as file:
            file.truncate(len(whole + newline))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no journal of an evaluation: {error!r:.100}") from None
    return parts, state


def _append(path: Path, line: Mapping[str, Any]) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def _lists(columns: Columns) -> dict[str, Any]:
    return {name: [str(x.dtype), x.tolist()] for name, x in columns.items()}


def _arrays(lists: Mapping[str, Any]) -> Columns:
    return {name: np.array(values, dtype) for name, (dtype, values) in lists.items()}
