"""Random checkpoints with a published model's shape, in Hugging Face format.

They serve to measure speed and memory, which do not depend on the weights. One decision: a tensor
is drawn when it is written, by a generator that is seeded with its name, so that memory use stays
small and the number of shards does not change the values.

    python scripts/tools/make_checkpoint.py tinyllama tinyllama-random --dtype bfloat16 --shards 2
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.files import write_json
from jaxllm.runtime.progress import bytes_bar
from jaxllm.text.formats import TOKENIZER_FILES, tokenizer_files
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import write_tensors
from jaxllm.weights.types.arrays import DTYPES

DEVIATION = 0.02
BLOCK = 1 << 20  # random numbers per block
Shape = tuple[int, ...]

TINYLLAMA: dict[str, Any] = {  # config.json of TinyLlama-1.1B-Chat-v1.0
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 32000,
}

GPT2: dict[str, Any] = {  # config.json of gpt2
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}


def tinyllama_shapes(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield every tensor of a Llama checkpoint with its shape; linears are `[out, in]`."""
    V, D, F = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    kv = D // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (V, D)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (D,)
        yield f"{layer}.self_attn.q_proj.weight", (D, D)
        yield f"{layer}.self_attn.k_proj.weight", (kv, D)
        yield f"{layer}.self_attn.v_proj.weight", (kv, D)
        yield f"{layer}.self_attn.o_proj.weight", (D, D)
        yield f"{layer}.post_attention_layernorm.weight", (D,)
        yield f"{layer}.mlp.gate_proj.weight", (F, D)
        yield f"{layer}.mlp.up_proj.weight", (F, D)
        yield f"{layer}.mlp.down_proj.weight", (D, F)
    yield "model.norm.weight", (D,)
    yield "lm_head.weight", (V, D)


