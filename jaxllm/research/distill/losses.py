"""Distillation losses: a divergence between next-token distributions of teacher and student.

All are generalized Jensen-Shannon divergences (GKD, arXiv 2306.13649, eq. 1) between the teacher's
P and the student's Q, with the mixture M = beta P + (1 - beta) Q:

    beta = 0        KL(P || Q), forward: mode-covering
    0 < beta < 1    beta KL(P || M) + (1 - beta) KL(Q || M)
    beta = 1        KL(Q || P), reverse: mode-seeking

They take log-probabilities of the whole vocabulary, or of the teacher's top-k tokens and all others
in one bucket. The student's distribution is put into the same k + 1 buckets. Their divergence is a
lower bound of that over the whole vocabulary (data processing inequality), and equal to it at
k = V.

Either the teacher runs within the step (`OnlineTeacherLoss`, whose `extra_inputs` is its
parameters), or its outputs were recorded before (`RecordedTeacherLoss`, whose rows are
`DistillRows`). Both return sums and weights as in `train.objective`, so accumulated batches weight
each token equally.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.divergence import kl_divergence
from jaxllm.ops.products import einsum
from jaxllm.ops.token_logprobs import map_rows
from jaxllm.runtime.validation import check_seed
from jaxllm.train.data.rows import IGNORED, Ints, Rows
from jaxllm.train.objective import LossOutput, forward, log_likelihoods
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

MIN_LOGPROB = -1e4  # the log-probability of an impossible token: finite, and its exponential is 0


PARAMS_KEY = "distill"
Distance = Literal["mse", "cosine"]
States = Sequence[jax.Array]


class DistillLossConfig(NamedTuple):
    """The distillation loss `alpha T^2 D + (1 - alpha) CE`.

    D is the divergence `beta` of both distributions at temperature T, CE the cross-entropy with the
    labels at temperature 1. The T^2 makes the size of the gradient independent of T (Hinton et al.
    2015, arXiv 1503.02531, section 2).
    """

    beta: float = 0.0
    temperature: float = 1.0
    alpha: float = 1.0


def divergence(p_XV: jax.Array, q_XV: jax.Array, beta: float) -> jax.Array:
    """Return the generalized Jensen-Shannon divergence in nats, `[..., V]` to `[...]`.

    It is never negative; if both distributions are equal, it and its gradient are exactly 0.

    Args:
        p_XV, q_XV: finite log-probabilities of teacher and student.
    """
    if beta == 0:
        return kl_divergence(p_XV, q_XV)
    if beta == 1:
        return kl_divergence(q_XV, p_XV)
    m_XV = mixture(p_XV, q_XV, beta)
    return beta * kl_divergence(p_XV, m_XV) + (1 - beta) * kl_divergence(q_XV, m_XV)


def mixture(p_XV: jax.Array, q_XV: jax.Array, beta: float) -> jax.Array:
    """Return `log(beta exp(p) + (1 - beta) exp(q))`, which is exactly p where q equals p."""
    high_XV, low_XV = jnp.maximum(p_XV, q_XV), jnp.minimum(p_XV, q_XV)
    weight_XV = jnp.where(p_XV < q_XV, beta, 1 - beta)  # of the smaller one
    return high_XV + jnp.log1p(weight_XV * jnp.expm1(low_XV - high_XV))


def log_probs(logits_XV: jax.Array, size: int, temperature: float) -> jax.Array:
    """Return float32 log-probabilities `[..., size]` of the first `size` tokens.

    The padding of the vocabulary after them is excluded from the softmax.
    """
    x_XV = logits_XV[..., :size].astype(jnp.float32)
    return jax.nn.log_softmax(x_XV if temperature == 1 else x_XV / temperature, axis=-1)


# Maps the student's logits [N, T, V] and the teacher's output for the same tokens, [N, T, ...], to
# the log-probabilities of teacher and student.
Compare = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


def distill_loss(
    logits_BTV: jax.Array,
    label_BT: jax.Array,
    teacher: Any,
    compare: Compare,
    config: DistillLossConfig,
    model: Model | None = None,
) -> LossOutput:
    """Return the loss of `DistillLossConfig` summed over all tokens with a label.

    Its parts are extras: `divergence` and `cross_entropy`.

    Each device runs one row at a time and recomputes it in the backward pass. So besides the logits
    and their gradient only one row of `[T, V]` is in memory.

    Args:
        teacher: arrays `[B, T, ...]` for `compare`.
        model: the student, whose mesh shards the rows; None for one device.
    """

    @jax.checkpoint
    def row_losses(arrays: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        logits_NTV, label_NT, teacher = arrays
        p_NTV, q_NTV = compare(logits_NTV, teacher)
        divergence_NT = divergence(p_NTV, q_NTV, config.beta)
        entropy_NT = -log_likelihoods(logits_NTV, label_NT)
        return jnp.where(label_NT == IGNORED, 0.0, divergence_NT), entropy_NT

    shards = 1 if model is None else model.num_data_shards(len(label_BT))
    divergence_BT, entropy_BT = map_rows(row_losses, (logits_BTV, label_BT, teacher), shards)
    total, entropy = divergence_BT.sum(), entropy_BT.sum()
    loss = config.alpha * config.temperature**2 * total
    if config.alpha != 1:
        loss = loss + (1 - config.alpha) * entropy
    tokens = (label_BT != IGNORED).sum().astype(jnp.float32)
    return LossOutput(loss, tokens, {"divergence": total, "cross_entropy": entropy})


def compare_logits(size: int, temperature: float) -> Compare:
    """Return a function from student and teacher logits to log-probabilities of the first `size`
    tokens.
    """

    def compare(logits_NTV: jax.Array, teacher_NTV: jax.Array) -> tuple[jax.Array, jax.Array]:
        p_NTV = jax.lax.stop_gradient(log_probs(teacher_NTV, size, temperature))
        return p_NTV, log_probs(logits_NTV, size, temperature)

    return compare


class TopKLogprobs(struct.PyTreeNode):
    """Top-k next tokens and the rest.

    Attributes:
        token_BTk: ids, best first, uint16 if the vocabulary fits, else uint32.
        logprob_BTL: float16 `[B, T, k + 1]`, the log-probabilities of these tokens, then that of
            all others together; -inf if there are no others.
    """

    token_BTk: Any
    logprob_BTL: Any


def ids_dtype(size: int) -> Any:
    """Return the dtype in a file for ids of a vocabulary of `size` tokens."""
    return np.uint16 if size <= 1 << 16 else np.uint32


def topk_logprobs(logits_XV: jax.Array, size: int, temperature: float, k: int) -> TopKLogprobs:
    """Return the buckets of logits `[..., V]`, of which the first `size` are real tokens."""
    p_XV = log_probs(logits_XV, size, temperature)
    top_Xk, token_Xk = jax.lax.top_k(p_XV, k)
    rest_X = _rest_logprob(p_XV, token_Xk)
    # An empty bucket is -inf in a file.
    rest_X = jnp.where(rest_X < MIN_LOGPROB / 2, -jnp.inf, rest_X)
    logprob_XL = jnp.concatenate([top_Xk, rest_X[..., None]], axis=-1)
    return TopKLogprobs(token_Xk.astype(ids_dtype(size)), logprob_XL.astype(jnp.float16))


def compare_topk(size: int, temperature: float) -> Compare:
    """Return a function from student logits and a teacher's `TopKLogprobs` to log-probabilities of
    both.

    The teacher's are normalized again, since they were rounded to float16.
    """

    def compare(logits_NTV: jax.Array, teacher: TopKLogprobs) -> tuple[jax.Array, jax.Array]:
        token_NTk = teacher.token_BTk.astype(jnp.int32)
        p_NTL = jnp.maximum(teacher.logprob_BTL.astype(jnp.float32), MIN_LOGPROB)
        p_NTL = p_NTL - jax.nn.logsumexp(p_NTL, axis=-1, keepdims=True)
        q_NTV = log_probs(logits_NTV, size, temperature)
        top_NTk = jnp.take_along_axis(q_NTV, token_NTk, axis=-1)
        q_NTL = jnp.concatenate([top_NTk, _rest_logprob(q_NTV, token_NTk)[..., None]], axis=-1)
        return jax.lax.stop_gradient(p_NTL), q_NTL

    return compare


def _rest_logprob(p_XV: jax.Array, token_Xk: jax.Array) -> jax.Array:
    """Return the log-probability of all other tokens: a sum, as 1 - sum(top k) would cancel."""
    named_XV = jnp.zeros(p_XV.shape, bool)
    named_XV = jnp.put_along_axis(named_XV, token_Xk, True, axis=-1, inplace=False)
    return jax.nn.logsumexp(jnp.where(named_XV, MIN_LOGPROB, p_XV), axis=-1)


@dataclasses.dataclass(frozen=True)
class HiddenLossConfig:
    """The loss of hidden states.

    Layers are numbered as in `Trace.hidden_states`: 0 is the embeddings, i the output of block i,
    and the last one comes after the final norm. The loss of a token is the mean squared difference
    (TinyBERT, arXiv 1909.10351, eq. 8), or 1 - cosine (DistilBERT, arXiv 1910.01108).

    If the widths differ, a learned matrix projects the student's states first. It is trained with
    the model, as an extra parameter `distill.LAYER.weight`, `[D teacher, D student]`.

    Attributes:
        distance: distance between two states.
        pairs: (student layer, teacher layer).
        weight: of the mean over pairs, relative to the loss of the logits.
    """

    distance: Distance = "mse"
    pairs: tuple[tuple[int, int], ...] = ()
    weight: float = 1.0


def even_pairs(student: int, teacher: int) -> tuple[tuple[int, int], ...]:
    """Return a pair for each block of the student: the teacher's layer at the same relative depth.

    student, teacher: numbers of layers.
    """
    return tuple((i, round(i * teacher / student)) for i in range(1, student + 1))


def check_pairs(hidden: HiddenLossConfig, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raise ConfigError for layers that do not exist, and if there is no pair."""
    if not hidden.pairs:
        raise ConfigError("the loss of hidden states needs pairs of layers: got none")
    for pair in hidden.pairs:
        for number, name, config in zip(
            pair, ("student", "teacher"), (student, teacher), strict=True
        ):
            if not 0 <= number <= config.num_hidden_layers:
                raise ConfigError(
                    f"hidden state {number} of the {name} does not exist: there are 0 to"
                    f" {config.num_hidden_layers}"
                )


