"""Parity check: runs the same input through two backends, and compares every activation.

The report names the first activation that diverges, as defined in `Tolerance`. For decoding, both
backends are fed the reference's greedy tokens, one at a time through their caches, so that an early
difference does not hide later ones. Errors are measured with numpy in float64.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.evaluate.parity.activations import LOGITS, Backend, JaxBackend, ParityCase
from jaxllm.files import finite_json
from jaxllm.files.plots import check_plot, save_figure
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import check_int

_FIGURES = ("max", "rel max", "rms", "rel rms", "1 - cos")
_CLOSE_BUCKETS = 2  # buckets of at most 1 ULP
_LEGEND = """\
max, rms: largest and RMS difference; rel: divided by the activation's largest value and RMS.
equal, 1 ulp: share of elements with equal bits, and at most 1 ULP apart (histogram: --json).
beyond: elements out of tolerance.
"""
# Lower bounds of the buckets of the ULP histogram: 0, 1, 2-3, 4-15, 16-255, ...
ULP_BUCKETS = (0, 1, 2, 4, 16, 256, 4096, 65536)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """An element is within tolerance if
    `|ours - theirs| <= atol * max(1, max |theirs|) + rtol * |theirs|`.

    `max |theirs|` is over the whole activation. The same two numbers apply to every activation and
    do not grow with depth. An activation diverges if one element is out of tolerance. The exception
    is for dtypes in which two correct programs may differ by more: if there is a float32 backend,
    an activation also holds if our RMS distance to it is at most `MAX_DRIFT` times the reference's.
    Raises ConfigError for a negative number.
    """

    atol: float
    rtol: float = 0.0

    def __post_init__(self) -> None:
        if not (self.atol >= 0 and self.rtol >= 0):
            raise ConfigError(f"tolerances must be at least 0: got {self.atol:g} and {self.rtol:g}")

    def margin(self, scale: float) -> float:
        """Return the largest gap between the reference's best two logits that counts as a tie."""
        return max(1e-3, 2 * self.atol * max(1.0, scale))


MAX_DRIFT = 1.5
# By activation dtype, for equal weights in the same format.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-5, 1e-4),
    "float16": Tolerance(5e-3),
    "bfloat16": Tolerance(1e-2),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The error of one activation against the reference's.

    count: elements compared. scale: the reference's largest finite magnitude. max_error, rms_error:
    of ours - theirs; relative_max: max_error / scale; relative_rms: rms_error / RMS of the
    reference. cosine: similarity of the two as vectors. ulps: histogram over `ULP_BUCKETS` of the
    distance in ULPs, in the coarser of the two dtypes (`dtype`); near zero ULPs are tiny, so counts
    are large. beyond: elements out of tolerance. worst: index of the largest error. drift: our RMS
    distance to a float32 backend, divided by the reference's.
    """

    name: str
    count: int
    dtype: str
    scale: float
    max_error: float
    rms_error: float
    relative_max: float
    relative_rms: float
    cosine: float
    ulps: tuple[int, ...]
    beyond: int
    worst: tuple[int, ...]
    drift: float | None = None

    @property
    def holds(self) -> bool:
        """Whether every element is within tolerance, or the rest is explained by rounding."""
        return self.beyond == 0 or (self.drift is not None and self.drift <= MAX_DRIFT)


def measure(
    name: str,
    values: np.ndarray,
    expected: np.ndarray,
    tolerance: Tolerance,
    exact: np.ndarray | None = None,
) -> Difference:
    """Compare two arrays of equal shape. exact: the float32 backend's, for `drift`.

    NaN is out of every tolerance; infinity equals only itself.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = values.astype(np.float64), expected.astype(np.float64)
        error = np.where(a == b, 0.0, np.abs(a - b))
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
        bound = tolerance.atol * max(1.0, scale) + tolerance.rtol * np.abs(b)
        beyond = ~((a == b) | (np.isfinite(b) & (error <= bound)))
        dtype = coarser_dtype(values.dtype, expected.dtype)
        return Difference(
            name=name,
            count=a.size,
            dtype=dtype.name,
            scale=scale,
            max_error=float(error.max()),
            rms_error=_rms(error),
            relative_max=_ratio(float(error.max()), scale),
            relative_rms=_ratio(_rms(error), _rms(b)),
            cosine=_cosine(a, b),
            ulps=histogram(ulp_distance(values.astype(dtype), expected.astype(dtype))),
            beyond=int(beyond.sum()),
            worst=tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape)),
            drift=None if exact is None else _drift(a, b, exact.astype(np.float64)),
        )


