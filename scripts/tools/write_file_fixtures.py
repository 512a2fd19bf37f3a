"""Small files of every kind that jaxllm writes, for tests/files/test_versions.py to read for ever.

Run it once for each release whose formats differ from those of the release before:

    python scripts/tools/write_file_fixtures.py tests/files/fixtures/v0.9

Every number in them follows from a closed form and is exact in its format, so that the test needs
no reference besides this file. tests/vectors has the fixtures of test vectors.
"""

import argparse
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import jaxllm
from jaxllm.adapters.attach import Adapter, LoraMatrices
from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.adapters.peft_io import write_adapter
from jaxllm.cache.files import save_cache
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.cli.conversation import _write_messages
from jaxllm.export.command_line import export
from jaxllm.files import JsonLog
from jaxllm.inside.lens import Lens, write_lens
from jaxllm.inside.sae import SparseAutoencoder, save_autoencoder
from jaxllm.inside.steering import write_directions
from jaxllm.ops.compile_cache import _save_payload
from jaxllm.weights.formats import as_format
from jaxllm.weights.types.nf4 import LEVELS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
# Format of each matrix, its name in transformers, and its size. Together they are the model.
MATRICES = {
    "model.embed_tokens": ("bfloat16", (16, 32)),
    "model.layers.0.self_attn.q_proj": ("int8", (32, 32)),
    "model.layers.0.self_attn.k_proj": ("int4-g32", (16, 32)),
    "model.layers.0.self_attn.v_proj": ("int3-g32", (16, 32)),
    "model.layers.0.self_attn.o_proj": ("int4-g32-zp-f16", (32, 32)),
    "model.layers.0.mlp.gate_proj": ("bf16-packed", (32, 32)),
    "model.layers.0.mlp.up_proj": ("bfloat16-2:4", (32, 32)),
    "model.layers.0.mlp.down_proj": ("int8-bitmap", (32, 32)),
    "lm_head": ("nf4-f32", (16, 32)),
}
NORMS = (
    "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm",
)  # fmt: skip
# Largest and smallest code of an integer format.
CODES = {"int8": (127, -127), "int4": (7, -8), "int3": (3, -4)}
TOKENS = [[1, 5, 9, 3], [1, 7, 2, 8]]
DIRECTIONS = (0, 2)  # layers of the steering vector
DIGEST = "the digest of a run"
FACTS = {"data": "three rows", "k": 3}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, 世界"},
    {"role": "assistant", "content": "Hello."},
]
RECORDS = [{"group": 0, "rows": ["a"]}, {"group": 1, "rows": ["ü", None, 0.5]}]
LORA = LoraConfig(r=2, lora_alpha=4.0, target_modules=["q_proj"])
PAYLOAD = pickle.dumps(("a kept value", 3))
EXPORTED_TOKENS = 8


def numbers(*shape: int, shift: int = 0) -> np.ndarray:
    """Return multiples of 1/8 from -1 to 1, float32."""
    n = np.arange(np.prod(shape, dtype=int)) * 7 + shift
    return ((n % 17 - 8) / 8).astype(np.float32).reshape(shape)


def matrix(name: str) -> np.ndarray:
    """Return a matrix that its format stores exactly, float32 `[O, I]`."""
    format, shape = MATRICES[name]
    count = np.arange(shape[0] * shape[1]).reshape(shape)
    if format == "nf4-f32":
        return np.array(LEVELS, np.float32)[count * 7 % 16]
    if format.endswith("-zp-f16"):  # 15 steps from the smallest number to the largest
        return ((count * 7 % 16 - 8) / 8).astype(np.float32)
    base = format.split("-")[0]
    if base not in CODES:
        x = numbers(*shape, shift=len(name))
        if format == "bf16-packed":  # which has room for few zeros
            return np.where((x == 0) & (count > 99), 2, x)
        return np.where(count % 4 < 2, x, 0) if format.endswith("2:4") else x
    most, least = CODES[base]
    x = (least + count * 7 % (most - least + 1)).astype(np.float32)
    x[:, 0], x[:, 1] = most, least
    if format.endswith("bitmap"):
        x = np.where(count % 3 == 0, x, 0)
        x[:, 0] = most
    return x / 128


def steering() -> dict[int, np.ndarray]:
    """Return directions by layer."""
    return {layer: numbers(32, shift=layer) for layer in DIRECTIONS}


