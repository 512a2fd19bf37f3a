"""Gemma 4 in GGUF: what differs between kinds of layers, unread keys, and its tokenizer."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers

import jaxllm
from jaxllm.config.model import Rope
from jaxllm.convert.gguf.reader import open_gguf
from jaxllm.convert.gguf.tokenizer_read import read_tokenizer
from jaxllm.convert.gguf.tokenizer_write import make_tokenizer_keys
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.hf import write_hf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.text.formats import TokenizerTree
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.formats import to_dense
from jaxllm.weights.paths import flatten
from tests.convert.gguf.gguf_files import overwrite, raw_of, raw_tensors, write
from tests.tiny_models import save_random

SMALL = {"use_double_wide_mlp": False, "global_head_dim": 16}  # as E4B
# As 12B and 31B: values from keys, other key heads in full layers, no embeddings by layer.
LARGE = {
    "attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "global_head_dim": 16,
}  # fmt: skip


EXPERTS = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "num_attention_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last two layers read earlier keys, and have an MLP of twice the size."""
    directory = tmp_path_factory.mktemp("gemma4")
    save_random(directory, "gemma4_text", global_head_dim=16)
    return directory


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_sizes_by_layer_are_read_and_written(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Files of models with and without shared layers and value projections are llama.cpp's."""
    save_random(tmp_path / "hf", "gemma4_text", **sizes)
    there, checkpoint = (
        write(tmp_path / "a.gguf", tmp_path / "hf"),
        open_checkpoint(tmp_path / "hf"),
    )
    read = open_gguf(there)
    assert read.config == checkpoint.config
    assert ("layers.1.self_attn.v_proj.weight" in read.tensors) == (sizes is SMALL)
    for number, origin in enumerate((checkpoint, read)):
        write_gguf(tmp_path / f"{number}.gguf", origin, "F32")
        assert raw_tensors(tmp_path / f"{number}.gguf") == raw_tensors(there)
        assert open_gguf(tmp_path / f"{number}.gguf").config == checkpoint.config


def test_keys_of_layers_that_read_others_are_dropped(source: Path, tmp_path: Path) -> None:
    """Google's files have keys and values that no layer reads, and so have llama.cpp's."""
    write_hf(tmp_path / "hf", open_checkpoint(source))
    tensors = load_file(source / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        for layer in (0, 1):
            array = tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
            tensors[f"model.layers.{layer + 2}.self_attn.{name}.weight"] = array
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    file = write(tmp_path / "a.gguf", tmp_path / "hf")
    assert "blk.3.attn_k.weight" in raw_tensors(file)
    expected = open_checkpoint(source)
    for path in (tmp_path / "hf", file):
        found = open_checkpoint(path)
        assert found.config == expected.config
        assert found.tensors.keys() == expected.tensors.keys()


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_fused_experts_are_read_and_written_apart(name: str, tmp_path: Path) -> None:
    """llama.cpp's converter fuses the experts' gates with their other inputs; it reads both."""
    save_random(tmp_path / "hf", "gemma4_text", **LARGE, **EXPERTS)
    there = write(tmp_path / "a.gguf", tmp_path / "hf", raw_of(gguf.GGMLQuantizationType[name]))
    checkpoint, fused = open_checkpoint(tmp_path / "hf"), raw_tensors(there)
    write_gguf(tmp_path / "b.gguf", checkpoint, name)
    write_gguf(tmp_path / "c.gguf", open_gguf(there), name)
    assert raw_tensors(tmp_path / "c.gguf") == raw_tensors(tmp_path / "b.gguf")
    params = [dict(flatten(jaxllm.load(x).params)) for x in (there, tmp_path / "b.gguf")]
    assert params[0].keys() == params[1].keys() == dict(checkpoint.tensors).keys()
    for path, weight in params[0].items():
        np.testing.assert_array_equal(to_dense(weight), to_dense(params[1][path]), path)
        if name == "F32":
            np.testing.assert_array_equal(weight, checkpoint.tensors[path].read(), path)
    for file in (there, tmp_path / "b.gguf"):
        assert open_gguf(file).config == checkpoint.config
    written = raw_tensors(tmp_path / "b.gguf")
    assert {n for n in fused if "gate_up" not in n} == {
        n for n in written if not n.endswith(("gate_exps.weight", "up_exps.weight"))
    }


BAD: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "experts": (lambda w: w.add_expert_count(4), "num_experts_per_tok"),
    "no list of windows": (
        lambda w: w.add_uint32("gemma4.attention.sliding_window_pattern", 0), "not a number for",
    ),
    "key heads by layer": (
        lambda w: w.add_head_count_kv([2, 2, 1, 2]), "must be equal in layers of one kind",
    ),
    "key heads of other layers": (
        lambda w: w.add_head_count_kv([2, 2, 2]), "has 3 entries for 4 layers",
    ),
    "thrice as many hidden channels": (
        lambda w: w.add_feed_forward_length([56, 56, 168, 168]), "twice as large",
    ),
    "values of another size": (lambda w: w.add_value_length_swa(4), "value_length_swa is not"),
    "a rotated part of local heads": (
        lambda w: w.add_rope_dimension_count_swa(2), "rope.dimension_count_swa is not supported",
    ),
    "yarn": (
        lambda w: (
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN), w.add_rope_scaling_factor(2.0),
        ),
        "rope_freqs.weight with rope.scaling.type 'yarn'",
    ),
    "linear scaling": (
        lambda w: (
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), w.add_rope_scaling_factor(2.0),
        ),
        "rope_freqs.weight with rope.scaling.type 'linear'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_other_layers_are_refused(case: str, source: Path, tmp_path: Path) -> None:
    change, message = BAD[case]
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_gguf(write(tmp_path / "a.gguf", source, also=overwrite(change)))


def test_other_divisors_are_refused(source: Path, tmp_path: Path) -> None:
    """The pairs that turn are the first ones."""

    def also(writer: gguf.GGUFWriter) -> None:
        writer.tensors[0]["rope_freqs.weight"].tensor[3] = 1  # type: ignore[index]

    with pytest.raises(ConfigError, match=r"must be a number <= 1000000000000.0, got 1.0+15"):
        open_gguf(write(tmp_path / "a.gguf", source, also=also))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias True"),
        ({"rope": Rope(rope_type="default", rope_theta=1e6)}, r"rope Rope\(rope_type='default'"),
        ({"rope": Rope(rope_type="linear", rope_theta=1e6, factor=2.0)}, "'linear'"),
        ({"local_rope": Rope(rope_type="linear", rope_theta=1e4, factor=2.0)}, "local_rope"),
        ({"vocab_size_per_layer_input": 140}, "vocab_size_per_layer_input 140"),
    ],
)
def test_unsupported_settings_are_not_written(
    changes: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(source)
    config: Any = dataclasses.replace(checkpoint.config, **changes)
    with pytest.raises(ConfigError, match=message):
        write_gguf(tmp_path / "a.gguf", dataclasses.replace(checkpoint, config=config), "F32")


def test_scaled_rotation_is_read_as_written(source: Path, tmp_path: Path) -> None:
    """Divisors are the factor of those pairs that turn."""
    checkpoint = open_checkpoint(source)
    config: Any = checkpoint.config
    rope = dataclasses.replace(config.rope, factor=4.0)
    config = dataclasses.replace(config, rope=rope)
    write_gguf(tmp_path / "a.gguf", dataclasses.replace(checkpoint, config=config), "F32")
    assert open_gguf(tmp_path / "a.gguf").config == config


def find_vocabulary() -> tuple[tokenizers.Tokenizer, list[tuple[str, str]]]:
    """A tokenizer of Gemma's kind; two merges of one piece are not adjacent."""
    merges = [("b", "c"), ("\u2581", "a"), ("a", "bc"), ("a", "b"), ("ab", "c"), ("\n", "\n")]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abc\n", *dict.fromkeys(left + right for left, right in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    library.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_call>", "<turn|>"])
    return library, merges


