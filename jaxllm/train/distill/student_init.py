"""Random initialization of a student with a configuration of its own.

A student that is part of its teacher: `compress.student`.
"""

import dataclasses
import math

import jax
import numpy as np

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.runtime.validation import check_seed
from jaxllm.weights.paths import Params, first_match, map_leaves
from jaxllm.weights.precision import Precision


def from_config(teacher: LM, config: ModelConfig, seed: int) -> LM:
    """Return a student with another configuration, the teacher's tokenizer and random weights.

    Raises ConfigError if the vocabulary is smaller than the tokenizer's.
    """
    size = 0 if teacher.tokenizer is None else teacher.tokenizer.vocab_size
    if config.vocab_size < size:
        raise ConfigError(
            f"vocab_size must be at least {size}, the tokenizer's: got {config.vocab_size}"
        )
    model, params = models.build(config, Precision.uniform("float32")), init_params(config, seed)
    return dataclasses.replace(teacher, config=config, model=model, params=params, recipe=())


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
