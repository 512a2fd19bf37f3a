"""`jaxllm serve` behind Ray Serve: the same application in each replica.

    serve run jaxllm.batch_inference.deployment:build model=demo:llama rows=8 replicas=2

Clients use OpenAI's interface, as for one server. Each replica has its own queue and caches.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, suggest_name

_DEFAULTS = {
    "model": "demo:llama", "name": "", "rows": "8", "capacity": "0", "threads": "1",
    "replicas": "1",
}  # fmt: skip


def build(arguments: Mapping[str, str] | None = None) -> Any:
    """Return the application for `serve run`.

    Args:
      arguments: strings by name: model, name (for clients), rows, capacity (tokens per row),
        threads, replicas.

    Raises ConfigError for other arguments, and if Ray or the server's packages are missing.
    """
    given = dict(arguments or {})
    for name in given:
        if name not in _DEFAULTS:
            raise ConfigError(f"unknown argument {name:.40}{suggest_name(name, _DEFAULTS)}")
    chosen = {**_DEFAULTS, **given}
    try:
        from ray import serve

        from jaxllm.server.app import build_app
        from jaxllm.server.backend import ServerSettings
        from jaxllm.server.model_process import ModelSettings
    except ImportError as error:
        message = f"this needs Ray Serve ({error}): pip install 'jaxllm[ray]'"
        raise ConfigError(message) from None
    try:
        rows, capacity, threads, replicas = (
            int(chosen[n]) for n in ("rows", "capacity", "threads", "replicas")
        )
    except ValueError as error:
        message = f"rows, capacity, threads and replicas must be integers: {error}"
        raise ConfigError(message) from None
    name = chosen["name"] or Path(chosen["model"]).name
    settings = ServerSettings((name,), hosts=("*",))  # Ray's proxy is in front
    process = ModelSettings(rows=rows, capacity=capacity, threads=threads)

    def build_replica() -> Any:
        """Return the application; its model's process starts with the first request."""
        from jaxllm.server.model_client import ModelClient

        client = ModelClient(partial(_load, chosen["model"]), process)
        return build_app(client, settings, starts_model=True)

    ingress: Any = serve.ingress(build_replica)
    deployed: Any = serve.deployment(
        name="jaxllm",
        num_replicas=replicas,
        max_ongoing_requests=rows + settings.max_waiting,  # the replica queues them itself
        ray_actor_options={"num_cpus": threads},
    )
    return deployed(ingress(_Replica)).bind()


class _Replica:
    """A replica: what Ray puts the application into."""


def _load(model: str) -> Any:
    from jaxllm.lm import load

    return load(model, show_progress=False)
