"""Steering vectors: a direction of the residual stream after each layer, from pairs of texts.

They are plain dictionaries from layers to vectors. llama.cpp's control vectors are the same: a file
has tensors `direction.L`, added to the stream after layer L, which counts from 0 as ours do. Its
files have none for layer 0, whose stream it cannot change; ours in safetensors may.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf.header import is_gguf, read_header
from jaxllm.convert.gguf.tensors import GGUFTensor
from jaxllm.convert.gguf.writer import check_absent, write_arrays
from jaxllm.errors import CheckpointError, ConfigError, NonFiniteError, TokenError
from jaxllm.files import as_path
from jaxllm.files.versions import STEERING
from jaxllm.generation.embeddings import check_text, group_by_length, pad_batch
from jaxllm.models.inputs import check_model
from jaxllm.models.interventions import Add
from jaxllm.ops.pooling import pool
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import check_int, is_integer, is_number
from jaxllm.steps import run_model
from jaxllm.weights import safetensors
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params
from jaxllm.weights.safetensors import first_non_finite, write_tensors

Directions = dict[int, np.ndarray]  # by layer, each float32 [D]
Method = Literal["mean", "pca"]
METHODS = ("mean", "pca")
TOKENS = ("last", "mean")
_ARCHITECTURE = "controlvector"


def find_directions(
    model: Model,
    params: Params,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    method: Method = "mean",
    tokens: Literal["last", "mean"] = "last",
    batch: int = 16,
    show_progress: bool | None = None,
) -> Directions:
    """Return the direction from the second texts of pairs to the first, after each layer.

    A strength of 1 is the mean step between the texts of a pair, or its part in this direction.

    Args:
        pairs: Token ids of two texts that differ in what to steer.
        method: "mean": the mean of the differences (Turner et al. 2023, arXiv 2308.10248; Rimsky et
            al. 2023, 2312.06681). "pca": the mean's part in the first principal direction of the
            differences, which are not centered (Zou et al. 2023, 2310.01405).
        tokens: Which states of a text to compare: that of its last token, or the mean of all.
        batch: Texts per batch.

    Raises:
        ConfigError: for an unknown method, and without pairs.
        TokenError: for texts that are empty or have ids outside the vocabulary.
        NonFiniteError: for states that are NaN or infinite.
    """
    check_model(model, params)
    for name, value, known in (("method", method, METHODS), ("tokens", tokens, TOKENS)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r:.40}")
    batch = check_int("batch", batch, 1, error=ConfigError)
    if not isinstance(pairs, Iterable) or any(isinstance(p, str) or len(p) != 2 for p in pairs):
        raise TokenError("pairs must be a list of pairs of token ids, two texts each")
    ids = [check_text(model, i, text) for i, text in enumerate(x for pair in pairs for x in pair)]
    if not ids:
        raise ConfigError("find_directions requires at least one pair of texts")
    c = model.config
    state_NLD = np.zeros((len(ids), c.num_hidden_layers, c.hidden_size), np.float32)
    groups = group_by_length(ids, batch)
    with steps_bar("reading", len(groups), show_progress) as advance:
        for members in groups:
            arrays = pad_batch([ids[member] for member in members], batch)
            state_LBD = _pool_streams(model, params, *arrays, pooling=tokens)
            state_NLD[members] = np.moveaxis(np.asarray(state_LBD), 1, 0)[: len(members)]
            advance()
    if not np.isfinite(state_NLD).all():
        raise NonFiniteError("the residual stream has NaN or infinite numbers")
    step_PLD = state_NLD[::2] - state_NLD[1::2]
    mean_LD = step_PLD.mean(axis=0)
    if method == "mean":
        return dict(enumerate(mean_LD))
    return {layer: _project_mean(step_PLD[:, layer]) for layer in range(c.num_hidden_layers)}


@partial(jax.jit, static_argnums=0, static_argnames="pooling")
def _pool_streams(
    model: Model, params: Params, token_BT: jax.Array, position_BT: jax.Array, *, pooling: str
) -> jax.Array:
    """Return the pooled stream after each layer, float32 `[L, B, D]`."""
    trace, _, _ = run_model(model, params, (), token_BT, position_BT, read=("resid_post",))
    names = [f"blocks.{layer}.resid_post" for layer in range(model.config.num_hidden_layers)]
    streams = trace.read_sites(tuple(names))
    return jnp.stack([pool(streams[name], position_BT >= 0, pooling) for name in names])


def _project_mean(step_PD: np.ndarray) -> np.ndarray:
    """Return the mean's part in the first principal direction, whatever that one's sign."""
    _, _, axis_KD = np.linalg.svd(step_PD, full_matrices=False)
    return (axis_KD[0] * (step_PD.mean(axis=0) @ axis_KD[0])).astype(np.float32)


def combine_directions(parts: Iterable[tuple[Mapping[int, np.ndarray], float]]) -> Directions:
    """Return the sum of several vectors, each times its strength, as llama.cpp adds its files.

    Raises:
        ConfigError: For vectors of several widths and for strengths that are not finite numbers.
    """
    total: Directions = {}
    for directions, scale in parts:
        if not is_number(scale) or not np.isfinite(scale):
            raise ConfigError(f"a vector's strength must be a finite number, got {scale!r:.40}")
        for layer, direction_D in directions.items():
            step_D = np.float32(scale) * np.asarray(direction_D, np.float32)
            before_D = total.get(layer, np.zeros_like(step_D))
            if before_D.shape != step_D.shape:
                raise ConfigError(f"vectors differ in width: {before_D.shape}, {step_D.shape}")
            total[layer] = before_D + step_D
    return dict(sorted(total.items()))


def steering_edits(
    directions: Mapping[int, np.ndarray], scale: Any = 1.0, layers: Iterable[int] | None = None
) -> dict[str, Add]:
    """Return the edits that add each direction to the stream after its layer, at all tokens.

    Args:
        scale: The strength: one number, or one for each row.
        layers: Which layers to change; None: all that have a direction.

    Raises:
        ConfigError: for layers without a direction.
    """
    chosen = sorted(directions) if layers is None else list(layers)
    for layer in chosen:
        if not is_integer(layer) or layer not in directions:
            known = f"{min(directions)} to {max(directions)}" if directions else "none"
            raise ConfigError(f"the vector has no direction of layer {layer!r:.40}, only {known}")
    return {f"blocks.{i}.resid_post": Add(directions[i], scale=scale) for i in chosen}


def read_directions(path: str | Path, config: ModelConfig | None = None) -> Directions:
    """Read a control vector of llama.cpp (GGUF), or the same tensors from safetensors.

    Args:
        config: Of the model that it must fit; None: any.

    Raises:
        CheckpointError: for files that are not well-formed, hold other tensors or numbers that are
            not finite, and for vectors of other models.
    """
    path = as_path(path)
    if is_gguf(path):
        tensors = _open_gguf(path)
    else:
        STEERING.check(safetensors.read_header(path).metadata, path)
        tensors = safetensors.open_tensors(path)
    directions: Directions = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"direction\.(0|[1-9][0-9]{0,5})", name)
        if layer is None:
            raise CheckpointError(f"{path}: {name!r:.80} is not named direction.LAYER")
        if tensor.dtype != np.float32 or tensor.ndim != 1 or not tensor.shape[0]:
            raise CheckpointError(
                f"{path}: {name} must be a float32 vector, got {tensor.dtype} {tensor.shape}"
            )
        directions[int(layer[1])] = np.array(tensor.read())
    widths = {x.shape[0] for x in directions.values()}
    if len(widths) != 1:
        what = f"directions of widths {sorted(widths)}" if widths else "no directions"
        raise CheckpointError(f"{path} has {what}")
    for layer_number, x in directions.items():
        if first_non_finite(x) is not None:
            raise CheckpointError(f"{path}: direction.{layer_number} holds NaN or infinity")
    if config is not None:
        check_fits_model(directions, config, str(path))
    return dict(sorted(directions.items()))


def check_fits_model(
    directions: Mapping[int, np.ndarray], config: ModelConfig, where: str = "the vector"
) -> None:
    """Raise CheckpointError if a model has another width, or lacks a layer of the vector."""
    (width,) = {x.shape[0] for x in directions.values()}
    if width != config.hidden_size:
        raise CheckpointError(
            f"{where} has directions of width {width}, the model's stream has {config.hidden_size}"
        )
    if max(directions) >= config.num_hidden_layers:
        raise CheckpointError(
            f"{where} has a direction of layer {max(directions)}, the model's last is"
            f" {config.num_hidden_layers - 1}"
        )


def write_directions(
    path: str | Path, directions: Mapping[int, np.ndarray], *, model_hint: str = ""
) -> None:
    """Write a vector: safetensors if the name ends so, else a control vector of llama.cpp (GGUF).

    GGUF has no direction of layer 0, so one there is left out.

    Args:
        model_hint: The kind of model that it is for, such as "llama"; not checked when read.

    Raises:
        CheckpointError: if the file exists or cannot be written.
        ConfigError: if there is nothing to write.
    """
    path = as_path(path)
    check_absent(path)
    to_gguf = path.suffix != ".safetensors"
    arrays = {
        f"direction.{layer}": np.asarray(x, np.float32)
        for layer, x in sorted(directions.items())
        if layer or not to_gguf
    }
    if not arrays:
        raise ConfigError("a control vector requires a direction of layer 1 or later")
    if not to_gguf:
        lazy = {name: LazyTensor.from_array(x) for name, x in arrays.items()}
        metadata = {**STEERING.text_mark, "model_hint": model_hint}
        return write_tensors(path, lazy, aligned=False, metadata=metadata)
    settings = {
        "general.architecture": _ARCHITECTURE,
        f"{_ARCHITECTURE}.model_hint": model_hint,
        f"{_ARCHITECTURE}.layer_count": np.int32(len(arrays)),
    }
    write_arrays(path, settings, arrays)


def _open_gguf(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a control vector. Raises CheckpointError for another file."""
    header = read_header(path)
    if (architecture := header.settings.get("general.architecture")) != _ARCHITECTURE:
        raise CheckpointError(
            f"{path} is not a control vector: general.architecture is {architecture!r:.40}"
        )
    if "direction.0" in header.tensor_infos:
        raise CheckpointError(f"{path}: direction.0 is not allowed: layers count from 1 in GGUF")
    return {
        name: GGUFTensor(header.buffer, info).to_plain()
        for name, info in header.tensor_infos.items()
    }
