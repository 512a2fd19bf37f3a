"""Parity reports as text, JSON and plots."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.evaluate.parity.compare import Report
from jaxllm.evaluate.parity.tolerance import MAX_DRIFT, Difference, bucket_names
from jaxllm.files import finite_json
from jaxllm.files.plots import save_figure

_FIGURES = ("max", "rel max", "rms", "rel rms", "1 - cos")
_CLOSE_BUCKETS = 2  # buckets of at most 1 ULP
_LEGEND = """\
max, rms: largest and RMS difference; rel: divided by the activation's largest value and RMS.
equal, 1 ulp: share of elements with equal bits, and at most 1 ULP apart (histogram: --json).
beyond: elements out of tolerance.
"""


def to_text(report: Report) -> str:
    """Return a legend, a line per activation, and the verdict; up to 100 columns if names are
    short.
    """
    width = max(len(d.name) for d in report.differences)
    drift = report.drift is not None
    head = f"{'stage':{width}}" + "".join(f"{name:>9}" for name in _FIGURES)
    head += f"{'equal':>9}{'1 ulp':>9}"
    lines = [_LEGEND, head + ("   drift" if drift else "")]
    lines += [_line(d, width) for d in report.differences]
    return "\n".join([*lines, "", *_verdict(report)]) + "\n"


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON-able values; NaN and infinity become null."""
    first = report.first
    data = {
        **dataclasses.asdict(report),
        "holds": report.holds,
        "first_diverging": first.name if first else None,
        "drift": report.drift,
        "ulp_buckets": bucket_names(),
    }
    greedy = data["greedy"]
    greedy["holds"] = report.greedy.holds
    greedy["first"] = report.greedy.first._asdict() if report.greedy.first else None
    for name, group in (("stages", report.stages), ("decoding", report.decoding)):
        data[name] = [{**dataclasses.asdict(d), "holds": d.holds} for d in group]
    plain: dict[str, Any] = finite_json(data)
    return plain


def to_png(report: Report, path: Path) -> None:
    """Write a PNG plot of the relative error of every activation, in order.

    Raises ConfigError if matplotlib is not installed, CheckpointError if the file cannot be
    written. An existing file is replaced atomically.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots require matplotlib: pip install 'jaxllm[notebooks]'") from None
    figure = Figure(figsize=(max(8.0, len(report.stages) / 8), 4.5), layout="constrained")
    axes = figure.subplots()
    x = range(len(report.stages))
    for label, values in (
        ("largest error / largest value", [d.relative_max for d in report.stages]),
        ("RMS error / RMS", [d.relative_rms for d in report.stages]),
    ):
        axes.plot(x, [v if v > 0 else math.nan for v in values], ".-", lw=0.8, label=label)
    if broken := [i for i, d in enumerate(report.stages) if not d.holds]:
        values = [report.stages[i].relative_max for i in broken]
        axes.plot(broken, values, "rx", label=f"diverges, first {report.stages[broken[0]].name}")
    # Label each layer at its output, its last activation.
    ends = [i for i, d in enumerate(report.stages) if d.name.rpartition(".")[2].isdigit()]
    axes.set_xticks(ends, [report.stages[i].name for i in ends], rotation=90, fontsize=7)
    if any(d.relative_max > 0 for d in report.stages):  # a log scale needs a value above 0
        axes.set_yscale("log")
    axes.grid(axis="x", lw=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"{report.ours} against {report.reference}", fontsize=9)
    save_figure(figure, path, dpi=120)


def _line(d: Difference, width: int) -> str:
    angle = max(1 - d.cosine, 0.0) if d.cosine == d.cosine else d.cosine
    figures = (d.max_error, d.relative_max, d.rms_error, d.relative_rms, angle)
    text = f"{d.name:{width}}" + "".join(f"{x:9.1e}" for x in figures)
    text += "".join(f"{_percent(sum(d.ulps[:n]), d.count):>9}" for n in (1, _CLOSE_BUCKETS))
    text += "" if d.drift is None else f"{d.drift:8.2f}"
    if d.beyond:
        text += f"  {'rounding' if d.holds else '<-'}: {d.beyond:,} of {d.count:,} beyond"
    return text


def _percent(n: int, count: int) -> str:
    return f"{100 * n / count:.1f}%"


def _verdict(report: Report) -> list[str]:
    t, greedy, first = report.tolerance, report.greedy, report.first
    lines = [
        f"{report.ours} against {report.reference}, {report.dtype}",
        f"tolerance: |error| <= {t.atol:g} x max(1, max |reference|) + {t.rtol:g} x |reference|",
        f"greedy: {greedy.agreed} of {greedy.compared} tokens agree"
        f" (margins up to {greedy.allowed_margin:.1e} are ties)",
    ]
    if m := greedy.first:
        lines.append(
            f"  first mismatch at row {m.row}, step {m.step}: {m.ours}, not {m.reference} (margin"
            f" {m.margin:.1e}); the largest margin of a mismatch is {greedy.worst_margin:.1e}"
        )
    if report.drift is not None:
        lines.append(
            f"drift: our logits' distance to {report.exact} is {report.drift:.2f} times the"
            f" reference's (at most {MAX_DRIFT})"
        )
    if any(d.beyond and d.holds for d in report.differences):
        lines.append(f"rounding: out of tolerance, but the drift is at most {MAX_DRIFT}")
    if first:
        lines.append(f"first to diverge: {first.name}, worst at {list(first.worst)}")
    return [*lines, "holds" if report.holds else "DOES NOT HOLD"]