def with_projections(
    params: Params, hidden: HiddenLossConfig, student: ModelConfig, teacher: ModelConfig, seed: int
) -> Params:
    """Return the student's parameters with a projection for each paired layer, if widths differ.

    Their normal initialization preserves the scale of a state. Raises what `check_pairs` raises.
    """
    check_pairs(hidden, student, teacher)
    if student.hidden_size == teacher.hidden_size:
        return params
    shape = (teacher.hidden_size, student.hidden_size)
    rng, projections = np.random.default_rng(check_seed(seed)), {}
    for layer in dict.fromkeys(layer for layer, _ in hidden.pairs):
        drawn = rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        projections[str(layer)] = {"weight": jax.device_put(drawn)}
    return {**params, PARAMS_KEY: projections}


def remove_projections(params: Params) -> Params:
    """Return the parameters without the projections."""
    return {path: x for path, x in params.items() if path != PARAMS_KEY}


def hidden_loss(
    hidden: HiddenLossConfig, params: Params, student: States, teacher: States, label_BT: Ints
) -> jax.Array:
    """Return the loss, summed over tokens with a label and averaged over pairs, a float32 scalar.

    params: contain the projections. student, teacher: hidden states `[B, T, D]`.
    """
    counted_BT, total = label_BT != IGNORED, jnp.zeros((), jnp.float32)
    for layer, teacher_layer in hidden.pairs:
        s_BTD = student[layer].astype(jnp.float32)
        t_BTD = jax.lax.stop_gradient(teacher[teacher_layer].astype(jnp.float32))
        if PARAMS_KEY in params:
            weight_DS = params[PARAMS_KEY][str(layer)]["weight"].astype(jnp.float32)
            s_BTD = einsum("BTS,DS->BTD", s_BTD, weight_DS)
        each_BT = _DISTANCES[hidden.distance](s_BTD, t_BTD)
        total += jnp.where(counted_BT, each_BT, 0.0).sum()
    return total / len(hidden.pairs)


