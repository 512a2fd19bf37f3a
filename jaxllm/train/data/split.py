"""The train/validation split."""

import dataclasses

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.train.data.examples import Examples


def split_examples(examples: Examples, fraction: float, seed: int = 0) -> tuple[Examples, Examples]:
    """Return training and validation examples, split at random; both keep their order.

    A single example is cut: its end is held out. Raises ConfigError if `fraction` is not between 0
    and 1, TokenError if there are too few tokens to split.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the held-out share must be between 0 and 1, got {fraction}")
    count = len(examples)
    if count == 1:
        size = len(examples.token_N)
        end = size - max(2, round(fraction * size))
        if end < 2:
            raise TokenError(f"{size} tokens are too few to hold some out: give validation data")
        return _slice_tokens(examples, 0, end), _slice_tokens(examples, end, size)
    held = np.zeros(count, bool)
    chosen = np.random.default_rng(seed).permutation(count)
    held[chosen[: min(count - 1, max(1, round(fraction * count)))]] = True
    return _select_examples(examples, ~held), _select_examples(examples, held)


def _slice_tokens(examples: Examples, start: int, end: int) -> Examples:
    counts_N = None if examples.loss_mask_N is None else examples.loss_mask_N[start:end]
    begin_E = np.array([0, end - start], np.int64)
    return dataclasses.replace(
        examples, token_N=examples.token_N[start:end], loss_mask_N=counts_N, begin_E=begin_E
    )


def _select_examples(examples: Examples, chosen_E: np.ndarray) -> Examples:
    length_E = np.diff(examples.begin_E)
    chosen_N = np.repeat(chosen_E, length_E)
    begin_E = np.concatenate([[0], np.cumsum(length_E[chosen_E])]).astype(np.int64)
    counts_N = None if examples.loss_mask_N is None else examples.loss_mask_N[chosen_N]
    return dataclasses.replace(
        examples, token_N=examples.token_N[chosen_N], loss_mask_N=counts_N, begin_E=begin_E
    )
