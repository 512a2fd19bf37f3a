"""Checkpoints in the format of transformers 4's Flax classes, made from a PyTorch checkpoint.

Written from `modeling_flax_gpt2.py`, `modeling_flax_llama.py` and `modeling_flax_utils.py` of
transformers 4; `flax.serialization.to_bytes` is what they wrote with.
"""

import json
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

# GPT-2's FlaxConv1D keeps its kernel [out, in], PyTorch's Conv1D [in, out]; nn.Dense [in, out],
# torch.nn.Linear [out, in]: each is the other's transpose.
TABLES = ("wte", "wpe", "embed_tokens")


def flax_arrays(directory: Path, dtype: Any = np.float32) -> dict[str, Any]:
    """Return a PyTorch checkpoint's tensors by their Flax paths."""
    found = {}
    for name, array in load_file(directory / "model.safetensors").items():
        *modules, last = name.split(".")
        if modules[-1] in TABLES:
            last = "embedding"
        elif last == "weight" and array.ndim == 2:
            last, array = "kernel", array.T
        elif last == "weight" and modules[-1].startswith("ln_"):
            last = "scale"
        found["/".join([*modules, last])] = jnp.asarray(array, dtype)
    return found


def packed(arrays: dict[str, Any]) -> bytes:
    """Return the bytes of a Flax file."""
    return flax.serialization.to_bytes(unflatten_dict(arrays, sep="/"))


def as_flax(directory: Path, shards: int = 1, dtype: Any = np.float32) -> Path:
    """Replace PyTorch's files by Flax's and return the first of them."""
    arrays = flax_arrays(directory, dtype)
    (directory / "model.safetensors").unlink()
    if shards == 1:
        (directory / "flax_model.msgpack").write_bytes(packed(arrays))
        return directory / "flax_model.msgpack"
    names = [f"flax_model-{i + 1:05d}-of-{shards:05d}.msgpack" for i in range(shards)]
    places = {path: names[i * shards // len(arrays)] for i, path in enumerate(arrays)}
    for name in names:
        held = {path: x for path, x in arrays.items() if places[path] == name}
        (directory / name).write_bytes(packed(held))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    return directory / names[0]


def as_flax_safetensors(directory: Path) -> None:
    """Write what `save_pretrained(safe_serialization=True)` of a Flax class wrote."""
    arrays = {path.replace("/", "."): np.array(x) for path, x in flax_arrays(directory).items()}
    save_file(arrays, directory / "model.safetensors", metadata={"format": "flax"})