def squared_distance(s_BTD: jax.Array, t_BTD: jax.Array) -> jax.Array:
    """Return the mean squared difference of states, `[B, T]`."""
    return ((s_BTD - t_BTD) ** 2).mean(axis=-1)


def cosine_distance(s_BTD: jax.Array, t_BTD: jax.Array) -> jax.Array:
    """Return `1 - cos`, `[B, T]`, as half the squared distance of unit vectors.

    So if both states are equal, value and gradient are exactly 0. Norms below 1e-6 are replaced by
    1e-6, since a state of zeros has no direction.
    """
    return ((_normalize(s_BTD) - _normalize(t_BTD)) ** 2).sum(axis=-1) / 2


def _normalize(x_BTD: jax.Array) -> jax.Array:
    square_BT1 = (x_BTD**2).sum(axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(jnp.maximum(square_BT1, 1e-12))


_DISTANCES = {"mse": squared_distance, "cosine": cosine_distance}


class DistillRows(Rows):
    """Rows with the teacher's recorded outputs `[B, T, ...]`."""

    teacher: TopKLogprobs


@dataclasses.dataclass(frozen=True)
class OnlineTeacherLoss:
    """The loss of `DistillLossConfig` with a teacher that runs in each step.

    Needs memory for the teacher's weights and its float32 logits `[B, T, V]`.

    Attributes:
        teacher: its module; its parameters are `extra_inputs` in a call.
        vocab_size: of the common vocabulary.
        hidden: the loss of hidden states, if any.
    """

    teacher: Model
    vocab_size: int
    config: DistillLossConfig
    hidden: HiddenLossConfig | None = None

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        student = forward(model, params, rows)
        teacher = jax.lax.stop_gradient(forward(self.teacher, extra_inputs, rows))
        compare = compare_logits(self.vocab_size, self.config.temperature)
        label_BT = jnp.asarray(rows.label_BT)
        loss = distill_loss(student.logits, label_BT, teacher.logits, compare, self.config, model)
        if self.hidden is None:
            return loss
        states = student.hidden_states, teacher.hidden_states
        distance = hidden_loss(self.hidden, params, *states, rows.label_BT)
        total = loss.total + self.hidden.weight * distance
        return LossOutput(total, loss.weight, {**loss.extras, "hidden": distance})


@dataclasses.dataclass(frozen=True)
class RecordedTeacherLoss:
    """The loss of `DistillLossConfig` with a teacher's outputs that were recorded at the same
    temperature.

    vocab_size: of the common vocabulary.
    """

    vocab_size: int
    config: DistillLossConfig

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        if not isinstance(rows, DistillRows):
            raise ConfigError("the rows have no recorded teacher outputs: use RecordedTeacher")
        compare = compare_topk(self.vocab_size, self.config.temperature)
        logits_BTV, label_BT = forward(model, params, rows).logits, jnp.asarray(rows.label_BT)
        return distill_loss(logits_BTV, label_BT, rows.teacher, compare, self.config, model)
