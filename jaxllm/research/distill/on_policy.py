"""On-policy distillation: the student generates the rows (GKD, arXiv 2306.13649, algorithm 1).

Before a fraction of the steps the current student continues the rows' prompts, and the step trains
on these continuations. Which steps, and the random numbers, depend on the key of the step alone, so
a resumed run has the same rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.generation.loops.generate import generate
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.generation.sampling.truncation import Temperature
from jaxllm.research.distill.losses import remove_projections
from jaxllm.runtime.multihost import to_host
from jaxllm.train.data.rows import IGNORED, Rows, blank_rows
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


@dataclasses.dataclass(frozen=True)
class OnPolicySampler:
    """Prepares the rows of a step: `sampled(params, rows, key) -> rows`.

    The prompt of a row is the part of its first document before the first token that counts, but at
    least `prompt_tokens` tokens: in plain text, the first `prompt_tokens` tokens.

    Attributes:
        model: the student's module.
        fraction: fraction of on-policy steps (GKD's lambda).
        new_tokens: maximum number of new tokens; the row and the model's context limit them too.
        temperature: of sampling.
        eos_token_ids: ids that end a text.
    """

    model: Model
    fraction: float
    prompt_tokens: int = 16
    new_tokens: int = 128
    temperature: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    def is_on_policy(self, key: jax.Array) -> bool:
        """Return whether the step with this key is on-policy."""
        return (
            self.fraction > 0
            and float(jax.random.uniform(jax.random.split(key)[0])) < self.fraction
        )

    def __call__(self, params: Params, rows: Rows, key: jax.Array) -> Rows:
        """Return the rows as they are, or as the student completes their prompts, `[..., T]`.

        Rows of padding stay. Raises what `generate` raises.
        """
        if not self.is_on_policy(key):
            return rows
        shape = np.shape(rows.token_BT)
        flat: Rows = jax.tree.map(lambda x: np.asarray(x).reshape(-1, shape[-1]), rows)
        sampled = self._generate_rows(params, flat, jax.random.split(key)[1])
        result: Rows = jax.tree.map(lambda x: x.reshape(shape), sampled)
        return result

    def _generate_rows(self, params: Params, rows: Rows, key: jax.Array) -> Rows:
        B, T = rows.token_BT.shape
        length_B = prompt_lengths(rows, self.prompt_tokens)
        has_tokens_B = length_B > 0
        width = int(length_B.max(initial=1))
        most = min(self.new_tokens, self.model.config.context_length - width + 1)
        # An empty row gets a prompt of one token; its continuation is not used.
        given_B = np.maximum(length_B, 1)
        column_T = np.arange(T)[None]
        token_BP = np.where(column_T < given_B[:, None], rows.token_BT, 0)[:, :width]
        wrote = generate(
            self.model,
            remove_projections(params),
            token_BP,
            lengths_B=given_B,
            # The last label of a row has no column, so one more token fits.
            max_new_tokens=[int(n) for n in np.clip(T + 1 - given_B, 1, most)],
            sampler=Sampler((Temperature(jnp.float32(self.temperature)),)),
            seed=jax.random.split(key, B),
            eos_token_ids=self.eos_token_ids,
        )
        new_BN, count_B = to_host((wrote.token_BT, wrote.length_B))
        made = blank_rows(B, T)
        for row in np.flatnonzero(has_tokens_B):
            begin, count = int(length_B[row]), int(count_B[row])
            text = np.concatenate([rows.token_BT[row, :begin], new_BN[row, :count]])
            columns = min(len(text) - 1, T)
            made.token_BT[row, :columns] = text[:columns]
            made.label_BT[row, begin - 1 : columns] = text[begin : columns + 1]
            made.position_BT[row, :columns] = np.arange(columns)
            made.document_BT[row, :columns] = 0
        return made


def prompt_lengths(rows: Rows, minimum: int) -> np.ndarray:
    """Return the prompt length of each row, int `[B]`; 0 for a row without labels.

    The prompt is part of the row's first document, and leaves at least one token to learn.
    """
    label_BT, document_BT = np.asarray(rows.label_BT), np.asarray(rows.document_BT)
    counts_BT = label_BT != IGNORED
    mask_BT = (document_BT == document_BT[:, :1]) & (document_BT >= 0)
    first_B = np.argmax(counts_BT & mask_BT, axis=1) + 1  # the label stands before its own token
    size_B = mask_BT.sum(axis=1)
    length_B = np.minimum(np.maximum(first_B, minimum), np.maximum(size_B, 1))
    return np.where(counts_BT.any(axis=1) & (size_B > 0), length_B, 0)
