"""GGUF adapters (`general.type` "adapter"), in the format of llama.cpp's `convert_lora_to_gguf`.

For a matrix `NAME`, `NAME.lora_a` is `[r, I]` and `NAME.lora_b` `[O, r]`, with rows in the order of
the GGUF matrix; for the token embedding `lora_a` is `[V, r]`. All matrices share one alpha: the
scale is alpha / r, or 1 if alpha is 0.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxllm import models
from jaxllm.adapters.attach import Adapter, LoraMatrices, resolve_adapter
from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.adapters.targets import TargetModule, list_targets, shorten_names
from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf import names
from jaxllm.convert.gguf.architecture import GGUFArchitecture
from jaxllm.convert.gguf.families import ARCHITECTURES
from jaxllm.convert.gguf.header import GGUFHeader, read_header
from jaxllm.convert.gguf.names import MatchedParam, ModuleRow
from jaxllm.convert.gguf.settings import write_config
from jaxllm.convert.gguf.tensors import GGUFTensor
from jaxllm.convert.gguf.writer import check_absent, write_arrays
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.safetensors import first_non_finite

_ALPHA = "adapter.lora.alpha"
_MATRIX_NAMES = ("lora_a", "lora_b")


def read_gguf_adapter(path: str | Path, config: ModelConfig) -> Adapter:
    """Read an adapter for a model of this configuration from a GGUF file.

    Raises CheckpointError with all problems: not an adapter, another architecture, other shapes,
    tensors other than LoRA's, values that are not finite.
    """
    header = read_header(Path(path))
    row, alpha = _check_header(header, config)
    targets, complaints = list_targets(config), list[str]()
    pieces: dict[str, dict[str, np.ndarray]] = {}
    stems = dict.fromkeys(name.rpartition(".")[0] for name in header.tensor_infos)
    for param in names.match_names(row.modules, stems):
        if isinstance(param, str) or param.path.removesuffix(".weight") not in targets:
            what = param if isinstance(param, str) else param.name
            complaints.append(f"{what} cannot have an adapter here")
    known = {
        f"{param.name}.{piece}": (param, piece)
        for param in _named_targets(row.modules, targets)
        for piece in _MATRIX_NAMES
        if param.module.row_range is None
    }
    for name in header.tensor_infos:
        if name in known:
            param, piece = known[name]
            array = _read_array(header, name, param.module if piece == "lora_b" else None, config)
            pieces.setdefault(param.path.removesuffix(".weight"), {})[piece] = array
        elif not complaints:
            complaints.append(f"{name} is not a LoRA tensor")
    matrices, ranks = {}, {}
    for module, pair in pieces.items():
        module_matrices = _make_matrices(targets[module], pair, complaints)
        if module_matrices is not None:
            matrices[module], ranks[module] = module_matrices, module_matrices.a.shape[0]
    if not pieces:
        complaints.append("no matrix has lora_a and lora_b")
    if complaints:
        shown = "\n  ".join(complaints[:50])
        raise CheckpointError(f"{path} does not fit this model:\n  {shown}")
    return Adapter(_infer_config(config, targets, ranks, alpha), matrices)


def write_gguf_adapter(path: str | Path, adapter: Adapter, config: ModelConfig) -> None:
    """Write a float32 GGUF file that llama.cpp can load for the same model.

    GGUF has one alpha, so scales that differ are multiplied into `lora_b`. Raises ConfigError for
    what GGUF does not support (DoRA) and for an adapter of another model, CheckpointError if the
    file exists or cannot be written.
    """
    path = Path(path)
    check_absent(path)
    architecture, row, _, _ = write_config(config)
    if adapter.config.use_dora:
        raise ConfigError("GGUF adapters do not support DoRA. Merge the adapter into its model")
    specs, alpha = resolve_adapter(config, adapter), float(adapter.config.lora_alpha) or 1.0
    tensors: dict[str, np.ndarray] = {}
    for param in _named_targets(row.modules, list_targets(config)):
        module = param.path.removesuffix(".weight")
        if module not in specs:
            continue
        if param.module.row_range is not None:
            raise ConfigError(f"{param.name} is fused in GGUF and separate here: not supported")
        spec, (a, b, _) = specs[module], adapter.matrices[module]
        times = np.float32(spec.scale * spec.rank / alpha)
        first, second = (np.asarray(x, np.float32) for x in (a, b))
        if spec.target.site == "rows":  # GGUF has the transpose
            first, second = second, np.ascontiguousarray(first.T)
        if param.module.row_order is not None:
            second = second[param.module.row_order(config)]
        tensors[f"{param.name}.lora_a"] = first
        tensors[f"{param.name}.lora_b"] = second if times == 1 else second * times
    settings = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        _ALPHA: alpha,
    }
    write_arrays(path, settings, tensors)


def _check_header(header: GGUFHeader, config: ModelConfig) -> tuple[GGUFArchitecture, float]:
    """Validate the header; return the table row of its architecture, and alpha."""
    settings, where = header.settings, f"{header.path}"
    kind, how = settings.get("general.type"), settings.get("adapter.type")
    if kind != "adapter" or how != "lora":
        raise CheckpointError(
            f"{where}: not a LoRA adapter: general.type {kind!r:.40}, adapter.type {how!r:.40}"
        )
    row = ARCHITECTURES.get(str(settings.get("general.architecture")))
    if row is None or row.family is not models.get_family(config.model_type):
        raise CheckpointError(
            f"{where}: the adapter's architecture is"
            f" {settings.get('general.architecture')!r:.40}, expected {config.model_type}"
        )
    if other := [key for key in settings if key.startswith("adapter.alora")]:
        raise CheckpointError(f"{where}: {other[0]} is not supported")
    alpha = settings.get(_ALPHA)
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise CheckpointError(f"{where}: {_ALPHA} must be a finite number, got {alpha!r:.40}")
    return row, alpha


def _named_targets(
    modules: tuple[ModuleRow, ...], targets: Mapping[str, TargetModule]
) -> list[MatchedParam]:
    """Return the targets that have a name in GGUF; a tied head has none."""
    paths = [f"{module}.weight" for module, target in targets.items() if target.site != "head"]
    return [param for param in names.match_paths(modules, paths) if isinstance(param, MatchedParam)]


def _read_array(
    header: GGUFHeader, name: str, module: ModuleRow | None, config: ModelConfig
) -> np.ndarray:
    entry, order = header.tensor_infos[name], None
    if module is not None and module.row_order is not None:
        order = np.argsort(module.row_order(config))
        if entry.shape[0] != len(order):  # `_make_matrices` reports the shape
            order = None
    return np.asarray(GGUFTensor(header.buffer, entry, order).to_plain().read())


def _make_matrices(
    target: TargetModule, pair: Mapping[str, np.ndarray], complaints: list[str]
) -> LoraMatrices | None:
    """Return the matrices in our layout, or None after appending to `complaints`."""
    missing = [piece for piece in _MATRIX_NAMES if piece not in pair]
    if missing:
        complaints.append(f"{target.path}: {missing[0]} is missing")
        return None
    a, b = (pair[piece] for piece in _MATRIX_NAMES)
    rows, columns = target.shape
    if target.site == "rows":
        a, b = (b.T, a) if a.ndim == b.ndim == 2 else (a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape != (len(a), columns) or b.shape != (rows, len(a)):
        complaints.append(
            f"{target.path}: LoRA shapes {a.shape}, {b.shape} do not match weight {target.shape}"
        )
        return None
    for array in (a, b):
        if first_non_finite(np.ascontiguousarray(array)) is not None:
            complaints.append(f"{target.path}: the adapter holds NaN or infinity")
    a_KI, b_OK = jax.device_put((np.ascontiguousarray(a), np.ascontiguousarray(b)))
    return LoraMatrices(a_KI, b_OK, None)


def _infer_config(
    config: ModelConfig, targets: Mapping[str, TargetModule], ranks: Mapping[str, int], alpha: float
) -> LoraConfig:
    """Return the configuration of an adapter with these ranks."""
    ((rank, _),) = Counter(ranks.values()).most_common(1)
    hf_names = {module: targets[module].name for module in ranks}
    others = {hf_names[module].replace(".", r"\."): r for module, r in ranks.items() if r != rank}
    return LoraConfig(
        r=rank,
        lora_alpha=alpha or float(rank),
        target_modules=shorten_names(hf_names.values(), targets.values()),
        rank_pattern=others,
        alpha_pattern={} if alpha else {name: float(r) for name, r in others.items()},
    )
