"""Written GGUF files, read back by the `gguf` package and by jaxllm."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.errors import CheckpointError
from jaxllm.weights.formats import to_dense
from jaxllm.weights.paths import flatten
from tests.conftest import Run, succeed
from tests.convert.gguf.gguf_files import dequantized, raw_of, raw_tensors, write
from tests.convert.gguf.test_reader import SMALL
from tests.convert.gguf.test_tokenizer import LINES, PUBLISHED, ours, trained
from tests.tiny_models import random_model, save_random, saved_once, tokens

GPT2 = {"n_layer": 1, "n_embd": 64, "n_inner": 96, "n_head": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a tiny model, by its family."""
    return saved_once(tmp_path_factory, lambda family: GPT2 if family == "gpt2" else SMALL)


def test_tensors_start_at_default_alignment(directory: Any, tmp_path: Path) -> None:
    """llama-quantize pads to the default whatever the key specifies, so no other alignment may be
    written.
    """
    path = tmp_path / "a.gguf"
    write_gguf(path, open_hf(directory("gpt2")), "Q8_0")
    reader, offset = gguf.GGUFReader(path), 0
    assert "general.alignment" not in reader.fields
    odd = 0
    for tensor in reader.tensors:
        assert tensor.data_offset == reader.data_offset + offset, tensor.name
        offset += gguf.GGUFWriter.ggml_pad(tensor.n_bytes, gguf.GGUF_DEFAULT_ALIGNMENT)
        odd += 0 < tensor.n_bytes % 64 <= 32
    assert odd, "no tensor distinguishes the alignments"
    assert path.stat().st_size == reader.data_offset + offset


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantized_integers_are_rewritten_unchanged(
    name: str, directory: Any, tmp_path: Path
) -> None:
    """Integers go back bit for bit, also if rounding again would choose another scale because the
    largest code is not -8.
    """

    def raw(tensor: str, array: np.ndarray) -> Any:
        data, kind = raw_of(gguf.GGMLQuantizationType[name])(tensor, array)
        if array.ndim > 1:
            data = data.copy().reshape(-1, 34 if name == "Q8_0" else 18)
            data[:, 2:] &= 0x77 if name == "Q4_0" else 0x3F
            data = data.reshape(len(array), -1)
        return data, kind

    theirs = write(tmp_path / "theirs.gguf", directory("mistral"), raw)
    write_gguf(tmp_path / "ours.gguf", open_checkpoint(theirs), name)
    assert raw_tensors(tmp_path / "ours.gguf") == raw_tensors(theirs)
    jaxllm.load(theirs).save(tmp_path / "native")
    write_gguf(tmp_path / "from native.gguf", open_checkpoint(tmp_path / "native"), name)
    assert raw_tensors(tmp_path / "from native.gguf") == raw_tensors(theirs)


