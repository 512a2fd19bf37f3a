"""Observers find the ranges that torch.ao.quantization finds on the same stream, or those of all
numbers at once.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxllm.errors import ConfigError, NonFiniteError
from jaxllm.research.static_inputs.histograms import HistogramObserver, histogram
from jaxllm.research.static_inputs.observers import (
    QParams,
    QRange,
    Range,
    check_finite,
    fake_quantize,
    find_qparams,
    grid_search,
    min_max,
    observe,
    quantize,
)

SHAPE = (2, 33, 12)
BYTE = QRange(-128, 127)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Ignore torch's warning that these observers will move to torchao."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def stream(seed: int = 0, count: int = 7) -> list[np.ndarray]:
    """Return arrays `[B, T, D]` with unequal channel widths and centers, each array wider."""
    rng = np.random.default_rng(seed)
    width_D, center_D = rng.uniform(0.1, 3, SHAPE[-1]), rng.normal(0, 1, SHAPE[-1])
    return [
        (rng.standard_t(4, SHAPE) * width_D * (1 + 0.2 * i) + center_D).astype(np.float32)
        for i in range(count)
    ]


def theirs(kind: str, arrays: list[np.ndarray], **options: Any) -> Any:
    """Return torch's observer after a stream."""
    from torch.ao.quantization import observer

    made = getattr(observer, kind)(dtype=torch.qint8, **options)
    for x in arrays:
        made(torch.from_numpy(x))
    return made


def ours(state: Any, arrays: list[np.ndarray]) -> Any:
    """Return our observer after a stream, in one compiled scan."""
    return _scanned(state, np.stack(arrays))


@jax.jit
def _scanned(state: Any, arrays: jax.Array) -> Any:
    return jax.lax.scan(lambda carry, x: (observe(carry, x), None), state, arrays)[0]


def assert_same_parameters(got: QParams, observer: Any) -> None:
    scale, zero = observer.calculate_qparams()
    np.testing.assert_allclose(np.atleast_1d(got.scale), scale.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(np.atleast_1d(got.zero), zero.numpy())


@pytest.mark.parametrize(
    ("symmetric", "levels"), [(False, BYTE), (True, BYTE), (True, QRange(-127, 127))]
)
@pytest.mark.parametrize("name", ["MinMax", "MovingAverageMinMax"])
def test_min_max_observers_equal_torch(name: str, symmetric: bool, levels: QRange) -> None:
    arrays = stream()
    state = ours(min_max(None if name == "MinMax" else 0.01), arrays)
    options = {
        "qscheme": torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine,
        "quant_min": levels.minimum, "quant_max": levels.maximum,
    }  # fmt: skip
    reference = theirs(f"{name}Observer", arrays, **options)
    np.testing.assert_allclose(state.low, reference.min_val.numpy(), rtol=1e-6)
    np.testing.assert_allclose(state.high, reference.max_val.numpy(), rtol=1e-6)
    assert_same_parameters(find_qparams(state.range(), levels, symmetric=symmetric), reference)


@pytest.mark.parametrize(
    ("numbers", "meaning"), [([3.0, 5.0], "positive"), ([-5.0, -3.0], "negative"), ([0.0], "zero")]
)
def test_zero_is_representable(numbers: list[float], meaning: str) -> None:
    """Ranges always include zero, which is quantized exactly."""
    state = observe(min_max(), jnp.array(numbers))
    given = find_qparams(state.range(), BYTE, symmetric=False)
    assert_same_parameters(given, theirs("MinMaxObserver", [np.array(numbers, np.float32)]))
    assert float(fake_quantize(jnp.zeros(1), given, BYTE)[0]) == 0


def test_empty_stream_has_torch_default_parameters() -> None:
    given = find_qparams(min_max().range(), BYTE, symmetric=False)
    assert (float(given.scale), int(given.zero)) == (1.0, 0)
    state = observe(min_max(), jnp.zeros((0, 2)))
    assert float(state.low) == np.inf


def assert_same_counts(state: HistogramObserver, reference: Any) -> None:
    """Assert equal counts, except for old bins whose center is on the edge of a new one."""
    assert (float(state.low), float(state.high)) == tuple(
        float(x) for x in (reference.min_val, reference.max_val)
    )
    elsewhere = np.abs(state.count_B - reference.histogram.numpy()).sum()
    assert elsewhere < 1e-3 * float(reference.histogram.sum())


@pytest.mark.parametrize("seed", range(3))
def test_histogram_observer_equals_torch(seed: int) -> None:
    arrays = stream(seed)
    state = observe(histogram(), arrays[0])
    reference = theirs("HistogramObserver", arrays[:1])
    np.testing.assert_array_equal(state.count_B, reference.histogram.numpy())
    assert_same_counts(ours(histogram(), arrays), theirs("HistogramObserver", arrays))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [256, 16])
