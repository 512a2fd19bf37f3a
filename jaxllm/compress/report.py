"""Size, quality (against the original), speed and run time of each step of a recipe."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec

from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress.pipeline import StepResult, initial_state
from jaxllm.compress.recipe import ModelState
from jaxllm.evaluate import bench
from jaxllm.evaluate.likelihood.data import Loader
from jaxllm.evaluate.likelihood.divergence import check_pair, logits_divergence, run_logits
from jaxllm.evaluate.likelihood.score import check_loader
from jaxllm.files import finite_json, read_json
from jaxllm.lm import LM
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.schema import as_schema
from jaxllm.weights.formats import as_weight
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, flatten

ORIGINAL = "original"
DECODED_TOKENS = 16  # tokens per timed decoding
REPETITIONS = 5


class ReportRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of a model after a step, compared with the original; None if not measured.

    bytes: size of the parameters. kl: mean KL divergence from the original in nats per token;
    kl_error is its standard error, kl_p99 its 99th percentile. same_top: share of tokens for which
    both models predict the same next token. ratio: perplexity over that of the original.
    tokens_per_second: decoding speed of a single row. seconds: run time of the step.
    """

    step: str
    bytes: int | None = None
    perplexity: float | None = None
    perplexity_error: float | None = None
    kl: float | None = None
    kl_error: float | None = None
    kl_p99: float | None = None
    same_top: float | None = None
    ratio: float | None = None
    ratio_error: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class StepEvaluator:
    """Measures models against the original.

    Attributes:
        loader: evaluation data; None measures no quality.
        speed: whether to time decoding.
    """

    original: LM
    loader: Loader | None
    speed: bool = True
    show_progress: bool | None = None

    def original_row(self, journal: TensorStore) -> ReportRow:
        """Return the row of the original itself. journal: from `compress.pipeline.make_store`."""
        return self._load_or_measure(
            ORIGINAL, initial_state(self.original), None, journal.child("0")
        )

    def step_row(self, result: StepResult) -> ReportRow:
        """Return the row of a step; an earlier run's measurements on the same data are reused."""
        return self._load_or_measure(str(result.line), result.state, result.seconds, result.store)

    def measure(self, step: str, state: ModelState, seconds: float | None = None) -> ReportRow:
        """Measure a model. Raises what `divergence` raises.

        Memory: the float32 logits `[B, T, V]` of a batch, twice.
        """
        size = sum(int(as_weight(leaf).nbytes) for _, leaf in flatten(state.params))
        quality = {} if self.loader is None else self._quality(state, self.loader)
        speed = tokens_per_second(self.original, state) if self.speed else None
        return ReportRow(step=step, bytes=size, seconds=seconds, tokens_per_second=speed, **quality)

    def _load_or_measure(
        self, step: str, state: ModelState | None, seconds: float | None, journal: TensorStore
    ) -> ReportRow:
        data = "" if self.loader is None else self.loader.digest
        stored_row = journal.child("row", data, str(self.speed))
        if (stored := stored_row.get_with_facts("numbers")) is not None:
            return msgspec.convert(stored[1], ReportRow)
        if state is None:  # measured on other data, and the model is no longer available
            return ReportRow(step=step, seconds=seconds)
        row = self.measure(step, state, seconds)
        stored_row.put("numbers", {}, msgspec.to_builtins(row))
        return row

    def _quality(self, state: ModelState, loader: Loader) -> dict[str, float]:
        original, compressed = self.original, state.model
        check_pair(original.model, compressed)
        for model in (original.model, compressed):
            check_loader(model, loader)

        def run(model: Model, params: Params) -> Iterator[jax.Array]:
            for batch in loader.batches():
                yield run_logits(model, params, batch.token_BT, batch.position_BT)
                done()

        with steps_bar("measuring", 2 * len(loader), self.show_progress) as done:
            models = run(original.model, original.params), run(compressed, state.params)
            divergence = logits_divergence(original.model, loader.batches(), *models)
        perplexity = divergence.other.perplexity
        return {
            "perplexity": perplexity.mean,
            "perplexity_error": perplexity.error,
            "kl": divergence.kl.mean,
            "kl_error": divergence.kl.error,
            "kl_p99": divergence.kl_p99,
            "same_top": divergence.same_top.mean,
            "ratio": divergence.perplexity_ratio.mean,
            "ratio_error": divergence.perplexity_ratio.error,
        }


def tokens_per_second(lm: LM, state: ModelState) -> float:
    """Return the median speed of a compiled decoding loop, one row from an empty cache.

    lm: supplies all but the configuration, model and parameters, which are `state`'s.
    """
    other = dataclasses.replace(lm, config=state.config, model=state.model, params=state.params)
    count = min(DECODED_TOKENS, state.config.context_length - 1)
    run = bench.prepare_run(other, bench.Test(decode=count), chunk=count)
    run()  # compiles
    return count / statistics.median(bench.time_run(run) for _ in range(REPETITIONS))


COLUMNS: tuple[tuple[str, Callable[[ReportRow], str]], ...] = (
    ("MB", lambda r: _format_value(r.bytes and r.bytes / 1e6, ".2f")),
    ("perplexity", lambda r: _format_value(r.perplexity, ".4f")),
    ("ratio", lambda r: _format_value(r.ratio, ".4f")),
    ("mean KL", lambda r: _format_value(r.kl, ".3g")),
    ("+/-", lambda r: _format_value(r.kl_error, ".1g")),
    ("same top-1", lambda r: _format_value(r.same_top, ".2%")),
    ("tokens/s", lambda r: _format_value(r.tokens_per_second, ".1f")),
    ("seconds", lambda r: _format_value(r.seconds, ".1f")),
)


def as_table(rows: Sequence[ReportRow]) -> str:
    """Format rows as a text table; "-" marks what was not measured."""
    lines = [["step", *(name for name, _ in COLUMNS)]]
    lines += [[row.step, *(show(row) for _, show in COLUMNS)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() + "\n"
        for line in lines
    )


def summarize(row: ReportRow) -> str:
    """Summarize a row in one line."""
    shown = [(name, show(row)) for name, show in COLUMNS if name in ("MB", "mean KL", "seconds")]
    return f"{row.step}: " + ", ".join(f"{name} {value}" for name, value in shown if value != "-")


def as_json(rows: Sequence[ReportRow], about: Mapping[str, Any]) -> str:
    """Return a JSON object of `about` (what was measured, and how) and the rows."""
    report = {**about, "rows": [msgspec.to_builtins(row) for row in rows]}
    return json.dumps(finite_json(report), indent=2) + "\n"


def read_rows(path: Path) -> list[ReportRow]:
    """Read the rows of a report by `as_json`. Raises CheckpointError if it is invalid."""
    report = as_schema(read_json(path), dict[str, Any], str(path))
    rows: list[ReportRow] = as_schema(report.get("rows"), list[ReportRow], f"{path}: rows")
    return rows


def _format_value(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
