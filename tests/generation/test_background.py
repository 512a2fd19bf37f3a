"""Requests from threads and tasks share one batch, and each receives its own stream."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm.errors import OverloadError, RequestError, SamplingError
from jaxllm.generation.background import BackgroundServer
from jaxllm.generation.completion import Completion


@pytest.fixture(scope="module")
def lm(shallow: Callable[[str], Path]) -> Any:
    return jaxllm.load(shallow("llama"))


@pytest.fixture
def live(lm: Any) -> Iterator[BackgroundServer]:
    live = BackgroundServer(lm, rows=2, capacity=200)
    yield live
    live.close()


PROMPTS = ["Once upon a time", "One day", "The cat", "There was"]
CHUNK = jaxllm.StreamChunk("Once", 5, -0.5, None, 0.0, None)
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}


async def collect(live: BackgroundServer, prompt: str, **options: Any) -> list[Any]:
    return [item async for item in live.stream({"prompt": prompt, **OPTIONS, **options})]


def test_streams_equal_single_requests(lm: Any, live: BackgroundServer) -> None:
    """Concurrent streams give the text, piece by piece, of each request run by itself."""

    async def all_at_once() -> list[list[Any]]:
        return await asyncio.gather(*(collect(live, prompt) for prompt in PROMPTS))

    for prompt, items in zip(PROMPTS, asyncio.run(all_at_once()), strict=True):
        *pieces, whole = items
        single = lm.generate(prompt, **OPTIONS)
        assert isinstance(whole, Completion)
        assert whole.tokens == single.tokens
        assert "".join(map(str, pieces)) == whole.text == single.text
        assert [piece.token for piece in pieces] == whole.tokens
        assert [piece.logprob for piece in pieces] == whole.logprobs
    future = live.submit({"prompt": PROMPTS[0], **OPTIONS})
    assert future.result().text == lm.generate(PROMPTS[0], **OPTIONS).text


def test_stream_excludes_stop_string(lm: Any, live: BackgroundServer) -> None:
    whole = lm.generate(PROMPTS[0], **OPTIONS).text
    stop = whole[10:13]
    *pieces, last = asyncio.run(collect(live, PROMPTS[0], stop_strings=[stop]))
    assert "".join(map(str, pieces)) == last.text == whole[: whole.index(stop)]


def test_stream_ends_with_held_back_text(lm: Any, live: BackgroundServer) -> None:
    """Text that could begin a stop string is held back, and sent when the stream ends."""
    whole = lm.generate(PROMPTS[0], **OPTIONS).text
    *pieces, last = asyncio.run(collect(live, PROMPTS[0], stop_strings=[whole[-3:] + "never"]))
    assert "".join(map(str, pieces)) == last.text == whole


def test_invalid_request_leaves_other_requests_unaffected(lm: Any, live: BackgroundServer) -> None:
    bad = live.submit({"prompt": "x", "temperature": -1})
    good = live.submit({"prompt": "One day", **OPTIONS})
    with pytest.raises(SamplingError, match="temperature"):
        bad.result()
    assert good.result().tokens == lm.generate("One day", **OPTIONS).tokens


def test_closed_stream_frees_its_row(
    live: BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a stream cancels its request and frees its row for the next request."""
    futures, submit = [], live.submit

    def record(request: Any, **options: Any) -> Any:
        futures.append(submit(request, **options))
        return futures[-1]

    monkeypatch.setattr(live, "submit", record)

    async def close_early() -> None:
        pieces = live.stream({"prompt": "Once", "max_new_tokens": 180, "min_new_tokens": 180})
        assert await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(close_early())
    assert futures[0].result().finish_reason == "cancelled"
    assert live.submit({"prompt": "One day", **OPTIONS}).result().finish_reason == "length"


