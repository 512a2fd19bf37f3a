"""A student that is part of its teacher: fewer layers, heads or channels.

Layers are taken evenly, including the first and the last,
as in DistilBERT (arXiv 1910.01108), or those with the highest block influence are kept (ShortGPT,
arXiv 2403.03853). Heads and channels are kept by salience.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

from jaxllm import models
from jaxllm.cache.files import fingerprint
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.lm import LM, shard_like, to_one_device
from jaxllm.research.pruning.layer_pruning import (
    block_influence,
    cut_layers,
    keep_most_influential,
)
from jaxllm.research.pruning.parameter_groups import Groups, group_count
from jaxllm.research.pruning.salience import (
    SALIENCES,
    Salience,
    keep_most_salient,
    measure_salience,
)
from jaxllm.research.pruning.structured_pruning import cut_groups, narrow_config
from jaxllm.runtime.multihost import check_processes_agree, is_multiprocess
from jaxllm.train.data.rows import Rows

MAX_ROWS = 8  # of the data, to choose layers, heads and channels

Choice = Literal["even", "influence"]


@dataclasses.dataclass(frozen=True)
class StudentSize:
    """The size of a student that is part of its teacher.

    Attributes:
        layers, heads, channels: how many layers, key/value heads (with their query heads) and MLP
            channels to keep; None for all.
        layer_choice: how to choose layers.
        importance: salience of heads and channels (`research.pruning.salience`).
    """

    layers: int | None = None
    heads: int | None = None
    channels: int | None = None
    layer_choice: Choice = "even"
    importance: Salience = "inputs"

    def __post_init__(self) -> None:
        if self.layer_choice not in get_args(Choice):
            raise ConfigError(
                f"choice of layers must be {' or '.join(get_args(Choice))}, got {self.layer_choice}"
            )
        if self.importance not in SALIENCES:
            raise ConfigError(
                f"salience must be one of {', '.join(SALIENCES)}, got {self.importance}"
            )

    @property
    def needs_text(self) -> bool:
        """Whether the choice depends on the teacher's activations on a text."""
        of_layers = self.layers is not None and self.layer_choice == "influence"
        narrow = self.heads is not None or self.channels is not None
        return of_layers or (narrow and self.importance != "magnitude")


def select_even_layers(total: int, count: int) -> list[int]:
    """Return `count` of `total` layers, evenly spaced: 6 of 12 are 0, 2, 4, 7, 9, 11.

    A single layer is the first. Raises ConfigError for a count out of range.
    """
    if not 1 <= count <= total:
        raise ConfigError(f"the student must keep 1 to {total} layers, got {count}")
    return [int(x) for x in np.linspace(0, total - 1, count).round()]


def check_student(config: ModelConfig, size: StudentSize) -> None:
    """Raise ConfigError for numbers of layers, heads or channels that a student cannot keep."""
    if size.layers is not None:
        select_even_layers(config.num_hidden_layers, size.layers)
    kinds: tuple[tuple[Groups, int | None], ...]
    kinds = (("heads", size.heads), ("channels", size.channels))
    for kind, count in kinds:
        if count is not None:
            narrow_config(config, kind, count)


def cut_student(teacher: LM, size: StudentSize, token_NT: np.ndarray | None = None) -> LM:
    """Return a student that is part of its teacher, in the teacher's formats.

    Layers are removed first, then heads, then channels.

    Args:
        token_NT: int32 ids, rows without padding, if `size.needs_text`.

    Raises ConfigError for numbers out of range, for removal of heads or channels from quantized
    weights, and if a text is needed and not given.
    """
    if size.needs_text and token_NT is None:
        raise ConfigError("this choice of parts needs a text: give one, or choose even layers")
    config, params = teacher.config, teacher.params
    rows = np.zeros((1, 1), np.int32) if token_NT is None else token_NT
    if size.layers is not None:
        total = config.num_hidden_layers
        kept = select_even_layers(total, size.layers)
        if size.layer_choice == "influence" and size.layers < total:
            measured = block_influence(teacher.model, params, rows)
            kept = keep_most_influential(measured, total - size.layers, 0, 0)
        config, params = cut_layers(config, params, kept)
    kinds: tuple[tuple[Groups, int | None], ...]
    kinds = (("heads", size.heads), ("channels", size.channels))
    for kind, count in kinds:
        if count is None:
            continue
        narrow_config(config, kind, count)  # refused before the work
        model = models.build(config, teacher.model.precision)
        salience = measure_salience(model, params, kind, size.importance, rows)
        dropped = group_count(config, kind) - count
        config, params = cut_groups(config, params, kind, keep_most_salient(salience, dropped))
    model = models.build(config, teacher.model.precision)
    return dataclasses.replace(teacher, config=config, model=model, params=params, recipe=())


def select_full_rows(rows: Rows) -> np.ndarray:
    """Return the ids of the rows without padding, int32 `[N, T]`."""
    whole_B = (np.asarray(rows.position_BT) >= 0).all(axis=1)
    return np.asarray(rows.token_BT)[whole_B]


def make_student(teacher: LM, size: StudentSize, token_NT: np.ndarray) -> LM:
    """Return a student that is part of its teacher, chosen by the teacher's activations on texts.

    It is made on one device, then sharded like the teacher. Each process makes it; different
    results raise an error.

    Args:
        token_NT: int32 ids, rows without padding; the first `MAX_ROWS` are used. There may be none
            unless `size.needs_text`.
    """
    some_NT = token_NT[:MAX_ROWS] if len(token_NT) else None
    student = cut_student(to_one_device(teacher), size, some_NT)
    if is_multiprocess():
        check_processes_agree({"student": fingerprint(student.params)})
    return shard_like(student, teacher)
