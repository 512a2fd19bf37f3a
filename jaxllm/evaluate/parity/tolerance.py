"""Error measures between two arrays, and tolerances; numpy in float64."""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxllm.errors import ConfigError

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
    ours: np.ndarray,
    theirs: np.ndarray,
    tolerance: Tolerance,
    exact: np.ndarray | None = None,
) -> Difference:
    """Compare two arrays of equal shape. exact: the float32 backend's, for `drift`.

    NaN is out of every tolerance; infinity equals only itself.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        error = np.where(a == b, 0.0, np.abs(a - b))
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
        bound = tolerance.atol * max(1.0, scale) + tolerance.rtol * np.abs(b)
        beyond = ~((a == b) | (np.isfinite(b) & (error <= bound)))
        dtype = coarser_dtype(ours.dtype, theirs.dtype)
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
            ulps=histogram(ulp_distance(ours.astype(dtype), theirs.astype(dtype))),
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


def bucket_names() -> tuple[str, ...]:
    """Return the names of buckets by their lower bounds: 0, 1, 2+, 4+, ..."""
    return ("0", "1", *(f"{least}+" for least in ULP_BUCKETS[2:]))


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else float("inf"))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.reshape(-1), b.reshape(-1)
    lengths = float(np.sqrt(a @ a) * np.sqrt(b @ b))
    return float(a @ b) / lengths if lengths else float(np.array_equal(a, b))


def _drift(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> float:
    ours_off, theirs_off = _rms(ours - exact), _rms(theirs - exact)
    return 1.0 if ours_off == theirs_off else _ratio(ours_off, theirs_off)
