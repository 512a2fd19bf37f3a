"""Read and write PEFT directories: adapter_config.json and adapter_model.safetensors.

A tensor name consists of `base_model.model.`, the module name in transformers, and a suffix:
`lora_A.weight` `[r, I]`, `lora_B.weight` `[O, r]`; for a token embedding `lora_embedding_A`
`[r, V]` and `lora_embedding_B` `[D, r]`, transposed here; for DoRA `lora_magnitude_vector`.

Every field of adapter_config.json (version 0.21) is read, known as harmless, or rejected. PEFT
itself only warns of unknown fields and ignores them, which may change the adapter.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.adapters.attach import Adapter, LoraMatrices, resolve_adapter
from jaxllm.adapters.fused_modules import fuse_modules, split_fused
from jaxllm.adapters.gguf import read_gguf_adapter
from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.adapters.targets import LoraSpec, list_targets, resolve_targets, shorten_names
from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf.reader import recognizes
from jaxllm.convert.hf import write_config
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import (
    as_path,
    atomic_directory,
    check_vacant,
    path_exists,
    path_inside,
    read_json,
    write_json,
)
from jaxllm.weights.formats import as_weight
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.safetensors import first_non_finite, open_tensors, write_tensors
from jaxllm.weights.types.arrays import DTYPES, DenseWeight
from jaxllm.weights.types.lora import strip_adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Fields of `LoraConfig` with the same name and meaning.
READ_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(LoraConfig)
    if field.name not in ("rules", "init_lora_weights")
)
# Fields without effect on the trained adapter: provenance, runtime and initialization.
IGNORED_FIELDS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ephemeral_gpu_offload",
        "eva_config",
        "fan_in_fan_out",  # the layout of the base checkpoint, known from its table
        "inference_mode",
        "init_lora_weights",  # see _INITS
        "loftq_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
}
# Initializations that leave the base unchanged. Others (pissa, olora, corda, loftq, lora_ga) modify
# the base weights too, so the adapter does not fit the original base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_EMPTY_VALUES: tuple[Any, ...] = (None, False, [], {})
_REMEDY = "merge it with PEFT (merge_and_unload) and load the merged model"


class _TensorSpec(NamedTuple):
    """Name and shape of a tensor in the file, and the field of `LoraMatrices` that it holds."""

    name: str
    shape: tuple[int, ...]
    matrix: str
    transposed: bool


def read_adapter(
    directory: str | Path, config: ModelConfig, params: Params | None = None
) -> Adapter:
    """Read an adapter for a model of this configuration from a PEFT directory or a GGUF file.

    params: base parameters. If the adapter contains the base's token embedding, as PEFT writes it,
    the two must be equal. Raises CheckpointError with all problems: unsupported fields, an adapter
    of another model, other shapes, or values that are not finite.
    """
    directory = as_path(directory)
    if recognizes(directory):
        return read_gguf_adapter(directory, config)
    if not path_exists(directory / CONFIG):
        if not path_exists(directory):
            raise CheckpointError(f"no adapter {directory}: no such file or directory")
        raise CheckpointError(f"{directory} has no {CONFIG}: not a PEFT adapter")
    lora = parse_peft_config(read_json(path_inside(directory, CONFIG)), str(directory / CONFIG))
    try:
        lows = resolve_targets(config, lora)
    except ConfigError as error:
        raise CheckpointError(f"{directory} is not an adapter for this model: {error}") from None
    tensors = split_fused(_open(directory), config, PREFIX)
    for name in [name for name in tensors if name.endswith(".base_layer.weight")]:
        _check_base_table(directory, name, tensors.pop(name), config, params)
    pieces = {m: _tensor_specs(low, dora=lora.use_dora) for m, low in lows.items()}
    wanted = {spec.name: spec.shape for specs in pieces.values() for spec in specs}
    # Older files name DoRA's magnitudes `lora_magnitude_vector.weight`.
    older = {f"{name}.weight": name for name in wanted if name.endswith("magnitude_vector")}
    tensors = {older.get(name, name): tensor for name, tensor in tensors.items()}
    _check_tensors(directory, tensors, wanted)
    return Adapter(lora, {m: _read_matrices(tensors, specs) for m, specs in pieces.items()})


def write_adapter(
    directory: str | Path, adapter: Adapter, config: ModelConfig, *, base: str | None = None
) -> None:
    """Write a PEFT directory atomically; PEFT can load it for the same model.

    base: name or directory of the base model, for PEFT. Raises CheckpointError if the directory
    already holds an adapter or cannot be written, and ConfigError as `fuse_modules` does and for an
    adapter of another model.
    """
    directory = as_path(directory)
    check_vacant(directory, CONFIG, "an adapter")
    lora, tensors = adapter.config, {}
    modules = fuse_modules(config, resolve_adapter(config, adapter), adapter.matrices, lora)
    specs = [spec for spec, _ in modules]
    for spec, matrices in modules:
        for piece in _tensor_specs(spec, dora=lora.use_dora):
            array = np.asarray(getattr(matrices, piece.matrix))
            array = np.ascontiguousarray(array.T) if piece.transposed else array
            tensors[piece.name] = LazyTensor.from_array(array)
    with atomic_directory(directory, CONFIG) as path:
        write_tensors(path / WEIGHTS, tensors, aligned=False, metadata={"format": "pt"})
        write_json(path / CONFIG, _make_config(lora, specs, config, base))


def _tensor_specs(spec: LoraSpec, *, dora: bool) -> list[_TensorSpec]:
    (rows, columns), site = spec.target.shape, spec.target.site
    name = f"{PREFIX}{spec.target.name}."
    if site == "rows":
        specs = [
            _TensorSpec(f"{name}lora_embedding_A", (spec.rank, rows), "b", True),
            _TensorSpec(f"{name}lora_embedding_B", (columns, spec.rank), "a", True),
        ]
    else:
        specs = [
            _TensorSpec(f"{name}lora_A.weight", (spec.rank, columns), "a", False),
            _TensorSpec(f"{name}lora_B.weight", (rows, spec.rank), "b", False),
        ]
    if dora:
        length = columns if site == "rows" else rows
        specs.append(_TensorSpec(f"{name}lora_magnitude_vector", (length,), "magnitude", False))
    return specs


def _open(directory: Path) -> dict[str, LazyTensor]:
    if path_exists(directory / WEIGHTS):
        return open_tensors(path_inside(directory, WEIGHTS))
    if path_exists(directory / "adapter_model.bin"):
        raise CheckpointError(
            f"{directory}: adapter_model.bin is a pickle, which can run code when loaded, and is"
            " not supported. Load it with PEFT and save it again (save_pretrained)"
        )
    raise CheckpointError(f"{directory}: no {WEIGHTS}")


def _check_tensors(
    directory: Path, tensors: Mapping[str, LazyTensor], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError with every missing, extra, misshapen or broken tensor."""
    if not wanted.keys() & tensors.keys():
        extra, expected = (next(iter(x), "nothing") for x in (tensors, wanted))
        raise CheckpointError(
            f"{directory} is an adapter for another model: no tensor name matches; got {extra},"
            f" expected {expected}"
        )
    complaints = [f"{name} is missing" for name in wanted if name not in tensors]
    for name, tensor in tensors.items():
        if name not in wanted:
            complaints.append(f"{name} is not covered by its {CONFIG}")
        elif tensor.shape != wanted[name]:
            complaints.append(f"{name} has shape {tensor.shape}, expected {wanted[name]}")
        elif tensor.dtype.name not in DTYPES:
            complaints.append(f"{name} is {tensor.dtype.name}, expected {', '.join(DTYPES)}")
        elif (bad := first_non_finite(tensor.read())) is not None:
            complaints.append(f"{name} holds {tensor.read().reshape(-1)[bad]} at index {bad}")
    if complaints:
        shown = "\n  ".join(complaints[:50])
        more = f"\n  and {len(complaints) - 50} more" if len(complaints) > 50 else ""
        raise CheckpointError(f"{directory} does not fit this model:\n  {shown}{more}")


