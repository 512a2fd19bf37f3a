"""How far two arrays are apart, and whether that is too far: plain numpy, float64 inside."""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxllm.errors import ConfigError

# Lower bounds of the buckets of the ULP histogram: 0, 1, 2-3, 4-15, 16-255, ...
ULP_BUCKETS = (0, 1, 2, 4, 16, 256, 4096, 65536)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """A number holds where `|ours - theirs| <= atol * max(1, max |theirs|) + rtol * |theirs|`.

    `max |theirs|` is over the whole stage. The same rule and the same two numbers apply to every
    stage: nothing grows with depth, and a stage diverges as soon as one number does not hold. There
    is one exception, for formats in which two correct programs may round further apart than that:
    where a float32 side is there to judge by, a stage holds as long as our RMS distance to it is at
    most `MAX_DRIFT` times the reference's own. Raises ConfigError for a negative number.
    """

    atol: float
    rtol: float = 0.0

    def __post_init__(self) -> None:
        if not (self.atol >= 0 and self.rtol >= 0):
            raise ConfigError(f"a tolerance is at least 0, got {self.atol:g} and {self.rtol:g}")

    def margin(self, scale: float) -> float:
        """How far apart the reference's two best logits may be where ours order them otherwise."""
        return max(1e-3, 2 * self.atol * max(1.0, scale))


MAX_DRIFT = 1.5
# By the format that is computed in; for equal weights in the same format.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-5, 1e-4),
    "float16": Tolerance(5e-3),
    "bfloat16": Tolerance(1e-2),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one stage is from the reference's.

    count: numbers compared. scale: the reference's largest finite magnitude. max_error,
    rms_error: of ours - theirs; relative_max: max_error / scale; relative_rms: rms_error / the
    reference's own RMS. cosine: of the two as vectors. ulps: how many numbers are as many steps
    apart as `ULP_BUCKETS` says, in the coarser of the two formats (`dtype`); around zero steps are
    small and many. beyond: numbers that do not hold. worst: the index of the largest error. drift:
    our RMS distance to a float32 reference, as a multiple of the reference's own distance to it.
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
        """Whether every number is within the tolerance, or what is not is rounding."""
        return self.beyond == 0 or (self.drift is not None and self.drift <= MAX_DRIFT)


def measure(
    name: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    tolerance: Tolerance,
    exact: np.ndarray | None = None,
) -> Difference:
    """Compare two arrays of one shape. exact: a float32 side's, for `drift`.

    NaN is beyond every tolerance; infinity holds against itself alone.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        error = np.where(a == b, 0.0, np.abs(a - b))
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
        bound = tolerance.atol * max(1.0, scale) + tolerance.rtol * np.abs(b)
        beyond = ~((a == b) | (np.isfinite(b) & (error <= bound)))
        dtype = coarser(ours.dtype, theirs.dtype)
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


def coarser(a: np.dtype, b: np.dtype) -> np.dtype:
    """Whichever of two floating-point formats has fewer digits."""
    return min((a, b), key=lambda dtype: ml_dtypes.finfo(dtype).nmant)


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable numbers apart, int64; both in the same format. NaN: as far as can be.

    Adjacent floats have adjacent bit patterns (IEEE 754), sign and magnitude; 0 and -0 are one.
    """
    integer = np.dtype(f"i{a.dtype.itemsize}")
    magnitude = np.iinfo(integer).max

    def ordered(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x).view(integer).astype(np.int64)
        return np.where(bits < 0, -(bits & magnitude), bits)

    distance = np.abs(ordered(a) - ordered(b))
    return np.where(np.isnan(a) | np.isnan(b), np.iinfo(np.int64).max, distance)


def histogram(distance: np.ndarray) -> tuple[int, ...]:
    """How many distances fall into each of `ULP_BUCKETS`."""
    bucket = np.searchsorted(ULP_BUCKETS, distance.reshape(-1), side="right") - 1
    return tuple(int(n) for n in np.bincount(bucket, minlength=len(ULP_BUCKETS)))


def bucket_names() -> tuple[str, ...]:
    """The buckets by their lower bounds: 0, 1, 2+, 4+, ...; each ends where the next begins."""
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
