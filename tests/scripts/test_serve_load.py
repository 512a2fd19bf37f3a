"""The load client: arrivals, the formulas of its results, a run against a server."""

import asyncio
import json

import numpy as np
import pytest

from scripts.benchmarks.serve_load import Timing, draw_load, format_table, run_http, summarize
from tests.server.servers import StubModel, serve_stub


def test_arrivals_fill_count_over_rate() -> None:
    """The last arrival is at `count / rate`; without a rate all are at the start."""
    options = {"clients": 4, "burstiness": 0.5, "prompt_tokens": 7, "new_tokens": 5, "vocab": 99}
    load = draw_load(40, rate=8.0, words=False, seed=1, **options)  # type: ignore[arg-type]
    assert load.arrivals[-1] == pytest.approx(5.0)
    assert (np.diff(load.arrivals) >= 0).all()
    assert {len(prompt) for prompt in load.prompts} == {7}
    at_once = draw_load(3, rate=float("inf"), words=True, seed=1, **options)  # type: ignore[arg-type]
    assert at_once.arrivals == [0.0] * 3
    assert len(at_once.prompts[0].split()) == 7


def test_results_follow_vllm_formulas() -> None:
    """Two requests with known times, and one that failed."""
    timings = [
        Timing(start=1.0, stamps=[1.5, 1.75, 2.0], prompt_tokens=10, tokens=3),
        Timing(start=1.5, stamps=[1.75, 3.0], prompt_tokens=20, tokens=2),
        Timing(start=2.0),
    ]
    found = summarize(timings, 4.0)
    assert (found["completed"], found["failed"], found["max_concurrent_requests"]) == (2, 1, 2)
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 5 / 4
    assert found["total_token_throughput"] == 35 / 4
    assert found["mean_ttft_ms"] == pytest.approx((500 + 250) / 2)
    assert found["mean_tpot_ms"] == pytest.approx((250 + 1250) / 2)
    assert found["median_itl_ms"] == pytest.approx(250)
    assert found["p99_e2el_ms"] == pytest.approx(np.percentile([1000, 1500], 99))
    assert found["std_ttft_ms"] == pytest.approx(125)
    assert "| b | " in format_table({"a": [found], "b": [found, found]})


def test_round_against_server() -> None:
    """Every request is counted with the usage that the server returns."""

    async def run() -> None:
        model = StubModel()
        async with serve_stub(model, max_waiting=64) as server:
            load = draw_load(
                9, clients=3, rate=1000.0, burstiness=1.0, prompt_tokens=4, new_tokens=2,
                vocab=99, words=False, seed=0,
            )  # fmt: skip
            url = f"http://{server.host}:{server.port}"
            found = summarize(*await asyncio.to_thread(asyncio.run, run_http(url, "", load)))
        assert (found["completed"], found["total_output_tokens"]) == (9, 9)
        assert sorted(map(json.dumps, load.prompts)) == sorted(
            json.dumps(fields["prompt"]) for fields in model.asked
        )

    asyncio.run(run())
