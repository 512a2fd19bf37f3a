"""Quantization as a transform of parameters, driven by an ordered table of path rules."""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.files import as_schema, compile_pattern
from jaxllm.weights.formats import STACKED, Weight, as_format, can_stack, dense, parse
from jaxllm.weights.leaves import sparse
from jaxllm.weights.paths import Params, check_params, first_match, map_leaves
from jaxllm.whole import format_name

Rules = str | Sequence[tuple[str, str | None]]

POSITIONS: tuple[str, str | None] = (
    r"wpe\.weight",
    None,
)  # a table of positions is small, and added to everything
# A router is small, and what it gets wrong goes to another expert.
ROUTER: tuple[str, str | None] = (r".*mlp\.gate\.weight", None)
# What the name of a format alone stands for: the table of tokens and the head take 8 bits where the
# other matrices take fewer, as in llama.cpp's mixtures; they are not pruned where these are.
_TOKENS_AND_HEAD = r"(embed_tokens|embed_in|wte|lm_head)\.weight"


def rules_of(rules: Rules) -> list[tuple[str, str | None]]:
    """The ordered rows that `rules` stands for.

    Raises ConfigError for a row of another form, a broken regex or an unknown format.
    """
    rules = format_name(rules)
    if isinstance(rules, str):
        parse(rules)
        rows = [POSITIONS, ROUTER]
        if rules.startswith(("int4", "int3", "int2", "nf4")):
            rows.append((_TOKENS_AND_HEAD, "int8-f16" if rules.endswith("-f16") else "int8"))
        if sparse.parse(rules) is not None:
            rows.append((_TOKENS_AND_HEAD, rules.partition("-")[0]))
        return [*rows, (".*", rules)]
    rows = as_schema(rules, list[tuple[str, str | None]], "quantization rules", ConfigError)
    for regex, name in rows:
        compile_pattern(regex, "quantization rule")
        if name is not None:
            parse(format_name(name))
    return [(regex, format_name(name)) for regex, name in rows]


def format_at(rules: Rules, path: str, ndim: int) -> str | None:
    """The format that `rules` gives the leaf at `path`; None to leave it, as every vector is.

    Raises ConfigError for a stack of matrices (experts) that would have one of a matrix alone.
    """
    found = first_match([(r, (f,)) for r, f in rules_of(rules)], path)
    name = None if found is None or ndim < 2 else found[0]
    if name is not None and ndim > 2 and not can_stack(name):
        raise ConfigError(f"{path}: experts cannot be {name}: give them {STACKED} by a rule")
    return name


def quantize(params: Params, rules: Rules) -> Params:
    """The parameters with their matrices in the formats that the first matching rule names.

    rules: ordered rows `(regex, format or None)` as `weights.paths` reads them, such as
    `[(r"lm_head", None), (r"layers\\.0", "int8"), (r".*", "int4-g64")]`, with formats as in
    `weights.formats`; or the name of one format for all matrices ("int8", "int4", "bf16-packed"),
    where 4 bits or fewer leave the tokens' table and the head at 8, "int8-2:4" and its like leave
    them as int8 and its like, and nothing changes the positions' table or a router of experts.
    Norms and biases stay.

    Raises ConfigError as `rules_of` does. Memory beside the result: one block of rows.
    """

    check_params(params)

    def change(path: str, leaf: Weight) -> Weight:
        name = format_at(rules, path, leaf.ndim)
        return leaf if name is None else as_format(leaf, name)

    return map_leaves(change, params)


def dequantize(params: Params) -> Params:
    """The parameters with every leaf an array: float32 for integers, bfloat16 for packed ones."""
    check_params(params)
    return map_leaves(lambda _, leaf: jnp.asarray(dense(leaf)), params)
