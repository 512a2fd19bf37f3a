"""Clients that people use, beside OpenAI's and Anthropic's for Python: each does what its own
documentation shows first. Skipped where they are not installed.

Python: pip install langchain-openai litellm instructor llm
JavaScript, in any folder, which the variable NODE_CLIENTS names: npm install openai ai zod
@ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic @anthropic-ai/sdk
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.server.servers import StubModel, say, serve_stub

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore"),  # their own: deprecated calls, open loops
]
MESSAGES: Any = [{"role": "system", "content": "Be short"}, {"role": "user", "content": "Hi"}]
THOUGHT = "<think>\nHm.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
OBJECT = '{"city": "Bonn"}'


class Weather(pydantic.BaseModel):
    """The form of an answer."""

    city: str


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


async def ask(text: str, run: Callable[[str], Any], **done: Any) -> tuple[Any, StubModel]:
    """Return what a client in a thread makes of a server that says `text`, and its model."""
    model = say(text, **done)
    async with serve_stub(model) as endpoint:
        found = await asyncio.to_thread(run, f"http://{endpoint.host}:{endpoint.port}")
    return found, model


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain(responses: bool) -> None:
    """Whole answers, streams, tools and structured output, through both of OpenAI's interfaces."""
    langchain = pytest.importorskip("langchain_openai")

    def chat(url: str) -> Any:
        return langchain.ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model="stub", use_responses_api=responses,
            max_retries=0,
        )  # fmt: skip

    def text_of(message: Any) -> str:
        return str(message.text if isinstance(message.text, str) else message.text())

    found, model = await ask("Hello", lambda url: chat(url).invoke(MESSAGES))
    assert text_of(found) == "Hello"
    assert found.usage_metadata["input_tokens"] == 9
    assert [m["role"] for m in model.asked[0]["messages"]] == ["system", "user"]
    found, _ = await ask("Hello", lambda url: "".join(map(text_of, chat(url).stream(MESSAGES))))
    assert found == "Hello"
    tools = [weather]
    found, _ = await ask(CALL, lambda url: chat(url).bind_tools(tools).invoke(MESSAGES))
    assert [(c["name"], c["args"]) for c in found.tool_calls] == [("weather", {"city": "Bonn"})]
    found, model = await ask(
        OBJECT, lambda url: chat(url).with_structured_output(Weather).invoke(MESSAGES)
    )
    assert found == Weather(city="Bonn")
    assert "json_schema" in model.asked[0]["options"]


async def test_langchain_sends_results_of_tools() -> None:
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")

    def run(url: str) -> Any:
        chat = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="stub")
        first = chat.bind_tools([weather]).invoke("Weather?")
        result = messages.ToolMessage("sunny", tool_call_id=first.tool_calls[0]["id"])
        return chat.invoke([messages.HumanMessage("Weather?"), first, result])

    _, model = await ask(CALL, run)
    assert [m["role"] for m in model.asked[1]["messages"]] == ["user", "assistant", "tool"]
    (call,) = model.asked[1]["messages"][1]["tool_calls"]
    assert call["function"]["name"] == "weather"


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_litellm(provider: str) -> None:
    litellm = pytest.importorskip("litellm")

    def complete(url: str, **fields: Any) -> Any:
        base = f"{url}/v1" if provider == "openai" else url
        return litellm.completion(
            model=f"{provider}/stub", api_base=base, api_key="none", messages=MESSAGES,
            max_tokens=50, num_retries=0, **fields,
        )  # fmt: skip

    found, model = await ask(f"{THOUGHT}Hello", complete)
    message = found.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello", "Hm.")
    assert [m["role"] for m in model.asked[0]["messages"]] == ["system", "user"]

    def stream(url: str) -> str:
        chunks = complete(url, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert (await ask("Hello", stream))[0] == "Hello"
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    found, _ = await ask(CALL, lambda url: complete(url, tools=[tool]))
    (call,) = found.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Bonn"}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
async def test_instructor(mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    def run(url: str) -> Any:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        return instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
            model="stub", messages=MESSAGES, response_model=Weather, max_retries=0
        )

    said = CALL.replace('"weather"', '"Weather"') if mode == "TOOLS" else OBJECT
    found, _ = await ask(said, run)
    assert found.city == "Bonn"


async def test_llm(tmp_path: Path) -> None:
    """Simon Willison's command, with the server among its extra models."""
    pytest.importorskip("llm")
    command = Path(sys.executable).with_name("llm")

    def run(url: str) -> str:
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: stub\n  model_name: stub\n  api_base: {url}/v1\n"
        )
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            [command, "-m", "stub", "-s", "Be short", "-o", "max_tokens", "9", "Hi"],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    found, model = await ask("Hello", run)
    assert found == "Hello\n"
    assert [m["role"] for m in model.asked[0]["messages"]] == ["system", "user"]
    assert model.asked[0]["options"]["max_new_tokens"] == 9


