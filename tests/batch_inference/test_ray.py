"""Ray Data equals worker processes; Ray Serve batches and streams requests."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

import jaxllm
from jaxllm.batch_inference.deployment import build
from jaxllm.batch_inference.job import BatchJob
from jaxllm.batch_inference.processes import InProcessWorkers
from jaxllm.batch_inference.ray_data import RayWorkers, connect_ray
from jaxllm.batch_inference.rows import read_lines
from jaxllm.batch_inference.runner import run_job
from jaxllm.errors import ConfigError
from tests.batch_inference.crashing_models import (
    OPTIONS,
    check_crashing_rows,
    load_crashing_lm,
    read_answers,
)
from tests.conftest import ROOT
from tests.server.processes import make_client

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # Ray's own: resource and deprecation warnings
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A private Ray cluster whose workers can import the tests."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxllm[ray]'")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    found, own = connect_ray("local", 3)
    assert own
    yield found
    found.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.mark.parametrize("task", ["generate", "score", "embed"])
def test_ray_actors_equal_in_process_results(
    task: str, ray: Any, model: Path, tmp_path: Path
) -> None:
    rows = read_lines([json.dumps([5 + n] * (1 + n % 5)) for n in range(20)] + ["{", "[999999]"])
    job = BatchJob(task=task, options=OPTIONS if task == "generate" else {}, rows=2, group=3)
    load = partial(jaxllm.load, model, show_progress=False)
    assert run_job(rows, job, RayWorkers(load, 2), tmp_path / "ray.jsonl") == (22, 2)
    run_job(rows, job, InProcessWorkers(load), tmp_path / "here.jsonl")
    found, expected = (read_answers(tmp_path / f"{name}.jsonl") for name in ("ray", "here"))
    for one, other in zip(found, expected, strict=True):
        for column in ("logprobs", "logprob", "embedding"):  # thread counts differ
            assert one.pop(column, 0) == pytest.approx(other.pop(column, 0), abs=1e-5)
        assert one == other


def test_crashed_actors_are_replaced_and_rows_fail(ray: Any, model: Path, tmp_path: Path) -> None:
    """Crashed actors are replaced; only rows that crash them repeatedly or raise get an error."""
    workers = RayWorkers(partial(load_crashing_lm, model), 2)
    check_crashing_rows(workers, model, tmp_path / "out")


def test_model_load_error_is_raised(ray: Any, tmp_path: Path) -> None:
    job = BatchJob(task="generate", options=OPTIONS)
    load = partial(jaxllm.load, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        run_job(read_lines(["[5]"]), job, RayWorkers(load, 1), tmp_path / "out")


@pytest.fixture(scope="module")
def url(ray: Any) -> Iterator[str]:
    from ray import serve

    port = 18_423
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"model": "demo:llama", "rows": "4"}), name="jaxllm", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def test_deployment_requests_share_batch_and_stream(url: str) -> None:
    """Concurrent requests to Ray Serve equal single requests, and streamed answers come in several
    pieces.
    """
    lm = jaxllm.load("demo:llama")
    prompts = ["Once upon a time", "One day", "The cat", "There was", "A boy", "Mom"]

    def ask(n: int) -> list[str]:
        with make_client(url) as client:
            stream = client.completions.create(
                model="demo:llama", prompt=prompts[n], max_tokens=30, temperature=0.9, seed=n,
                stream=True,
            )  # fmt: skip
            return [chunk.choices[0].text for chunk in stream]

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, range(len(prompts))))
    for n, pieces in enumerate(answers):
        single = lm.generate(prompts[n], max_new_tokens=30, temperature=0.9, seed=n)
        assert "".join(pieces) == single.text
        assert len(pieces) > 3


def test_deployment_refuses_invalid_requests(url: str) -> None:
    with make_client(url) as client, pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo:llama", prompt="x", temperature=-1)


def test_deployment_arguments_are_checked(ray: Any) -> None:
    with pytest.raises(ConfigError, match="unknown argument modle: did you mean model"):
        build({"modle": "demo:llama"})
    with pytest.raises(ConfigError, match="must be integers"):
        build({"rows": "many"})