def test_min_error_search_equals_torch(count: int, seed: int) -> None:
    """The histogram's range of least error equals torch's within 1% of a bin."""
    reference = theirs("HistogramObserver", stream(seed))
    reference.dst_nbins = count
    numbers = [reference.min_val, reference.max_val, reference.histogram]
    low, high, count_B = (jnp.asarray(x.numpy()) for x in numbers)
    found = histogram().replace(low=low, high=high, count_B=count_B).min_error_range(count)
    width = float(high - low) / 2048
    for ours, torchs in zip(found, reference._non_linear_param_search(), strict=True):
        assert abs(float(ours) - float(torchs)) < 0.01 * width
    assert found.high < high  # the search narrowed it


def test_constant_then_varying_histogram_equals_torch() -> None:
    """A histogram of one constant, later of other numbers, equals torch's."""
    arrays = [np.full(SHAPE, v, np.float32) for v in (0.25, 0.25)]
    state, reference = ours(histogram(), arrays), theirs("HistogramObserver", arrays)
    np.testing.assert_array_equal(state.count_B, reference.histogram.numpy())
    assert [float(x) for x in state.min_error_range(256)] == [0.25, 0.25]
    assert [float(x) for x in state.percentile_range(99.9)] == [0.25, 0.25]
    for x in stream(count=2):
        state = observe(state, x)
        reference(torch.from_numpy(x))
    assert_same_counts(state, reference)
    assert float(state.count_B.sum()) == 4 * np.prod(SHAPE)


@pytest.mark.parametrize("percent", [99.9, 99.0, 90.0, 100.0])
def test_percentile_range_equals_exact_percentiles(percent: float) -> None:
    """Percentile ranges equal the exact percentiles to within two bins."""
    arrays = stream()
    state: HistogramObserver = ours(histogram(), arrays)
    low, high = state.percentile_range(percent)
    sides = np.percentile(np.stack(arrays), [(100 - percent) / 2, (100 + percent) / 2])
    # A percentile between two numbers may be anywhere in the gap.
    gaps = [np.abs(np.stack(arrays) - side) for side in sides]
    near = [np.partition(gap.ravel(), 3)[3] for gap in gaps]
    width = float(state.high - state.low) / 2048
    assert abs(float(low) - sides[0]) <= 2 * width + near[0]
    assert abs(float(high) - sides[1]) <= 2 * width + near[1]


def gptq_find_params(x_OI: torch.Tensor, bits: int, symmetric: bool) -> Any:
    """Reimplement `Quantizer.find_params` of IST-DASLab/gptq with `mse=True`, per row."""
    maxq = 2**bits - 1
    low, high = x_OI.amin(1).clamp(max=0), x_OI.amax(1).clamp(min=0)
    if symmetric:
        high = torch.maximum(low.abs(), high)
        low = torch.where(low < 0, -high, low)
    best = torch.full_like(low, float("inf"))
    scale, zero = torch.zeros_like(low), torch.zeros_like(low)
    for i in range(80):
        p = 1 - i / 100
        s = (p * high - p * low) / maxq
        z = torch.full_like(s, (maxq + 1) / 2) if symmetric else torch.round(-p * low / s)
        q = torch.clamp(torch.round(x_OI / s[:, None]) + z[:, None], 0, maxq)
        error = ((s[:, None] * (q - z[:, None]) - x_OI).abs() ** 2.4).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
    return scale.numpy(), zero.numpy()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [96, 32])