# llama-quantize's tensor types in mixed quantizations, by layer.
MIXED = {
    ("llama", "Q4_K_M"): {
        "output": "Q6_K", "blk.0.attn_v": "Q4_K", "blk.2.attn_v": "Q6_K", "blk.3.ffn_down": "Q6_K",
        "blk.2.ffn_down": "Q6_K", "blk.1.ffn_down": "Q4_K", "token_embd": "Q4_K",
        "blk.3.attn_q": "Q4_K",
    },
    ("gpt2", "Q5_K_M"): {
        "token_embd": "Q6_K", "blk.0.attn_qkv": "Q6_K", "blk.3.ffn_down": "Q6_K",
        "blk.1.ffn_down": "Q5_K", "blk.0.ffn_up": "Q5_K", "position_embd": "F32",
    },
    ("mixtral", "Q4_K_M"): {
        "output": "Q6_K", "blk.0.attn_v": "Q8_0", "blk.0.attn_k": "Q8_0",
        "blk.0.attn_output": "Q5_K", "blk.0.ffn_down_exps": "Q6_K", "blk.0.ffn_gate_inp": "F32",
        "blk.0.ffn_up_exps": "Q4_K",
    },
    ("qwen3", "Q6_K"): {"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q8_0", "token_embd": "Q6_K"},
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(("family", "kind"), MIXED)
def test_mixed_types_equal_llama_quantize(family: str, kind: str, tmp_path: Path, run: Run) -> None:
    """Mixed types such as Q4_K_M assign each tensor the type that llama-quantize assigns."""
    sizes = {
        "llama": {**WIDE, "num_hidden_layers": 4, "tie_word_embeddings": False},
        "gpt2": {"n_layer": 4, "n_embd": 256, "n_inner": 256, "n_head": 4},
        "mixtral": {**WIDE, "num_hidden_layers": 1, "num_local_experts": 8},
        "qwen3": {**WIDE, "num_hidden_layers": 1, "intermediate_size": 96},
    }[family]
    save_random(tmp_path / "hf", family, **sizes)
    file = tmp_path / "a.gguf"
    _, message = succeed(run, "convert", tmp_path / "hf", file, "--to-gguf", kind.lower())
    kinds = {n.removesuffix(".weight"): kind for n, (kind, *_) in raw_tensors(file).items()}
    assert MIXED[family, kind].items() <= kinds.items()
    assert ("1 matrices are Q8_0, as in llama-quantize" in message) is (family == "qwen3")
    read, lm = dequantized(file), jaxllm.load(file)
    by_size: dict[tuple[int, ...], Any] = {}
    for _, weight in flatten(lm.params):
        by_size.setdefault(np.asarray(to_dense(weight)).shape, []).append(
            np.asarray(to_dense(weight))
        )
    for name, array in read.items():  # query and key rows may be permuted
        rows = np.sort(array, axis=0)
        assert any(np.array_equal(rows, np.sort(x, axis=0)) for x in by_size[array.shape]), name


def test_gguf_converts_to_hugging_face_and_back(directory: Any, tmp_path: Path) -> None:
    for family in ("mistral", "gpt2"):
        file = write(tmp_path / f"{family}.gguf", directory(family))
        write_hf(tmp_path / family, open_checkpoint(file))
        found = load_file(tmp_path / family / "model.safetensors")
        expected = load_file(directory(family) / "model.safetensors")
        prefix = "transformer." if family == "gpt2" else ""
        assert found.keys() == {name.removeprefix(prefix) for name in expected}
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name.removeprefix(prefix)], array, name)
        write_gguf(tmp_path / "again.gguf", open_checkpoint(tmp_path / family), "F32")
        assert raw_tensors(tmp_path / "again.gguf") == raw_tensors(file)
        (tmp_path / "again.gguf").unlink()


