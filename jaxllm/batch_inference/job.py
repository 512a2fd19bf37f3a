"""A batch job: its settings, groups of rows, and everything that the answers depend on."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from jaxllm.batch_inference.rows import Row
from jaxllm.errors import CapacityError, ConfigError, SamplingError
from jaxllm.runtime.validation import check_int, is_integer

SEED_BITS = 53  # exact in every JSON reader


class Group(NamedTuple):
    """Consecutive rows that are answered together, and the group's number."""

    number: int
    rows: list[Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchJob:
    """The settings of a batch job.

    The last bits of answers can depend on `rows`, `group` and `threads`.

    Attributes:
      task: a name in `tasks.TASKS`.
      options: of all rows; a row's own options override them.
      rows: rows that run at once.
      group: rows per group, the unit of work.
      threads: threads per worker.
      tries: crashes of its worker after which a row counts as failed.
      timeout: seconds after which the worker of a group, or of a row that runs alone, is killed;
        None: no limit.
      metadata: what else the answers depend on, such as the model's name, as JSON values. A resumed
        run must have the same.
    """

    task: str
    options: Mapping[str, Any]
    rows: int = 8
    group: int = 64
    threads: int = 1
    tries: int = 3
    timeout: float | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rows", "group", "threads", "tries"):
            check_int(name, getattr(self, name), 1, 1 << 20, CapacityError)
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, got {self.timeout}")
        if self.task == "generate" and not is_integer(self.options.get("seed", 0)):
            raise SamplingError(
                f"the seed must be a number, got {self.options['seed']!r:.40}: rows that run again"
                " have to repeat it"
            )

    def groups(self, rows: Sequence[Row]) -> list[Group]:
        """Divide rows into groups of `group` rows."""
        starts = range(0, len(rows), self.group)
        return [Group(n, list(rows[i : i + self.group])) for n, i in enumerate(starts)]

    def facts(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return all that the answers depend on, except the weights, as JSON values by name."""
        content = json.dumps(rows, ensure_ascii=False, sort_keys=True)
        facts = {
            "task": self.task,
            **{f"option {name}": value for name, value in sorted(self.options.items())},
            "rows": self.rows,
            "group": self.group,
            "threads": self.threads,
            **self.metadata,
            "input": hashlib.sha256(content.encode()).hexdigest(),
            "jaxllm": version("jaxllm"),
        }
        try:
            plain: dict[str, Any] = json.loads(json.dumps(facts, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"an option is not a JSON value: {error}") from None
        return plain


def row_seed(run_seed: int, row_id: Any, copy: int = 0) -> int:
    """Return a row's seed: the first 53 bits of a SHA-256 of the run's seed and the row's id.

    copy: number of earlier rows with the same id.
    """
    key = [run_seed, row_id, copy] if copy else [run_seed, row_id]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
