"""Adapters beside what is one module in PEFT's base and several here: Phi-3's qkv_proj, for one.

What PEFT has beside such a module is beside each of ours: the same A, and of B and of DoRA's
lengths its own rows. Back it is that again where ours have one A. Those that were trained here have
one each, and theirs is then as wide as all of ours together, B's blocks along the diagonal: the
same product.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxllm import models
from jaxllm.adapters.attach import Matrices
from jaxllm.adapters.config import LoraConfig
from jaxllm.adapters.targets import Low
from jaxllm.config import ModelConfig
from jaxllm.convert.engine import TABLES
from jaxllm.convert.layouts import Fused, Span
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.lazy import LazyTensor, joined

_ROWS = ("lora_B.weight", "lora_magnitude_vector", "lora_magnitude_vector.weight")


class Group(NamedTuple):
    """A module of PEFT's base: its name, ours by path, and which of its rows each of them is."""

    name: str
    modules: tuple[str, ...]
    spans: list[list[Span]]

    @property
    def rows(self) -> int:
        return max(end for each in self.spans for _, end in each)


def groups_of(config: ModelConfig) -> list[Group]:
    """The modules that are several here, of all layers."""
    _, table = TABLES[config.model_type].write_config(config)
    layers, found = models.family(config.model_type).layers, []
    for layout in table.layouts:
        if isinstance(layout, Fused):
            spans = layout.spans(config)
            for number in range(config.num_hidden_layers):
                path = f"{layers}.{number}."
                modules = tuple(f"{path}{name}" for name in layout.ours)
                found.append(Group(f"{table.prefix}{path}{layout.theirs}", modules, spans))
    return found


def apart(
    tensors: Mapping[str, LazyTensor], config: ModelConfig, prefix: str
) -> dict[str, LazyTensor]:
    """PEFT's tensors with those beside a fused module beside each of ours.

    prefix: before PEFT's names. Raises CheckpointError for rows that do not fit.
    """
    _, table = TABLES[config.model_type].write_config(config)
    groups = {f"{prefix}{group.name}": group for group in groups_of(config)}
    made = {}
    for name, tensor in tensors.items():
        module, _, rest = name.partition(".lora_")
        group, what = groups.get(module), f"lora_{rest}"
        if group is None or what not in ("lora_A.weight", *_ROWS):
            made[name] = tensor
            continue
        if what in _ROWS and tensor.shape[:1] != (group.rows,):
            raise CheckpointError(
                f"{name} has shape {tensor.shape}, this model makes it {group.rows} rows"
            )
        for ours, spans in zip(group.modules, group.spans, strict=True):
            part = tensor
            if what in _ROWS:
                part = joined([tensor.rows(*span) for span in spans])
            made[f"{prefix}{table.prefix}{ours}.{what}"] = part
    return made


def together(
    config: ModelConfig, lows: Mapping[str, Low], matrices: Mapping[str, Matrices], lora: LoraConfig
) -> list[tuple[Low, Matrices]]:
    """What is beside each of PEFT's modules, of adapters `matrices` by our paths.

    Raises ConfigError for DoRA beside some rows of a module alone.
    """
    groups = {module: group for group in groups_of(config) for module in group.modules}
    made, done = [], set[str]()
    for module, low in lows.items():
        group = groups.get(module)
        if group is None:
            made.append((low, matrices[module]))
        elif group.name not in done:
            done.add(group.name)
            made.append(_joined(group, lows, matrices, lora))
    return made


def _joined(
    group: Group, lows: Mapping[str, Low], matrices: Mapping[str, Matrices], lora: LoraConfig
) -> tuple[Low, Matrices]:
    there = [module for module in group.modules if module in matrices]
    first, found = lows[there[0]], [jax.tree.map(np.asarray, matrices[m]) for m in there]
    if lora.use_dora and len(there) < len(group.modules):
        raise ConfigError(
            f"DoRA beside {', '.join(there)} alone has no form in PEFT, whose {group.name} is one"
            f" with other rows, which would have lengths too: train all of"
            f" {', '.join(group.modules)}, or merge the adapter"
        )
    scales = [lows[m].scale for m in there]
    one = len(set(scales)) == 1 and all(np.array_equal(m.a, found[0].a) for m in found)
    a_KI = found[0].a if one else np.concatenate([m.a for m in found])
    b_OK = np.zeros((group.rows, len(a_KI)), found[0].b.dtype)
    magnitude = np.zeros(group.rows, found[0].b.dtype) if lora.use_dora else None
    column = 0
    for module, each, scale in zip(there, found, scales, strict=True):
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
    target = first.target._replace(name=group.name, fused="", shape=(group.rows, a_KI.shape[1]))
    return Low(target, rank, scales[0], alpha), Matrices(*jax.device_put((a_KI, b_OK, magnitude)))
