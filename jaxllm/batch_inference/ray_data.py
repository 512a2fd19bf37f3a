"""Workers as actors of Ray Data, on any machines, with the same groups and the same code.

Ray starts the actors, restarts crashed ones and runs their groups again; a separate actor counts
crashes. Needs pip install 'jaxllm[ray]'.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.batch_inference.job import BatchJob, Group
from jaxllm.batch_inference.rows import Row
from jaxllm.batch_inference.worker import CrashCounter, GroupResult, Load, Worker, take_cores
from jaxllm.errors import ConfigError, JaxllmError

LOCAL = "local"  # start Ray on this machine for this run
_BLOCKS = 4096  # of a dataset; Ray schedules each block
# Read when Ray is imported: no usage report, no warnings about actor creation.
_QUIET_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}


class RayWorkers(NamedTuple):
    """Answers groups in Ray actors. The model's path must lead to the same files on all machines.

    address: of a cluster, "auto" for the running one, or `LOCAL`.
    """

    load: Load
    workers: int
    address: str = LOCAL

    def answers(
        self, job: BatchJob, groups: Sequence[Group], folder: Path
    ) -> Iterator[GroupResult]:
        """Yield the groups as they finish.

        Raises ConfigError if Ray is missing or does not start, or the model cannot be loaded.
        """
        ray, own = connect_ray(self.address, self.workers * job.threads)
        try:
            # The counts must survive crashes: this actor runs nothing else.
            tries = ray.remote(num_cpus=0)(RemoteCrashCounter).remote()
            items = [json.dumps([group.number, *group.rows]) for group in groups]
            data = ray.data.from_items(items, override_num_blocks=min(len(items), _BLOCKS))
            found = data.map_batches(
                _Actor,
                fn_constructor_kwargs={"load": self.load, "job": job, "tries": tries},
                batch_size=1,
                batch_format="numpy",
                compute=ray.data.ActorPoolStrategy(size=min(self.workers, len(items))),
                num_cpus=job.threads,
            )
            for row in found.iter_rows():
                yield _parse_result(row["answered"])
        except ray.exceptions.RayError as error:
            raise ConfigError(f"Ray: {error!s:.300}") from None
        finally:
            if own:
                ray.shutdown()


def connect_ray(address: str, cores: int) -> tuple[Any, bool]:
    """Return the module `ray`, connected, and whether this call connected it.

    An existing connection is used again. A local Ray gets `cores` cores, no dashboard and no usage
    report. Raises ConfigError if Ray is missing or does not start.
    """
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray: Any = import_module("ray")
        import_module("ray.data")
    except ImportError as error:
        raise ConfigError(f"this needs Ray ({error}): pip install 'jaxllm[ray]'") from None
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # ours counts rows
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if ray.is_initialized():
        return ray, False
    local = {"num_cpus": cores, "include_dashboard": False} if address == LOCAL else {}
    try:
        with warnings.catch_warnings():  # JAX warns of forks, but Ray's processes start afresh
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray at {address!r:.100} did not start: {error!s:.300}") from None
    return ray, True


class RemoteCrashCounter:
    """`CrashCounter` in an actor."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def begin(self, name: str) -> int:
        """See `CrashCounter`."""
        self._begun[name] = self._begun.get(name, 0) + 1
        return self._begun[name]

    def end(self, name: str) -> None:
        """See `CrashCounter`."""
        self._begun.pop(name, None)


class _CrashCounterClient(NamedTuple):
    """`CrashCounter` that call a `RemoteCrashCounter` actor."""

    actor: Any

    def begin(self, name: str) -> int:
        return int(import_module("ray").get(self.actor.begin.remote(name)))

    def end(self, name: str) -> None:
        import_module("ray").get(self.actor.end.remote(name))


class _Actor:
    """A Ray actor. It loads the model with its first group, so it can return loading errors."""

    def __init__(self, load: Load, job: BatchJob, tries: Any) -> None:
        take_cores((), job.threads)
        self._load, self._job = load, job
        self._tries: CrashCounter = _CrashCounterClient(tries)
        self._worker: Worker | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        (item,) = batch["item"]
        number, *rows = json.loads(str(item))
        try:
            if self._worker is None:
                self._worker = Worker(self._load, self._job, self._tries)
        except JaxllmError as error:
            return {"answered": [json.dumps({"refused": str(error)})]}
        answered = self._worker.answer_group(Group(number, [Row(*row) for row in rows]))
        return {"answered": [json.dumps(answered._asdict())]}


def _parse_result(text: str) -> GroupResult:
    found = json.loads(text)
    if "refused" in found:
        raise ConfigError(found["refused"])
    return GroupResult(**found)
