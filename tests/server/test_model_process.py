"""Both ends of the socket between the HTTP process and the model's, each by itself."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.server import model_process
from jaxllm.server.frames import encode_frame
from jaxllm.server.model_client import ModelClient
from jaxllm.server.model_process import ModelProcess, ModelSettings

pytestmark = pytest.mark.anyio
GENERATE = {"do": "generate", "logprobs": None}


class _Writer:
    """Collects the frames that a client sends, as bytes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.write = self.sent.append

    def is_closing(self) -> bool:
        return False


async def test_cancel_is_sent_for_open_request() -> None:
    """A generation that is left is cancelled in the model, and is not counted any more; one that
    has ended is not cancelled.
    """
    client, writer = ModelClient(lambda: None, ModelSettings()), _Writer()
    client.state, client._writer = "ready", writer  # type: ignore[assignment]
    for is_started in (False, True):
        frames = client.generate({"prompt": "x"})
        first = asyncio.create_task(anext(frames))  # type: ignore[var-annotated,arg-type]
        await asyncio.sleep(0)
        (number,) = client.waiting
        if is_started:
            client._receive({"id": number, "started": True}, asyncio.Event())
            assert await first == {"id": number, "started": True}
            assert (client.waiting, client.running) == (set(), {number})
            await frames.aclose()
        else:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        assert (client.waiting, client.running, client._answers) == (set(), set(), {})
        assert writer.sent[-1] == encode_frame({"id": number, "do": "cancel"})
    frames = client.generate({"prompt": "x"})
    first = asyncio.create_task(anext(frames))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    (number,) = client.waiting
    client._receive({"id": number, "done": {}}, asyncio.Event())
    await first
    await frames.aclose()
    assert writer.sent[-1] != encode_frame({"id": number, "do": "cancel"})


class _Frames:
    """Collects the frames that a model process sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    def wait_for(self, condition: Callable[[Any], bool]) -> Any:
        """Return the first frame for which a condition holds, once it was sent."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if found := [frame for frame in self.sent if condition(frame)]:
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"no such frame: {self.sent}")