def gpt2_shapes(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield every tensor of a GPT-2 checkpoint with its shape; Conv1D matrices are `[in, out]`."""
    D = config["n_embd"]
    yield "wte.weight", (config["vocab_size"], D)
    yield "wpe.weight", (config["n_positions"], D)
    for i in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            yield f"h.{i}.{norm}.weight", (D,)
            yield f"h.{i}.{norm}.bias", (D,)
        for name, I, O in (  # noqa: E741
            ("attn.c_attn", D, 3 * D),
            ("attn.c_proj", D, D),
            ("mlp.c_fc", D, 4 * D),
            ("mlp.c_proj", 4 * D, D),
        ):
            yield f"h.{i}.{name}.weight", (I, O)
            yield f"h.{i}.{name}.bias", (O,)
    yield "ln_f.weight", (D,)
    yield "ln_f.bias", (D,)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A published model: its config.json, the field that counts layers, and its tensors."""

    config: dict[str, Any]
    layers_field: str
    shapes: Callable[[dict[str, Any]], Iterator[tuple[str, Shape]]]


KINDS = {
    "tinyllama": Kind(TINYLLAMA, "num_hidden_layers", tinyllama_shapes),
    "gpt2": Kind(GPT2, "n_layer", gpt2_shapes),
}


def random_tensor(name: str, shape: Shape, dtype: np.dtype, seed: int) -> LazyTensor:
    """Return a lazy tensor from N(0, 0.02), or N(1, 0.02) for a norm scale."""
    mean = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0

    def read() -> np.ndarray:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        array = np.empty(math.prod(shape), dtype)
        for start in range(0, array.size, BLOCK):
            part = array[start : start + BLOCK]
            part[:] = rng.standard_normal(part.size, np.float32) * DEVIATION + np.float32(mean)
        return array.reshape(shape)

    return LazyTensor(dtype, shape, read)


def split_tensors(tensors: dict[str, LazyTensor], shards: int) -> list[dict[str, LazyTensor]]:
    """Split tensors, in order, into `shards` non-empty groups of about equal bytes."""
    groups: list[dict[str, LazyTensor]] = [{} for _ in range(shards)]
    total, done, at = sum(t.nbytes for t in tensors.values()), 0, 0
    for index, (name, tensor) in enumerate(tensors.items()):
        full = done >= total * (at + 1) / shards
        last_chance = len(tensors) - index == shards - at - 1
        if groups[at] and at + 1 < shards and (full or last_chance):
            at += 1
        groups[at][name] = tensor
        done += tensor.nbytes
    return groups


def write_weights(directory: Path, tensors: dict[str, LazyTensor], shards: int) -> None:
    """Write `model.safetensors`, or shards and `model.safetensors.index.json`."""
    total = sum(t.nbytes for t in tensors.values())
    with bytes_bar("writing weights", total) as advance:
        if shards == 1:
            path = directory / "model.safetensors"
            write_tensors(path, tensors, aligned=False, metadata={"format": "pt"}, progress=advance)
            return
        weight_map = {}
        for i, group in enumerate(split_tensors(tensors, shards), 1):
            path = directory / f"model-{i:05}-of-{shards:05}.safetensors"
            write_tensors(path, group, aligned=False, metadata={"format": "pt"}, progress=advance)
            weight_map |= dict.fromkeys(group, path.name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def check_free(destination: Path, force: bool) -> None:
    """Raise FileExistsError if writing here would overwrite files without permission."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return
    if not force:
        raise FileExistsError(f"{destination} is not empty; choose another DST, or pass --force")
    if not (destination / "config.json").exists():
        raise FileExistsError(f"{destination} is not a checkpoint; --force replaces only those")


def find_tokenizer_files(directory: Path) -> list[Path]:
    """Return the tokenizer files of a directory.

    Raises:
        FileNotFoundError: if there are none.
    """
    if not (files := tokenizer_files(directory)):
        raise FileNotFoundError(f"{directory} has none of {', '.join(TOKENIZER_FILES)}")
    return files


def make_checkpoint(
    kind: str,
    destination: Path,
    *,
    dtype: str,
    seed: int,
    layers: int | None = None,
    fields: Mapping[str, Any] | None = None,
    shards: int = 1,
    tokenizer: Path | None = None,
    force: bool = False,
) -> None:
    """Write a checkpoint of `kind` atomically.

    Args:
        fields: values that replace those of the kind's config.json.

    Raises:
        ValueError: for an unknown field, or an impossible number of layers or shards.
        FileExistsError: if `destination` is not empty, unless `force` and it is a checkpoint.
        FileNotFoundError: if the `tokenizer` directory has no tokenizer.
    """
    model = KINDS[kind]
    if unknown := sorted(set(fields or ()) - set(model.config)):
        raise ValueError(
            f"{kind} has no field {', '.join(unknown)}: expected one of {', '.join(model.config)}"
        )
    config = model.config | {"torch_dtype": dtype} | dict(fields or {})
    if layers is not None:
        config[model.layers_field] = layers
    shapes = dict(model.shapes(config))
    if config[model.layers_field] < 1 or not 1 <= shards <= len(shapes):
        raise ValueError(f"expected at least 1 layer, and from 1 to {len(shapes)} shards")
    check_free(destination, force)
    files = find_tokenizer_files(tokenizer) if tokenizer else []
    tensors = {
        n: random_tensor(n, shape, np.dtype(DTYPES[dtype]), seed) for n, shape in shapes.items()
    }

    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        write_weights(partial, tensors, shards)
        for file in filter(Path.is_file, files):
            shutil.copyfile(file, partial / file.name)
        ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
        write_json(partial / "generation_config.json", ids)
        write_json(partial / "config.json", config)
        if destination.is_dir():
            shutil.rmtree(destination)
        partial.replace(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    """Write the checkpoint described on the command line."""
    parser = argparse.ArgumentParser(
        description="Write a random checkpoint with a published model's shape.",
        epilog="example: python scripts/tools/make_checkpoint.py tinyllama random --shards 2",
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="number of layers (default: as published)")
    parser.add_argument(
        "--set",
        dest="fields",
        metavar="NAME=VALUE",
        action="append",
        type=lambda text: text.split("=", 1),
        help="a field of config.json and its JSON value; repeatable",
    )
    parser.add_argument("--shards", type=int, default=1, help="number of safetensors files")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="source of tokenizer files")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint at DST")
    options = vars(parser.parse_args())
    try:
        options["fields"] = {name: json.loads(value) for name, value in options["fields"] or ()}
        make_checkpoint(options.pop("kind"), options.pop("destination"), **options)
    except (OSError, ValueError) as error:
        sys.exit(f"make_checkpoint: {error}")


if __name__ == "__main__":
    main()
