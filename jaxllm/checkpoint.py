"""Checkpoints in jaxllm's own form: `model.safetensors` under our names, `config.json`, tokenizer.

The tensors lie on 64-byte boundaries, so loading maps the file into memory and XLA uses it as it
lies. Loading from lazy tensors, with every check, is shared with `convert`.
"""

import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import models
from jaxllm.config import ModelConfig, config_from_dict
from jaxllm.errors import CheckpointError
from jaxllm.progress import bytes_bar
from jaxllm.textfiles import read_json, write_json
from jaxllm.weights.files import LazyTensor, first_non_finite, open_tensors, write_tensors
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.precision import DTYPES, Override, Precision

FORMAT = "jaxllm"
VERSION = 1
WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been opened and understood, its tensors not yet read.

    tensors: by our paths, in the shapes that the configuration demands. generation: the contents
    of generation_config.json, or what an older config.json said in its place. precision: as the
    checkpoint keeps its weights, unless it says otherwise.
    """

    directory: Path
    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    generation: Mapping[str, Any]
    precision: Precision


def is_native(directory: Path) -> bool:
    """Whether a directory holds a checkpoint in jaxllm's own form."""
    return read_model_json(directory).get("format") == FORMAT


def open_native(directory: Path) -> Checkpoint:
    """Open a directory that `save` wrote. Raises CheckpointError with all that is wrong with it."""
    data = read_model_json(directory)
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{directory}: written in version {data.get('version')!r} of the format,"
            f" this jaxllm reads version {VERSION}"
        )
    config = config_from_dict(data["model"])
    precision = dict(data["precision"])
    overrides = tuple((regex, Override(**o)) for regex, o in precision.pop("overrides"))
    tensors = open_tensors(directory / WEIGHTS, mapped=True)
    check_names(tensors, config, str(directory))
    return Checkpoint(
        directory,
        config,
        tensors,
        read_generation(directory),
        Precision(**precision, overrides=overrides),
    )


def save(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    files: Iterable[Path] = (),
    show_progress: bool | None = None,
) -> None:
    """Write a checkpoint in jaxllm's own form; config.json comes last, when all else is there.

    files: further files to copy (the tokenizer's). Raises CheckpointError if `directory` already
    holds a checkpoint.
    """
    claim(directory)
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    with bytes_bar(f"writing {directory.name}", total, show_progress) as advance:
        write_tensors(
            directory / WEIGHTS,
            checkpoint.tensors,
            metadata={"format": FORMAT},
            progress=advance,
        )
    for file in files:
        shutil.copyfile(file, directory / file.name)
    write_json(directory / "generation_config.json", checkpoint.generation)
    write_json(
        directory / "config.json",
        {
            "format": FORMAT,
            "version": VERSION,
            "model": checkpoint.config.to_dict(),
            "precision": dataclasses.asdict(checkpoint.precision),
        },
    )


def claim(directory: Path) -> None:
    """Make a directory to write to. Raises CheckpointError if it already holds a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "config.json").exists():
        raise CheckpointError(f"{directory} already holds a checkpoint; name an empty directory")


def load_params(
    checkpoint: Checkpoint, precision: Precision, *, show_progress: bool | None = None
) -> Params:
    """Read every tensor in the format that `precision` keeps it in.

    Memory: the parameters, and the largest tensor once more where its format changes. Raises
    CheckpointError with every tensor that holds NaN or infinity, or that a narrower format cannot
    hold.
    """
    shapes = models.param_shapes(models.build(checkpoint.config))
    complaints: list[str] = []
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    with bytes_bar(f"loading {checkpoint.directory.name}", total, show_progress) as advance:

        def read(path: str, _: jax.ShapeDtypeStruct) -> jax.Array:
            tensor = checkpoint.tensors[path]
            leaf = _to_device(path, tensor, precision.weights_at(_module(path)), complaints)
            if leaf.dtype != tensor.dtype:
                tensor.release()
            advance(tensor.nbytes)
            return leaf

        params = map_leaves(read, shapes)
    if complaints:
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(complaints)}")
    return params


def _to_device(path: str, tensor: LazyTensor, dtype: np.dtype, complaints: list[str]) -> jax.Array:
    array = tensor.read()
    if (bad := first_non_finite(array)) is not None:
        complaints.append(f"{path} holds {array.reshape(-1)[bad]} at index {bad}")
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    leaf = jax.device_put(array, may_alias=True)
    if leaf.dtype != dtype:
        leaf = leaf.astype(dtype)
        narrower = jnp.finfo(dtype).max < jnp.finfo(array.dtype).max
        if narrower and bad is None and not bool(jnp.isfinite(leaf).all()):
            complaints.append(f"{path} overflows {dtype} (largest {jnp.finfo(dtype).max})")
    # Reading is lazy on the device too: without this the buffers of many tensors pile up.
    return leaf.block_until_ready()


def native_precision(tensors: Mapping[str, LazyTensor]) -> Precision:
    """One format for everything: the one in which most of the bytes are stored."""
    sizes = {name: 0 for name in DTYPES}
    for tensor in tensors.values():
        if tensor.dtype.name in sizes:
            sizes[tensor.dtype.name] += tensor.nbytes
    return Precision.uniform(max(sizes, key=lambda name: sizes[name]))


def check_names(tensors: Mapping[str, LazyTensor], config: ModelConfig, where: str) -> None:
    """Raise CheckpointError with every missing, unexpected, misshapen or mistyped tensor."""
    expected = dict(flatten(models.param_shapes(models.build(config))))
    complaints = [f"{path} is missing" for path in expected if path not in tensors]
    for path, tensor in tensors.items():
        if path not in expected:
            complaints.append(f"{path} is not part of this model")
        elif tensor.shape != expected[path].shape:
            complaints.append(
                f"{path} has shape {tensor.shape}, the configuration says {expected[path].shape}"
            )
        elif tensor.dtype.name not in (*DTYPES, "float64"):
            complaints.append(f"{path} is {tensor.dtype.name}, not a floating-point format")
    if complaints:
        shown = "\n  ".join(complaints[:50])
        more = f"\n  and {len(complaints) - 50} more" if len(complaints) > 50 else ""
        raise CheckpointError(f"{where} does not fit its configuration:\n  {shown}{more}")


def read_generation(directory: Path) -> dict[str, Any]:
    """The contents of generation_config.json; empty where there is none."""
    path = directory / "generation_config.json"
    return read_json(path) if path.exists() else {}


def read_model_json(directory: Path) -> dict[str, Any]:
    """The contents of config.json. Raises CheckpointError where it is missing or no JSON object."""
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(f"{directory} has no config.json: not a model directory")
    return read_json(path)


def _module(path: str) -> str:
    return path.rpartition(".")[0]
