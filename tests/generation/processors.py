"""Shared by the tests of processors: random scores, contexts, and one compiled call for each."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxllm.generation.sampling.sampler import Context, Processor, row_keys

APPLY: Callable[..., jax.Array] = jax.jit(lambda scores, p, context: p(scores, context))


def make_context(
    rows: Sequence[Sequence[int]], prompts: Sequence[int] = (), slots: int = 24
) -> Context:
    """Return a sampler's context with rows of unequal length."""
    token_BL = np.full((len(rows), slots), -1, np.int32)
    for row, tokens in enumerate(rows):
        token_BL[row, : len(tokens)] = tokens
    prompt_B = np.array(prompts or [0] * len(rows), np.int32)
    length_B = np.array([len(tokens) for tokens in rows], np.int32)
    return Context(*map(jnp.asarray, (token_BL, prompt_B, length_B)), row_keys(0, len(rows)))


def apply(processor: Processor, scores: Any, context: Context | None = None) -> np.ndarray:
    """Return the processed scores, for an empty text without a context."""
    context = context or Context.empty(jax.random.key(0), len(scores))
    return np.asarray(APPLY(jnp.asarray(scores, jnp.float32), processor, context))


def apply_theirs(processor: Any, scores: np.ndarray, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return what a processor of transformers makes of each row by itself."""
    pairs = zip(rows, torch.tensor(scores), strict=True)
    return torch.cat([processor(torch.tensor([ids]), row_V[None]) for ids, row_V in pairs]).numpy()


def logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Return random scores `[B, V]`."""
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).astype(np.float32)
