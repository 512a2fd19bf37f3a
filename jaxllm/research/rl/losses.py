"""Policy gradients: GRPO and its two corrected forms, as an objective of the training loop.

For an answer with advantage A, whose token t has the probability ratio rho to the distribution that
it was drawn from, the loss of t is `-min(rho A, clip(rho, 1 - low, 1 + high) A) + beta (exp(d) - d
- 1)`, d the log-probability of the reference minus that of the model (Shao et al. 2024, arXiv
2402.03300, eq. 3 and 4). Advantages and the weights of tokens are constants of the rows; so one
objective has all three forms, and its gradient does not depend on how rows are batched.

rho is of the distribution *sampled from*, after temperature, truncation and grammar: the same
processors run again on the training pass's logits. The divergence is that of the models themselves.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import models, steps
from jaxllm.generation.sampling.sampler import Context, Sampler, apply_processors
from jaxllm.ops import native
from jaxllm.ops.row_sums import log_softmax
from jaxllm.ops.token_logprobs import log_likelihood, pick_token
from jaxllm.train.data.rows import IGNORED, Rows
from jaxllm.train.objective import LossOutput
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

EPSILON = 1e-4  # added to the standard deviation, as in TRL


class LossForm(NamedTuple):
    """scales: whether advantages are divided by their standard deviation. clip_high: default."""

    scales: bool
    clip_high: float


# dr-grpo: Liu et al. 2025, arXiv 2503.20783. dapo: Yu et al. 2025, arXiv 2503.14476, eq. 8, without
# its dynamic sampling and its rewards for length.
FORMS = {"grpo": LossForm(True, 0.2), "dr-grpo": LossForm(False, 0.2), "dapo": LossForm(True, 0.28)}


class AnswerRows(Rows):
    """Rows of a prompt and its answer, whose labels are the answer's tokens.

    N is the maximum number of tokens of an answer; arrays are float32, 0 after the answer's end.

    Attributes:
        logprob_BN: log-probability of each token under the distribution that it was drawn from.
        reference_BN: the same under the reference model, before any processor.
        weight_BN: weight of each token in the loss.
        advantage_B, reward_B: of the whole answer.
    """

    logprob_BN: Any
    reference_BN: Any
    weight_BN: Any
    advantage_B: Any
    reward_B: Any


def group_advantages(reward_PG: np.ndarray, form: str) -> np.ndarray:
    """Return how much better each of a prompt's G answers is than their mean, float32 `[P, G]`.

    It is computed in float64, from differences to the first answer: equal rewards give exact zeros.
    `grpo` and `dapo` divide by the sample's standard deviation (G - 1) plus `EPSILON`.
    """
    reward_PG = reward_PG.astype(np.float64)
    reward_PG = reward_PG - reward_PG[:, :1]
    advantage_PG = reward_PG - reward_PG.mean(axis=1, keepdims=True)
    if FORMS[form].scales:
        advantage_PG = advantage_PG / (reward_PG.std(axis=1, ddof=1, keepdims=True) + EPSILON)
    return advantage_PG.astype(np.float32)


def token_weights(length_B: np.ndarray, width: int, form: str) -> np.ndarray:
    """Return the weight of each token, float32 `[B, width]`, such that the loss is the weighted sum
    divided by the number of answers.

    `grpo` takes the mean over the tokens of an answer, `dapo` over those of all answers; `dr-grpo`
    divides by the constant `width`.
    """
    is_real_BN = np.arange(width)[None] < length_B[:, None]
    divisor_B = {
        "grpo": length_B,
        "dr-grpo": np.full_like(length_B, width),
        "dapo": np.full(len(length_B), length_B.mean()),
    }[form]
    return np.where(is_real_BN, 1 / divisor_B[:, None], 0).astype(np.float32)


def answer_logprobs(
    model: Model, params: Params, rows: Rows, sampler: Sampler, width: int
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probabilities of the answers' tokens, float32 `[B, width]` each: under the
    model, and under the distribution that the sampler draws from. 0 after the end.

    With `Precision.invariant` and the native kernels, both are the bits that `generate` returns.
    """
    label_BT = jnp.asarray(rows.label_BT)
    first_B = jnp.argmax(label_BT != IGNORED, axis=1)
    column_BN = first_B[:, None] + jnp.arange(width)[None]
    token_BN = jnp.take_along_axis(label_BT, column_BN, axis=1)
    is_real_BN = token_BN != IGNORED
    token_BN = jnp.where(is_real_BN, token_BN, 0)
    trace, *_ = steps.run_model(model, params, (), rows.token_BT, rows.position_BT)
    x_BND = jnp.take_along_axis(trace.norm, column_BN[..., None], axis=1)
    with native.use_one_path(model.precision.invariant):
        logits_BNV = models.compute_logits(model, models.head_params(model, params), x_BND)
    raw_BN = log_likelihood(logits_BNV, token_BN)
    text_BT, prompt_B = jnp.asarray(rows.token_BT), first_B.astype(jnp.int32) + 1
    key_B = jax.random.split(jax.random.key(0), len(prompt_B))  # no processor here draws

    def process(carry: tuple[Sampler, jax.Array], column: Any) -> Any:
        (sampler, length_B), (logits_BV, token_B) = carry, column
        context = Context(text_BT, prompt_B, length_B, key_B)  # processors stop at the length
        scores_BV = apply_processors(logits_BV, sampler, context)
        logprob_B = pick_token(log_softmax(scores_BV), token_B)
        return (sampler.observe(scores_BV, token_B), length_B + 1), logprob_B

    columns = jnp.moveaxis(logits_BNV, 1, 0), token_BN.T
    _, processed_NB = jax.lax.scan(process, (sampler.begin(len(prompt_B)), prompt_B), columns)
    return jnp.where(is_real_BN, raw_BN, 0.0), jnp.where(is_real_BN, processed_NB.T, 0.0)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The clipped loss of `AnswerRows`; the extra inputs are the sampler."""

    clip_low: float
    clip_high: float
    beta: float = 0.0

    def __call__(
        self, model: Model, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        assert isinstance(rows, AnswerRows)
        width = rows.logprob_BN.shape[1]
        return self.compute(*answer_logprobs(model, params, rows, extra_inputs, width), rows)

    def compute(self, raw_BN: jax.Array, logprob_BN: jax.Array, rows: AnswerRows) -> LossOutput:
        """Return the loss of log-probabilities as `answer_logprobs` returns them.

        extras: reward; length of the answers; `drift`, the mean of |rho - 1|, 0 in the first step
        on new answers; `clipped`, the share of tokens without a gradient; `kl`, the divergence from
        the reference. Means over tokens have the weights of the loss.
        """
        advantage_B1, weight_BN = rows.advantage_B[:, None], rows.weight_BN
        ratio_BN = jnp.exp(logprob_BN - rows.logprob_BN)
        limited_BN = jnp.clip(ratio_BN, 1 - self.clip_low, 1 + self.clip_high)
        gain_BN, limit_BN = ratio_BN * advantage_B1, limited_BN * advantage_B1
        loss_BN = -jnp.minimum(gain_BN, limit_BN)
        each = {"drift": jnp.abs(ratio_BN - 1), "clipped": (limit_BN < gain_BN).astype(jnp.float32)}
        if self.beta:
            d_BN = rows.reference_BN - raw_BN
            each["kl"] = jnp.exp(d_BN) - d_BN - 1
            loss_BN = loss_BN + self.beta * each["kl"]
        length = (weight_BN > 0).sum().astype(jnp.float32)
        extras = {"reward": rows.reward_B.sum(), "length": length}
        extras |= {name: (weight_BN * x_BN).sum() for name, x_BN in each.items()}
        answers = jnp.float32(weight_BN.shape[0])
        return LossOutput((weight_BN * loss_BN).sum(), answers, extras)