def test_merges_without_scores_are_gemmas_tokenizer() -> None:
    """Such a tokenizer has model "gemma4", and the ids of its tokenizer.json; marks of calls are
    shown in texts.
    """
    library, merges = find_vocabulary()
    roles = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>"}
    tree = TokenizerTree(json.loads(library.to_str()), roles, True)
    count = library.get_vocab_size()
    keys = make_tokenizer_keys(tree, {}, {}, count)
    assert keys["tokenizer.ggml.model"] == "gemma4"
    assert keys["tokenizer.ggml.merges"] == [" ".join(merge) for merge in merges]
    read = read_tokenizer(keys | {"tokenizer.ggml.add_bos_token": False}, Path("a.gguf"))
    assert read is not None
    assert read.adds_bos  # whatever early files have
    mine = Tokenizer.from_tree(Path("a.gguf"), read)
    for text in ("", " ", "abc a b  c", "a\n\n\nbc", "\u00e9 abcabc<turn|>", "\u2581a a\t"):
        ids = mine.encode(text, parse_special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert mine.decode(ids) == library.decode(ids).replace("<turn|>", "")
    shown = {mine.token(i) for i in range(count)} - {mine.token(i) for i in mine.special_ids}
    assert "<|tool_call>" in shown
    assert "<turn|>" not in shown


def test_merges_across_line_ends_are_refused() -> None:
    """llama.cpp splits a text at line ends before it merges."""
    library, _ = find_vocabulary()
    tree = json.loads(library.to_str())
    tree["model"]["vocab"]["a\n"] = max(tree["model"]["vocab"].values()) + 3
    tree["model"]["merges"].append(["a", "\n"])
    with pytest.raises(ConfigError, match="do not follow from scores"):
        make_tokenizer_keys(TokenizerTree(tree, {}, True), {}, {}, 300)
