"""An equivalence report as a table, as JSON, as a picture."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.evaluate.equivalence.compare import Report
from jaxllm.evaluate.equivalence.difference import MAX_DRIFT, Difference, bucket_names
from jaxllm.files import finite_json, writing

_FIGURES = ("max", "rel max", "rms", "rel rms", "1 - cos")
_CLOSE = 2  # buckets that are at most 1 ULP apart
_LEGEND = """\
max, rms: largest and RMS difference; rel: divided by the stage's largest number and RMS.
equal, 1 ulp: share of numbers with the same bits, and at most 1 ULP apart (histogram: --json).
"""


def to_text(report: Report) -> str:
    """Return a legend, a line per stage, and the verdict, at most 100 columns wide where names are
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
    """The report as plain values that JSON has; NaN and infinity become null."""
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
    """Write a picture of the error of every stage, relative to the stage, in order.

    Raises ConfigError where matplotlib is not installed, CheckpointError where the file cannot be
    written; an older file of this name is replaced when the new one is complete.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'jaxllm[notebooks]'") from None
    figure = Figure(figsize=(max(8.0, len(report.stages) / 8), 4.5), layout="constrained")
    axes = figure.subplots()
    x = range(len(report.stages))
    for label, values in (
        ("largest error / largest number", [d.relative_max for d in report.stages]),
        ("RMS error / RMS", [d.relative_rms for d in report.stages]),
    ):
        axes.plot(x, [v if v > 0 else math.nan for v in values], ".-", lw=0.8, label=label)
    if broken := [i for i, d in enumerate(report.stages) if not d.holds]:
        values = [report.stages[i].relative_max for i in broken]
        axes.plot(broken, values, "rx", label=f"diverges, first {report.stages[broken[0]].name}")
    # A layer's own output ends it: that is where its name stands.
    ends = [i for i, d in enumerate(report.stages) if d.name.rpartition(".")[2].isdigit()]
    axes.set_xticks(ends, [report.stages[i].name for i in ends], rotation=90, fontsize=7)
    if any(d.relative_max > 0 for d in report.stages):  # two that agree have nothing to scale
        axes.set_yscale("log")
    axes.grid(axis="x", lw=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"{report.ours} against {report.reference}", fontsize=9)
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _line(d: Difference, width: int) -> str:
    angle = max(1 - d.cosine, 0.0) if d.cosine == d.cosine else d.cosine
    figures = (d.max_error, d.relative_max, d.rms_error, d.relative_rms, angle)
    text = f"{d.name:{width}}" + "".join(f"{x:9.1e}" for x in figures)
    text += "".join(f"{_percent(sum(d.ulps[:n]), d.count):>9}" for n in (1, _CLOSE))
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
        f"tolerance: |error| <= {t.atol:g} x max(1, largest of the stage) + {t.rtol:g} x |number|",
        f"greedy: {greedy.agreed} of {greedy.compared} tokens agree"
        f" (a tie is a margin of at most {greedy.allowed_margin:.1e})",
    ]
    if m := greedy.first:
        lines.append(
            f"  first at row {m.row}, step {m.step}: {m.ours}, not {m.reference}, which leads by"
            f" {m.margin:.1e}; the largest lead that was lost is {greedy.worst_margin:.1e}"
        )
    if report.drift is not None:
        lines.append(
            f"drift: our logits are {report.drift:.2f} times as far from {report.exact} as the"
            f" reference's are (at most {MAX_DRIFT})"
        )
    if any(d.beyond and d.holds for d in report.differences):
        lines.append(f"rounding: beyond, but drifting at most {MAX_DRIFT} times as far")
    if first:
        lines.append(f"first to diverge: {first.name}, most at {list(first.worst)}")
    return [*lines, "holds" if report.holds else "DOES NOT HOLD"]
