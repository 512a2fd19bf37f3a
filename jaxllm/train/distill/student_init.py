"""Initialization of a student: from its teacher with fewer layers, heads or channels, or random.

Layers are taken evenly, including the first and the last,
as in DistilBERT (arXiv 1910.01108), or those with the highest block influence are kept (ShortGPT,
arXiv 2403.03853). Heads and channels are kept by salience.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax
import numpy as np

from jaxllm import models
from jaxllm.cache.files import fingerprint
from jaxllm.compress.methods.layer_pruning import (
    block_influence,
    cut_layers,
    keep_most_influential,
)
from jaxllm.compress.methods.parameter_groups import Kind, group_count
from jaxllm.compress.methods.salience import (
    SALIENCES,
    Salience,
    keep_most_salient,
    measure_salience,
)
from jaxllm.compress.methods.structured_pruning import cut_groups, narrow_config
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.runtime.multihost import check_processes_agree, is_multiprocess
from jaxllm.runtime.validation import check_seed
from jaxllm.train.data.rows import Data
from jaxllm.train.jobs import shard_like, to_one_device
from jaxllm.weights.paths import Params, first_match, map_leaves
from jaxllm.weights.precision import Precision

MAX_ROWS = 8  # of the data, to choose layers, heads and channels

Choice = Literal["even", "influence"]


@dataclasses.dataclass(frozen=True)
class StudentSize:
    """The size of a student that is part of its teacher.

    Attributes:
      layers, heads, channels: how many layers, key/value heads (with their query heads) and MLP
        channels to keep; None for all.
      layer_choice: how to choose layers.
      importance: salience of heads and channels (`compress.methods.salience`).
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
    kinds: tuple[tuple[Kind, int | None], ...]
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
    kinds: tuple[tuple[Kind, int | None], ...]
    kinds = (("heads", size.heads), ("channels", size.channels))
    for kind, count in kinds:
        if count is None:
            continue
        narrow_config(config, kind, count)  # refused before the work
        model = models.build(config, teacher.model.precision)
        found = measure_salience(model, params, kind, size.importance, rows)
        gone = group_count(config, kind) - count
        config, params = cut_groups(config, params, kind, keep_most_salient(found, gone))
    return _with_params(teacher, config, params, teacher.model.precision)


def make_student(teacher: LM, size: StudentSize, data: Data) -> LM:
    """Return a student that is part of its teacher, chosen by the teacher's activations on data.

    It is made on one device, then sharded like the teacher. Each process makes it; different
    results raise an error.
    """
    rows = data.batch(0)
    whole_R = (np.asarray(rows.position_BT) >= 0).all(axis=1)
    token_NT = np.asarray(rows.token_BT)[whole_R][:MAX_ROWS]
    student = cut_student(to_one_device(teacher), size, token_NT if len(token_NT) else None)
    if is_multiprocess():
        check_processes_agree({"student": fingerprint(student.params)})
    return shard_like(student, teacher)


def from_config(teacher: LM, config: ModelConfig, seed: int) -> LM:
    """Return a student with another configuration, the teacher's tokenizer and random weights.

    Raises ConfigError if the vocabulary is smaller than the tokenizer's.
    """
    size = 0 if teacher.tokenizer is None else teacher.tokenizer.vocab_size
    if config.vocab_size < size:
        raise ConfigError(
            f"vocab_size must be at least {size}, the tokenizer's: got {config.vocab_size}"
        )
    precision = Precision.uniform("float32")
    return _with_params(teacher, config, init_params(config, seed), precision)


# Parameters with another initialization, by path.
_NORM, _BIAS = r".*(norm|layernorm|ln_\w+)\.weight", r".*\.bias"
_OUT = r".*(o_proj|down_proj|c_proj|dense|dense_4h_to_h)\.weight"  # writes to the residual stream


def init_params(config: ModelConfig, seed: int, deviation: float = 0.02) -> Params:
    """Return initial parameters, float32: norms are 1, biases 0, all others normal.

    deviation: the standard deviation; matrices that write to the residual stream have it divided by
    the square root of their number (Radford et al. 2019, GPT-2, section 2.3).
    """
    rng = np.random.default_rng(check_seed(seed))
    out = deviation / math.sqrt(2 * config.num_hidden_layers)
    rules = ((_BIAS, (0.0, 0.0)), (_NORM, (1.0, 0.0)), (_OUT, (0.0, out)), (".*", (0.0, deviation)))

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        mean, spread = first_match(rules, path) or (0.0, 0.0)
        drawn = mean + spread * rng.standard_normal(shape.shape, np.float32)
        return jax.device_put(drawn.astype(np.float32))

    return map_leaves(draw, models.param_shapes(models.build(config)))


def _with_params(teacher: LM, config: ModelConfig, params: Params, precision: Precision) -> LM:
    model = models.build(config, precision)
    return dataclasses.replace(teacher, config=config, model=model, params=params, recipe=())
