"""Objectives: pure functions of parameters and rows around the inference forward pass.

A loss is a sum and its divisor, never a mean. Sums of several batches add up; a mean of means would
weight tokens by the size of their batch.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxllm import models, steps
from jaxllm.models.inputs import check_predicts_tokens
from jaxllm.models.layers import Trace
from jaxllm.ops.token_logprobs import AxisNames, log_likelihood
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

CHUNK_BYTES = 64 * 2**20  # of the logits that exist at once


class LossOutput(NamedTuple):
    """Sums over rows, float32 scalars: the loss is `total / weight`.

    extras: further sums by name, divided by the same weight; they are logged, not minimized.
    """

    total: jax.Array
    weight: jax.Array
    extras: dict[str, jax.Array] = {}  # noqa: RUF012  never changed


class Objective(Protocol):
    """A frozen dataclass, whose fields are static in the compiled step.

    Args of a call:
      extra_inputs: further arrays that it needs, an argument of the compiled step.
      key: for its random numbers.
    """

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput: ...


def forward(
    model: Model,
    params: Params,
    rows: Rows,
    segments: steps.Segments = (),
    *,
    gather_logits: bool = False,
    **options: Any,
) -> Trace:
    """Run the forward pass over rows whose documents do not attend to each other.

    Models whose layers keep a state need one document a row (`Dataset.check`).

    Args:
        segments: cache segments that all documents attend to.
        gather_logits: on a mesh, gather the logits of the whole vocabulary on every device. Losses
            do not need it: they sum over sharded logits.
        options: other arguments of `steps.forward`.
    """
    if not model.config.has_state:
        options["document_BT"] = rows.document_BT
    return steps.run_model(
        model if gather_logits else model.with_sharded_logits(),
        params,
        segments,
        rows.token_BT,
        rows.position_BT,
        **options,
    )[0]


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy with the labels, in nats per token."""

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        trace = forward(model, params, rows)
        return LossOutput(*next_token_loss(model, params, trace, rows.label_BT))


def next_token_loss(
    model: Model, params: Params, trace: Trace, label_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the `cross_entropy` of a forward pass, of which many logits never exist at once.

    Logits of more than `CHUNK_BYTES` are computed again from the final norm's output, for some
    tokens at a time. XLA then removes those of the trace, if nothing else reads them. On a mesh,
    logits are sharded instead.
    """
    check_predicts_tokens(model.config)
    tokens = label_BT.size
    chunks = -(-4 * tokens * model.config.vocab_size // CHUNK_BYTES)
    if model.is_sharded or chunks <= 1:
        return cross_entropy(trace.logits, label_BT)
    size = -(-tokens // chunks)
    padding = (0, size * chunks - tokens)
    label_N = jnp.pad(label_BT.reshape(-1), padding, constant_values=IGNORED)
    x_ND = jnp.pad(trace.norm.reshape(tokens, -1), (padding, (0, 0)))
    total = _sum_chunks(
        model,
        models.head_params(model, params),
        x_ND.reshape(chunks, 1, size, -1),
        (label_N.reshape(chunks, 1, size), jnp.arange(chunks)),
    )
    return total, (label_N != IGNORED).sum().astype(jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_chunks(
    model: Model, head: Params, x_C1SD: jax.Array, labels: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Return the summed cross-entropy of C chunks of tokens, float32.

    A chunk's gradient is computed together with its loss. So no logits are stored for the backward
    pass or computed again in it.

    Args:
        head: Parameters of the head; only the differentiated ones have a gradient.
        x_C1SD: The final norm's output.
        labels: Labels `[C, 1, S]` and numbers `[C]` of the chunks.
    """
    return jax.lax.map(lambda chunk: _chunk_loss(model, head, *chunk), (x_C1SD, labels)).sum()


@partial(_sum_chunks.defjvp, symbolic_zeros=True)
def _(model: Model, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (head, *chunks), (head_tangent, x_tangent, _) = primals, tangents
    arrays, structure = jax.tree.flatten(head)
    moved = jax.tree.leaves(head_tangent)
    trained = {i: x for i, x in enumerate(arrays) if not isinstance(moved[i], SymbolicZero)}

    def loss(trained: dict[int, jax.Array], *chunk: Any) -> jax.Array:
        leaves = [trained.get(i, x) for i, x in enumerate(arrays)]
        return _chunk_loss(model, jax.tree.unflatten(structure, leaves), *chunk)

    def add_chunk(sums: Any, chunk: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        total, (gradient, x_gradient) = jax.value_and_grad(loss, (0, 1))(trained, *chunk)
        sums = jax.tree.map(lambda old, new: old + new.astype(jnp.float32), sums, gradient)
        return sums, (total, x_gradient)

    zeros = {i: jnp.zeros(x.shape, jnp.float32) for i, x in trained.items()}
    sums, (totals, x_gradient) = jax.lax.scan(add_chunk, zeros, tuple(chunks))
    terms = [(gradient, moved[i]) for i, gradient in sums.items()]
    terms += [] if isinstance(x_tangent, SymbolicZero) else [(x_gradient, x_tangent)]
    products = [jnp.vdot(g.astype(jnp.float32), t.astype(jnp.float32)) for g, t in terms]
    return totals.sum(), sum(products, jnp.zeros((), jnp.float32))


def _chunk_loss(
    model: Model, head: Params, x_1SD: jax.Array, labels: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Return the summed cross-entropy of one chunk; its number selects the dropout mask."""
    label_1S, number = labels

    def fold_key(leaf: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(leaf, number) if is_key else leaf

    logits = models.compute_logits(model, jax.tree.map(fold_key, head), x_1SD)
    return cross_entropy(logits, label_1S)[0]


def log_likelihoods(logits_BTV: jax.Array, label_BT: jax.Array, over: AxisNames = ()) -> jax.Array:
    """Return the log-probability of each label, float32 `[B, T]`; 0 where it is `IGNORED`.

    over: as in `ops.token_logprobs`.
    """
    counted_BT = label_BT != IGNORED
    safe_BT = jnp.where(counted_BT, label_BT, 0)
    logprob_BT = log_likelihood(logits_BTV.astype(jnp.float32), safe_BT, over)
    return jnp.where(counted_BT, logprob_BT, 0.0)


def cross_entropy(
    logits_BTV: jax.Array, label_BT: jax.Array, over: AxisNames = ()
) -> tuple[jax.Array, jax.Array]:
    """Return the summed negative log-likelihood in nats, and the number of labels, float32 each.

    A label is the token that follows the token of its column. `IGNORED` labels do not count; if
    there are no others, both results are 0. over: as in `ops.token_logprobs`.
    """
    counted = (label_BT != IGNORED).sum().astype(jnp.float32)
    return -log_likelihoods(logits_BTV, label_BT, over).sum(), counted
