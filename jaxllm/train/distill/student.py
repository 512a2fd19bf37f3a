"""A student made from its teacher: fewer layers, fewer heads, narrower MLPs; or from nothing.

Cutting is `compress.structure`'s. Layers are taken at even distances, first and last among them, as
DistilBERT does (arXiv 1910.01108), or those stay that change the stream most (ShortGPT, arXiv
2403.03853). Heads and channels go by salience.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax
import numpy as np

from jaxllm import models
from jaxllm.api import LM
from jaxllm.compress.structure import influence, salience, structure
from jaxllm.compress.structure.salience import SALIENCES, Salience
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.paths import Params, first_match, map_leaves
from jaxllm.weights.precision import Precision
from jaxllm.whole import check_seed

Choice = Literal["even", "influence"]


@dataclasses.dataclass(frozen=True)
class Smaller:
    """What a student keeps of its teacher: numbers of layers, of key/value heads (with the query
    heads that share them) and of channels of an MLP; None for all.

    choice: which layers. by: what heads and channels count for (`compress.structure.salience`).
    """

    layers: int | None = None
    heads: int | None = None
    channels: int | None = None
    choice: Choice = "even"
    by: Salience = "inputs"

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise ConfigError(
                f"layers are chosen {' or '.join(get_args(Choice))}, not {self.choice}"
            )
        if self.by not in SALIENCES:
            raise ConfigError(f"salience is by one of {', '.join(SALIENCES)}, not {self.by}")

    @property
    def needs_text(self) -> bool:
        """Whether the choice looks at what the teacher makes of a text."""
        of_layers = self.layers is not None and self.choice == "influence"
        narrow = self.heads is not None or self.channels is not None
        return of_layers or (narrow and self.by != "magnitude")


def even_layers(total: int, count: int) -> list[int]:
    """`count` of `total` layers at even distances; of 12 the 6 are 0, 2, 4, 7, 9, 11.

    One alone is the first. Raises ConfigError for a count that cannot be.
    """
    if not 1 <= count <= total:
        raise ConfigError(f"of {total} layers 1 to {total} can stay, got {count}")
    return [int(x) for x in np.linspace(0, total - 1, count).round()]


def check_part(config: ModelConfig, smaller: Smaller) -> None:
    """Raise ConfigError for numbers of layers, heads or channels that a student cannot keep."""
    if smaller.layers is not None:
        even_layers(config.num_hidden_layers, smaller.layers)
    kinds: tuple[tuple[structure.Kind, int | None], ...]
    kinds = (("heads", smaller.heads), ("channels", smaller.channels))
    for kind, count in kinds:
        if count is not None:
            structure.narrower(config, kind, count)


def made_from(teacher: LM, smaller: Smaller, token_NT: np.ndarray | None = None) -> LM:
    """A student that is part of its teacher, in the teacher's formats.

    token_NT: int32 ids, whole rows, for what looks at a text (`Smaller.needs_text`). Layers go
    first, then heads, then channels. Raises ConfigError for numbers that cannot be, for quantized
    weights of which heads or channels were to go, and where a text is needed and not given.
    """
    if smaller.needs_text and token_NT is None:
        raise ConfigError("which parts stay is seen on a text: give one, or choose even layers")
    config, params = teacher.config, teacher.params
    rows = np.zeros((1, 1), np.int32) if token_NT is None else token_NT
    if smaller.layers is not None:
        total = config.num_hidden_layers
        kept = even_layers(total, smaller.layers)
        if smaller.choice == "influence" and smaller.layers < total:
            measured = influence.block_influence(teacher.model, params, rows)
            kept = influence.without_least(measured, total - smaller.layers, 0, 0)
        config, params = structure.cut_layers(config, params, kept)
    kinds: tuple[tuple[structure.Kind, int | None], ...]
    kinds = (("heads", smaller.heads), ("channels", smaller.channels))
    for kind, count in kinds:
        if count is None:
            continue
        structure.narrower(config, kind, count)  # refused before the work
        model = models.build(config, teacher.model.precision)
        found = salience.salience(model, params, kind, smaller.by, rows)
        gone = structure.groups(config, kind) - count
        config, params = structure.cut(config, params, kind, salience.least(found, gone))
    return _with(teacher, config, params, teacher.model.precision)


def from_nothing(teacher: LM, config: ModelConfig, seed: int) -> LM:
    """A student of another configuration with the teacher's tokenizer, its weights drawn (`fresh`).

    Raises ConfigError for a vocabulary that has no room for the tokenizer's.
    """
    size = 0 if teacher.tokenizer is None else teacher.tokenizer.vocab_size
    if config.vocab_size < size:
        raise ConfigError(f"a vocabulary of {config.vocab_size} has no room for {size} tokens")
    precision = Precision.uniform("float32")
    return _with(teacher, config, fresh(config, seed), precision)


# What is drawn otherwise, by path.
_NORM, _BIAS = r".*(norm|layernorm|ln_\w+)\.weight", r".*\.bias"
_OUT = r".*(o_proj|down_proj|c_proj|dense|dense_4h_to_h)\.weight"  # writes into the stream


def fresh(config: ModelConfig, seed: int, deviation: float = 0.02) -> Params:
    """Parameters to begin with, float32: norms of 1, biases of 0, all else normal.

    deviation: the standard deviation; of matrices that write into the stream less, by the square
    root of their number (Radford et al. 2019, GPT-2, section 2.3).
    """
    rng = np.random.default_rng(check_seed(seed))
    out = deviation / math.sqrt(2 * config.num_hidden_layers)
    rules = ((_BIAS, (0.0, 0.0)), (_NORM, (1.0, 0.0)), (_OUT, (0.0, out)), (".*", (0.0, deviation)))

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        mean, spread = first_match(rules, path) or (0.0, 0.0)
        drawn = mean + spread * rng.standard_normal(shape.shape, np.float32)
        return jax.device_put(drawn.astype(np.float32))

    return map_leaves(draw, models.param_shapes(models.build(config)))


def _with(teacher: LM, config: ModelConfig, params: Params, precision: Precision) -> LM:
    model = models.build(config, precision)
    return dataclasses.replace(teacher, config=config, model=model, params=params, recipe=())