def test_grid_search_equals_gptq_find_params(columns: int, symmetric: bool) -> None:
    """One observer for each row, or for each group of a row's columns."""
    w_RI = np.random.default_rng(3).standard_t(3, (6, 96)).astype(np.float32).reshape(-1, columns)
    to = QRange(-8, 7)

    def search(w_I: jax.Array) -> QParams:
        state = grid_search(observe(min_max(), w_I).range(), to, symmetric=symmetric)
        return find_qparams(observe(state, w_I).range(), to, symmetric=symmetric)

    found = jax.vmap(search)(w_RI)
    scale, zero = gptq_find_params(torch.from_numpy(w_RI), 4, symmetric)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(found.zero + 8, zero)


def test_streamed_grid_search_equals_single_batch() -> None:
    arrays = stream()
    found = ours(min_max(), arrays).range()
    state = grid_search(found, BYTE, symmetric=False)
    whole = np.concatenate(arrays)
    together, apart = observe(state, whole), ours(state, arrays)
    np.testing.assert_allclose(apart.error_K, together.error_K, rtol=1e-4)
    assert apart.error_K.shape == (80,)
    errors = [
        np.sum(np.abs(np.asarray(fake_quantize(whole, given, BYTE)) - whole) ** 2.4)
        for given in (
            find_qparams(Range(p * found.low, p * found.high), BYTE, symmetric=False)
            for p in (1.0, 0.5, 0.21)
        )
    ]
    np.testing.assert_allclose(together.error_K[jnp.array([0, 50, 79])], errors, rtol=1e-3)


def test_quantized_codes_equal_torch() -> None:
    """Codes equal torch's except at ties, because torch multiplies by the inverse scale."""
    x = stream()[0]
    given = find_qparams(observe(min_max(), x).range(), BYTE, symmetric=False)
    reference = torch.quantize_per_tensor(
        torch.from_numpy(x), float(given.scale), int(given.zero), torch.qint8
    )
    # torch multiplies by the inverse scale, so ties may round differently.
    assert np.mean(np.asarray(quantize(x, given, BYTE)) != reference.int_repr().numpy()) < 0.002


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_observers_count_and_skip_nonfinite_values(bad: float) -> None:
    x = stream()[0].copy()
    x[1, 2, 5] = x[0, 0, 5] = bad
    good = np.where(np.isfinite(x), x, 0.0)
    for state in (min_max(), min_max(0.01), histogram(64)):
        check_finite(state, "layers.0")
        after = observe(state, x)
        with pytest.raises(NonFiniteError, match=r"layers\.3: 2 NaN or infinite"):
            check_finite(after, "layers.3")
        assert np.isfinite(np.concatenate([np.ravel(v) for v in after_range(after)])).all()
        again = observe(after, good)
        with pytest.raises(NonFiniteError):
            check_finite(again, "layers.3")


def after_range(state: Any) -> Range:
    return state.percentile_range(99.0) if isinstance(state, HistogramObserver) else state.range()


def test_nonfinite_count_does_not_overflow() -> None:
    state = min_max().replace(non_finite=jnp.int32(2**31 - 1))
    assert int(observe(state, jnp.array([jnp.nan, 1])).non_finite) == 2**30 + 1


def test_invalid_observer_settings_are_refused() -> None:
    for call, message in (
        (lambda: histogram(0), "bins"),
        (lambda: histogram().percentile_range(0.0), "percentile"),
        (lambda: histogram().min_error_range(1), "levels"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