def coarser_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the floating-point dtype with fewer mantissa bits."""
    return min((a, b), key=lambda dtype: ml_dtypes.finfo(dtype).nmant)


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return distances in ULPs, int64, of arrays of the same dtype; for NaN the largest int64.

    Adjacent floats have adjacent sign-and-magnitude bit patterns (IEEE 754); 0 and -0 are equal.
    """
    integer = np.dtype(f"i{a.dtype.itemsize}")
    magnitude = np.iinfo(integer).max

    def to_ordered(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x).view(integer).astype(np.int64)
        return np.where(bits < 0, -(bits & magnitude), bits)

    distance = np.abs(to_ordered(a) - to_ordered(b))
    return np.where(np.isnan(a) | np.isnan(b), np.iinfo(np.int64).max, distance)


def histogram(distance: np.ndarray) -> tuple[int, ...]:
    """Count the distances in each of `ULP_BUCKETS`."""
    bucket = np.searchsorted(ULP_BUCKETS, distance.reshape(-1), side="right") - 1
    return tuple(int(n) for n in np.bincount(bucket, minlength=len(ULP_BUCKETS)))


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else float("inf"))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.reshape(-1), b.reshape(-1)
    lengths = float(np.sqrt(a @ a) * np.sqrt(b @ b))
    return float(a @ b) / lengths if lengths else float(np.array_equal(a, b))


def _drift(values: np.ndarray, expected: np.ndarray, exact: np.ndarray) -> float:
    rms, reference_rms = _rms(values - exact), _rms(expected - exact)
    return 1.0 if rms == reference_rms else _ratio(rms, reference_rms)


@dataclasses.dataclass(frozen=True)
class GreedyComparison:
    """Comparison of greedy tokens, each chosen after the reference's text.

    Attributes:
        compared: Number of tokens over all rows.
        agreed: Number of equal ones.
        first: The first mismatch: row and step, both from 0, the two tokens, and its margin, the
            reference's best logit minus its second best.
        worst_margin: The largest margin of a mismatch, 0 without any.
        allowed_margin: Margins up to this are ties within the tolerance.
    """

    compared: int
    agreed: int
    first: dict[str, Any] | None
    worst_margin: float
    allowed_margin: float

    @property
    def holds(self) -> bool:
        """Whether all mismatches are ties."""
        return self.worst_margin <= self.allowed_margin


@dataclasses.dataclass(frozen=True)
class Report:
    """The comparison of two backends on one case.

    stages: activations in the order of computation, at every token that is not padding. decoding:
    the cache's keys and values after the steps of `greedy`, by layer, and the steps' logits.
    `worst` of an activation is (row, column) of the case and the index in the vector; of the cache
    it starts with (row, position), of decoded logits with (row, step). exact: name of the float32
    backend from which drift is measured, if any.
    """

    ours: str
    reference: str
    dtype: str
    tolerance: Tolerance
    stages: tuple[Difference, ...]
    decoding: tuple[Difference, ...]
    greedy: GreedyComparison
    exact: str | None = None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, in order."""
        return (*self.stages, *self.decoding)

    @property
    def first(self) -> Difference | None:
        """The first activation that diverges, if any."""
        return next((d for d in self.differences if not d.holds), None)

    @property
    def drift(self) -> float | None:
        """Drift of the logits; None without a float32 backend."""
        return self.stages[-1].drift

    @property
    def holds(self) -> bool:
        """Whether no activation diverges, greedy tokens agree, and the logits' drift is small."""
        return self.first is None and self.greedy.holds and (self.drift or 0.0) <= MAX_DRIFT


def verify(
    backend: JaxBackend,
    reference: Backend,
    case: ParityCase,
    *,
    new_tokens: int = 32,
    tolerance: Tolerance | None = None,
    exact: Backend | None = None,
    show_progress: bool | None = None,
) -> Report:
    """Run a case and `new_tokens` greedy tokens through both backends, and compare.

    Padding is excluded from every figure.

    Args:
        tolerance: By default that of the coarser of the two dtypes (`TOLERANCES`).
        exact: A float32 backend; if given, the report includes the distance of both from it.

    Raises:
        ConfigError: If the models differ in shape.
        TokenError: If the case does not fit the model.
    """
    check_int("new_tokens", new_tokens, 1, error=ConfigError)
    case.check(backend.model.config, new_tokens)
    sides = [reference, backend, *([exact] if exact else [])]
    stages: list[dict[str, np.ndarray]] = []
    decoded: list[dict[str, np.ndarray]] = []
    with steps_bar("comparing", 2 * len(sides), show_progress) as advance:
        for side in sides:
            stages.append(side.activations(case))
            _check_shapes(stages[-1], stages[0])
            advance()
        for side in sides:
            text_BN = decoded[0][LOGITS].argmax(axis=2) if decoded else None
            decoded.append(side.decode(case, new_tokens, text_BN))
            advance()
    return make_report(backend, reference, case, stages, decoded, tolerance, exact)


