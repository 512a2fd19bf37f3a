"""Random sequences of cache operations against a list that is recomputed from scratch each time.

The list has an entry for every token ever run: its id, its position, and the entries it attended
to. transformers computes the text with exactly this attention mask.
"""

import dataclasses
import os
import tempfile
from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import jaxllm
from jaxllm import cache as ops
from jaxllm.errors import CapacityError
from tests.cache.caches import close
from tests.tiny_models import VOCAB, Twin, load_twin, save_random

CAPACITY, TAIL, PROBE = 24, 8, 7


@dataclasses.dataclass
class Text:
    """One row: every token that ever ran, and the entries still in the cache, by position."""

    ran: list[tuple[int, int, frozenset[int]]] = dataclasses.field(default_factory=list)
    held: dict[int, int] = dataclasses.field(default_factory=dict)
    next_position: int = 0

    def run(self, token: int, position: int) -> None:
        seen = {entry for p, entry in self.held.items() if p < position}
        self.ran.append((token, position, frozenset(seen)))
        self.held[position] = len(self.ran) - 1
        self.next_position = max(self.next_position, position + 1)

    def copy(self) -> "Text":
        return Text(list(self.ran), dict(self.held), self.next_position)

    def tokens(self) -> list[int]:
        return [self.ran[self.held[p]][0] for p in sorted(self.held)]

    def logits(self, twin: Twin) -> np.ndarray:
        """Return transformers' logits after the probe token."""
        probed = self.copy()
        probed.run(PROBE, self.next_position)
        n = len(probed.ran)
        seen = np.eye(n, dtype=bool)
        for i, (_, _, entries) in enumerate(probed.ran):
            seen[i, list(entries)] = True
        mask = torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)
        ids = np.array([[token for token, _, _ in probed.ran]])
        at = torch.tensor([[position for _, position, _ in probed.ran]])
        return twin.logits(ids, attention_mask=mask[None, None], position_ids=at)[0, -1]


@once
def twin() -> Twin:
    directory = Path(tempfile.mkdtemp())
    save_random(directory, "llama", num_hidden_layers=2)
    return load_twin(directory)


def draw_integers(draw: Any, n: int, low: int, high: int) -> list[int]:
    return draw.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))


class Cache(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.params = twin().model, twin().params
        self.cache = jaxllm.init_cache(self.model.config, 1, CAPACITY)
        self.texts = [Text()]
        self.forks = 0

    @property
    def rows(self) -> int:
        return len(self.texts)

    @rule(draw=st.data())
    def prefill(self, draw: Any) -> None:
        lengths = draw_integers(draw, self.rows, 1, 4)
        ids = np.array([draw_integers(draw, 4, 0, VOCAB - 1) for _ in range(self.rows)])
        arguments = (self.model, self.params, self.cache, ids)
        if int(self.cache.cursor) + max(lengths) > self.cache.capacity:
            with pytest.raises(CapacityError):
                jaxllm.prefill(*arguments, lengths_B=np.array(lengths))
            return
        _, self.cache = jaxllm.prefill(*arguments, lengths_B=np.array(lengths))
        for text, row, length in zip(self.texts, ids.tolist(), lengths, strict=True):
            for token in row[:length]:
                text.run(token, text.next_position)

    @rule(draw=st.data())
    def decode(self, draw: Any) -> None:
        if int(self.cache.cursor) == self.cache.capacity:
            return
        token_B = draw_integers(draw, self.rows, 0, VOCAB - 1)
        out = jaxllm.forward(self.model, self.params, self.cache, np.array(token_B)[:, None])
        self.cache = jaxllm.commit(self.cache, out.delta)
        for text, token in zip(self.texts, token_B, strict=True):
            text.run(token, text.next_position)

    @precondition(lambda self: self.rows == 1 and self.forks < 2)
    @rule()
    def fork(self) -> None:
        self.cache = ops.fork(self.cache, 2, capacity=TAIL)
        self.texts = [self.texts[0], self.texts[0].copy()]
        self.forks += 1

    @precondition(lambda self: self.rows == 2)
    @rule(row=st.integers(0, 1))
    def branch(self, row: int) -> None:
        self.cache, self.texts = ops.branch(self.cache, row), [self.texts[row]]

    @rule(draw=st.data())
    def rewind(self, draw: Any) -> None:
        to = [
            draw.draw(st.integers(max(0, t.next_position - 3), t.next_position)) for t in self.texts
        ]
        self.cache = ops.rewind(self.cache, to=np.array(to))
        for text, end in zip(self.texts, to, strict=True):
            text.held = {p: entry for p, entry in text.held.items() if p < end}
            text.next_position = end

    @rule(draw=st.data())
    def keep(self, draw: Any) -> None:
        mask = np.ones((self.rows, self.cache.slots), bool)
        for row, text in enumerate(self.texts):
            removed = draw.draw(
                st.sets(st.sampled_from(sorted(text.held)), max_size=3)
                if text.held
                else st.just(set())
            )
            mask[row] = ~np.isin(np.asarray(self.cache.position_BS)[row], sorted(removed))
            text.held = {p: entry for p, entry in text.held.items() if p not in removed}
        self.cache = ops.keep(self.cache, mask)

    @rule()
    def compact(self) -> None:
        self.cache, self.forks = ops.compact(self.cache, capacity=3 * CAPACITY), 0

    @rule(draw=st.data())
    def patch(self, draw: Any) -> None:
        """Recompute three positions, now without the tokens removed before them."""
        start = draw.draw(st.integers(0, max(0, min(t.next_position for t in self.texts) - 3)))
        self.cache = jaxllm.recompute(self.model, self.params, self.cache, start, start + 3)
        for text in self.texts:
            for p in range(start, start + 3):
                if p in text.held:
                    text.run(text.ran[text.held[p]][0], p)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            ops.save_cache(path, self.cache, self.model, self.params)
            self.cache = ops.load_cache(path, self.model, self.params)

    @invariant()
    def cache_equals_its_texts(self) -> None:
        assert self.cache.batch == self.rows
        assert self.cache.next_position_B.tolist() == [t.next_position for t in self.texts]
        ids = np.full((self.rows, 1), PROBE)
        ours = jaxllm.forward(self.model, self.params, self.cache, ids).logits[:, 0]
        for row, text in enumerate(self.texts):
            assert self.cache.tokens(row) == text.tokens()
            close(ours[row], text.logits(twin()))


@pytest.mark.parametrize(
    ("examples", "steps"), [(4, 12), pytest.param(150, 30, marks=pytest.mark.full)]
)
def test_random_operations_equal_recomputation(examples: int, steps: int) -> None:
    """After any sequence of operations, tokens and logits equal transformers' recomputation."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Cache,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize="CI" in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
