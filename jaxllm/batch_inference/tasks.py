"""The tasks of a batch job: generate, by `LM.serve`, and score, embed and classify, in batches.

An answer is a dict of JSON values: those of its task, or `error`. The rows that run together may
change the last bits of a score, vector or logit, and nothing else.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from jaxllm.batch_inference.rows import BatchRow
from jaxllm.errors import CapacityError, ConfigError, JaxllmError, SamplingError, suggest_name
from jaxllm.generation.completion import Completion
from jaxllm.generation.embeddings import log_probs
from jaxllm.generation.heads import describe, shortest_floats
from jaxllm.generation.options import check_options
from jaxllm.lm import LM
from jaxllm.runtime.validation import check_int, is_integer

Answer = dict[str, Any]
Answered = tuple[BatchRow, Answer]
WINDOW = 8  # batches of texts to read at once; those of similar lengths run together
SEED_BITS = 53  # exact in every JSON reader


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A task for all rows, with default options.

    Attributes:
        task: "generate", or a name in `TEXT_TASKS`.
        options: of all rows; a row's own options override them.
        batch_size: rows that run at once.

    Raises a JaxllmError for a task or an option that no model supports.
    """

    task: str
    options: Mapping[str, Any]
    batch_size: int = 8

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, 1, 1 << 20, CapacityError)
        if self.task != "generate":
            _check_text_options(self.task, self.options)
            return
        check_options(self.options, "serve")
        if not is_integer(self.options.get("seed", 0)):
            raise SamplingError(
                f"the seed must be a number, got {self.options['seed']!r:.40}: a resumed run"
                " repeats it"
            )


def answer_rows(lm: LM, job: BatchJob, rows: Iterable[BatchRow]) -> Iterator[Answered]:
    """Yield each row with its answer as it finishes; a row is read when there is room for it.

    Raises a JaxllmError for options that the model does not support.
    """
    unreadable: list[Answered] = []

    def readable_rows() -> Iterator[BatchRow]:
        for row in rows:
            if row.complaint is None:
                yield row
            else:
                unreadable.append((row, {"error": row.complaint}))

    answer = _generate if job.task == "generate" else _answer_texts
    for answered in answer(lm, job, readable_rows()):
        yield answered
        yield from unreadable
        unreadable.clear()
    yield from unreadable


def row_seed(run_seed: int, row_id: Any) -> int:
    """Return a row's seed: the first 53 bits of a SHA-256 of the run's seed and the row's id."""
    digest = hashlib.sha256(json.dumps([run_seed, row_id], sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def _generate(lm: LM, job: BatchJob, rows: Iterator[BatchRow]) -> Iterator[Answered]:
    """Continue prompts by continuous batching. A row without a seed gets one from its id."""
    lm.with_adapter(job.options.get("adapter"))  # raises an error before any row does
    running = dict[int, BatchRow]()

    def requests() -> Iterator[dict[str, Any]]:
        for row in rows:
            running[row.line] = row
            seed = row.request.get("seed")
            if seed is None:
                seed = row_seed(job.options.get("seed", 0), row.id)
            yield {**job.options, **row.request, "id": row.line, "seed": seed}

    for line, result in lm.serve(requests(), rows=job.batch_size):
        yield running.pop(line), _format_completion(result)


def _format_completion(result: Completion | JaxllmError) -> Answer:
    if isinstance(result, JaxllmError):
        return {"error": str(result)}
    complete = result.grammar_complete
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        **({} if complete is None else {"grammar_complete": complete}),
        "seed": result.seed,
    }


def _answer_texts(lm: LM, job: BatchJob, rows: Iterator[BatchRow]) -> Iterator[Answered]:
    """Answer rows of a task without decoding, a window at a time; equal options share a batch."""
    run_task = TEXT_TASKS[job.task].run
    run_task(lm, [], batch=job.batch_size, **job.options)  # raises an error before any row does

    def run(prompts: Sequence[Any], options: Mapping[str, Any]) -> list[Answer]:
        """Answer prompts together; if that raises an error, each half by itself."""
        try:
            _check_text_options(job.task, options)
            return run_task(lm, prompts, batch=job.batch_size, **options)
        except JaxllmError as error:
            if len(prompts) == 1:
                return [{"error": str(error)}]
            half = len(prompts) // 2
            return [*run(prompts[:half], options), *run(prompts[half:], options)]

    while window := list(islice(rows, WINDOW * job.batch_size)):
        alike: dict[str, list[BatchRow]] = {}
        for row in window:
            own = {name: x for name, x in row.request.items() if name != "prompt"}
            alike.setdefault(json.dumps(own, sort_keys=True), []).append(row)
        for own_options, some in alike.items():
            prompts = [row.request["prompt"] for row in some]
            answers = run(prompts, {**job.options, **json.loads(own_options)})
            yield from zip(some, answers, strict=True)


def _check_text_options(task: str, options: Mapping[str, Any]) -> None:
    if task not in TEXT_TASKS:
        names = ["generate", *TEXT_TASKS]
        raise ConfigError(
            f"task must be {', '.join(names)}: got {task!r:.40}{suggest_name(task, names)}"
        )
    names = list(TEXT_TASKS[task].options)
    for name in options.keys() - {*names}:
        raise ConfigError(
            f"{task} has no option {name:.40}, only {', '.join(names)}{suggest_name(name, names)}"
        )


def _score(
    lm: LM, prompts: Sequence[Any], *, batch: int, adapter: str | None = None
) -> list[Answer]:
    """Return the log-probability of each token but the first, and their sum."""
    lm = lm.with_adapter(adapter)
    texts = [lm.encode(prompt) for prompt in prompts]
    return [
        {
            "tokens": ids,
            "logprobs": shortest_floats(logprob_T),
            "logprob": float(logprob_T.sum(dtype=np.float64)),
        }
        for ids, logprob_T in zip(
            texts, log_probs(lm.model, lm.params, texts, batch=batch), strict=True
        )
    ]


def _embed(lm: LM, prompts: Sequence[Any], **options: Any) -> list[Answer]:
    vectors_BD = lm.embed(prompts, show_progress=False, **options)
    return [{"embedding": shortest_floats(x_D)} for x_D in vectors_BD]


def _classify(lm: LM, prompts: Sequence[Any], **options: Any) -> list[Answer]:
    return describe(lm.classify(prompts, show_progress=False, **options))


class TextTask(NamedTuple):
    """A task of one pass. run: returns the answers to prompts. options: their names."""

    run: Callable[..., list[Answer]]
    options: tuple[str, ...]


TEXT_TASKS = {
    "score": TextTask(_score, ("adapter",)),
    "embed": TextTask(
        _embed, ("layer", "pooling", "normalize", "prompt_name", "instruction", "adapter")
    ),
    "classify": TextTask(_classify, ("adapter",)),
}
