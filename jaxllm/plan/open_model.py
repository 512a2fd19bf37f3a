"""Opens a checkpoint for planning, or only its configuration."""

from pathlib import Path

from jaxllm.checkpoints.native import Checkpoint
from jaxllm.convert.hf import read_config, unread_fields
from jaxllm.convert.registry import open_checkpoint, warn_ignored
from jaxllm.files import read_json
from jaxllm.weights.precision import Precision

WEIGHT_SUFFIXES = (".safetensors", ".msgpack", ".bin", ".gguf", ".pt", ".pth", ".h5")


def open_for_planning(path: str | Path) -> Checkpoint:
    """Open the checkpoint at `path`, as in `jaxllm.load`.

    A config.json, or a directory without weight files, gives a checkpoint without tensors. Its
    weights count as bfloat16, unless its `dtype` is float32 or float16.

    Raises CheckpointError or ConfigError if there is no valid checkpoint.
    """
    if not isinstance(path, Path):
        alone = Path(path) / "config.json"
        if not alone.is_file() or any(
            file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            for file in alone.parent.iterdir()
        ):
            return open_checkpoint(path)
        path = alone
    data = read_json(path)
    config, _ = read_config(data)
    stored = data.get("dtype", data.get("torch_dtype"))
    dtype = stored if stored in ("float32", "float16", "bfloat16") else "bfloat16"
    opened = Checkpoint(path, config, {}, {}, Precision.uniform(dtype), ignored=unread_fields(data))
    warn_ignored(opened)
    return opened
