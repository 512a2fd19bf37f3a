"""gpt-oss checkpoints: the table, and the layout of experts, in bfloat16 or in MXFP4.

The rows of gate and up alternate, gate first. In bfloat16 the matrices are stored as `[in, out]`.
In MXFP4 byte j of a group of 32 columns holds columns 2 j (low bits) and 2 j + 1.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.convert.decoders import LAYER_TYPES, make_table, resolve_layer_types
from jaxllm.convert.experts import ROUTER_FIELDS
from jaxllm.convert.fused_layouts import Tensors
from jaxllm.convert.tables import Field
from jaxllm.errors import CheckpointError
from jaxllm.models.gpt_oss import GptOssConfig
from jaxllm.weights.lazy import LazyTensor, stack_tensors
from jaxllm.weights.types.mxfp4 import FORMAT, GROUP

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERTS = re.compile(r"(layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(_bias|_blocks|_scales|)")
_OURS = re.compile(r"(layers\.\d+\.mlp\.experts\.)(gate|up|down)_proj\.(weight|bias)")
_SINKS = re.compile(r"(layers\.\d+\.self_attn\.sinks)(\.weight|)")


def _repack(blocks: np.ndarray) -> np.ndarray:
    """Convert `[O, G, 16]` to the bytes of `Mxfp4Weight`: columns i and i + 16 share byte i."""
    first, second = blocks[..., :8], blocks[..., 8:]
    even, odd = first & 15 | second << 4, first >> 4 | second & 0xF0
    return np.stack([even, odd], axis=-1).reshape(len(blocks), -1)


# By a tensor's suffix: our suffix, and what converts one expert's.
_READERS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "": (".weight", np.transpose),
    "_bias": (".bias", lambda part: part),
    "_blocks": (".weight.data", _repack),
    "_scales": (".weight.scale", lambda part: part),
}


class GptOssLayout:
    """The experts and the sinks of each layer."""

    def matches(self, path: str) -> bool:
        return any(regex.fullmatch(path) for regex in (_EXPERTS, _SINKS))

    def read(self, tensors: Tensors, config: GptOssConfig) -> Tensors:
        result = Tensors()
        for path, tensor in tensors.items():
            match = _EXPERTS.fullmatch(path)
            if match is None:
                sinks = _SINKS.fullmatch(path)
                result[f"{sinks[1]}.weight" if sinks else path] = tensor
                continue
            _check_shape(path, match, tensor, config)
            names = ("gate", "up") if match[2] == "gate_up" else ("down",)
            columns = config.hidden_size if len(names) == 2 else config.expert_size
            for i, name in enumerate(names):
                part = _convert_experts(tensor, match[3], columns, slice(i, None, len(names)))
                result[f"{match[1]}{name}_proj{_READERS[match[3]][0]}"] = part
        return result

    def write(self, tensors: Tensors, config: GptOssConfig) -> Tensors:
        result = Tensors()
        for path, tensor in tensors.items():
            match = _OURS.fullmatch(path)
            if match is None:
                sinks = _SINKS.fullmatch(path)
                result[sinks[1] if sinks else path] = tensor
            elif match[2] != "up":
                parts = [tensor]
                if match[2] == "gate":
                    parts.append(tensors[path.replace("gate_proj", "up_proj")])
                name = "gate_up" if match[2] == "gate" else "down"
                end = "_bias" if match[3] == "bias" else ""
                result[f"{match[1]}{name}_proj{end}"] = _join_experts(parts)
        return result


def _check_shape(path: str, match: re.Match[str], tensor: LazyTensor, config: GptOssConfig) -> None:
    E, D, F = config.num_experts, config.hidden_size, config.expert_size
    rows, columns = (2 * F, D) if match[2] == "gate_up" else (D, F)
    wanted: tuple[int, ...] = {
        "": (E, columns, rows),
        "_bias": (E, rows),
        "_blocks": (E, rows, columns // GROUP, GROUP // 2),
        "_scales": (E, rows, columns // GROUP),
    }[match[3]]
    if tensor.shape != wanted:
        raise CheckpointError(f"{path} has shape {tensor.shape}, expected {wanted} by config.json")


def _convert_experts(tensor: LazyTensor, kind: str, columns: int, take: slice) -> LazyTensor:
    """Return some output rows of each expert, converted. columns: of the matrix."""
    suffix, convert = _READERS[kind]
    rows = range(tensor.shape[-1 if kind in ("", "_bias") else 1])[take]
    dtype = tensor.dtype
    shape: tuple[int, ...] = (len(rows),) if kind else (len(rows), columns)
    if kind in ("_blocks", "_scales"):
        spec = FORMAT.array_specs((len(rows), columns))[suffix.removeprefix(".weight")]
        dtype, shape = np.dtype(spec[1]), tuple(n or 0 for n in spec[0])

    def read(expert: int) -> np.ndarray:
        whole = tensor.rows(expert, expert + 1).read()[0]
        part = convert(whole[..., take] if not kind else whole[take])
        missing = shape[-1] - part.shape[-1]  # to whole chunks
        return np.ascontiguousarray(np.pad(part, [*[(0, 0)] * (part.ndim - 1), (0, missing)]))

    def one(expert: int) -> LazyTensor:
        return LazyTensor(dtype, shape, lambda: read(expert), tensor.release)

    return stack_tensors([one(expert) for expert in range(tensor.shape[0])])


def _join_experts(parts: list[LazyTensor]) -> LazyTensor:
    """Return each expert's bias or transposed matrix, with the output rows of the parts in turn."""
    rows, *columns = parts[0].shape[1:]

    def read(expert: int) -> np.ndarray:
        each = [part.rows(expert, expert + 1).read()[0] for part in parts]
        joined = np.stack(each, axis=1).reshape(rows * len(parts), *columns)
        return np.ascontiguousarray(joined.T)

    def release() -> None:
        for part in parts:
            part.release()

    def one(expert: int) -> LazyTensor:
        shape = (*columns, rows * len(parts))
        return LazyTensor(parts[0].dtype, shape, lambda: read(expert), release)

    return stack_tensors([one(expert) for expert in range(parts[0].shape[0])])


def _add_defaults(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if data.get("rope_parameters") is None and data.get("rope_scaling") is None:
        return {**data, "rope_scaling": DEFAULT_ROPE}
    return data


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    resolve_layer_types(fields, lambda i: i % 2 == 0)


def _write_rope(config: GptOssConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Name the type if there is no scaling: without settings, transformers takes its own."""
    if config.rope.rope_type != "default":
        return data
    rope = {k: v for k, v in dataclasses.asdict(config.rope).items() if v is not None}
    return {**data, "rope_theta": None, "rope_scaling": None, "rope_parameters": rope}


TABLES = (
    make_table(
        "GptOss",
        GptOssConfig,
        LAYER_TYPES,
        Field("attention_bias", "attention_bias", True),
        Field("num_key_value_heads", "num_key_value_heads", 8),
        Field("head_dim", "head_dim", 64),
        Field("max_position_embeddings", "max_position_embeddings", 131072),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("sliding_window", "sliding_window", 128),
        Field("num_local_experts", "num_experts", 128),
        Field("num_experts_per_tok", "num_experts_per_tok", 4),
        Field("swiglu_alpha", "swiglu_alpha", 1.702),
        Field("swiglu_limit", "swiglu_limit", 7.0),
        # A fact about training, which rope_scaling repeats.
        ignored_fields=ROUTER_FIELDS | {"initial_context_length"},
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        layouts=(GptOssLayout(),),
        theta=150000.0,
        prepare=_add_defaults,
        derive=_resolve_layers,
        finish=_write_rope,
    ),
)
