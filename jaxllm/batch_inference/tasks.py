"""The table of tasks: generate, score, embed, classify. Each is a function of a group of rows.

An answer is a dict of JSON values: the columns of its task, or `error`. The other rows of a group
may change a row's last bits, and nothing else; therefore groups are fixed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.batch_inference.job import BatchJob, row_seed
from jaxllm.batch_inference.rows import Row
from jaxllm.errors import ConfigError, JaxllmError, SamplingError, suggest_name
from jaxllm.generation.completion import Completion
from jaxllm.generation.embeddings import check_text, log_probs
from jaxllm.generation.heads import describe, shortest_floats
from jaxllm.generation.options import check_options
from jaxllm.lm import LM

Answer = dict[str, Any]


class Task(NamedTuple):
    """A task.

    Attributes:
      run: returns the answers to rows, in order.
      check: raises a JaxllmError for options that the model does not support.
      columns: Arrow types of the answer's columns.
    """

    run: Callable[[LM, BatchJob, Sequence[Row]], list[Answer]]
    check: Callable[[LM, Mapping[str, Any]], Any]
    columns: dict[str, str]


def check_task(task: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError or SamplingError for a task or an option that no model supports."""
    if task not in TASKS:
        raise ConfigError(
            f"task must be {', '.join(TASKS)}: got {task!r:.40}{suggest_name(task, TASKS)}"
        )
    if task == "generate":
        check_options(options, "serve")
        return
    for name in options:
        if name not in _OPTIONS[task]:
            known = ", ".join(_OPTIONS[task])
            raise ConfigError(
                f"{task} has no option {name}, only {known}{suggest_name(name, _OPTIONS[task])}"
            )


def generate(lm: LM, job: BatchJob, rows: Sequence[Row]) -> list[Answer]:
    """Generate continuations by continuous batching. A row without a seed gets one from its id."""
    results = dict(
        lm.serve([_make_request(job, n, row) for n, row in enumerate(rows)], rows=job.rows)
    )
    return [format_completion(results[n]) for n in range(len(rows))]


def _make_request(job: BatchJob, number: int, row: Row) -> dict[str, Any]:
    request = {**job.options, **row.request, "id": number}
    if row.request.get("seed") is None:
        request["seed"] = row_seed(job.options.get("seed", 0), row.id, row.duplicate)
    return request


def format_completion(result: Completion | JaxllmError) -> Answer:
    """Return a completion, or the error in its place, as an answer."""
    if isinstance(result, JaxllmError):
        return {"error": str(result)}
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        **(
            {} if result.grammar_complete is None else {"grammar_complete": result.grammar_complete}
        ),
        "seed": result.seed,
    }


def score(lm: LM, job: BatchJob, rows: Sequence[Row]) -> list[Answer]:
    """Return the log-probability of each token but the first, and their sum.

    Texts with the same adapter run together, batched by length.
    """
    answers, texts = dict[int, Answer](), dict[int, list[int]]()
    alike: dict[str | None, list[int]] = {}
    for n, row in enumerate(rows):
        try:
            _check_row_options(row, "score", ("adapter",))
            adapter = row.request.get("adapter", job.options.get("adapter"))
            lm.with_adapter(adapter)
            texts[n] = lm.encode(row.request["prompt"])
            check_text(lm.model, 0, texts[n])
        except JaxllmError as error:
            answers[n] = {"error": str(error)}
        else:
            alike.setdefault(adapter, []).append(n)
    for adapter, members in alike.items():
        found = _score_texts(lm.with_adapter(adapter), [texts[n] for n in members], job.rows)
        answers |= dict(zip(members, found, strict=True))
    return [answers[n] for n in range(len(rows))]


def _score_texts(lm: LM, texts: Sequence[list[int]], batch: int) -> list[Answer]:
    """Score texts together; if that raises an error, score each by itself."""
    try:
        found = log_probs(lm.model, lm.params, texts, batch=batch)
    except JaxllmError as error:
        if len(texts) == 1:
            return [{"error": str(error)}]
        return [answer for ids in texts for answer in _score_texts(lm, [ids], batch)]
    return [
        {
            "tokens": ids,
            "logprobs": shortest_floats(logprob_T),
            "logprob": float(logprob_T.sum(dtype=np.float64)),
        }
        for ids, logprob_T in zip(texts, found, strict=True)
    ]


def embed(lm: LM, job: BatchJob, rows: Sequence[Row]) -> list[Answer]:
    """Return pooled hidden states. If a text is invalid, each text of the group runs by itself."""
    try:
        found_BD = lm.embed(_read_prompts(rows, "embed"), **_batch_options(job))
        return [{"embedding": shortest_floats(x_D)} for x_D in found_BD]
    except JaxllmError as error:
        return _answer_alone(embed, lm, job, rows, error)


def classify(lm: LM, job: BatchJob, rows: Sequence[Row]) -> list[Answer]:
    """Return the best label, the scores and the logits, in the order of the head's labels."""
    try:
        return describe(lm.classify(_read_prompts(rows, "classify"), **_batch_options(job)))
    except JaxllmError as error:
        return _answer_alone(classify, lm, job, rows, error)


def _read_prompts(rows: Sequence[Row], task: str) -> list[Any]:
    for row in rows:
        _check_row_options(row, task, ())
    return [row.request["prompt"] for row in rows]


def _batch_options(job: BatchJob) -> dict[str, Any]:
    return {"batch": job.rows, "show_progress": False, **job.options}


def _answer_alone(
    run: Callable[[LM, BatchJob, Sequence[Row]], list[Answer]],
    lm: LM,
    job: BatchJob,
    rows: Sequence[Row],
    error: JaxllmError,
) -> list[Answer]:
    """Return the answers of rows that failed together, each run by itself."""
    if len(rows) == 1:
        return [{"error": str(error)}]
    return [answer for row in rows for answer in run(lm, job, [row])]


def _check_row_options(row: Row, task: str, allowed: Sequence[str]) -> None:
    for name in row.request:
        if name not in ("prompt", *allowed):
            raise SamplingError(f"line {row.line}: {task} does not support {name} in a row")


def _check_embed(lm: LM, options: Mapping[str, Any]) -> None:
    lm.embed([], show_progress=False, **options)


def _check_classify(lm: LM, options: Mapping[str, Any]) -> None:
    lm.classify([], show_progress=False, **options)


def _check_adapter(lm: LM, options: Mapping[str, Any]) -> None:
    lm.with_adapter(options.get("adapter"))


_OPTIONS = {
    "score": ("adapter",),
    "embed": ("layer", "pooling", "normalize", "prompt_name", "instruction", "adapter"),
    "classify": ("adapter",),
}
TASKS = {
    "generate": Task(
        generate,
        _check_adapter,
        {
            "text": "string",
            "tokens": "list<int32>",
            "finish_reason": "string",
            "grammar_complete": "bool",
            "seed": "uint64",
        },
    ),
    "score": Task(
        score,
        _check_adapter,
        {"tokens": "list<int32>", "logprobs": "list<float32>", "logprob": "float64"},
    ),
    "embed": Task(embed, _check_embed, {"embedding": "list<float32>"}),
    "classify": Task(
        classify,
        _check_classify,
        {"label": "string", "scores": "list<float32>", "logits": "list<float32>"},
    ),
}
