"""Requests from threads and tasks share one batch, and each receives its own stream."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm.batch_inference.server import BackgroundServer
from jaxllm.errors import SamplingError
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
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}


async def collect(live: BackgroundServer, prompt: str, **options: Any) -> list[Any]:
    return [item async for item in live.stream({"prompt": prompt, **OPTIONS, **options})]


def test_streams_equal_single_requests(lm: Any, live: BackgroundServer) -> None:
    """Concurrent streams give the text, piece by piece, that each request gives when
    run by itself.
    """

    async def all_at_once() -> list[list[Any]]:
        return await asyncio.gather(*(collect(live, prompt) for prompt in PROMPTS))

    for prompt, items in zip(PROMPTS, asyncio.run(all_at_once()), strict=True):
        *pieces, whole = items
        single = lm.generate(prompt, **OPTIONS)
        assert isinstance(whole, Completion)
        assert whole.tokens == single.tokens
        assert "".join(pieces) == whole.text == single.text
        assert len(pieces) > 3
    future = live.submit({"prompt": PROMPTS[0], **OPTIONS})
    assert future.result().text == lm.generate(PROMPTS[0], **OPTIONS).text


def test_stream_excludes_stop_string(lm: Any, live: BackgroundServer) -> None:
    whole = lm.generate(PROMPTS[0], **OPTIONS).text
    stop = whole[10:13]
    *pieces, last = asyncio.run(collect(live, PROMPTS[0], stop_strings=[stop]))
    assert "".join(pieces) == last.text == whole[: whole.index(stop)]


def test_stream_ends_with_held_back_text(lm: Any, live: BackgroundServer) -> None:
    """Text that could begin a stop string is held back, and sent when the stream ends."""
    whole = lm.generate(PROMPTS[0], **OPTIONS).text
    *pieces, last = asyncio.run(collect(live, PROMPTS[0], stop_strings=[whole[-3:] + "never"]))
    assert "".join(pieces) == last.text == whole


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

    def record(request: Any) -> Any:
        futures.append(submit(request))
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
    """A step that ends after a client closes its stream may still deliver text, which
    is dropped.
    """
    requests: list[Any] = []

    def record(request: Any) -> Future[Completion]:
        requests.append(request)
        request["on_text"]("Once")
        return Future()

    monkeypatch.setattr(live, "submit", record)

    async def close_early() -> None:
        pieces = live.stream({"prompt": "Once", **OPTIONS})
        assert await anext(pieces) == "Once"
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(close_early())
    requests[0]["on_text"](" upon")
    assert requests[0]["is_cancelled"]()


def test_closed_or_failed_server_rejects_requests(lm: Any) -> None:
    """A closed server finishes its requests and rejects new ones; a failed one reports
    the cause.
    """
    live = BackgroundServer(lm, rows=1, capacity=64)
    last = live.submit({"prompt": "One day", **OPTIONS})
    live.close()
    assert last.result().tokens
    with pytest.raises(RuntimeError, match="closed"):
        live.submit({"prompt": "One day"}).result()

    def broken(text: str) -> None:
        raise OSError("the listener is broken")

    live = BackgroundServer(lm, rows=1, capacity=64)
    with pytest.raises(RuntimeError, match="the model ended: OSError"):
        live.submit({"prompt": "One day", **OPTIONS, "on_text": broken}).result()
    with pytest.raises(RuntimeError, match="the model ended"):
        live.submit({"prompt": "One day"}).result()
