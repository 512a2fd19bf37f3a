"""The train/validation split."""

import dataclasses

import numpy as np

from jaxllm.errors import ConfigError, TokenError
from jaxllm.train.data.examples import Examples


def part(examples: Examples, share: float, seed: int = 0) -> tuple[Examples, Examples]:
    """Return training and validation examples, split at random; both keep their order.

    A single example is cut: its end is held out. Raises ConfigError if `share` is not between 0 and
    1, TokenError if there are too few tokens to split.
    """
    if not 0 < share < 1:
        raise ConfigError(f"the held-out share must be between 0 and 1, got {share}")
    count = len(examples)
    if count == 1:
        size = len(examples.token_N)
        end = size - max(2, round(share * size))
        if end < 2:
            raise TokenError(f"{size} tokens are too few to hold some out: give validation data")
        return _tokens(examples, 0, end), _tokens(examples, end, size)
    held = np.zeros(count, bool)
    chosen = np.random.default_rng(seed).permutation(count)
    held[chosen[: min(count - 1, max(1, round(share * count)))]] = True
    return _chosen(examples, ~held), _chosen(examples, held)


def _tokens(examples: Examples, start: int, end: int) -> Examples:
    counts_N = None if examples.counts_N is None else examples.counts_N[start:end]
    begin_E = np.array([0, end - start], np.int64)
    return dataclasses.replace(
        examples, token_N=examples.token_N[start:end], counts_N=counts_N, begin_E=begin_E
    )


def _chosen(examples: Examples, chosen_E: np.ndarray) -> Examples:
    length_E = np.diff(examples.begin_E)
    chosen_N = np.repeat(chosen_E, length_E)
    begin_E = np.concatenate([[0], np.cumsum(length_E[chosen_E])]).astype(np.int64)
    counts_N = None if examples.counts_N is None else examples.counts_N[chosen_N]
    return dataclasses.replace(
        examples, token_N=examples.token_N[chosen_N], counts_N=counts_N, begin_E=begin_E
    )
