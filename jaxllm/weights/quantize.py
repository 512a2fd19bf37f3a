"""Quantization as a transform of parameters, driven by an ordered table of path rules."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern
from jaxllm.runtime.schema import as_schema
from jaxllm.runtime.validation import canonical_dtype
from jaxllm.weights.formats import STACKABLE, Weight, as_format, can_stack, parse_format, to_dense
from jaxllm.weights.paths import Params, check_params, first_match, map_leaves
from jaxllm.weights.types.block_weight import FALLBACKS, SUPER

Rules = str | Sequence[tuple[str, str | None]]

# Matrices that stay as they are if a format's name stands for all rules. The position table is
# small, and its errors reach every token. A router is small, and its errors send tokens to other
# experts. A score head has few rows, and its errors are those of the scores.
KEPT_RULES: tuple[tuple[str, str | None], ...] = (
    (r"wpe\.weight", None),
    (r".*(mlp\.(gate|router|shared_expert_gate)|moe\.proj)\.weight", None),
    (r"score\.weight", None),
)
# If a format's name stands for all rules: the token table and the head keep 8 bits if the other
# matrices have fewer, as in llama.cpp's mixtures, and they are never pruned.
_TOKENS_AND_HEAD = r"(embed_tokens|embed_in|wte|lm_head)\.weight"
# What "int4" stands for as all rules: llama.cpp's four bits, with more for the matrices that lose
# most, as in its mixtures. A fused query, key and value matrix has four.
_VALUE_AND_DOWN = r".*\.(v_proj|down_proj|dense_4h_to_h|mlp\.c_proj)"
FOUR_BIT_RULES: tuple[tuple[str, str | None], ...] = (
    *KEPT_RULES,
    (_TOKENS_AND_HEAD, "int8"),
    (_VALUE_AND_DOWN, "q6_k"),
    (".*", "q4_k"),
)


def resolve_rules(rules: Rules) -> list[tuple[str, str | None]]:
    """Return the ordered rows that `rules` stands for.

    Raises:
        ConfigError: for a malformed row, an invalid regex or an unknown format.
    """
    rules = canonical_dtype(rules)
    if rules == "int4":
        return [*FOUR_BIT_RULES]
    if isinstance(rules, str):
        dense = parse_format(rules).dense_format
        rows = [*KEPT_RULES]
        if rules.startswith(("int4", "int3", "int2", "nf4", *FALLBACKS)):
            rows.append((_TOKENS_AND_HEAD, "int8-f16" if rules.endswith("-f16") else "int8"))
        if dense is not None:
            rows.append((_TOKENS_AND_HEAD, dense))
        return [*rows, (".*", rules)]
    names = str, type(None)
    if isinstance(rules, tuple) and all(
        isinstance(row, tuple) and all(isinstance(x, names) for x in row) for row in rules
    ):
        return list(_check_rows(rules))
    return _check_rows.__wrapped__(rules)


@lru_cache(maxsize=16)  # a model's rules are resolved for each of its parameters
def _check_rows(rules: Any) -> list[tuple[str, str | None]]:
    rows = as_schema(rules, list[tuple[str, str | None]], "quantization rules", ConfigError)
    for regex, name in rows:
        compile_pattern(regex, "quantization rule")
        if name is not None:
            parse_format(canonical_dtype(name))
    return [(regex, canonical_dtype(name)) for regex, name in rows]


def is_convolution(shape: tuple[int, ...]) -> bool:
    """Return whether a parameter of this shape is a convolution by channel, `[X, 1, L]`."""
    return len(shape) == 3 and shape[1] == 1


def find_format(rules: Rules, path: str, shape: tuple[int, ...]) -> str | None:
    """Return the format that `rules` gives the leaf of `shape` at `path`; None for biases, vectors
    and convolutions.

    Rows that are not whole blocks of q4_k, q5_k or q6_k have the format of `FALLBACKS`.

    Raises:
        ConfigError: if a stack of matrices (experts) would get a format that cannot be stacked.
    """
    match = first_match([(r, (f,)) for r, f in resolve_rules(rules)], path)
    plain = len(shape) < 2 or is_convolution(shape) or path.endswith(".bias")
    name = None if match is None or plain else match[0]
    if name in FALLBACKS and shape[-1] % SUPER:
        return FALLBACKS[name]
    if name is not None and len(shape) > 2 and not can_stack(name):
        raise ConfigError(
            f"{path}: experts cannot be {name}. Add a rule that makes them {STACKABLE}"
        )
    return name


def quantize(params: Params, rules: Rules) -> Params:
    """Convert each matrix to the format of the first rule that matches it. Norms and biases stay.

    Memory besides the result: one block of rows.

    Args:
        rules: ordered rows `(regex, format or None)` as in `weights.paths`, such as `[(r"lm_head",
            None), (r"layers\\.0", "int8"), (r".*", "int4-g64")]`, with formats as in
            `weights.formats`. Or one format's name for all matrices ("int8", "int4-g64",
            "bf16-packed"), or "int4" (`FOUR_BIT_RULES`). With a name, the position table, MoE
            routers and score heads are left alone; formats of 6 bits or fewer keep the token table
            and the head at 8 bits; formats that leave out zeros keep theirs.

    Raises:
        ConfigError: as `resolve_rules` does.
    """

    check_params(params)

    def change(path: str, leaf: Weight) -> Weight:
        name = find_format(rules, path, leaf.shape)
        return leaf if name is None else as_format(leaf, name)

    return map_leaves(change, params)


def dequantize(params: Params) -> Params:
    """Convert every weight to an array: float32 for integers, bfloat16 for `bf16-packed`."""
    check_params(params)
    return map_leaves(lambda _, leaf: jnp.asarray(to_dense(leaf)), params)
