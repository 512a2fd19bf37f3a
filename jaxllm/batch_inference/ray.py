"""Batch inference and the server on many machines, by Ray: pip install 'jaxllm[ray]'.

    serve run jaxllm.batch_inference.ray:build model=demo:llama rows=8 replicas=2

runs `jaxllm serve` in each replica of Ray Serve, with OpenAI's interface, its own queue and caches;
a request goes to the replica that has seen the longest beginning of it.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from jaxllm.batch_inference.rows import BatchRow
from jaxllm.batch_inference.tasks import WINDOW, Answer, BatchJob, answer_rows
from jaxllm.errors import ConfigError, requires_extra, suggest_name
from jaxllm.lm import LM, load

TRIES = 3  # crashes of an actor on the same rows that end the job
ARGUMENTS = {
    "model": "demo:llama", "name": "", "rows": "8", "capacity": "0", "threads": "1",
    "replicas": "1",
}  # fmt: skip


def answer_on_ray(
    load_model: Callable[[], LM],
    job: BatchJob,
    rows: Iterable[BatchRow],
    *,
    address: str,
    workers: int,
) -> Iterator[tuple[BatchRow, Answer]]:
    """Yield each row with its answer, from actors of Ray Data that share all cores.

    Args:
        load_model: picklable; its paths must lead to the same files on all machines.
        address: of a cluster; "local" starts Ray on this machine for this call.
        workers: the number of actors.

    Raises ConfigError if Ray is missing or does not start, and for errors of the actors.
    """
    ray = _import_ray("ray")
    ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts rows
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    is_connected = ray.is_initialized()
    try:
        if not is_connected:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        cores = max(1, int(ray.cluster_resources()["CPU"]) // workers)
        data = ray.data.from_items([json.dumps(row) for row in rows])
        with warnings.catch_warnings():  # of the last two arguments, which have no successors yet
            warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
            answered = data.map_batches(
                _Actor,
                fn_constructor_args=(load_model, job, cores),
                batch_size=WINDOW * job.batch_size,
                compute=ray.data.ActorPoolStrategy(size=workers),
                num_cpus=cores,
                max_restarts=TRIES,
                max_task_retries=TRIES,
            )
        for item in answered.iter_rows():
            row, answer = json.loads(item["answered"])
            yield BatchRow(*row), answer
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        cause = str(error).strip().rpartition("\n")[2]  # below a trace of calls
        raise ConfigError(f"Ray at {address!r:.100}: {cause:.300}") from None
    finally:
        if not is_connected:
            ray.shutdown()


class _Actor:
    """A model in a process of Ray, which answers batches of rows."""

    def __init__(self, load_model: Callable[[], LM], job: BatchJob, cores: int) -> None:
        os.environ["PJRT_NPROC"] = str(cores)  # before XLA creates its CPU client
        self._lm, self._job = load_model(), job

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        rows = [BatchRow(*json.loads(text)) for text in batch["item"]]
        return {"answered": [json.dumps(pair) for pair in answer_rows(self._lm, self._job, rows)]}


def build(arguments: Mapping[str, str] | None = None) -> Any:
    """Return the application for `serve run`. arguments: those of `ARGUMENTS`, as texts;
    name: the model's for clients.

    Raises ConfigError for other arguments, and if Ray or the server's packages are missing.
    """
    for name in (given := dict(arguments or {})):
        if name not in ARGUMENTS:
            raise ConfigError(f"unknown argument {name:.40}{suggest_name(name, ARGUMENTS)}")
    model, name, *numbers = {**ARGUMENTS, **given}.values()
    try:
        rows, capacity, threads, replicas = map(int, numbers)
    except ValueError as error:
        text = f"rows, capacity, threads and replicas must be integers: {error}"
        raise ConfigError(text) from None
    serve = _import_ray("ray.serve")
    from jaxllm.batch_inference.ray_serve import Ingress, PrefixRouter, Replica
    from jaxllm.server.backend import ServerSettings
    from jaxllm.server.model_process import ModelSettings

    name = name or os.path.basename(model)
    settings = ServerSettings((name,), hosts=("*",))  # Ray's proxy is in front
    process = ModelSettings(rows=rows, capacity=capacity, threads=threads)
    num_open = rows + settings.max_waiting  # the replica queues them itself
    replica: Any = serve.deployment(
        name="jaxllm",
        num_replicas=replicas,
        max_ongoing_requests=num_open,
        ray_actor_options={"num_cpus": threads},
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"margin": rows // 2},
        },
    )
    ingress: Any = serve.deployment(
        name="jaxllm-ingress",
        max_ongoing_requests=num_open * replicas,
        ray_actor_options={"num_cpus": 0},
    )
    load_model = partial(load, model, show_progress=False)
    return ingress(Ingress).bind(replica(Replica).bind(load_model, process, settings), settings)


def _import_ray(name: str) -> Any:
    # Read when Ray is imported: no usage report, and fewer lines of its C++ on stderr.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with requires_extra("ray", "this"):
        import_module("ray.data")
        return import_module(name)
