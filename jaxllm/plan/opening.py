"""A checkpoint to plan with: opened as any other, or its configuration alone."""

from pathlib import Path

from jaxllm.checkpoint import Checkpoint
from jaxllm.convert.engine import read_config, unread_fields
from jaxllm.files import read_json
from jaxllm.loading import open_checkpoint, warn_unread
from jaxllm.weights.precision import Precision

WEIGHTS = (".safetensors", ".msgpack", ".bin", ".gguf", ".pt", ".pth", ".h5")


def opened_for(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, as `jaxllm.load` takes it; of a config.json, or of a directory with
    nothing else of a model, one without tensors, whose weights are in bfloat16 unless its `dtype`
    says float32 or float16.

    Raises CheckpointError or ConfigError for what is none.
    """
    if not isinstance(path, Path):
        alone = Path(path) / "config.json"
        if not alone.is_file() or any(
            file.suffix in WEIGHTS or file.name.endswith(".index.json")
            for file in alone.parent.iterdir()
        ):
            return open_checkpoint(path)
        path = alone
    data = read_json(path)
    config, _ = read_config(data)
    said = data.get("dtype", data.get("torch_dtype"))
    dtype = said if said in ("float32", "float16", "bfloat16") else "bfloat16"
    opened = Checkpoint(path, config, {}, {}, Precision.uniform(dtype), ignored=unread_fields(data))
    warn_unread(opened)
    return opened
