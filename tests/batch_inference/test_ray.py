"""Ray Data equals this process; Ray Serve batches, streams, routes and cancels requests."""

import io
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import jaxllm
from jaxllm.batch_inference.ray import answer_on_ray, build
from jaxllm.batch_inference.rows import parse_lines
from jaxllm.batch_inference.tasks import Answer, BatchJob, answer_rows
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from tests.conftest import ROOT
from tests.server.processes import make_client

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # Ray's own: resource and deprecation warnings
]
OPTIONS = {"max_new_tokens": 4, "temperature": 1.0, "seed": 5}
LINES = b"".join(b"%r\n" % ([5 + n] * (1 + n % 5)) for n in range(20))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A private Ray cluster whose workers can import the tests."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxllm[ray]'")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def answer(load: Any, task: str = "generate", lines: bytes = LINES) -> dict[Any, Answer]:
    job = BatchJob(task=task, options=OPTIONS if task == "generate" else {}, batch_size=2)
    rows = parse_lines(io.BytesIO(lines))
    return {row.id: x for row, x in answer_on_ray(load, job, rows, address="local", workers=2)}


@pytest.mark.parametrize("task", ["generate", "score", "embed"])
def test_ray_actors_equal_this_process(task: str, ray: Any, model: Path) -> None:
    load = partial(jaxllm.load, model, show_progress=False)
    lines = LINES + b"{\n[999999]\n"
    found = answer(load, task, lines)
    job = BatchJob(task=task, options=OPTIONS if task == "generate" else {}, batch_size=2)
    expected = list(answer_rows(load(), job, parse_lines(io.BytesIO(lines))))
    assert len(found) == len(expected) == 22
    assert sum("error" in x for x in found.values()) == 2
    for row, x in expected:
        other = found[row.id]
        for column in ("logprobs", "logprob", "embedding"):  # thread counts differ
            assert x.pop(column, 0) == pytest.approx(other.pop(column, 0), abs=1e-5)
        assert x == other


class CrashingLM:
    """A model that kills its own process when its first rows arrive, once or always."""

    def __init__(self, lm: LM, once: Path | None) -> None:
        self.lm, self.once = lm, once

    def with_adapter(self, adapter: None) -> LM:
        return self.lm

    def serve(self, requests: Iterable[Any], rows: int) -> Iterator[tuple[Any, Any]]:
        if self.once is None or not self.once.exists():
            if self.once is not None:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from self.lm.serve(requests, rows=rows)


def load_crashing(model: Path, once: Path | None) -> Any:
    return CrashingLM(jaxllm.load(model, show_progress=False), once)


def test_crashed_actor_is_replaced(ray: Any, model: Path, tmp_path: Path) -> None:
    """The rows of an actor that is killed once run again; if they always kill it, the job ends."""
    found = answer(partial(load_crashing, model, tmp_path / "once"))
    assert found == answer(partial(jaxllm.load, model, show_progress=False))
    with pytest.raises(ConfigError, match="Ray at 'local': "):
        answer(partial(load_crashing, model, None))


def test_model_load_error_is_raised(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        answer(partial(jaxllm.load, tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def url(ray: Any) -> Iterator[str]:
    from ray import serve

    port = 18_423
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = {"model": "demo:llama", "rows": "2", "replicas": "2"}
    serve.run(build(arguments), name="jaxllm", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def test_deployment_requests_share_batch_and_stream(url: str) -> None:
    """Concurrent requests to Ray Serve equal single ones, and streamed answers come in pieces."""
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


def converse(url: str, title: str, key: str) -> list[int]:
    """Hold eight conversations in turn, each of three requests; return their cached tokens.

    key: the clients'; `{}` in it is the number of the turn.
    """
    story = " Once upon a time there was a little girl who lived in a house." * 10
    conversations = [[{"role": "user", "content": f"{title} {n}{story}"}] for n in range(8)]
    cached = []
    for turn in range(3):
        with make_client(url).with_options(api_key=key.format(turn)) as client:
            for messages in conversations:
                answer = client.chat.completions.create(
                    model="demo:llama", messages=messages, max_tokens=8, seed=0
                )
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)
                content = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": content},
                             {"role": "user", "content": "And then?"}]  # fmt: skip
    return cached


def test_next_turns_meet_their_prefix_cache(url: str) -> None:
    """With another key each turn, which is another conversation for the router, many do not."""
    cached = converse(url, "Tale", "same")
    assert not any(cached[:8]) and min(cached[8:]) >= 128
    others = converse(url, "Book", "turn-{}")
    assert sum(others[8:]) < sum(cached[8:])


def test_answers_end_when_client_leaves(url: str) -> None:
    """The requests of a client that leaves do not run to their ends."""
    prompt = "Once upon a time there was a little girl who lived in a small house. " * 4
    key = {"Authorization": "Bearer none"}

    def count(name: str) -> float:
        """Return a number of the replica that has seen the prompt."""
        page = httpx.request("GET", f"{url}/metrics", json={"prompt": prompt}, headers=key).text
        return sum(map(float, re.findall(rf"^jaxllm:{name}.* (\S+)$", page, re.MULTILINE)))

    with make_client(url) as client:
        stream = client.completions.create(
            model="demo:llama", prompt=prompt, max_tokens=300, n=16, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert next(iter(stream)).choices
        ended = count('request_success_total.*"length"')
        assert count("num_requests_running") == 2 and count("num_requests_waiting") > 0
        stream.close()
    while count("num_requests_running") or count("num_requests_waiting"):
        time.sleep(0.1)
    assert count('request_success_total.*"length"') < ended + 14


def test_deployment_passes_statuses_and_headers_on(url: str) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    page = httpx.get(f"{url}/page.js")
    assert page.headers["content-type"].startswith("text/javascript")
    assert page.headers["referrer-policy"] == "no-referrer" and len(page.content) > 1000
    refused = httpx.post(f"{url}/v1/completions", content=b" " * (5 << 20))
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "body_too_large"
    assert httpx.get(f"{url}/nowhere").status_code == 404
    assert httpx.request("DELETE", f"{url}/v1/completions").status_code == 405


def test_deployment_refuses_invalid_requests(url: str) -> None:
    with make_client(url) as client, pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo:llama", prompt="x", temperature=-1)


def test_deployment_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="unknown argument modle: did you mean model"):
        build({"modle": "demo:llama"})
    with pytest.raises(ConfigError, match="must be integers"):
        build({"rows": "many"})
