"""Grammars: which texts a row may write, as values beside the cache.

regex: automata over bytes. automaton: the same over tokens, as tables that compiled loops read.
context_free: JSON Schema, Lark and GBNF through llguidance. json_schema, json_numbers, gbnf: these
forms as Lark. grammar: `Grammar` and `Matcher`.
token_masks: masks for compiled loops, from the text so far. vocabulary: the bytes of tokens.
"""

from jaxllm.grammar.grammar import Grammar, Matcher

__all__ = ["Grammar", "Matcher"]
