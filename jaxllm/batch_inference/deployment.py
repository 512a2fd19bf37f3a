"""A model behind Ray Serve: continuous batching in each replica, with optional streaming.

    serve run jaxllm.batch_inference.deployment:build model=demo:llama rows=8 replicas=1

A request is a POST of a JSON object with `prompt` and options of `LM.generate`. The response is a
JSON object; with `"stream": true` JSON lines: `{"text": piece}` each, then the whole answer.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from jaxllm.batch_inference.worker import take_cores
from jaxllm.errors import ConfigError, JaxllmError, SamplingError, suggest_name

_DEFAULTS = {"model": "demo:llama", "rows": "8", "capacity": "", "threads": "1", "replicas": "1"}


class Replica:
    """One replica: a model with its background thread."""

    def __init__(self, model: str, rows: int, capacity: int | None, threads: int) -> None:
        take_cores((), threads)
        from jaxllm.batch_inference.server import BackgroundServer
        from jaxllm.lm import load

        self._live = BackgroundServer(load(model), rows=rows, capacity=capacity)

    async def generate(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield `{"text": piece}` for each piece, then the whole answer, or `{"error": ...}`."""
        from jaxllm.batch_inference.tasks import format_completion

        try:
            async for item in self._live.stream(_check_request(request)):
                yield {"text": item} if isinstance(item, str) else format_completion(item)
        except JaxllmError as error:
            yield {"error": str(error)}

    async def __call__(self, request: Any) -> Any:
        """Answer a Starlette HTTP request."""
        from starlette.responses import JSONResponse, StreamingResponse

        from jaxllm.files import parse_json

        try:
            asked = parse_json(await request.body(), "the request", SamplingError)
            if not isinstance(asked, dict):
                raise SamplingError("a request must be a JSON object with a prompt and options")
        except SamplingError as error:
            return JSONResponse({"error": str(error)}, 400)
        streams = bool(asked.pop("stream", False))
        answers = self.generate(asked)
        if streams:
            return StreamingResponse(_json_lines(answers), media_type="application/x-ndjson")
        async for answer in answers:
            last = answer
        return JSONResponse(last, 400 if "error" in last else 200)


def build(arguments: Mapping[str, str] | None = None) -> Any:
    """Return the application for `serve run`.

    Args:
      arguments: strings by name: model, rows, capacity (tokens per row), threads, replicas.

    Raises ConfigError for other arguments, and if Ray is missing.
    """
    given = dict(arguments or {})
    for name in given:
        if name not in _DEFAULTS:
            raise ConfigError(f"unknown argument {name:.40}{suggest_name(name, _DEFAULTS)}")
    chosen = {**_DEFAULTS, **given}
    try:
        from ray import serve

        rows, threads, replicas = (int(chosen[n]) for n in ("rows", "threads", "replicas"))
        capacity = int(chosen["capacity"]) if chosen["capacity"] else None
    except ImportError as error:
        raise ConfigError(f"this needs Ray Serve ({error}): pip install 'jaxllm[ray]'") from None
    except ValueError as error:
        raise ConfigError(f"rows, capacity, threads and replicas must be integers: {error}") from (
            None
        )
    deployed: Any = serve.deployment(
        Replica,
        name="jaxllm",
        num_replicas=replicas,
        max_ongoing_requests=4 * rows,  # more than rows: requests queue in the replica
        ray_actor_options={"num_cpus": threads},
    )
    return deployed.bind(chosen["model"], rows, capacity, threads)


def _check_request(request: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("on_text", "is_cancelled", "id"):
        if name in request:
            raise SamplingError(f"a request cannot have {name!r}")
    return request


async def _json_lines(answers: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for answer in answers:
        yield json.dumps(answer, ensure_ascii=False) + "\n"
