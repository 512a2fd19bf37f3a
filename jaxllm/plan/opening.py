"""A checkpoint to plan with: opened as any other, or its configuration alone."""

from pathlib import Path

from jaxllm.checkpoint import Checkpoint
from jaxllm.convert.engine import read_config, unread_fields
from jaxllm.files import read_json
from jaxllm.loading import open_checkpoint, warn_unread
from jaxllm.weights.precision import Precision


def opened_for(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, as `jaxllm.load` takes it; of a config.json one without tensors,
    whose weights are in bfloat16 unless its `dtype` says float32 or float16.

    Raises CheckpointError or ConfigError for what is none.
    """
    if not isinstance(path, Path):
        return open_checkpoint(path)
    data = read_json(path)
    config, _ = read_config(data)
    said = data.get("dtype", data.get("torch_dtype"))
    dtype = said if said in ("float32", "float16", "bfloat16") else "bfloat16"
    opened = Checkpoint(path, config, {}, {}, Precision.uniform(dtype), ignored=unread_fields(data))
    warn_unread(opened)
    return opened
