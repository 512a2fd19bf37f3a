"""Token log-probabilities, the basis of perplexity and of the lm-evaluation-harness adapter.

One compiled program runs a batch and reduces its logits to two numbers per token on the device. A
loop over a loader can resume from a journal, which identifies data and models, then has each
batch's numbers per scored token and its place in the data. So an interrupt loses only the current
batch. One process at a time locks the file.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxllm.cache.files import fingerprint
from jaxllm.errors import CapacityError, CheckpointError, ConfigError, NonFiniteError
from jaxllm.evaluate.likelihood.data import Batch, Loader
from jaxllm.files import JsonLog, lock_file
from jaxllm.ops.token_logprobs import log_likelihood
from jaxllm.runtime import signals
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.schema import as_schema
from jaxllm.runtime.validation import check_token_ids
from jaxllm.steps import run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

MAX_LOGIT_BYTES = 1 << 28  # maximum bytes of float32 logits for the default batch size


class Scores(NamedTuple):
    """Scores of each token given those on its left, `[B, T]`; zero and False if not scored.

    logprob_BT: float32, natural logarithm. greedy_BT: whether it is the most likely token.
    """

    logprob_BT: np.ndarray
    greedy_BT: np.ndarray


def score(model: Model, params: Params, batch: Batch) -> Scores:
    """Run one batch. Raises NonFiniteError if the model returns NaN or infinity.

    Memory: one float32 `[B, T, V]`.
    """
    logprob_BT, greedy_BT = _score(model, params, batch.token_BT, batch.position_BT)
    logprob_BT = np.where(batch.scored_BT, np.asarray(logprob_BT), np.float32(0))
    check_finite(logprob_BT, batch)
    return Scores(logprob_BT, np.asarray(greedy_BT) & batch.scored_BT)


@partial(jax.jit, static_argnums=0)
def _score(
    model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits_BTV = logits(model, params, token_BT, position_BT)
    target_BT = token_BT[:, 1:]
    greedy_BT = jnp.argmax(logits_BTV, axis=-1) == target_BT
    return pad_first_column(log_likelihood(logits_BTV, target_BT)), pad_first_column(greedy_BT)


def logits(model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array) -> jax.Array:
    """Return next-token logits, float32 `[B, T - 1, V]`; on a mesh the vocabulary is sharded."""
    return run_model(
        model.with_sharded_logits(), params, (), token_BT[:, :-1], position_BT[:, :-1]
    )[0].logits


def pad_first_column(x_BT: jax.Array) -> jax.Array:
    """Prepend a zero column for the first token, which nothing predicts."""
    return jnp.pad(x_BT, ((0, 0), (1, 0)))


def check_loader(model: Model, loader: Loader) -> None:
    """Raise TokenError for ids outside the vocabulary, CapacityError for rows that are too long."""
    if not isinstance(loader, Loader):
        raise ConfigError(
            f"loader has the wrong type: got {loader!r:.60}, expected a Loader from"
            " jaxllm.evaluate.likelihood.data.loader(documents, window=...)"
        )
    config = model.config
    if loader.width - 1 > config.context_length:
        raise CapacityError(
            f"window is too long: got {loader.width} tokens, context is {config.context_length}"
        )
    for number, ids in enumerate(loader.documents):
        check_token_ids(ids, config.vocab_size, f"document {number}: ")
    check_token_ids(np.array(loader.bos or 0), config.vocab_size, "bos: ")


def check_finite(x_BT: np.ndarray, batch: Batch) -> None:
    """Raise NonFiniteError, naming the window, if a value is NaN or infinite."""
    if not np.isfinite(x_BT).all():
        row, column = np.argwhere(~np.isfinite(x_BT))[0]
        raise NonFiniteError(
            f"the model returned NaN or infinite logits: window {batch.span_B[row]}, token {column}"
        )


def default_batch(vocab_size: int, window: int) -> int:
    """Return the number of rows, 1 to 16, whose logits take at most 256 MiB (if more than one)."""
    return int(np.clip(MAX_LOGIT_BYTES // (4 * vocab_size * window), 1, 16))


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
