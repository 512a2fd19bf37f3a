"""Several models behind one address: which one answers, which one is in memory."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm.cli.serve import ServedModelOptions, choose_models
from jaxllm.errors import ConfigError
from jaxllm.server.backend import ServerSettings
from jaxllm.server.listen import Address, BoundedProtocol, make_server
from jaxllm.server.model_client import ModelError
from jaxllm.server.model_process import ModelSettings
from jaxllm.server.model_router import ModelRouter, ServedModel
from tests.server.processes import make_client, start_server
from tests.server.servers import DONE, INFO, Endpoint, Frame, StubModel, answer_once, until

pytestmark = pytest.mark.anyio
MB = 1 << 20


class LoadedStub(StubModel):
    """A stub that is loaded and unloaded, and says that it takes `nbytes`."""

    def __init__(
        self, nbytes: int, script: Callable[..., Any] = answer_once, fails: int = 0
    ) -> None:
        super().__init__(script)
        self.state, self.nbytes, self.fails = "starting", nbytes, fails
        self.starts, self.ends = 0, 0

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(0.01)
        if self.starts <= self.fails:
            raise ModelError("failed", "its file is damaged")
        self._task, self.state = asyncio.create_task(asyncio.sleep(1000)), "ready"

    async def unload(self) -> None:
        self.ends += self.is_started
        await super().unload()

    def send(self, frame: Frame) -> None:
        assert frame["do"] == "drain", frame

    async def call(self, do: str, **fields: Any) -> Any:
        assert do == "stats", do
        return {"memory_bytes": self.nbytes}


@contextlib.asynccontextmanager
async def serve_models(
    *stubs: LoadedStub, memory: int | None = None, idle: float | None = None, **settings: Any
) -> AsyncIterator[tuple[Endpoint, ModelRouter]]:
    """Serve stubs as the models a, b, ... within the block."""
    models = [
        ServedModel(stub, (name, f"{name}-too"), (f"{name}-tuned",), stub.nbytes)
        for name, stub in zip("abc", stubs, strict=False)
    ]
    router = ModelRouter(models, ServerSettings(("a",), **settings), memory, idle)
    await router.start()
    server = make_server(router.app, BoundedProtocol)
    with Address("127.0.0.1", 0).open() as listening:
        serving = asyncio.create_task(server.serve([listening]))
        await until(lambda: server.started)
        try:
            yield Endpoint(*listening.getsockname()), router
        finally:
            server.should_exit = True
            await serving
            await router.close()


async def complete(endpoint: Endpoint, model: str | None, **fields: Any) -> Any:
    named = {} if model is None else {"model": model}
    return await endpoint.ask("POST", "/v1/completions", {"prompt": "x", **named, **fields})


async def test_each_request_goes_to_its_model() -> None:
    """By its names and adapters; without a name, to the first. It is loaded on demand, once."""
    first, second = LoadedStub(MB), LoadedStub(MB)
    second.info = {**INFO, "adapters": ["b-tuned"]}
    async with serve_models(first, second) as (endpoint, _):
        assert (first.starts, second.starts) == (1, 0)
        for name, stub, answered in (
            (None, first, "a"), ("", first, "a"), ("a-too", first, "a-too"), ("b", second, "b"),
            ("b-tuned", second, "b-tuned"),
        ):  # fmt: skip
            before = len(stub.asked)
            answer = await complete(endpoint, name)
            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["model"] == answered
            assert len(stub.asked) == before + 1
        assert [x["adapter"] for x in second.asked] == ["base", "b-tuned"]
        assert (first.starts, second.starts) == (1, 1)


async def test_models_that_nobody_has_load_nothing() -> None:
    stub = LoadedStub(MB)
    async with serve_models(LoadedStub(MB), stub) as (endpoint, _):
        answer = await complete(endpoint, "c")
        assert answer.status == 404
        error = json.loads(answer.body)["error"]
        assert error["code"] == "model_not_found"
        assert "a, a-too, a-tuned, b, b-too, b-tuned" in error["message"]
        for body in ({"prompt": "x", "model": 3}, ["x"]):
            assert (await endpoint.ask("POST", "/v1/completions", body)).status == 400
        assert (await endpoint.ask("GET", "/props?model=nobody")).status == 404
        assert (await endpoint.ask("GET", "/nowhere")).status == 404
        assert stub.starts == 0


async def test_models_are_listed_with_their_state() -> None:
    async with serve_models(LoadedStub(MB), LoadedStub(MB)) as (endpoint, _):
        await complete(endpoint, "a")
        listed = json.loads((await endpoint.ask("GET", "/v1/models")).body)["data"]
        states = {entry["id"]: entry["status"]["value"] for entry in listed}
        assert states == {
            **dict.fromkeys(("a", "a-too", "a-tuned"), "loaded"),
            **dict.fromkeys(("b", "b-too", "b-tuned"), "unloaded"),
        }
        one = json.loads((await endpoint.ask("GET", "/v1/models/b-tuned")).body)
        assert (one["id"], one["root"]) == ("b-tuned", "b")
        health = json.loads((await endpoint.ask("GET", "/health")).body)
        assert health == {"status": "ok", "models": {"a": "loaded", "b": "unloaded"}}
        assert json.loads((await endpoint.ask("GET", "/props?model=b")).body)["model_alias"] == "b"


async def test_metrics_have_each_name_once_and_every_model() -> None:
    async with serve_models(LoadedStub(MB), LoadedStub(MB)) as (endpoint, _):
        await complete(endpoint, "b")
        lines = (await endpoint.ask("GET", "/metrics")).body.decode().splitlines()
        help_lines = [line for line in lines if line.startswith("# HELP")]
        assert len(set(help_lines)) == len(help_lines) > 10
        for name, count in (("a", "0.0"), ("b", "1.0")):
            assert f'jaxllm:generation_tokens_total{{model_name="{name}"}} {count}' in lines


async def test_the_one_used_longest_ago_gives_way() -> None:
    """Until the others and the new one fit; its own size is known once it was loaded."""
    first, second, third = LoadedStub(4 * MB), LoadedStub(4 * MB), LoadedStub(6 * MB)
    async with serve_models(first, second, third, memory=10 * MB) as (endpoint, _):
        for name in ("b", "a"):
            assert (await complete(endpoint, name)).status == 200
        assert (first.ends, second.ends) == (0, 0)
        assert (await complete(endpoint, "c")).status == 200
        assert (first.ends, second.ends, third.starts) == (0, 1, 1)
        assert (await complete(endpoint, "b")).status == 200
        assert (first.ends, second.starts, third.ends) == (1, 2, 0)


async def test_running_answers_end_before_their_model_does() -> None:
    """And requests that come meanwhile for either model are answered after it."""
    going_on = asyncio.Event()

    async def wait(fields: Frame) -> AsyncGenerator[Frame]:
        yield {"started": True}
        await going_on.wait()
        yield {"chunk": ["x", 5, "length"]}
        yield DONE

    first, second = LoadedStub(6 * MB, wait), LoadedStub(6 * MB)
    async with serve_models(first, second, memory=10 * MB) as (endpoint, router):
        running = asyncio.create_task(complete(endpoint, "a"))
        await until(lambda: first.asked)
        others = [asyncio.create_task(complete(endpoint, name)) for name in "bbab"]
        await until(lambda: router.models[0].status() == "unloading")
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (running, *others))
        assert second.starts == 0
        going_on.set()
        answers = await asyncio.gather(running, *others)
        assert [answer.status for answer in answers] == [200] * 5
        assert (first.left, second.left) == (0, 0)


async def test_unused_models_are_unloaded_and_loaded_again() -> None:
    stub = LoadedStub(MB)
    async with serve_models(stub, idle=0.05) as (endpoint, router):
        await until(lambda: router.models[0].status() == "unloaded")
        assert (await complete(endpoint, None)).status == 200
        assert stub.starts == 2


async def test_a_model_that_cannot_be_loaded_is_tried_again() -> None:
    stub = LoadedStub(MB, fails=1)
    async with serve_models(LoadedStub(MB), stub) as (endpoint, _):
        answer = await complete(endpoint, "b")
        assert answer.status == 503
        assert "its file is damaged" in json.loads(answer.body)["error"]["message"]
        assert (await complete(endpoint, "b")).status == 200


async def test_keys_and_sizes_are_checked_before_a_model_is_loaded() -> None:
    stub = LoadedStub(MB)
    async with serve_models(LoadedStub(MB), stub, keys=("secret",), body_bytes=100) as (to, _):
        body = {"prompt": "x", "model": "b"}
        assert (await to.ask("POST", "/v1/completions", body)).status == 401
        key = {"Authorization": "Bearer secret"}
        long = {**body, "prompt": "x" * 200}
        assert (await to.ask("POST", "/v1/completions", long, **key)).status == 413
        assert stub.starts == 0
        assert (await to.ask("POST", "/v1/completions", body, **key)).status == 200


async def test_each_model_has_its_own_limit_of_waiting_requests() -> None:
    stub = LoadedStub(MB)
    stub.settings = ModelSettings(max_waiting=0)
    async with serve_models(LoadedStub(MB), stub) as (endpoint, _):
        statuses = [(await complete(endpoint, name, n=3)).status for name in "ab"]
        assert statuses == [200, 400]  # two rows each


async def test_an_ending_server_loads_nothing() -> None:
    stub = LoadedStub(MB)
    async with serve_models(LoadedStub(MB), stub) as (endpoint, router):
        await router.drain(0.1)
        for name in "ab":
            answer = await complete(endpoint, name)
            assert answer.status == 503
            assert "shutting down" in json.loads(answer.body)["error"]["message"]
        assert stub.starts == 0


async def test_responses_go_on_with_another_model() -> None:
    """The conversation is the server's, and not a model's."""
    first, second = LoadedStub(MB), LoadedStub(MB)
    async with serve_models(first, second) as (endpoint, _):
        body = {"model": "a", "input": "one"}
        begun = json.loads((await endpoint.ask("POST", "/v1/responses", body)).body)
        then = {"model": "b", "input": "two", "previous_response_id": begun["id"]}
        assert (await endpoint.ask("POST", "/v1/responses", then)).status == 200
        said = [message["content"] for message in second.asked[0]["messages"]]
        assert said == ["one", "x", "two"]
        found = json.loads((await endpoint.ask("GET", f"/v1/responses/{begun['id']}")).body)
        assert found["id"] == begun["id"]


def options(**given: Any) -> ServedModelOptions:
    return ServedModelOptions(**given)


def test_models_of_a_file_have_options_of_their_own(tmp_path: Path) -> None:
    file, adapter = tmp_path / "models.toml", tmp_path / "adapter"
    adapter.mkdir()
    file.write_text(f"""
        [small]
        model = "demo:llama"
        rows = 4
        chat_template = "chat.jinja"
        adapter = ["tuned={adapter}"]
        [other]
        model = "demo:gpt2"
    """)
    small, other = choose_models([str(file)], [], options(rows=2, capacity=64))
    assert (small.names, small.model, other.names) == (("small",), "demo:llama", ("other",))
    assert (small.options.rows, other.options.rows) == (4, 2)
    assert small.options.capacity == other.options.capacity == 64
    assert small.options.chat_template == Path("chat.jinja")
    assert small.options.adapter == [f"tuned={adapter}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no models"),
        ("model = 3", r"\[model\] must be a table"),
        ("[a]\nrows = 3", r"\[a\] must be a table with model"),
        ('[a]\nmodel = "demo:llama"\nrow = 3', r"\[a\] has row.*rows"),
        ('[a]\nmodel = "demo:llama"\nrows = 0', r"\[a\] rows: .*>= 1"),
        ('[a]\nmodel = "demo:llama"\nrows = "4"', r"\[a\] rows: .*int"),
        ("[a", "models.toml: "),
    ],
)
def test_wrong_files_of_models_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        choose_models([str(file)], [], options())


def test_options_of_one_model_and_equal_names_are_refused() -> None:
    two = ["demo:llama", "demo:gpt2"]
    with pytest.raises(ConfigError, match="--draft is of one model"):
        choose_models(two, [], options(draft="lookup"))
    with pytest.raises(ConfigError, match="a --name for each of 2"):
        choose_models(two, ["a"], options())
    with pytest.raises(ConfigError, match="different names"):
        choose_models(two, ["a", "a"], options())
    assert [one.names for one in choose_models(two, [], options())] == [(name,) for name in two]
    assert choose_models(two[:1], ["a", "b"], options())[0].names == ("a", "b")


@pytest.mark.more
def test_two_real_models_take_turns(shallow: Any) -> None:
    """With memory for one: each answer is that of the model alone, and one process is there."""
    paths = {name: str(shallow(name)) for name in ("llama", "gpt2")}
    flags = ("--name=llama", "--name=gpt2", "--memory", "1MiB", "--rows", "2")
    asked = {"prompt": "Once upon a time", "max_tokens": 5, "seed": 1, "temperature": 0}
    alone = {
        name: jaxllm.load(path).generate(asked["prompt"], max_new_tokens=5, temperature=0).text
        for name, path in paths.items()
    }
    with (
        start_server(paths["gpt2"], *flags, model=paths["llama"]) as running,
        make_client(running.url) as client,
    ):
        for name in ("llama", "gpt2", "llama"):
            assert client.completions.create(model=name, **asked).choices[0].text == alone[name]
        states = {entry.id: entry.status["value"] for entry in client.models.list().data}
    assert states == {"llama": "loaded", "gpt2": "unloaded"}
    assert sum("unloading" in line for line in running.lines) == 2