def lens() -> Lens:
    """Return a lens of one layer."""
    return Lens(jnp.asarray(numbers(1, 32, 32)), jnp.asarray(numbers(1, 32, shift=1)))


def autoencoder() -> SparseAutoencoder:
    """Return a sparse autoencoder with two features."""
    parts = ((4, 2), (2,), (2, 4), (4,), (2,))
    arrays = [jnp.asarray(numbers(*shape, shift=i)) for i, shape in enumerate(parts)]
    return SparseAutoencoder(*arrays, site="blocks.0.resid_post")


def adapter() -> Adapter:
    """Return an adapter of one module."""
    parts = LoraMatrices(jnp.asarray(numbers(2, 32)), jnp.asarray(numbers(32, 2, shift=1)), None)
    return Adapter(LORA, {"layers.0.self_attn.q_proj": parts})


def part_weights() -> dict[str, Any]:
    """Return the weights of a part: a plain array and integers, in nested names."""
    codes = as_format(jnp.asarray(matrix("model.layers.0.self_attn.q_proj")), "int8")
    return {"layers.0": {"q": {"weight": codes}, "norm": jnp.asarray(numbers(5))}}


def make_model(folder: Path) -> jaxllm.LM:
    """Return the model, from a checkpoint that transformers could read."""
    tensors = {f"{name}.weight": matrix(name) for name in MATRICES}
    tensors |= {f"{name}.weight": numbers(32, shift=i) for i, name in enumerate(NORMS)}
    rows = [
        (f".*{name.rpartition('.')[2]}.*", None if format == "bfloat16" else format)
        for name, (format, _) in MATRICES.items()
    ]
    return _load(folder, CONFIG, tensors, dtype="bfloat16", quantize=rows)


def make_small_model(folder: Path) -> jaxllm.LM:
    """Return a model of 700 numbers in float32, which is exported."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    tensors = {}
    for i, (name, (_, shape)) in enumerate(MATRICES.items()):
        rows = shape[0] if name.endswith(("embed_tokens", "head")) else shape[0] // 4
        tensors[f"{name}.weight"] = numbers(rows, 8, shift=i)
    tensors |= {f"{name}.weight": numbers(8, shift=i) for i, name in enumerate(NORMS)}
    return _load(folder, CONFIG | sizes, tensors, dtype="float32")


def _load(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], **options: Any
) -> jaxllm.LM:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return jaxllm.load(folder, show_progress=False, **options)


def write_fixtures(target: Path) -> None:
    """Write one file or directory of each kind."""
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths in the exported program
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        lm = make_model(Path(scratch) / "plain")
        small = make_small_model(Path(scratch) / "small")
    lm.save(target / "checkpoint", show_progress=False)
    lm = jaxllm.load(target / "checkpoint", show_progress=False)
    for dtype in ("bfloat16", "int8"):
        cache = jaxllm.init_cache(lm.model, 2, 6, dtype=dtype)
        filled = jaxllm.prefill(lm.model, lm.params, cache, np.array(TOKENS)).cache
        save_cache(target / f"{dtype}.cache", filled, lm.model, lm.params)
    store = TensorStore(target, DIGEST)
    store.put("weights", part_weights(), {"seconds": 1.5})
    store.put_arrays("arrays", {"ids": np.arange(6, dtype=np.uint16).reshape(2, 3)}, FACTS)
    log = JsonLog(target / "journal", FACTS)
    for record in RECORDS:
        log.append(record)
    log.close()
    write_lens(target / "lens.safetensors", lens())
    write_directions(target / "steering.safetensors", steering(), model_hint="llama")
    write_directions(target / "steering.gguf", steering(), model_hint="llama")
    save_autoencoder(autoencoder(), target / "autoencoder")
    write_adapter(target / "adapter", adapter(), lm.config)
    _write_messages(target / "chat.json", MESSAGES)
    _save_payload(target / "kept.forms", PAYLOAD)
    export(
        small.model, small.params, target / "export", num_tokens=1, max_tokens=EXPORTED_TOKENS,
        step_names=["decode"], show_progress=False,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write small files of every kind.")
    parser.add_argument("target", type=Path, help="New directory to write.")
    write_fixtures(parser.parse_args().target)
