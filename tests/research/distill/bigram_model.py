"""Shared by the distillation tests: rows with two documents and padding, and a bigram model.

The bigram model compiles in a tenth of the time of a small Llama.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.layers import Trace
from jaxllm.models.llama import LlamaConfig
from jaxllm.models.modules import get_param
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import forward
from jaxllm.weights.model import Model
from jaxllm.weights.precision import Precision
from tests.tiny_models import VOCAB, random_model, tokens

B, T = 2, 7
CONFIG: LlamaConfig = random_model("llama", num_hidden_layers=1)[0].config


class Pairs(Model, nn.Module):
    """A model of pairs of tokens: the vector of one says how likely each is to follow."""

    config: LlamaConfig
    precision: Precision = Precision.uniform("float32")

    @nn.compact
    def __call__(self, token_BT: Any, position_BT: Any, length_B: Any, *_: Any, **__: Any) -> Trace:
        shape = self.config.vocab_size, self.config.hidden_size
        before, after = get_param(self, "before", *shape), get_param(self, "after", *shape)
        x_BTD = before[token_BT]
        return Trace(x_BTD, (), jnp.tanh(x_BTD), x_BTD @ after.T)


def pairs(seed: int, spread: float, width: int = 16) -> tuple[Pairs, dict[str, jax.Array]]:
    """Return a bigram model and random tables."""
    rng, shape = np.random.default_rng(seed), (VOCAB, width)
    tables = [jnp.asarray(spread * rng.standard_normal(shape, np.float32)) for _ in range(2)]
    config = dataclasses.replace(CONFIG, hidden_size=width)
    return Pairs(config), dict(zip(("before", "after"), tables, strict=True))


def rows_of(seed: int = 0) -> Rows:
    """Return rows with two documents in the first row and padding in the second."""
    token = tokens(B, T + 1, seed)
    label, position = token[:, 1:].copy(), np.tile(np.arange(T), (B, 1))
    document = np.zeros((B, T), int)
    position[0, 4:], document[0, 4:] = np.arange(3), 1
    position[1, 5:], document[1, 5:], label[1, 5:], label[0, :2] = -1, -1, IGNORED, IGNORED
    return Rows(*(x.astype(np.int32) for x in (token[:, :-1], label, position, document)))


@partial(jax.jit, static_argnums=0)
def compute_logits(model: Any, params: Any, rows: Rows) -> jax.Array:
    """Return the logits of `rows`."""
    plain = Rows(rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT)
    return forward(model, params, plain).logits