def _check_base_table(
    directory: Path, name: str, tensor: LazyTensor, config: ModelConfig, params: Params | None
) -> None:
    """Raise CheckpointError if an embedding stored with the adapter differs from the base's."""
    module = name.removeprefix(PREFIX).removesuffix(".base_layer.weight")
    target = next((t for t in list_targets(config).values() if t.name == module), None)
    same = target is not None and tensor.shape == target.shape
    if same and target is not None and params is not None:
        leaf = as_weight(strip_adapters(dict(flatten(params))[target.path]))
        if isinstance(leaf, DenseWeight) and leaf.format == tensor.dtype.name:
            same = np.array_equal(np.asarray(leaf.array), tensor.read())
    if not same:
        raise CheckpointError(
            f"{directory}: {name} differs from this model's embedding, as with a resized"
            " vocabulary. Merge the adapter with PEFT (merge_and_unload) and load the merged model"
        )


def _read_matrices(tensors: Mapping[str, LazyTensor], specs: list[_TensorSpec]) -> LoraMatrices:
    def read(piece: _TensorSpec) -> jax.Array:
        array = tensors[piece.name].read()
        return jax.device_put(np.ascontiguousarray(array.T) if piece.transposed else array)

    matrices = {piece.matrix: read(piece) for piece in specs}
    return LoraMatrices(matrices["a"], matrices["b"], matrices.get("magnitude"))


