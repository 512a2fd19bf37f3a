"""Processors that remove the tokens that a grammar does not allow.

`AutomatonMask` follows an automaton with a state per row, in JAX alone. `TextMask` asks Python for
the mask of each row's text (`grammar.token_masks`), for grammars that are no automata, and for
batches whose rows have different grammars.

A row without any allowed token writes one that is not allowed, and then ends: those who read its
tokens check them (`completion`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.generation.sampling.constraints import MissingIds
from jaxllm.generation.sampling.sampler import GREEDY, Context, Processor, Sampler
from jaxllm.grammar.automaton import TokenAutomaton
from jaxllm.grammar.grammar import Grammar
from jaxllm.grammar.token_masks import mask_tokens, register
from jaxllm.grammar.vocabulary import Vocabulary
from jaxllm.ops.padding import next_power_of_two

_MIN_TABLE = 4096  # few sizes of tables mean few compiled programs


class AutomatonMask(Processor):
    """Allow the tokens of a `TokenAutomaton`.

    Attributes:
        table_X: the automaton's table, flat and padded: state x classes + class -> next state.
        class_V: the class of each token.
        classes: their number.
        end: the state after the end.
        state: int32, scalar or one per row, `[B]`.
    """

    table_X: Any
    class_V: Any
    classes: Any
    end: Any
    state: Any

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        state_B = jnp.broadcast_to(self.state, scores_BV.shape[:1])
        allowed_BV = self.table_X[state_B[:, None] * self.classes + self.class_V[None]] >= 0
        return jnp.where(allowed_BV, scores_BV, -jnp.inf)

    def begin(self, rows: int) -> "AutomatonMask":
        return self.replace(state=jnp.broadcast_to(self.state, (rows,)))

    def observe(self, scores_BV: jax.Array, token_B: jax.Array) -> "AutomatonMask":
        state_B = jnp.broadcast_to(self.state, token_B.shape)
        after_B = self.table_X[state_B * self.classes + self.class_V[token_B]]
        return self.replace(state=jnp.where(after_B < 0, self.end, after_B).astype(jnp.int32))


class TextMask(Processor):
    """Allow the tokens that `grammar.token_masks` allows after each row's generated text.

    grammar: a number of `register`, scalar or one per row, `[B]`; 0 allows every token.
    """

    grammar: Any
    size: int = struct.field(pytree_node=False, default=0)

    def __call__(self, scores_BV: jax.Array, context: Context) -> jax.Array:
        grammar_B = jnp.broadcast_to(self.grammar, context.prompt_B.shape)
        texts = context.prompt_B, context.length_B, context.token_BL
        return jnp.where(mask_tokens(grammar_B, *texts, self.size), scores_BV, -jnp.inf)


def grammar_mask(grammar: Grammar, vocabulary: Vocabulary, *, by_text: bool = False) -> Processor:
    """Return the processor of a grammar: an `AutomatonMask` if it is an automaton.

    by_text: a `TextMask` anyway; all of them share their compiled programs. Raises what
    `Grammar.compile` raises.
    """
    compiled = grammar.compile(vocabulary)
    if by_text or not isinstance(compiled, TokenAutomaton):
        return TextMask(np.int32(register(grammar, vocabulary)), size=vocabulary.size)
    states, classes = compiled.next_SC.shape
    table_X = np.full(next_power_of_two(states * classes, _MIN_TABLE), -1, np.int32)
    table_X[: states * classes] = compiled.next_SC.reshape(-1)
    numbers = np.int32(classes), np.int32(states - 1), np.int32(compiled.start)
    return AutomatonMask(*jax.device_put((table_X, compiled.class_V, *numbers)))


def only_masks(sampler: Sampler) -> Sampler:
    """Return a greedy sampler with the masks of a sampler alone."""
    kinds = MissingIds | AutomatonMask | TextMask
    masks = [p for p in sampler.processors if isinstance(p, kinds)]
    return GREEDY.replace(processors=tuple(masks))