JAVASCRIPT = {  # by package: code that prints JSON; `url` is the server's, `load` imports a package
    "openai": ("""
        const OpenAI = (await load("openai")).default;
        const client = new OpenAI({baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0});
        const whole = await client.chat.completions.create({model: "stub", messages});
        const asked = {model: "stub", messages, stream: true};
        const stream = await client.chat.completions.create(asked);
        let text = "";
        for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
        const response = await client.responses.create({model: "stub", input: "Hi"});
        const events = [];
        for await (const event of await client.responses.create({model: "stub", input: "Hi",
            stream: true})) events.push(event.type);
        print([whole.choices[0].message.content, text, response.output_text, events.at(-1)]);
    """, "Hello", ["Hello", "Hello", "Hello", "response.completed"]),
    "@anthropic-ai/sdk": ("""
        const Anthropic = (await load("@anthropic-ai/sdk")).default;
        const client = new Anthropic({baseURL: url, apiKey: "none", maxRetries: 0});
        const user = [{role: "user", content: "Hi"}];
        const whole = await client.messages.create({model: "stub", max_tokens: 9, messages: user});
        const stream = client.messages.stream({model: "stub", max_tokens: 9, messages: user});
        let text = "";
        stream.on("text", (piece) => text += piece);
        const final = await stream.finalMessage();
        print([whole.content[0].text, text, final.stop_reason]);
    """, "Hello", ["Hello", "Hello", "end_turn"]),
    "ai": ("""
        const {generateText, streamText, generateObject, jsonSchema, tool, stepCountIs} =
            await load("ai");
        const {createOpenAI} = await load("@ai-sdk/openai");
        const {createOpenAICompatible} = await load("@ai-sdk/openai-compatible");
        const {createAnthropic} = await load("@ai-sdk/anthropic");
        const found = [];
        const openai = createOpenAI({baseURL: `${url}/v1`, apiKey: "none"});
        const models = [
            openai("stub"), openai.chat("stub"),
            createOpenAICompatible({name: "own", baseURL: `${url}/v1`})("stub"),
            createAnthropic({baseURL: `${url}/v1`, apiKey: "none"})("stub"),
        ];
        for (const model of models) {
            const {text} = await generateText({model, prompt: "Hi", maxRetries: 0});
            let streamed = "";
            const stream = streamText({model, prompt: "Hi", maxRetries: 0,
                onError({error}) { throw error; }});
            for await (const piece of stream.textStream) streamed += piece;
            found.push([text, streamed]);
        }
        print(found);
    """, "Hello", [["Hello", "Hello"]] * 4),
    "ai tools": ("""
        const {generateText, jsonSchema, tool} = await load("ai");
        const {createOpenAI} = await load("@ai-sdk/openai");
        const {createAnthropic} = await load("@ai-sdk/anthropic");
        const openai = createOpenAI({baseURL: `${url}/v1`, apiKey: "none"});
        const anthropic = createAnthropic({baseURL: `${url}/v1`, apiKey: "none"});
        const weather = tool({
            description: "weather", execute: async ({city}) => `sunny in ${city}`,
            inputSchema: jsonSchema({type: "object", properties: {city: {type: "string"}},
                required: ["city"]}),
        });
        const found = [];
        for (const model of [openai("stub"), openai.chat("stub"), anthropic("stub")]) {
            const {toolResults} = await generateText({model, prompt: "Hi", tools: {weather},
                maxRetries: 0});
            found.push(toolResults.map((result) => result.output));
        }
        print(found);
    """, CALL, [["sunny in Bonn"]] * 3),
}  # fmt: skip


@pytest.mark.parametrize("package", JAVASCRIPT)
async def test_javascript(package: str) -> None:
    folder, node = os.environ.get("NODE_CLIENTS", "."), shutil.which("node")
    if node is None or not (Path(folder, "node_modules") / package.split()[0]).exists():
        pytest.skip(f"no node with {package} (npm install, and NODE_CLIENTS=its folder)")
    code, said, expected = JAVASCRIPT[package]

    def run(url: str) -> Any:
        frame = f"""
            import {{createRequire}} from "node:module";
            import {{pathToFileURL}} from "node:url";
            const find = createRequire({json.dumps(str(Path(folder).resolve() / "x.js"))});
            const load = (name) => import(pathToFileURL(find.resolve(name)));
            const print = (value) => console.log(JSON.stringify(value));
            const url = {json.dumps(url)}, messages = {json.dumps(MESSAGES)};
            {code}
        """
        done = subprocess.run(
            [node, "--input-type=module", "-"], input=frame, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert (await ask(said, run))[0] == expected
