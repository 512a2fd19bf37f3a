"""What is to be done with rows, and everything that the answers depend on, by name."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from jaxllm.errors import CapacityError, ConfigError, SamplingError
from jaxllm.fleet.rows import Row
from jaxllm.whole import is_whole, whole

SEED_BITS = 53  # which every reader of JSON keeps exactly


class Group(NamedTuple):
    """Consecutive rows, answered as one: the number of the group, and its rows."""

    number: int
    rows: list[Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """task: its name in `tasks.TASKS`. options: for all rows, a row's own go before them.

    rows: how many run at once. group: how many rows are one unit of work, answered and kept as one.
    threads: of each worker; the last bits can depend on all three. tries: how often a row may end
    its worker before it counts as failed. timeout: seconds that a group, or a row that runs by
    itself, may take before its worker is ended; None: any time. about: what else the answers depend
    on, as the model's name: numbers and texts, for a run that goes on to be compared with.
    """

    task: str
    options: Mapping[str, Any]
    rows: int = 8
    group: int = 64
    threads: int = 1
    tries: int = 3
    timeout: float | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rows", "group", "threads", "tries"):
            whole(name, getattr(self, name), 1, 1 << 20, CapacityError)
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"a timeout is of seconds above 0, got {self.timeout}")
        if self.task == "generate" and not is_whole(self.options.get("seed", 0)):
            raise SamplingError(
                f"the seed must be a number, got {self.options['seed']!r:.40}: rows that run again"
                " draw as they drew before"
            )

    def groups(self, rows: Sequence[Row]) -> list[Group]:
        """The rows, so many a group."""
        starts = range(0, len(rows), self.group)
        return [Group(n, list(rows[i : i + self.group])) for n, i in enumerate(starts)]

    def facts(self, rows: Sequence[Row]) -> dict[str, Any]:
        """All that the answers depend on but for the weights, by name, as JSON keeps it."""
        said = json.dumps(rows, ensure_ascii=False, sort_keys=True)
        facts = {
            "task": self.task,
            **{f"option {name}": value for name, value in sorted(self.options.items())},
            "rows": self.rows,
            "group": self.group,
            "threads": self.threads,
            **self.about,
            "input": hashlib.sha256(said.encode()).hexdigest(),
            "jaxllm": version("jaxllm"),
        }
        try:
            kept: dict[str, Any] = json.loads(json.dumps(facts, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"an option that JSON cannot keep: {error}") from None
        return kept


def seed_of(run: int, name: Any, copy: int = 0) -> int:
    """A row's seed: the first 53 bits of a SHA-256 of the run's seed and the row's id.

    copy: how many rows before it have the same id.
    """
    key = [run, name, copy] if copy else [run, name]
    said = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).digest()
    return int.from_bytes(said[:8], "big") >> (64 - SEED_BITS)
