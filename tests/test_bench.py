"""Benchmark figures follow their definitions."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

import jaxllm
from jaxllm.cli.quantize import quantize
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.evaluate import bench
from jaxllm.evaluate.bench import (
    BenchResult,
    Test as Work,  # a name that pytest does not collect
)
from tests.tiny_models import save_random

ROW = BenchResult("tg4 x 2", 8, (0.5, 0.25, 1.0), 3.0, 30.0, 40.0)


def test_bench_result_formats_figures() -> None:
    """Rates of 16, 32 and 8 give mean, spread and bandwidth in dict, CSV, Markdown and JSON."""
    # Rates of 16, 32 and 8: the mean is 56/3, the squared deviations sum to 896/3.
    assert ROW.to_dict() == {
        "test": "tg4 x 2",
        "tokens_per_second": 16.0,
        "spread": round((896 / 3 / 2) ** 0.5, 2),
        "compile_s": 3.0,
        "weights_gb_s": 30.0,
        "bus_gb_s": 40.0,
        "share_of_bus": 0.75,
    }
    once = BenchResult("pp8", 8, (0.5,), 0.0, None, 40.0)
    assert (once.tokens_per_second, once.stdev) == (16.0, 0.0)
    assert once.to_dict()["weights_gb_s"] is once.to_dict()["share_of_bus"] is None
    assert bench.as_csv([ROW, once]).splitlines() == [
        "test,tokens_per_second,spread,compile_s,weights_gb_s,bus_gb_s,share_of_bus",
        "tg4 x 2,16.0,12.22,3.0,30.0,40.0,0.75",
        "pp8,16.0,0.0,0.0,,40.0,",
    ]
    assert bench.as_markdown([ROW, once]).splitlines()[2:] == [
        "| tg4 x 2 | 16.00 | 12.22 | 3.0 | 30.0 | 75% of 40.0 |",
        "| pp8 | 16.00 | 0.00 | 0.0 |  |  |",
    ]
    assert json.loads(bench.as_json([ROW], {"jax": "x"})) == {"jax": "x", "rows": [ROW.to_dict()]}


def test_make_tests_lists_expected_tests() -> None:
    tests = bench.make_tests([8, 16], 4, [0, 32], [1, 2])
    assert [test.name for test in tests] == ["pp8", "pp16", "tg4", "tg4 @ d32", "tg4 x 2"]
    assert [test.tokens for test in tests] == [8, 16, 4, 4, 8]
    assert bench.make_tests([], 1, [], [1]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([8, 0], 4, [0], [1]), r"prompts must be at least 1, got \[8, 0\]"),
        (([8], 0, [0], [1]), "decode must be at least 1"),
        (([8], 4, [-1], [1]), "depths must be at least 0"),
        (([8], 4, [0], [0]), "batches must be at least 1"),
    ],
)
def test_make_tests_refuses_values_out_of_range(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.make_tests(*arguments)


@pytest.mark.parametrize(
    ("family", "tied", "tables"),
    [
        ("llama", False, ["model.embed_tokens.weight"]),
        ("llama", True, []),
        ("gpt2", True, ["transformer.wpe.weight"]),
        ("gpt2", False, ["transformer.wpe.weight", "transformer.wte.weight"]),
    ],
)
def test_weight_bytes_count_tensors_read_per_token(
    family: str, tied: bool, tables: list[str], tmp_path: Path
) -> None:
    """All tensors of the file count, but not tables of which a token reads one row."""
    save_random(tmp_path, family, tie_word_embeddings=tied)
    stored = load_file(tmp_path / "model.safetensors")
    expected = sum(x.nbytes for x in stored.values()) - sum(stored[n].nbytes for n in tables)
    assert bench.weight_bytes(jaxllm.load(tmp_path)) == expected
    assert bench.weight_bytes(jaxllm.load(tmp_path, dtype="float16")) == expected // 2


def test_weight_bytes_include_quantization_scales(tmp_path: Path) -> None:
    save_random(tmp_path / "hf", "llama")
    quantize(str(tmp_path / "hf"), tmp_path / "small", name="int4-g32-zp")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    read = [x.nbytes for n, x in stored.items() if not n.startswith(("embed_tokens", "__"))]
    assert bench.weight_bytes(jaxllm.load(tmp_path / "small")) == sum(read)


def set_durations(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the next timed sections take the given seconds, in order."""
    clock = itertools.accumulate(x for s in seconds for x in (0.0, s))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))


def test_first_run_counts_as_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first run gives the compile time, never below 0; only the other runs are timed."""
    save_random(tmp_path, "gpt2", n_layer=1)
    lm = jaxllm.load(tmp_path)
    set_durations(monkeypatch, 7.0, 0.5, 4.0, 2.0)
    readings = iter([10.0, 30.0, 20.0, 5.0, 6.0, 7.0])
    ran = []
    monkeypatch.setattr(bench, "PROBE_BYTES", 64)
    monkeypatch.setattr(bench, "prepare_run", lambda lm, test, chunk: lambda: ran.append(test))
    monkeypatch.setattr(bench, "measure_bandwidth", lambda probe: next(readings))
    tests = [Work(decode=4, batch=2), Work(prompt=6)]
    decode, prompt = bench.bench(lm, tests[:1], repetitions=3), bench.bench(lm, tests[1:])
    (row,) = decode
    assert (row.test, row.tokens, row.seconds) == ("tg4 x 2", 8, (0.5, 4.0, 2.0))
    assert (row.tokens_per_second, row.compile_s, row.bandwidth_gb_s) == (4.0, 5.0, 30.0)
    assert row.weights_gb_s == pytest.approx(bench.weight_bytes(lm) * 4 / 2.0 / 1e9)
    # A first run that is faster counts as 0 s of compilation.
    set_durations(monkeypatch, 1.0, *[3.0] * 5)
    readings = iter([1.0] * 5)
    (row,) = prompt
    assert (row.tokens_per_second, row.compile_s, row.weights_gb_s) == (2.0, 0.0, None)
    assert ran == [tests[0]] * 4 + [tests[1]] * 6


def test_bench_refuses_test_exceeding_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_random(tmp_path, "gpt2", n_layer=1)
    monkeypatch.setattr(bench, "PROBE_BYTES", 64)
    lm = jaxllm.load(tmp_path)
    for work in (Work(prompt=98), Work(decode=8, depth=90)):
        with pytest.raises(CapacityError, match="exceeds the model's context of 97"):
            next(bench.bench(lm, [work], repetitions=1))


def test_measured_bandwidth_is_fastest_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    set_durations(monkeypatch, 0.5, 0.25, 1.0)
    probe = jnp.zeros(1 << 10, jnp.uint32)
    assert bench.measure_bandwidth(probe) == pytest.approx(probe.nbytes / 0.25 / 1e9)
