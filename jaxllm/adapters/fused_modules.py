"""Adapters of modules that are fused in PEFT's base model and separate here, as Phi-3's qkv_proj.

To read one, each of our modules gets the same A, and its rows of B and of DoRA's magnitude. To
write it, this is undone if our modules share one A. Adapters trained here have separate A matrices;
the fused ones are then concatenated, with B block-diagonal, which gives the same product.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxllm import models
from jaxllm.adapters.attach import LoraMatrices
from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.adapters.targets import LoraSpec
from jaxllm.config.model import ModelConfig
from jaxllm.convert.fused_layouts import FusedLayout, Span
from jaxllm.convert.hf import write_config
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.lazy import LazyTensor, concat_tensors

_ROW_TENSORS = ("lora_B.weight", "lora_magnitude_vector", "lora_magnitude_vector.weight")


class FusedGroup(NamedTuple):
    """A fused module: its name in PEFT, the paths of our modules, and the rows of each."""

    name: str
    modules: tuple[str, ...]
    spans: list[list[Span]]

    @property
    def num_rows(self) -> int:
        return max(end for each in self.spans for _, end in each)


def list_groups(config: ModelConfig) -> list[FusedGroup]:
    """Return the fused modules of all layers."""
    _, table = write_config(config)
    layers, groups = models.get_family(config.model_type).layers, []
    for layout in table.layouts:
        if isinstance(layout, FusedLayout):
            spans = layout.row_spans(config)
            for number in range(config.num_hidden_layers):
                path = f"{layers}.{number}."
                modules = tuple(f"{path}{name}" for name in layout.parts)
                groups.append(FusedGroup(f"{table.prefix}{path}{layout.fused}", modules, spans))
    return groups


def split_fused(
    tensors: Mapping[str, LazyTensor], config: ModelConfig, prefix: str
) -> dict[str, LazyTensor]:
    """Split PEFT's tensors of fused modules into tensors of our modules.

    prefix: prefix of PEFT's names. Raises CheckpointError for a wrong number of rows.
    """
    _, table = write_config(config)
    groups = {f"{prefix}{group.name}": group for group in list_groups(config)}
    split = {}
    for name, tensor in tensors.items():
        module, _, rest = name.partition(".lora_")
        group, what = groups.get(module), f"lora_{rest}"
        if group is None or what not in ("lora_A.weight", *_ROW_TENSORS):
            split[name] = tensor
            continue
        if what in _ROW_TENSORS and tensor.shape[:1] != (group.num_rows,):
            raise CheckpointError(
                f"{name} has shape {tensor.shape}, expected {group.num_rows} rows"
            )
        for path, spans in zip(group.modules, group.spans, strict=True):
            part = tensor
            if what in _ROW_TENSORS:
                part = concat_tensors([tensor.rows(*span) for span in spans])
            split[f"{prefix}{table.prefix}{path}.{what}"] = part
    return split


def fuse_modules(
    config: ModelConfig,
    specs: Mapping[str, LoraSpec],
    matrices: Mapping[str, LoraMatrices],
    lora: LoraConfig,
) -> list[tuple[LoraSpec, LoraMatrices]]:
    """Combine adapters of our modules into adapters of PEFT's modules.

    matrices: by our module paths. Raises ConfigError for DoRA on only a part of a fused module.
    """
    groups = {module: group for group in list_groups(config) for module in group.modules}
    fused, done = [], set[str]()
    for module, low in specs.items():
        group = groups.get(module)
        if group is None:
            fused.append((low, matrices[module]))
        elif group.name not in done:
            done.add(group.name)
            fused.append(_fuse_group(group, specs, matrices, lora))
    return fused


def _fuse_group(
    group: FusedGroup,
    specs: Mapping[str, LoraSpec],
    matrices: Mapping[str, LoraMatrices],
    lora: LoraConfig,
) -> tuple[LoraSpec, LoraMatrices]:
    members = [module for module in group.modules if module in matrices]
    first, parts = specs[members[0]], [jax.tree.map(np.asarray, matrices[m]) for m in members]
    if lora.use_dora and len(members) < len(group.modules):
        raise ConfigError(
            f"DoRA on {', '.join(members)} alone cannot be written for PEFT, where {group.name}"
            f" also contains other rows. Train all of {', '.join(group.modules)}, or merge the"
            " adapter"
        )
    scales = [specs[m].scale for m in members]
    one = len(set(scales)) == 1 and all(np.array_equal(m.a, parts[0].a) for m in parts)
    a_KI = parts[0].a if one else np.concatenate([m.a for m in parts])
    b_OK = np.zeros((group.num_rows, len(a_KI)), parts[0].b.dtype)
    magnitude = np.zeros(group.num_rows, parts[0].b.dtype) if lora.use_dora else None
    column = 0
    for module, each, scale in zip(members, parts, scales, strict=True):
        spans = group.spans[group.modules.index(module)]
        rows = np.concatenate([np.arange(*span) for span in spans])
        width = each.b.shape[1]
        b_OK[rows, column : column + width] = each.b * np.float32(scale / scales[0])
        column += 0 if one else width
        if magnitude is not None:
            magnitude = magnitude.astype(each.magnitude.dtype)
            magnitude[rows] = each.magnitude
    rank = len(a_KI)
    alpha = first.alpha if one else scales[0] * (rank**0.5 if lora.use_rslora else rank)
    target = first.target._replace(
        name=group.name, fused_name="", shape=(group.num_rows, a_KI.shape[1])
    )
    return LoraSpec(target, rank, scales[0], alpha), LoraMatrices(
        *jax.device_put((a_KI, b_OK, magnitude))
    )
