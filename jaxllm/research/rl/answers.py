"""The rows of a step: the current model answers prompts, or scored answers of a file are read.

The random numbers of an answer depend on the key of the step and the answer's place in it, so a
resumed run has the same rows.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.errors import NonFiniteError
from jaxllm.generation.loops.finish import Finish
from jaxllm.generation.loops.generate import generate
from jaxllm.generation.sampling.sampler import GREEDY, Sampler
from jaxllm.research.rl.losses import AnswerRows, answer_logprobs, group_advantages, token_weights
from jaxllm.research.rl.prompts import Prompt, PromptRows, Reward, score_answer
from jaxllm.text.detokenizer import StreamDecoder
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.train.data.rows import Rows, blank_rows
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AnswerSampler:
    """Prepares the rows of a step: prompts `[A, P, T]` become answers `[A, P * G, T + N - 1]`.

    Attributes:
        form: of the loss, a key of `losses.FORMS`.
        group_size: G, answers per prompt.
        max_new_tokens: N, of an answer.
        sampling: the options that made `sampler`.
        reward_name: of the reward function; "" if the prompts have scored answers.
        reference: parameters of the reference model; None without one.
    """

    form: str
    group_size: int
    max_new_tokens: int
    sampling: dict[str, Any]
    reward_name: str
    model: Model = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(repr=False)
    prompts: Sequence[Prompt] = dataclasses.field(repr=False)
    reward: Reward | None = dataclasses.field(repr=False)
    sampler: Sampler = dataclasses.field(repr=False)
    eos_token_ids: tuple[int, ...] = dataclasses.field(repr=False)
    reference: Params | None = dataclasses.field(repr=False, default=None)

    def __call__(self, params: Params, rows: Rows, key: jax.Array) -> AnswerRows:
        """Raises ConfigError if the reward function fails, and what `generate` raises."""
        assert isinstance(rows, PromptRows)
        batches = len(rows.index_B)
        made = [
            self._answer_batch(params, jax.tree.map(lambda x, n=n: x[n], rows), number_key)
            for n, number_key in enumerate(jax.random.split(key, batches))
        ]
        joined: AnswerRows = jax.tree.map(lambda *x: np.stack(x), *made)
        counts_AB = (joined.weight_BN > 0).sum(axis=2)
        weight_RN = token_weights(counts_AB.reshape(-1), self.max_new_tokens, self.form)
        reward_PG = joined.reward_B.reshape(-1, self.group_size)
        return joined.replace(
            weight_BN=weight_RN.reshape(joined.weight_BN.shape),
            advantage_B=group_advantages(reward_PG, self.form).reshape(joined.reward_B.shape),
            reward_B=joined.reward_B.astype(np.float32),
        )

    def _answer_batch(self, params: Params, rows: PromptRows, key: jax.Array) -> AnswerRows:
        """Return the answers of one batch: weights 1, advantages 0, and rewards in float64."""
        G, N = self.group_size, self.max_new_tokens
        chosen = [self.prompts[i] for i in rows.index_B for _ in range(G)]
        B, W = len(chosen), rows.token_BT.shape[1]
        length_B = np.array([len(prompt.ids) for prompt in chosen], np.int32)
        if self.reward is None:
            scored = [answer for i in rows.index_B for answer in self.prompts[i].answers]
            answers = [answer.token_N for answer in scored]
            rewards, logprob_BN = [answer.reward for answer in scored], np.zeros((B, N), np.float32)
        else:
            wrote = jax.device_get(
                generate(
                    self.model, params, rows.token_BT.repeat(G, axis=0), lengths_B=length_B,
                    max_new_tokens=N, sampler=self.sampler, seed=jax.random.split(key, B),
                    eos_token_ids=self.eos_token_ids, processed_logprobs=True,
                ).replace(cache=None)
            )  # fmt: skip
            if (wrote.finish_B == Finish.NON_FINITE).any():
                raise NonFiniteError("the model returned NaN or infinite logits for an answer")
            answers = [x[:n] for x, n in zip(wrote.token_BT, wrote.length_B, strict=True)]
            logprob_BN, rewards = wrote.processed_logprob_BT, []
            for prompt, answer in zip(chosen, answers, strict=True):
                text = StreamDecoder(self.tokenizer, prompt.ids).decode_all(answer.tolist()) or ""
                rewards.append(score_answer(self.reward, prompt, text))
        made = blank_rows(B, W + N - 1)
        for row, (prompt, answer) in enumerate(zip(chosen, answers, strict=True)):
            before, end = len(prompt.ids) - 1, len(prompt.ids) + len(answer) - 1
            made.token_BT[row, :end] = [*prompt.ids, *answer][:-1]
            made.label_BT[row, before:end] = answer
            made.position_BT[row, :end] = np.arange(end)
            made.document_BT[row, :end] = 0
        if self.reward is None:  # whoever wrote them: as if the current model had
            logprob_BN = _score(self.model, params, made, self.sampler, N)[1]
        reference_BN = np.zeros((B, N), np.float32)
        if self.reference is not None:
            reference_BN = _score(self.model, self.reference, made, GREEDY, N)[0]
        is_real_BN = np.arange(N)[None] < np.array([len(answer) for answer in answers])[:, None]
        return AnswerRows(
            **vars(made),
            logprob_BN=np.asarray(logprob_BN),
            reference_BN=np.asarray(reference_BN),
            weight_BN=is_real_BN.astype(np.float32),
            advantage_B=np.zeros(B, np.float32),
            reward_B=np.array(rewards, np.float64),
        )


_score = partial(jax.jit, static_argnums=(0, 4))(answer_logprobs)
