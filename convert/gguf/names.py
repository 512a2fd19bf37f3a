"""What tensors are called in GGUF, and how their rows lie there: a row of a table for each module.

llama.cpp's names are uniform, so families share rows. Its rotary embedding of the architecture
`llama` turns neighbours, ours the two halves of a head: `interleaved` says how rows lie for that,
whatever type they are of, since a row is whole blocks.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxllm.config import ModelConfig

Order = Callable[[ModelConfig], np.ndarray]  # of a module's rows: ours, for each of theirs


class Module(NamedTuple):
    """A module: its path here and its name there, `*` for a layer's number in both.

    order: for each row there the number of that row here; None: as they are. plus: what numbers
    have there more than here (norms of 1 + w). single: written in F32 whatever others are written
    in, as llama.cpp has it.
    """

    ours: str
    theirs: str
    order: Order | None = None
    plus: float = 0.0
    single: bool = False


class Named(NamedTuple):
    """A parameter: its path here, its name there, and its module."""

    path: str
    name: str
    module: Module


def interleaved(heads: str) -> Order:
    """The rows of each head's two halves in turn: those of `heads`, a field of the configuration.

    llama.cpp's `LlamaModel.permute`, which its converter does to queries and keys.
    """

    def order(config: ModelConfig) -> np.ndarray:
        rows = getattr(config, heads) * config.head_dim
        by_half = np.arange(rows).reshape(-1, 2, config.head_dim // 2)
        return by_half.swapaxes(1, 2).reshape(-1)

    return order


LLAMA = (
    Module("embed_tokens", "token_embd"),
    Module("norm", "output_norm"),
    Module("lm_head", "output"),
    Module("layers.*.input_layernorm", "blk.*.attn_norm"),
    Module("layers.*.self_attn.q_proj", "blk.*.attn_q", interleaved("num_attention_heads")),
    Module("layers.*.self_attn.k_proj", "blk.*.attn_k", interleaved("num_key_value_heads")),
    Module("layers.*.self_attn.v_proj", "blk.*.attn_v"),
    Module("layers.*.self_attn.o_proj", "blk.*.attn_output"),
    Module("layers.*.post_attention_layernorm", "blk.*.ffn_norm"),
    Module("layers.*.mlp.gate_proj", "blk.*.ffn_gate"),
    Module("layers.*.mlp.up_proj", "blk.*.ffn_up"),
    Module("layers.*.mlp.down_proj", "blk.*.ffn_down"),
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
    """Their names as parameters of ours, or as they are where no row knows them."""
    known = {row.theirs: row for row in modules}
    for name in names:
        stem, _, what = name.rpartition(".")
        number = re.search(r"(?<=\.)\d+(?=\.|$)", stem)
        general = stem if number is None else f"{stem[: number.start()]}*{stem[number.end() :]}"
        row = known.get(general)
        if row is None or what not in ("weight", "bias"):
            yield name
        else:
            path = row.ours.replace("*", number[0] if number else "*")
            yield Named(f"{path}.{what}", name, row)


def theirs(modules: Iterable[Module], paths: Iterable[str]) -> Iterator[Named | str]:
    """Our paths as parameters of theirs, or as they are where no row knows them."""
    back = {row: row._replace(ours=row.theirs, theirs=row.ours) for row in modules}
    rows = {row.ours: row for row in modules}
    for found in ours(back.values(), paths):
        if isinstance(found, str):
            yield found
        else:
            yield Named(found.name, found.path, rows[found.module.theirs])