def parse_peft_config(data: Mapping[str, Any], where: str) -> LoraConfig:
    """Parse adapter_config.json. Raises CheckpointError with all unsupported fields."""
    complaints = []
    for name, values in ALLOWED_VALUES.items():
        if name in data and data[name] not in values:
            known = " or ".join(map(repr, values))
            complaints.append(f"{name} must be {known}, got {data[name]!r:.60}")
    init = data.get("init_lora_weights")
    if not any(
        init is value or (isinstance(init, str) and init == value) for value in _PLAIN_INITS
    ):
        complaints.append(
            f"init_lora_weights {init!r:.60} requires a modified base model; save the adapter as"
            " plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for name, value in data.items():
        known_name = name in READ_FIELDS or name in IGNORED_FIELDS or name in ALLOWED_VALUES
        if not known_name and not any(value is x or value == x for x in _EMPTY_VALUES):
            complaints.append(f"{name} is not supported (got {value!r:.60})")
    if "peft_type" not in data:
        complaints.append("peft_type is missing")
    if data.get("target_modules") is None:
        complaints.append("target_modules is missing")
    if complaints:
        raise CheckpointError(f"{where}: {'; '.join(complaints)}; {_REMEDY}")
    fields = {name: data[name] for name in READ_FIELDS if data.get(name) is not None}
    if init == "gaussian":
        fields["init_lora_weights"] = "gaussian"
    try:
        return LoraConfig(**fields)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _make_config(
    lora: LoraConfig, specs: Sequence[LoraSpec], config: ModelConfig, base: str | None
) -> dict[str, Any]:
    """Return the contents of adapter_config.json for PEFT."""
    _, table = write_config(config)
    targets = [t._replace(name=t.fused_name or t.name) for t in list_targets(config).values()]
    alphas = {s.target.name: s.alpha for s in specs if s.alpha != lora.lora_alpha}
    return {
        "alpha_pattern": {name: _as_json_number(alpha) for name, alpha in alphas.items()},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        # Whether the base's linear layers are Conv1D.
        "fan_in_fan_out": any(
            re.fullmatch(regex, s.target.path) for regex in table.conv1d for s in specs
        ),
        "inference_mode": True,
        "init_lora_weights": "gaussian" if lora.init_lora_weights == "gaussian" else True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _as_json_number(lora.lora_alpha),
        "lora_bias": False,
        "lora_dropout": lora.lora_dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.r,
        "rank_pattern": {s.target.name: s.rank for s in specs if s.rank != lora.r},
        "revision": None,
        "target_modules": shorten_names([s.target.name for s in specs], targets),
        "task_type": "CAUSAL_LM",
        "use_dora": lora.use_dora,
        "use_rslora": lora.use_rslora,
    }


def _as_json_number(alpha: float) -> float | int:
    """Return whole numbers as int, as PEFT writes them."""
    return int(alpha) if float(alpha).is_integer() else alpha
