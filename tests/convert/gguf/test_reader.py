"""GGUF files of tiny models equal transformers' models with the same weights."""

import dataclasses
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import jaxllm
from jaxllm.cache.files import fingerprint
from jaxllm.convert.gguf.blocks import BLOCKS, BY_NAME
from jaxllm.convert.gguf.more_types import MORE_TYPES
from jaxllm.convert.gguf.reader import open_gguf
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.hf import open_hf
from jaxllm.errors import CheckpointError, ConfigError, LargerWeightsWarning
from jaxllm.lm import LM
from jaxllm.ops import native
from jaxllm.weights.formats import to_dense, weight_format
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision
from jaxllm.weights.types.block_weight import BlockWeight
from tests.convert.gguf.gguf_files import ARCHS, CONV1D, dequantized, finish, raw_of, write
from tests.convert.gguf.test_blocks import random_rows, theirs
from tests.tiny_models import ROPES, assert_close, save_random, saved_once, tokens

TYPES = [gguf.GGMLQuantizationType[name] for name in BY_NAME]
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "head_dim": 8,
    "num_attention_heads": 4, "rms_norm_eps": 1e-3,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "mistral": SMALL,
    "gpt2": {"n_layer": 1, "n_embd": 256, "n_inner": 512, "n_head": 4, "n_positions": 64},
}
KEPT = {
    "Q8_0": "int8-g32-f16", "Q5_0": "int8-g32-f16", "Q4_0": "int4-g32-f16", "Q6_K": "q6_k",
    "Q4_1": "offset/int4-g32-zp-f16", "Q5_1": "offset/int8-g32-f16",
    "Q4_K": "q4_k", "Q5_K": "q5_k",
}  # fmt: skip
IDS = tokens(2, 9)
NEEDS_KERNELS = pytest.mark.skipif(native.isa() is None, reason="there are no native kernels")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a tiny model, by its family."""
    return saved_once(tmp_path_factory, lambda family: {"spread": 0.05, **SIZES[family]})


def in_torch(directory: Path, file: Path) -> Any:
    """Return transformers' model with the weights that the package reads from a file."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config, kind = model.config, model.config.model_type
    layers, numbers = config.num_hidden_layers, dequantized(file)
    known = gguf.get_tensor_name_map(ARCHS[kind], layers)
    for name, parameter in model.named_parameters():
        array = numbers[known.get_name(name, try_suffixes=(".weight", ".bias"))]
        if kind == "gpt2" and CONV1D.search(name):
            array = array.T
        if kind != "gpt2" and ("q_proj" in name or "k_proj" in name):
            half = config.head_dim // 2
            array = array.reshape(-1, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        parameter.data.copy_(torch.tensor(np.ascontiguousarray(array)))
    return model.eval()


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.numpy()


def ours(lm: LM) -> np.ndarray:
    return np.asarray(jaxllm.forward(lm.model, lm.params, None, IDS).logits)


def assert_equal_weights(lm: LM, model: Any) -> None:
    """Check that a Llama has the weights of transformers' model, bit for bit."""
    theirs = dict(model.named_parameters())
    for path, weight in flatten(lm.params):
        name = path if path.startswith("lm_head") else f"model.{path}"
        np.testing.assert_array_equal(to_dense(weight), theirs[name].detach().numpy(), path)


@pytest.mark.parametrize(
    ("family", "kind"),
    [pytest.param("llama", kind, id=f"llama-{kind.name}") for kind in TYPES]
    + [
        pytest.param(
            "gpt2", kind, id=f"gpt2-{kind.name}",
            marks=[] if kind.name in ("BF16", "Q8_0") else [pytest.mark.full],
        )
        for kind in TYPES
    ],
)  # fmt: skip
def test_logits_equal_dequantized_transformers_model(
    kind: gguf.GGMLQuantizationType, family: str, directory: Any, tmp_path: Path
) -> None:
    """For every tensor type, weights equal the package's dequantized values bit for bit, and logits
    equal transformers'.
    """
    file = write(tmp_path / "a.gguf", directory(family), raw_of(kind))
    model = in_torch(directory(family), file)
    # Types that are loaded as float32 share one program.
    lm = jaxllm.load(file, dtype=None if kind.name in KEPT else Precision())
    formats = {weight_format(x) for _, x in flatten(lm.params) if x.ndim > 1}
    assert formats - {"float32"} == ({KEPT[kind.name]} if kind.name in KEPT else set())
    if family == "llama":  # bit for bit, rows in order
        assert_equal_weights(lm, model)
    assert_close(ours(lm), logits(model))


@pytest.mark.parametrize("first", [0, 8])
def test_types_without_format_are_exact_int8(first: int, directory: Any, tmp_path: Path) -> None:
    """Weights of random blocks, a type for each matrix, equal the package's numbers bit for bit.
    One line has the types, and their size in memory.
    """
    kinds = cycle(MORE_TYPES[first : first + 8])

    def raw(name: str, array: np.ndarray) -> Any:
        if array.ndim < 2:
            return raw_of(gguf.GGMLQuantizationType.F32)(name, array)
        kind = next(kinds)
        made = random_rows(BLOCKS[kind.type_id], len(array), array.shape[1] // kind.columns)
        if kind.name == "MXFP4":
            exponents = made[:, :: kind.nbytes]  # XLA takes subnormal scales for zero
            exponents[:] = exponents % 64 + 96
        return made, theirs(BLOCKS[kind.type_id])

    file = write(tmp_path / "a.gguf", directory("llama"), raw)
    with pytest.warns(LargerWeightsWarning, match=r"IQ\w+, .* become int8.* MB of the file take"):
        lm = jaxllm.load(file)
    found = {weight_format(x) for _, x in flatten(lm.params) if x.ndim > 1}
    assert found == {"int8-g16", "int8-g32", *(["float32"] if first == 0 else [])}
    assert_equal_weights(lm, in_torch(directory("llama"), file))


def test_q8_0_code_minus_128_is_exact(directory: Any, tmp_path: Path) -> None:
    """Q8_0 holds int8: llama.cpp writes no code below -127, other tools may."""
    kind = gguf.GGMLQuantizationType.Q8_0

    def raw(name: str, array: np.ndarray) -> Any:
        data, found = raw_of(kind)(name, array)
        if found == kind:
            data = data.copy().reshape(-1, 34)
            data[:, 2::3] = 0x80
            data = data.reshape(len(array), -1)
        return data, found

    file = write(tmp_path / "a.gguf", directory("llama"), raw)
    model, lm = in_torch(directory("llama"), file), jaxllm.load(file)
    assert_equal_weights(lm, model)
    assert_close(ours(lm), logits(model))


@pytest.mark.parametrize("kind", [k for k in TYPES if k.name in KEPT and "_K" not in k.name])
def test_padding_columns_have_zero_scale(
    kind: gguf.GGMLQuantizationType, directory: Any, tmp_path: Path
) -> None:
    """Rows of 96 columns are padded to chunks of 128; the scales of the padding are zero."""
    lm = jaxllm.load(write(tmp_path / "a.gguf", directory("mistral"), raw_of(kind)))
    leaf: Any = lm.params["layers.0"]["mlp"]["down_proj"]["weight"]
    scale = leaf.arrays()[".weight.scale" if "_1" in kind.name else ".scale"]
    assert leaf.shape == (64, 96) and not np.asarray(scale)[:, 3:].any()


def test_half_precision_weights_keep_their_dtype(directory: Any, tmp_path: Path) -> None:
    """F16 and BF16 matrices keep their dtype, norms are float32, and the cache takes the file's
    dtype.
    """
    for name, dtype in {"F16": "float16", "BF16": "bfloat16"}.items():
        kind = gguf.GGMLQuantizationType[name]
        lm = jaxllm.load(write(tmp_path / f"{name}.gguf", directory("llama"), raw_of(kind)))
        found = {path: weight_format(x) for path, x in flatten(lm.params)}
        assert set(found.values()) == {dtype, "float32"}
        assert {path for path in found if found[path] == "float32"} == {
            path for path in found if "norm" in path
        }
        assert lm.model.precision.cache == dtype


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("gpt2", {"tie_word_embeddings": False, "n_inner": None, "n_embd": 64}),
    ],
    ids=["llama, biases, tied", "gpt2, untied, default inner"],
)
def test_gguf_variants_equal_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {**SIZES[family], **({} if family == "gpt2" else SMALL), **changes}
    save_random(tmp_path / "hf", family, **sizes)
    file = write(tmp_path / "a.gguf", tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    lm = jaxllm.load(file)
    assert_close(ours(lm), logits(model))
    hf = jaxllm.load(tmp_path / "hf")
    assert lm.config == hf.config  # and so everything derived from it


LLAMA3 = {**ROPES["llama3"], "rope_theta": 5e5}


def divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Compute the divisors as llama.cpp's converter does."""
    found, old = [], rope["original_max_position_embeddings"]
    for i in range(0, head_dim, 2):
        wavelen = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        low, high = (rope[f"{end}_freq_factor"] for end in ("low", "high"))
        smooth = np.clip((old / wavelen - low) / (high - low), 0, 1)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("which", ["llama3", "another llama3", "linear", "yarn"])
def test_rope_scaling_equals_transformers(which: str, tmp_path: Path) -> None:
    """Every RoPE scaling gives transformers' logits, and survives writing; factors of unknown
    origin are read as divisors.
    """
    rope: dict[str, Any] = {
        **ROPES,
        "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
        "another llama3": LLAMA3,
    }[which]
    save_random(tmp_path / "hf", "llama", **SMALL, rope_parameters=rope)

    def also(writer: gguf.GGUFWriter) -> None:
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", divisors(rope, SMALL["head_dim"]))
            return
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

    lm = jaxllm.load(write(tmp_path / "a.gguf", tmp_path / "hf", also=also))
    kind = "divisors" if which == "another llama3" else rope["rope_type"]
    assert lm.config.rope.rope_type == kind
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert_close(ours(lm), logits(model))
    opened = open_hf(tmp_path / "hf")
    write_gguf(tmp_path / "b.gguf", opened, "F16")
    assert which == "another llama3" or open_gguf(tmp_path / "b.gguf").config == opened.config


def test_split_file_opens_from_any_part(directory: Any, tmp_path: Path) -> None:
    """Any part of a split file opens the whole model; missing or misnumbered parts raise errors."""
    write(tmp_path / "a.gguf", directory("mistral"), split_max_tensors=4)
    parts = sorted(tmp_path.iterdir())
    assert [p.name for p in parts] == [f"a-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    whole = write(tmp_path / "whole.gguf", directory("mistral"))
    expected = {path: np.asarray(x) for path, x in flatten(jaxllm.load(whole).params)}
    for part in parts[:2]:
        for path, x in flatten(jaxllm.load(part).params):
            np.testing.assert_array_equal(np.asarray(x), expected[path], path)
    parts[1].rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"a-00002-of-00003\.gguf is missing"):
        open_gguf(parts[0])
    parts[0].rename(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match="does not match its header, part 1 of 3"):
        open_gguf(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").rename(parts[1])
    with pytest.raises(CheckpointError, match="does not match its header, part 1 of 3"):
        open_gguf(parts[1])


def test_all_missing_keys_are_reported_together(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(1)
    finish(writer)
    with pytest.raises(ConfigError) as caught:
        open_gguf(tmp_path / "a.gguf")
    for key in ("embedding_length", "attention.head_count", "layer_norm_rms", "token_embd.weight"):
        assert key in str(caught.value)


def test_nonfinite_weights_are_refused(directory: Any, tmp_path: Path) -> None:
    def raw(name: str, array: np.ndarray) -> Any:
        array = np.full_like(array, np.inf) if "attn_v" in name else array
        return raw_of(gguf.GGMLQuantizationType.F16)(name, array)

    with pytest.raises(CheckpointError, match=r"v_proj\.weight holds inf"):
        jaxllm.load(write(tmp_path / "a.gguf", directory("mistral"), raw))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@NEEDS_KERNELS
def test_blocks_are_read_in_place(kind: str, directory: Any, tmp_path: Path) -> None:
    """Matrices whose rows keep their order lie in the mapped file, and those of others are copied
    in blocks; logits and fingerprints are those of copied weights.
    """
    file = write(tmp_path / "a.gguf", directory("llama"), raw_of(gguf.GGMLQuantizationType[kind]))
    opened = open_gguf(file)
    lm, copied = jaxllm.load(opened), jaxllm.load(dataclasses.replace(opened, blocks={}))
    leaves = dict(flatten(lm.params))
    mapped = {path for path, leaf in leaves.items() if isinstance(leaf, BlockWeight)}
    reordered = {path for path in leaves if "q_proj" in path or "k_proj" in path}
    assert mapped == {path for path, leaf in leaves.items() if leaf.ndim == 2}
    assert {leaves[path].type for path in mapped} == {kind}
    assert opened.nbytes == sum(leaf.nbytes for leaf in leaves.values())
    begins = {leaves[path].data.unsafe_buffer_pointer() for path in mapped - reordered}
    lying = {path: x for path, x in opened.blocks.items() if path not in reordered}
    offsets = {x.read().ctypes.data for x in lying.values()}
    assert begins == offsets and not any(begin % 64 for begin in begins)
    blocks = kind.endswith("_K")  # which are also stored as blocks
    assert blocks == any(isinstance(leaf, BlockWeight) for _, leaf in flatten(copied.params))
    np.testing.assert_array_equal(ours(lm), ours(copied))
    assert fingerprint(lm.params) == fingerprint(copied.params)
    placed = jaxllm.load(file, place=lambda path, array: None)
    assert blocks == any(isinstance(leaf, BlockWeight) for _, leaf in flatten(placed.params))
