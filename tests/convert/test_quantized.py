"""GPTQ's and AWQ's checkpoints: every integer is kept, the rest is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import jaxllm
from jaxllm.convert.engine import open_hf
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import as_leaf, format_of
from jaxllm.weights.paths import flatten
from tests.convert import hub
from tests.twins import tokens

# What is written, and the formats that the leaves have then.
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gptq": ({}, {"int4-g32-zp-f16"}),
    "gptq, symmetric": ({"symmetric": True}, {"int4-g32-f16"}),
    "gptq, second version": ({"less": 0}, {"int4-g32-zp-f16"}),
    "gptq, act-order": ({"act_order": True}, {"ordered/int4-g32-zp-f16"}),
    "gptq, a row": ({"group": -1, "act_order": True}, {"int4-g128-zp-f16"}),
    "gptq, 3 bits": ({"bits": 3}, {"int3-g32-zp-f16"}),
    "gptq, 2 bits, act-order": (
        {"bits": 2, "symmetric": True, "act_order": True}, {"ordered/int2-g32-f16"},
    ),
    "gptq, 8 bits, a row": ({"bits": 8, "group": -1, "symmetric": True}, {"int8-zp-f16"}),
    "gptq, 8 bits": ({"bits": 8}, {"int8-g32-zp-f16"}),
    "gptq, wide scales": ({"group": 64, "scales": np.float32}, {"int4-g64-zp"}),
    "gptq, odd groups": ({"group": 96}, {"int4-g32-zp-f16"}),
    "awq": ({"method": "awq"}, {"int4-g32-zp-f16"}),
    "awq, large groups": ({"method": "awq", "group": 256}, {"int4-g128-zp-f16"}),
    "awq, the head too": ({"method": "awq", "group": -1, "head": True}, {"int4-g128-zp-f16"}),
}  # fmt: skip


def leaves(directory: Path) -> dict[str, Any]:
    return {p: x for p, x in flatten(jaxllm.load(directory).params) if not hasattr(x, "at")}


def codes(leaf: Any) -> np.ndarray:
    """The codes of a leaf's bytes, as `weights.leaves.digits` says where they lie."""
    data, bits = np.asarray(leaf.data), leaf.bits
    i = np.arange(data.shape[1] * 8 // bits)
    if bits == 8:
        return data
    if bits == 4:
        return data[:, 16 * (i // 32) + i % 16] >> (4 * (i // 16 % 2)).astype(np.uint8) & 15
    chunk, j = i // 128, i % 128
    begin = chunk * {2: 32, 3: 48}[bits]
    lower = data[:, begin + j % 32] >> (2 * (j // 32)).astype(np.uint8) & 3
    if bits == 2:
        return lower
    return lower | (data[:, begin + 32 + j % 16] >> (j // 16).astype(np.uint8) & 1) << 2


def values(leaf: Any) -> np.ndarray:
    """What the pieces of a leaf mean, by the formula of its class."""
    if leaf.composed:
        out = np.empty(leaf.shape, np.float32)
        out[:, np.asarray(leaf.order)] = values(leaf.weight)
        return out
    q, scale = codes(leaf).astype(np.float32), np.asarray(leaf.scale)
    middle = 2 ** (leaf.bits - 1)
    zero = np.full(scale.shape, middle) if leaf.zero is None else np.asarray(leaf.zero)
    wide = [np.repeat(x.astype(np.float32), q.shape[1] // x.shape[1], 1) for x in (zero, scale)]
    weight = (q - wide[0]) * wide[1]
    assert not weight[:, leaf.shape[1] :].any(), "what is added stands for zero"
    return weight[:, : leaf.shape[1]]


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_exactly_what_the_file_means(case: str, tmp_path: Path) -> None:
    options, formats = CASES[case]
    model = hub.random_model("llama", num_hidden_layers=1, vocab_size=136)
    meant = hub.write(tmp_path, model, **options)
    found = leaves(tmp_path)
    assert found.keys() == meant.keys()
    assert {format_of(leaf) for leaf in found.values()} == formats
    for path, leaf in found.items():
        np.testing.assert_array_equal(values(leaf), meant[path], err_msg=path)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"act_order": True, "shards": True}),
        ("llama", {"method": "awq", "group": 64}),
        ("gpt2", {"bits": 3, "group": -1, "symmetric": True}),
    ],
)
def test_logits_are_those_of_transformers_on_the_dequantized_model(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = hub.random_model(family)
    meant = hub.write(tmp_path, model, **options)
    lm = jaxllm.load(tmp_path, dtype="float32")
    quantized = {p: leaf for p, leaf in flatten(lm.params) if p in meant}
    for path, leaf in quantized.items():
        np.testing.assert_array_equal(np.asarray(as_leaf(leaf).dense()), meant[path])
    token_BT = tokens(2, 19)
    with torch.no_grad():
        theirs = model(torch.tensor(token_BT)).logits.numpy()
    ours = np.asarray(jaxllm.forward(lm.model, lm.params, None, token_BT).logits)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    greedy = model.generate(torch.tensor(token_BT[:1]), max_new_tokens=8, do_sample=False)
    text = lm.generate(token_BT[0].tolist(), max_new_tokens=8)
    assert text.tokens == greedy[0, 19:].tolist()
