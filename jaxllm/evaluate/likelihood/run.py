"""Resumable evaluation loop over a loader, with a journal of numbers per scored token.

The journal identifies data and models, then has each batch's numbers and its place in the data. So
an interrupt loses only the current batch. One process at a time locks the file.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.errors import CheckpointError
from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.files import JsonLog, lock_file
from jaxllm.runtime import signals
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.schema import as_schema
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

Columns = dict[str, np.ndarray]  # by name, one number per scored token, `[N]`
Models = Mapping[str, tuple[Model, Params]]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """A record: the place of a batch, and its numbers by name with their dtype."""

    state: dict[str, int | str]
    columns: dict[str, tuple[Literal["float32", "float64", "bool"], list[float | bool]]]


def run_batches(
    loader: Loader,
    evaluate: Callable[[Batch], Columns],
    *,
    models: Models,
    journal: Path | None = None,
    description: str = "evaluating",
    summary: Callable[[Columns], str] = lambda _: "",
    show_progress: bool | None = None,
) -> Columns:
    """Run `evaluate` on every batch of an epoch, and concatenate the results in the loader's order.

    Args:
        models: By role; with the data they identify a journal.
        journal: File to resume from; created if missing.
        summary: Returns a text about the results so far, for the message after an interrupt.

    Raises:
        CheckpointError: If the journal is of other models, other data or another order, damaged,
            in use by another process, or not writable.
    """
    parts: list[Columns] = []

    def describe_progress() -> str:
        known = summary(_concatenate(parts[:])) if parts else ""
        on = f"the same command resumes from {journal}" if journal else "--journal FILE saves them"
        return f"{len(parts)} of {len(loader)} batches done{known and f', {known}'}; {on}"

    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.exit_message(describe_progress))
        finished: Iterator[Columns] = iter(())
        if journal is not None:
            stack.enter_context(lock_file(journal))
            log = JsonLog(journal, _describe_inputs(loader, models))
            stack.callback(log.close)
            finished = iter(_read_columns(log, loader))
        done = stack.enter_context(steps_bar(description, len(loader), show_progress))
        for number, batch in enumerate(loader.batches(), 1):
            columns = next(finished, None)
            if columns is None:
                columns = evaluate(batch)
                if journal is not None:
                    state = _state_after(loader, number)
                    log.append({"state": state, "columns": _to_lists(columns)})
            parts.append(columns)
            done()
    return _concatenate(parts)


def _concatenate(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _describe_inputs(loader: Loader, models: Models) -> dict[str, str]:
    """Return digests of the data, and of the weights and formats of every model."""
    weights = {
        name: f"{fingerprint(params)[:16]} {model.precision!r} {model.config!r}"
        for name, (model, params) in models.items()
    }
    return {"data": loader.digest, **weights}


def _state_after(loader: Loader, batches: int) -> dict[str, int | str]:
    """Return what identifies a batch in the journal: the data, and the rows up to its end."""
    row = min(batches * loader.batch, len(loader.spans))
    return {"epoch": 0, "row": row, "digest": loader.digest}


def _read_columns(journal: JsonLog, loader: Loader) -> list[Columns]:
    """Return the numbers of the finished batches, after checking them against the loader's."""
    if len(journal) > len(loader):
        raise CheckpointError(
            f"{journal.path} has too many lines: got {len(journal)}, expected {len(loader)}"
        )
    parts: list[Columns] = []
    for number, (value, batch) in enumerate(zip(journal, loader.batches()), 1):  # noqa: B905
        where = f"{journal.path}, line {number + 1}"
        if value is None:
            raise CheckpointError(
                f"{where} is damaged: its checksum does not match. Remove the file, or use another"
            )
        record: _Record = as_schema(value, _Record, where)
        columns = {name: np.array(x, dtype) for name, (dtype, x) in record.columns.items()}
        count = int(batch.scored_BT.sum())
        if record.state != _state_after(loader, number) or any(
            len(x) != count for x in columns.values()
        ):
            raise CheckpointError(f"{where} does not match its batch")
        parts.append(columns)
    if any(part.keys() != parts[0].keys() for part in parts):
        raise CheckpointError(f"{journal.path} is damaged: its lines have different columns")
    return parts


def _to_lists(columns: Columns) -> dict[str, Any]:
    return {name: [str(x.dtype), x.tolist()] for name, x in columns.items()}