def make_report(
    backend: Backend,
    reference: Any,
    case: ParityCase,
    stages: list[dict[str, np.ndarray]],
    decoded: list[dict[str, np.ndarray]],
    tolerance: Tolerance | None,
    exact: Backend | None = None,
) -> Report:
    """Return the report of two backends, of which `reference` needs only a name and a dtype.

    Args:
        stages: Activations of the reference, the backend, and `exact`, if any.
        decoded: Their results of decoding (`activations.decoded_arrays`), or parts of them.
    """
    dtype = coarser_dtype(np.dtype(backend.dtype), np.dtype(reference.dtype)).name
    tolerance = tolerance or TOLERANCES[dtype]
    logits = [side[LOGITS] for side in decoded]
    held_BP = np.logical_and.reduce([side["held"] for side in decoded if "held" in side])
    caches = [{n: x for n, x in side.items() if n not in ("held", LOGITS)} for side in decoded]
    return Report(
        ours=backend.name,
        reference=reference.name,
        dtype=dtype,
        tolerance=tolerance,
        stages=_compare(stages, case.real_BT[:, case.num_cached :], tolerance, case.num_cached),
        decoding=(
            *_compare(caches, held_BP, tolerance),
            measure(LOGITS, logits[1], logits[0], tolerance, *logits[2:]),
        ),
        greedy=compare_greedy(logits[1], logits[0], tolerance),
        exact=f"{exact.name} in float32" if exact else None,
    )


def _compare(
    sides: list[dict[str, np.ndarray]], real_BT: np.ndarray, tolerance: Tolerance, start: int = 0
) -> tuple[Difference, ...]:
    """Compare every array of the second side with the first's where `real_BT`; a third is exact.

    start: column of the case where the arrays begin. Raises ConfigError if names or shapes differ.
    """
    reference, arrays, *exact = sides
    _check_shapes(arrays, reference)
    differences = []
    for name in reference:
        values, expected, *truth = (side[name][real_BT] for side in (arrays, reference, *exact))
        difference = measure(name, values, expected, tolerance, *truth)
        first, *rest = difference.worst
        row, column = np.argwhere(real_BT)[first].tolist()
        differences.append(dataclasses.replace(difference, worst=(row, start + column, *rest)))
    return tuple(differences)


def compare_greedy(
    logits_BNV: np.ndarray, expected_BNV: np.ndarray, tolerance: Tolerance
) -> GreedyComparison:
    """Compare the argmax tokens of both backends' logits after the same text."""
    expected_BNV = expected_BNV.astype(np.float64)
    token_BN, best_BN = logits_BNV.argmax(axis=2), expected_BNV.argmax(axis=2)
    ordered = np.partition(expected_BNV, -2, axis=2)
    margin_BN = ordered[:, :, -1] - ordered[:, :, -2]
    differ = np.argwhere((token_BN != best_BN).T)  # by step, then by row
    first = None
    if len(differ):
        n, b = differ[0]
        first = {
            "row": int(b),
            "step": int(n),
            "reference": int(best_BN[b, n]),
            "ours": int(token_BN[b, n]),
            "margin": float(margin_BN[b, n]),
        }
    return GreedyComparison(
        compared=best_BN.size,
        agreed=best_BN.size - len(differ),
        first=first,
        worst_margin=float(margin_BN[token_BN != best_BN].max(initial=0.0)),
        allowed_margin=tolerance.margin(float(np.abs(expected_BNV).max())),
    )


def _check_shapes(arrays: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    if list(arrays) != list(reference):
        odd = set(arrays).symmetric_difference(reference)
        raise ConfigError(
            f"the two models have different activations: {len(arrays)} and {len(reference)},"
            f" {min(odd)} only in one of them"
        )
    for name, x in reference.items():
        if arrays[name].shape != x.shape:
            raise ConfigError(
                f"the two models differ in shape: {name} is {arrays[name].shape} and {x.shape}"
            )


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
        "ulp_buckets": ("0", "1", *(f"{least}+" for least in ULP_BUCKETS[2:])),
        "greedy": {**dataclasses.asdict(report.greedy), "holds": report.greedy.holds},
    }
    for name, group in (("stages", report.stages), ("decoding", report.decoding)):
        data[name] = [{**dataclasses.asdict(d), "holds": d.holds} for d in group]
    plain: dict[str, Any] = finite_json(data)
    return plain


def to_png(report: Report, path: Path) -> None:
    """Write a PNG plot of the relative error of every activation, in order.

    Raises ConfigError if matplotlib is not installed, CheckpointError if the file cannot be
    written. An existing file is replaced atomically.
    """
    check_plot()
    from matplotlib.figure import Figure

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
            f"  first mismatch at row {m['row']}, step {m['step']}: {m['ours']}, not"
            f" {m['reference']} (margin {m['margin']:.1e});"
            f" the largest margin of a mismatch is {greedy.worst_margin:.1e}"
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