def test_unexpected_error_is_answered(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is nobody's on purpose ends its request, not the process."""
    frames = _Frames()
    process = ModelProcess(lm, ModelSettings(rows=1), frames)  # type: ignore[arg-type]

    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("unexpected")

    monkeypatch.setattr(process._server, "submit", fail)
    frame = {"prompt": "x", "options": {"max_new_tokens": 1, "seed": 0}}
    process.receive({"id": 5, "do": "generate", **frame})
    frames.wait_for(lambda frame: "error" in frame)
    assert frames.sent == [
        {"id": 5, "error": {"kind": "failed", "message": "TypeError: unexpected"}}
    ]
    assert not process._cancelled


def test_computations_take_turns_and_end_with_clients(
    lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings run a piece at a time, in turns; one that is cancelled stops at its next piece; a
    completion and a tokenization are answered while pieces wait; too many are refused.
    """
    monkeypatch.setattr(model_process, "PIECE_TEXTS", 1)
    frames = _Frames()
    process = ModelProcess(lm, ModelSettings(rows=1, max_waiting=2), frames)  # type: ignore[arg-type]
    ran: list[str] = []
    room = threading.Semaphore(0)  # how many pieces may run

    def embed(texts: Any, **_: Any) -> Any:
        room.acquire()
        ran.extend(process.lm.decode(text) for text in texts)
        return np.full((len(texts), 2), len(ran), np.float32)

    monkeypatch.setattr(LM, "embed", lambda self, *args, **options: embed(*args, **options))
    prompt = {"prompt_name": None, "instruction": None}
    for number, texts in ((1, ["a", "b", "c"]), (2, ["d", "e"]), (3, ["f"]), (4, ["g"])):
        process.receive({"id": number, "do": "embed", "texts": texts, "prompt": prompt})
    assert frames.wait_for(lambda frame: frame["id"] == 4)["error"]["kind"] == "overload"
    options = {"max_new_tokens": 2, "seed": 0}
    process.receive({**GENERATE, "id": 5, "prompt": "x", "options": options})
    process.receive({"id": 6, "do": "detokenize", "tokens": [5]})
    for number in (5, 6):
        frames.wait_for(partial(is_end, number))
    assert not ran
    process.receive({"id": 1, "do": "cancel"})
    room.release(10)
    for number in (2, 3):
        frames.wait_for(partial(is_end, number))
    process.receive({"id": 7, "do": "embed", "texts": ["h"], "prompt": prompt})
    frames.wait_for(partial(is_end, 7))
    assert ran in (["a", "d", "f", "e", "h"], ["d", "f", "e", "h"])
    assert not [frame for frame in frames.sent if frame["id"] == 1]
    assert not process._cancelled and not process._num_computing


def test_compiled_programs_are_bounded(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many compiled programs are forgotten. Freed memory is given back every few seconds."""
    cleared: list[bool] = []
    trimmed: list[bool] = []
    monkeypatch.setattr("jax.clear_caches", lambda: cleared.append(True))
    trim = "jaxllm.ops.compile_cache.return_freed_memory"
    monkeypatch.setattr(trim, lambda: trimmed.append(True))
    monkeypatch.setattr(model_process, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(model_process, "TRIM_S", 0.0)
    process = ModelProcess(lm, ModelSettings(rows=1), _Frames())  # type: ignore[arg-type]
    for _ in range(8):
        process.count_compile("/jax/core/compile/backend_compile_duration", 0.1)
        process.count_compile("/jax/other", 0.1)
        process._limit_memory()
    assert (len(cleared), len(trimmed)) == (2, 8)
    monkeypatch.setattr(model_process, "TRIM_S", 1000.0)
    for _ in range(3):
        process._limit_memory()
    assert len(trimmed) == 9


def test_warm_up_compiles_what_requests_need(
    shallow: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs before the first request, and requests of many lengths, alone and together, with
    usual options and rare ones, then compile nothing. It ends though a request is always open.
    """
    lm = jaxllm.load(shallow("llama"))
    frames = _Frames()
    process = ModelProcess(lm, ModelSettings(rows=4), frames)  # type: ignore[arg-type]
    monkeypatch.setattr("jaxllm.generation.batching.step.run_microbatch", None)
    monkeypatch.setattr(model_process, "MAX_WAIT_S", 0.1)
    process._cancelled[0] = threading.Event()
    assert "programs_to_compile" not in process._describe_use()  # nothing is planned yet
    process.warm_up()
    assert process._describe_use()["programs_to_compile"] == 0
    del process._cancelled[0]
    monkeypatch.undo()
    before = len(compiled)
    assert before
    for number, words in enumerate((1, 2, 4, 6, 9, 20, 40, 60, 80, 100), 1):
        options = {"max_new_tokens": 3, "seed": 0, "temperature": number % 2}
        prompt = f"{number} " + "Once upon " * words
        process.receive({**GENERATE, "id": number, "prompt": prompt, "options": options})
        frames.wait_for(partial(is_end, number))
    for number in range(11, 17):
        options = {"max_new_tokens": 12, "seed": 0, "min_p": 0.1}
        options |= {"dry_multiplier": 0.5, "typical_p": 0.9} if number > 13 else {}
        process.receive({**GENERATE, "id": number, "prompt": f"{number}", "options": options})
    for number in range(11, 17):
        frames.wait_for(partial(is_end, number))
    assert compiled[before:] == []


def test_the_loop_compiles_no_step(shallow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From nothing compiled, while a thread compiles, requests of several forms are answered, and
    the thread that runs them compiles no step, draw or row's beginning.
    """
    jax.clear_caches()
    monkeypatch.setattr(model_process, "MAX_WAIT_S", 0.1)
    names: list[str] = []

    def listen(event: str, *_: Any, fun_name: str = "?", **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            name = fun_name.removeprefix("jit(").removesuffix(")")
            names.append(f"{threading.current_thread().name} {name}")

    frames, lm = _Frames(), jaxllm.load(shallow("llama"))
    process = ModelProcess(lm, ModelSettings(rows=3), frames)  # type: ignore[arg-type]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        compiling = threading.Thread(target=process.compile_programs, name="compiling")
        compiling.start()
        while process._programs is None:
            time.sleep(0.01)
        biases = {token: token / 100 for token in range(70)}
        for number in range(1, 9):
            options = {"max_new_tokens": 12, "seed": 0, "temperature": number % 2}
            options |= {"logit_bias": biases} if number == 3 else {}
            prompt = f"{number} " + "Once upon " * 5 * number
            process.receive({**GENERATE, "id": number, "prompt": prompt, "options": options})
        for number in range(1, 9):
            frames.wait_for(partial(is_end, number))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        process._server.close()
        compiling.join()
    loop = {name.split()[1] for name in names if name.startswith("jaxllm-serve")}
    assert {"_run", "draw_rows", "fill_row"} <= {name.split()[1] for name in names}
    assert not loop & {"_run", "draw_rows", "fill_row"}


@pytest.mark.more
def test_warm_up_compiles_what_drafted_requests_need(
    shallow: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft model, requests that come one by one compile nothing."""
    always = lambda self: iter([(True, 1 << 60)])  # noqa: E731 - whatever is faster here
    monkeypatch.setattr("jaxllm.generation.loops.draft_pace.DraftPace._choices", always)
    lm = jaxllm.load(shallow("llama"))
    frames, settings = _Frames(), ModelSettings(rows=4, load_draft=lambda: lm, draft_tokens=2)
    process = ModelProcess(lm, settings, frames)  # type: ignore[arg-type]
    process.warm_up()
    before = len(compiled)
    for number in range(1, 9):
        options = {"max_new_tokens": 12, "seed": 0, "temperature": number % 2}
        request = {**GENERATE, "id": number, "prompt": "Once upon a time " * number}
        process.receive({**request, "options": options})
        done = frames.wait_for(partial(is_end, number))["done"]
        proposed, accepted, drafts = done["draft_stats"]
        assert 0 < drafts < proposed == accepted
    assert compiled[before:] == []


def test_warm_up_leaves_out_what_the_checkpoint_refuses(lm: Any) -> None:
    """A checkpoint with options that no request of a batch can have is served all the same."""
    beams = dataclasses.replace(lm, generation={"num_beams": 4})
    frames = _Frames()
    process = ModelProcess(beams, ModelSettings(rows=1, capacity=64), frames)  # type: ignore[arg-type]
    process.warm_up()
    options = {"max_new_tokens": 3, "seed": 0, "num_beams": 1, "temperature": 1.0}
    process.receive({**GENERATE, "id": 1, "prompt": "x", "options": options})
    assert frames.wait_for(partial(is_end, 1))["done"]["finish_reason"] == "length"


def is_end(number: int, frame: Any) -> bool:
    """Whether a frame is the last of a request."""
    return frame["id"] == number and "done" in frame


def test_drain_refuses_waiting_request(lm: Any) -> None:
    """The running request finishes; one that waits, and a new one, end as unavailable."""
    frames = _Frames()
    process = ModelProcess(lm, ModelSettings(rows=1), frames)  # type: ignore[arg-type]
    for number, new in ((1, 200), (2, 5)):
        options = {"max_new_tokens": new, "seed": 0}
        process.receive({**GENERATE, "id": number, "prompt": "x", "options": options})
        if number == 1:
            frames.wait_for(lambda frame: frame["id"] == 1 and "started" in frame)
    deadline = time.monotonic() + 60
    while not process._server.waiting and time.monotonic() < deadline:
        time.sleep(0.005)
    process.receive({"id": 0, "do": "drain"})
    refused = frames.wait_for(lambda frame: frame["id"] == 2)
    assert refused["error"]["kind"] == "unavailable"
    frames.wait_for(lambda frame: frame["id"] == 1 and "done" in frame)
    process.receive({**GENERATE, "id": 3, "prompt": "x", "options": options})
    assert frames.wait_for(lambda frame: frame["id"] == 3)["error"]["kind"] == "unavailable"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
         "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]b[PREFIX]a"),
    ],
)  # fmt: skip
def test_prompt_fills_in_between_texts(tokens: Any, expected: str) -> None:
    """As Qwen2.5-Coder's and Codestral's model cards show; other models refuse."""
    process = ModelProcess.__new__(ModelProcess)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    process.lm = SimpleNamespace(tokenizer=SimpleNamespace(id=vocabulary.get))  # type: ignore[assignment]
    assert process._fill_in("a", "b") == expected
    del vocabulary[tokens[0]]
    with pytest.raises(ConfigError, match="suffix"):
        process._fill_in("a", "b")


def test_opened_thought_is_found_in_prompt() -> None:
    """It is at the prompt's end, or in the answer that goes on; a user's mark is none."""
    process = ModelProcess.__new__(ModelProcess)
    vars(process)["_thought_marks"] = ("<think>", "</think>")
    for text, frame, opened in (
        ("<user>x<answer><think>\n", {}, "<think>"),
        ("<user>x <think><answer>", {}, ""),
        ("<answer><think>\n\n</think>\n\n", {}, ""),
        ("", {"continues": True, "messages": [{"content": "<think>Hm"}]}, "<think>"),
        ("", {"continues": True, "messages": [{"content": "<think>Hm</think>"}]}, ""),
    ):
        assert process._find_opened(text, frame) == opened
