"""GGUF's tensor names and row orders: a table with a row per module.

llama.cpp's names are uniform, so families share rows. For the architecture `llama` its RoPE rotates
adjacent pairs, ours the two halves of a head. `interleaved` gives the row order that converts
between them; it works for every tensor type, since a row is whole blocks.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxllm.config import ModelConfig

Order = Callable[[ModelConfig], np.ndarray]  # our row for each of GGUF's
Part = Callable[[ModelConfig], tuple[int, int, int]]  # a tensor's rows: first, end, total


class Module(NamedTuple):
    """A module: our path and GGUF's name, both with `*` for the layer number.

    Attributes:
        order: Our row for each row in GGUF; None: the same order.
        plus: The number added to weights in GGUF (1 for norms stored as 1 + w).
        single: Whether it is always written in F32, like llama.cpp does.
        part: The rows of this module in a tensor that fuses several.
    """

    ours: str
    theirs: str
    order: Order | None = None
    plus: float = 0.0
    single: bool = False
    part: Part | None = None


class Named(NamedTuple):
    """A parameter: our path, its GGUF name, and its module."""

    path: str
    name: str
    module: Module


def interleaved(heads: str) -> Order:
    """Return the order that interleaves the two halves of each head.

    It is `LlamaModel.permute`, which llama.cpp's converter applies to queries and keys.

    Args:
        heads: The config field with the head count.
    """

    def order(config: ModelConfig) -> np.ndarray:
        rows = getattr(config, heads) * config.head_dim
        by_half = np.arange(rows).reshape(-1, 2, config.head_dim // 2)
        return by_half.swapaxes(1, 2).reshape(-1)

    return order


def part_of(rows: Callable[[ModelConfig], tuple[int, ...]], number: int) -> Part:
    """Return the rows of module `number` in a fused tensor. rows: the row count of each module."""

    def part(config: ModelConfig) -> tuple[int, int, int]:
        counts = rows(config)
        begin = sum(counts[:number])
        return begin, begin + counts[number], sum(counts)

    return part


def _of_heads(config: ModelConfig) -> tuple[int, ...]:
    K = config.num_key_value_heads * config.head_dim
    return (config.num_attention_heads * config.head_dim, K, K)


def _gate_and_up(config: ModelConfig) -> tuple[int, ...]:
    return (config.intermediate_size,) * 2


_ATTENTION, _MLP = "layers.*.self_attn", "layers.*.mlp"
_QUERIES, _KEYS = interleaved("num_attention_heads"), interleaved("num_key_value_heads")
_ENDS = (
    Module("embed_tokens", "token_embd"),
    Module("norm", "output_norm"),
    Module("lm_head", "output"),
)
_QKVO = (
    Module(f"{_ATTENTION}.q_proj", "blk.*.attn_q"),
    Module(f"{_ATTENTION}.k_proj", "blk.*.attn_k"),
    Module(f"{_ATTENTION}.v_proj", "blk.*.attn_v"),
    Module(f"{_ATTENTION}.o_proj", "blk.*.attn_output"),
)
_TURNED = (
    _QKVO[0]._replace(order=_QUERIES),
    _QKVO[1]._replace(order=_KEYS),
    *_QKVO[2:],
)
_NORMED = (
    Module(f"{_ATTENTION}.q_norm", "blk.*.attn_q_norm"),
    Module(f"{_ATTENTION}.k_norm", "blk.*.attn_k_norm"),
)
_NORMS = (
    Module("layers.*.input_layernorm", "blk.*.attn_norm"),
    Module("layers.*.post_attention_layernorm", "blk.*.ffn_norm"),
)
_GATED = (
    Module(f"{_MLP}.gate_proj", "blk.*.ffn_gate"),
    Module(f"{_MLP}.up_proj", "blk.*.ffn_up"),
    Module(f"{_MLP}.down_proj", "blk.*.ffn_down"),
)
_EXPERTS = (
    Module(f"{_MLP}.gate", "blk.*.ffn_gate_inp", single=True),
    Module(f"{_MLP}.experts.gate_proj", "blk.*.ffn_gate_exps"),
    Module(f"{_MLP}.experts.up_proj", "blk.*.ffn_up_exps"),
    Module(f"{_MLP}.experts.down_proj", "blk.*.ffn_down_exps"),
)
_AFTER = (
    Module("layers.*.post_attention_layernorm", "blk.*.post_attention_norm"),
    Module("layers.*.post_feedforward_layernorm", "blk.*.post_ffw_norm"),
)
_AROUND = (
    Module("layers.*.input_layernorm", "blk.*.attn_norm"),
    Module("layers.*.pre_feedforward_layernorm", "blk.*.ffn_norm"),
    *_AFTER,
)


def _plus_one(modules: tuple[Module, ...]) -> tuple[Module, ...]:
    """Return modules with norms stored as 1 + w, like llama.cpp's converter for Gemma does.

    The model multiplies by exactly the stored x: 1 + (x - 1) = x in float32 for x >= 1/2, and
    below that x - 1 is exact if x was computed as 1 + w. w itself is recovered if 1 + w was exact:
    for |w| >= 2^-16 in bfloat16 and >= 2^-13 in float16.
    """
    return tuple(m._replace(plus=1.0) if "norm" in m.theirs else m for m in modules)


# In these llama.cpp rotates adjacent pairs, so query and key rows are permuted: its converter does
# this for all subclasses of its `LlamaModel` (Mistral, Mixtral, Granite, SmolLM3).
LLAMA = (*_ENDS, *_NORMS, *_TURNED, *_GATED)
MIXTRAL = (*_ENDS, *_NORMS, *_TURNED, *_EXPERTS)
# In all others it rotates the halves of a head, like jaxllm.
QWEN2 = (*_ENDS, *_NORMS, *_QKVO, *_GATED)
QWEN3 = (*QWEN2, *_NORMED)
QWEN3_MOE = (*_ENDS, *_NORMS, *_QKVO, *_NORMED, *_EXPERTS)
GEMMA2 = _plus_one((*_ENDS[:2], *_AROUND, *_QKVO, *_GATED))  # always tied
GEMMA3 = _plus_one((*_ENDS, *_AROUND, *_QKVO, *_NORMED, *_GATED))
OLMO2 = (*_ENDS, *_AFTER, *_QKVO, *_NORMED, *_GATED)
PHI3 = (
    *_ENDS,
    *_NORMS,
    *(
        Module(f"{_ATTENTION}.{x}_proj", "blk.*.attn_qkv", part=part_of(_of_heads, i))
        for i, x in enumerate("qkv")
    ),
    _QKVO[3],
    *(
        Module(f"{_MLP}.{name}", "blk.*.ffn_up", part=part_of(_gate_and_up, i))
        for i, name in enumerate(("gate_proj", "up_proj"))
    ),
    _GATED[2],
)
GPT_NEOX = (  # QKV rows are per head in Hugging Face's files, concatenated in GGUF
    Module("embed_in", "token_embd"),
    Module("final_layer_norm", "output_norm"),
    Module("lm_head", "output"),
    *_NORMS,
    *(
        Module(f"layers.*.attention.{x}_proj", "blk.*.attn_qkv", part=part_of(_of_heads, i))
        for i, x in enumerate("qkv")
    ),
    Module("layers.*.attention.dense", "blk.*.attn_output"),
    Module("layers.*.mlp.dense_h_to_4h", "blk.*.ffn_up"),
    Module("layers.*.mlp.dense_4h_to_h", "blk.*.ffn_down"),
)
GPT2 = (
    Module("wte", "token_embd"),
    Module("wpe", "position_embd", single=True),
    Module("ln_f", "output_norm"),
    Module("lm_head", "output"),
    Module("h.*.ln_1", "blk.*.attn_norm"),
    Module("h.*.attn.c_attn", "blk.*.attn_qkv"),
    Module("h.*.attn.c_proj", "blk.*.attn_output"),
    Module("h.*.ln_2", "blk.*.ffn_norm"),
    Module("h.*.mlp.c_fc", "blk.*.ffn_up"),
    Module("h.*.mlp.c_proj", "blk.*.ffn_down"),
)


def ours(modules: Iterable[Module], names: Iterable[str]) -> Iterator[Named | str]:
    """Yield the parameter for each GGUF name, or the name itself if no row matches."""
    known: dict[str, list[Module]] = {}
    for row in modules:
        known.setdefault(row.theirs, []).append(row)
    for name in names:
        stem, _, what = name.rpartition(".")
        number = re.search(r"(?<=\.)\d+(?=\.|$)", stem)
        general = stem if number is None else f"{stem[: number.start()]}*{stem[number.end() :]}"
        rows = known.get(general)
        if rows is None or what not in ("weight", "bias"):
            yield name
            continue
        for row in rows:
            path = row.ours.replace("*", number[0] if number else "*")
            yield Named(f"{path}.{what}", name, row)


def theirs(modules: Iterable[Module], paths: Iterable[str]) -> Iterator[Named | str]:
    """Yield the parameter for each of our paths, or the path itself if no row matches."""
    back = {row: row._replace(ours=row.theirs, theirs=row.ours) for row in modules}
    rows = {row.ours: row for row in modules}
    for found in ours(back.values(), paths):
        if isinstance(found, str):
            yield found
        else:
            yield Named(found.name, found.path, rows[found.module.theirs])