def test_rope_divisors_round_trip_through_hugging_face(tmp_path: Path) -> None:
    """RoPE divisors survive the native format, give transformers' logits as a Hugging Face
    checkpoint, and survive GGUF.
    """
    import torch

    factors = (1.0, 1.5, 2.0, 4.0)
    rope = jaxllm.Rope(rope_type="divisors", rope_theta=1e4, divisors=factors)
    model, params = random_model("llama", **SMALL)
    config = jaxllm.LlamaConfig(**{**vars(model.config), "rope": rope})
    lm = jaxllm.lm.LM(config, jaxllm.build(config), params, None, {}, tmp_path)
    lm.save(tmp_path / "native")
    opened = open_checkpoint(tmp_path / "native")
    assert opened.config == config
    write_hf(tmp_path / "hf", opened)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = tokens(1, 20)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    found = jaxllm.forward(lm.model, lm.params, None, ids).logits
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-4, rtol=1e-4)
    write_gguf(tmp_path / "a.gguf", opened, "F32")
    assert open_checkpoint(tmp_path / "a.gguf").config == config


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_tokenizer_converts_both_ways(name: str, tmp_path: Path, run: Run) -> None:
    """A byte-level tokenizer gives equal ids in GGUF and after conversion back, with its chat
    template and BOS flag.
    """
    library = trained(name)
    save_random(tmp_path / "hf", "gpt2", **GPT2, vocab_size=library.get_vocab_size() + 2)
    library.save(str(tmp_path / "hf" / "tokenizer.json"))
    config = {
        "eos_token": "<|end|>", "bos_token": "<|end|>", "add_bos_token": True,
        "chat_template": [
            {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
            {"name": "tool_use", "template": "{{ tools[0] }}{{ eos_token }}"},
        ],
    }  # fmt: skip
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    file = tmp_path / "a.gguf"
    _, message = succeed(run, "convert", tmp_path / "hf", file, "--to-gguf", "q8_0")
    assert "with its tokenizer" in message, message
    keys = gguf.GGUFReader(file).fields
    assert keys["tokenizer.ggml.pre"].contents() == name
    assert keys["tokenizer.chat_templates"].contents() == ["tool_use"]
    mine = ours(file)
    for text in [*LINES, "a<think>b<|end|>c"]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert mine.encode(text, parse_special=True) == expected, text
    assert mine.adds_bos and mine.eos_id == 0
    if name not in ("llama-bpe", "qwen2"):
        return
    _, message = succeed(run, "convert", file, tmp_path / "back", "--to-hf")
    assert "with its tokenizer" in message, message
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in LINES:
        assert theirs.encode(text, add_special_tokens=False) == library.encode(text).ids, text
    assert theirs.encode("a") == [0, *library.encode("a").ids]
    messages = [{"role": "user", "content": "Hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "Hi<|end|>"
    tools = [{"type": "f"}]
    assert theirs.apply_chat_template(messages, tools=tools, tokenize=False).endswith("f'}<|end|>")


def test_sentencepiece_tokenizer_writes_to_gguf(
    data: Callable[[str], Path], tmp_path: Path
) -> None:
    """A SentencePiece tokenizer written to GGUF gives equal ids and texts, with the library's token
    types.
    """
    from jaxllm.convert.gguf.tokenizer_write import make_tokenizer_keys
    from jaxllm.convert.gguf.writer import write_arrays
    from jaxllm.text.formats import read_tree
    from jaxllm.text.tokenizer import Tokenizer

    directory = data("llama_tokenizer")
    tree, whole = read_tree(directory), Tokenizer.from_directory(directory)
    keys = make_tokenizer_keys(tree, {}, {"eos_token_id": [2, 5]}, 32_000)
    assert keys["tokenizer.ggml.eot_token_id"] == 5
    write_arrays(tmp_path / "a.gguf", {"general.architecture": "llama", **keys}, {})
    mine = ours(tmp_path / "a.gguf")
    for text in [*LINES, *(f"a{' ' * n}b" for n in range(40))]:
        assert mine.encode(text) == whole.encode(text), text
        assert mine.decode(mine.encode(text)) == whole.decode(whole.encode(text))
    assert (mine.bos_id, mine.eos_id, mine.unk_id, mine.adds_bos) == (1, 2, 0, True)
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    kinds = keys["tokenizer.ggml.token_type"]
    checks = ((2, library.is_unknown), (3, library.is_control), (6, library.is_byte))
    for number, check in checks:
        assert {i for i, kind in enumerate(kinds) if kind == number} == {
            i for i in range(32_000) if check(i)
        }


def test_conflicting_conversion_options_are_refused(tmp_path: Path, run: Run) -> None:
    (tmp_path / "there.gguf").touch()
    for arguments, message in {
        ("--to-gguf", "Q4_K_S"): "must be one of F32, F16, BF16, Q8_0",
        ("--to-gguf", "F16", "--to-hf"): "cannot be combined",
        ("--to-gguf", "F16", "--dtype", "bfloat16"): "leave out --dtype",
    }.items():
        status, _, error = run("convert", "demo:llama", tmp_path / "a.gguf", *arguments)
        assert status and message in error, error
    status, _, error = run("convert", "demo:llama", tmp_path / "there.gguf", "--to-gguf", "F16")
    assert status and "already exists" in error


def test_overflowing_weights_are_refused(directory: Any, tmp_path: Path) -> None:
    """A weight that the target type cannot hold raises an error, and no file is written."""
    large = {n: x.copy() for n, x in load_file(directory("gpt2") / "model.safetensors").items()}
    name = next(name for name in large if "c_fc.weight" in name)
    large[name][3, 5] = 1e5
    shutil.copytree(directory("gpt2"), tmp_path / "hf")
    save_file(large, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"c_fc\.weight: 100000\.0 is not a finite number in"):
        write_gguf(tmp_path / "a.gguf", open_hf(tmp_path / "hf"), "F16")
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_commands_accept_gguf_file(
    family: str, shallow: Callable[[str], Path], tmp_path: Path, run: Run
) -> None:
    """Generate and info accept a GGUF file in place of a directory, with equal output, weights and
    tokenizer.
    """
    file = tmp_path / "a.gguf"
    assert run("convert", shallow(family), file, "--to-gguf", "F32")[0] == 0
    outputs = {}
    for model in (file, shallow(family)):
        out, _ = succeed(run, "generate", model, "-p", "One day", "-n", 12, "--dtype", "float32")
        outputs[model] = out
    assert outputs[file] == outputs[shallow(family)] != ""
    _, out, _ = run("info", file, "--json")
    facts = json.loads(out)
    assert facts["form"] == "GGUF" and facts["tokenizer"] is True
    lm, hf = jaxllm.load(file), jaxllm.load(shallow(family))
    for path, weight in flatten(hf.params):
        array = np.asarray(to_dense(dict(flatten(lm.params))[path]))
        np.testing.assert_array_equal(array, np.asarray(to_dense(weight)), path)
    text = "Once upon a time, there was a girl.\n"
    assert lm.encode(text) == hf.encode(text)