def test_text_after_stream_close_is_dropped(
    live: BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that ends after a client left its stream may deliver text, which is dropped."""
    requests: list[Any] = []

    def record(request: Any, **options: Any) -> Future[Completion]:
        requests.append(request)
        request["on_chunk"](CHUNK)
        return Future()

    monkeypatch.setattr(live, "submit", record)

    async def close_early() -> None:
        pieces = live.stream({"prompt": "Once", **OPTIONS})
        assert await anext(pieces) is CHUNK
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(close_early())
    requests[0]["on_chunk"](CHUNK)
    assert requests[0]["is_cancelled"]()


def test_closed_or_failed_server_rejects_requests(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed server finishes its requests and rejects new ones; a failed one reports
    the cause. What fails in one request's callback ends that request alone.
    """
    live = BackgroundServer(lm, rows=1, capacity=64)
    last = live.submit({"prompt": "One day", **OPTIONS})
    live.close()
    assert last.result().tokens
    with pytest.raises(RuntimeError, match="closed"):
        live.submit({"prompt": "One day"}).result()

    def broken(chunk: Any) -> None:
        raise OSError("the listener is broken")

    live = BackgroundServer(lm, rows=1, capacity=64)
    with pytest.raises(RequestError, match="OSError: the listener is broken"):
        live.submit({"prompt": "One day", **OPTIONS, "on_chunk": broken}).result()
    assert live.submit({"prompt": "One day", **OPTIONS}).result().tokens == last.result().tokens
    live.close()

    live = BackgroundServer(lm, rows=1, capacity=64)
    monkeypatch.setattr("jaxllm.generation.serve.serve", broken)
    with pytest.raises(RuntimeError, match="the model ended: TypeError"):
        live.submit({"prompt": "One day", **OPTIONS}).result()
    with pytest.raises(RuntimeError, match="the model ended"):
        live.submit({"prompt": "One day"}).result()


def test_full_queue_refuses_requests(lm: Any) -> None:
    """More than `max_waiting` requests, or tokens, are refused; cancelled ones do not count."""
    live = BackgroundServer(lm, rows=1, capacity=200, max_waiting=2, max_waiting_tokens=50)
    started, cancelled = threading.Event(), threading.Event()
    long = {"prompt": "Once", "max_new_tokens": 150, "min_new_tokens": 150}
    first = live.submit(long, on_start=started.set)
    assert started.wait(60)
    second = live.submit({"prompt": "One day", **OPTIONS, "is_cancelled": cancelled.is_set})
    with pytest.raises(OverloadError, match="tokens are waiting"):
        live.submit({"prompt": [5] * 50, **OPTIONS}).result()
    third = live.submit({"prompt": "The cat", **OPTIONS})
    with pytest.raises(OverloadError, match="2 requests are waiting"):
        live.submit({"prompt": "Once", **OPTIONS}).result()
    cancelled.set()
    fourth = live.submit({"prompt": "There was", **OPTIONS})
    assert second.result(1).finish_reason == "cancelled"
    assert not first.done()
    live.close(refuse_waiting=True)
    assert len(first.result().tokens) == 150
    for refused in (third, fourth):
        with pytest.raises(RuntimeError, match="closed"):
            refused.result()


def test_cancelled_request_leaves_queue_of_equal_ones(lm: Any) -> None:
    """Requests in the queue have arrays, so they are told apart by identity, never compared."""
    live = BackgroundServer(lm, rows=1, capacity=200)
    started, cancelled = threading.Event(), threading.Event()
    live.submit({"prompt": "Once", "max_new_tokens": 150}, on_start=started.set)
    assert started.wait(60)
    equal = {"prompt": "One day", **OPTIONS, "logit_bias": {5: 1.0, 6: 2.0}}
    futures = [live.submit({**equal, "is_cancelled": gone}) for gone in (bool, cancelled.is_set)]
    cancelled.set()
    live.drop_cancelled()
    assert futures[1].result(1).finish_reason == "cancelled"
    assert live.waiting == 1
    live.close(refuse_waiting=True)


def test_many_coroutines_share_one_batch(lm: Any) -> None:
    """`agenerate` and `astream` give the tokens of `generate`; a cancelled task frees its row."""

    async def read(prompt: str) -> list[Any]:
        return [piece async for piece in lm.astream(prompt, **OPTIONS)]

    async def run() -> Any:
        endless = asyncio.create_task(lm.agenerate("Once", max_new_tokens=190, min_new_tokens=190))
        whole = await asyncio.gather(*(lm.agenerate(prompt, **OPTIONS) for prompt in PROMPTS))
        pieces = await asyncio.gather(*map(read, PROMPTS))
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        return whole, pieces

    for prompt, whole, pieces in zip(PROMPTS, *asyncio.run(run()), strict=True):
        single = lm.generate(prompt, **OPTIONS)
        assert whole.tokens == single.tokens == [piece.token for piece in pieces]
        assert "".join(map(str, pieces)) == single.text
        assert pieces[-1].finish_reason == single.finish_reason
    with pytest.raises(SamplingError, match="num_beams"):
        asyncio.run(lm.agenerate("Once", num_beams=2))


def test_idle_server_ends_its_thread(lm: Any) -> None:
    """It frees the cache, and the next request starts it again."""
    live = BackgroundServer(lm, rows=1, capacity=64, idle_seconds=0.05)
    for _ in range(2):
        assert live.submit({"prompt": "One day", **OPTIONS}).result().tokens
        deadline = time.monotonic() + 30
        while live._thread is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert live._thread is None
