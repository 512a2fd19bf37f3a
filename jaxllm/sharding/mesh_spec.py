"""The axes of a device mesh as users write them: `data=2,tensor=4`.

A mesh is defined by its axis sizes alone, which hash and print; it uses the first devices of
`jax.num_devices()`. An axis that is not named has size 1.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxllm.errors import ConfigError
from jaxllm.runtime.multihost import is_multiprocess

# name -> what it shards, outermost first: neighbors on the last axis are the nearest devices.
AXES = {
    "data": "rows of a batch",
    "stage": "layers",
    "sequence": "tokens of a text, and slots of its cache",
    "expert": "experts of a mixture",
    "tensor": "heads, MLP channels, tokens of the vocabulary",
}
# name -> an alternative mode of the axis, and the field of `MeshSpec` that selects it.
AXIS_MODES = {"sequence": ("heads", "use_ulysses"), "tensor": ("tokens", "sequence_parallel")}
# Axes that other packages carry out: the group `jaxllm.mesh_axes` has the class of their models, a
# `sharding.ShardedModel`.
PLUGIN_AXES = ("stage",)
MAX_DEVICES = 1 << 20  # devices per axis; a larger number is a typo


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Sizes of the mesh axes, outermost first."""

    data: int = 1
    stage: int = 1
    sequence: int = 1
    expert: int = 1
    tensor: int = 1
    # With fewer key/value heads than devices on `tensor`, each head is replicated on this number of
    # them, which split its query heads (`partition_rules.resolve_mesh`); users name the product of
    # both.
    kv_replicas: int = 1
    # Attention over `sequence` is Ulysses', which exchanges tokens for heads and shards caches by
    # heads (`sequence=4:heads`). Otherwise it is ring attention, and caches are sharded by slots.
    use_ulysses: bool = False
    # Between linears (norms, residual sums), prompts and training texts are sharded by tokens over
    # `tensor` (Korthikanti et al. 2022, arXiv 2205.05198); `tensor=4:tokens`.
    sequence_parallel: bool = False

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return (*AXES, "kv_replicas")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def num_shards(self, names: tuple[str, ...]) -> int:
        """Return the number of shards if several axes split an array."""
        return math.prod(getattr(self, name) for name in names)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in AXES} | {
            "tensor": self.tensor * self.kv_replicas
        }
        said = (
            f"{name}={size}{self._mode_suffix(name)}" for name, size in sizes.items() if size > 1
        )
        return ",".join(said) or "tensor=1"

    def _mode_suffix(self, name: str) -> str:
        how, field = AXIS_MODES.get(name, ("", ""))
        return f":{how}" if field and getattr(self, field) else ""


def parse_mesh(text: str) -> MeshSpec:
    """Parse `name=size,name=size`.

    Raises:
        ConfigError: for an unknown or repeated axis, and for an invalid size.
    """
    if not isinstance(text, str):
        raise ConfigError(f"mesh must be a text such as data=2,tensor=4, got {text!r:.60}")
    sizes: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, size = (part.strip() for part in item.partition("="))
        if not equals or name not in AXES:
            known = "; ".join(f"{axis} splits {what}" for axis, what in AXES.items())
            raise ConfigError(
                f"mesh must look like data=2,tensor=4 ({known}), got {item.strip()!r:.60}"
            )
        if name in sizes:
            raise ConfigError(f"mesh {text!r:.60} names the axis {name} twice")
        size, colon, how = size.partition(":")
        if colon and (name not in AXIS_MODES or how != AXIS_MODES[name][0]):
            known = ", ".join(f"{axis}=4:{how}" for axis, (how, _) in AXIS_MODES.items())
            raise ConfigError(f"mode of a mesh axis must be as in {known}, got {item!r:.60}")
        if not (size.isascii() and size.isdigit() and 1 <= int(size[:9]) <= MAX_DEVICES):
            raise ConfigError(
                f"size of mesh axis {name} must be an integer from 1 to {MAX_DEVICES:,}, got"
                f" {size!r:.20}"
            )
        sizes[name] = int(size)
        if colon:
            sizes[AXIS_MODES[name][1]] = True
    return MeshSpec(**sizes)


def check_devices(axes: MeshSpec) -> None:
    """Raise ConfigError if the mesh needs more devices than there are.

    With several processes the mesh must use all devices, or a process would hold no part of the
    model.
    """
    devices, platform, processes = jax.device_count(), jax.default_backend(), jax.process_count()
    if processes > 1 and axes.num_devices != devices:
        raise ConfigError(
            f"mesh {axes} has {axes.num_devices} devices, but the {processes} processes have"
            f" {devices}: a"
            " mesh of several processes must use all devices"
        )
    if axes.num_devices <= devices:
        return
    more = (
        f". To simulate {axes.num_devices} devices on one CPU, set"
        f" JAX_NUM_CPU_DEVICES={axes.num_devices}"
        " in the environment"
        if platform == "cpu"
        else ""
    )
    named = f"{devices} {platform} device{'s are' if devices > 1 else ' is'} available"
    raise ConfigError(f"mesh {axes} needs {axes.num_devices} devices, {named}{more}")


@cache
def build_mesh(axes: MeshSpec) -> Mesh:
    """Return the mesh over JAX's first devices. Raises ConfigError if there are too few."""
    check_devices(axes)
    kinds = (AxisType.Auto,) * len(axes.names)
    devices = jax.devices()[: axes.num_devices]
    return jax.make_mesh(axes.sizes, axes.names, axis_types=kinds, devices=devices)


def submesh(mesh: Mesh, axis: str, number: int) -> Mesh:
    """Return the submesh of the devices with this index on an axis, with the same axes."""
    at = mesh.axis_names.index(axis)
    return Mesh(mesh.devices.take([number], axis=at), mesh.axis_names, axis_types=mesh.axis_types)


def is_local(mesh: Mesh) -> bool:
    """Return whether a mesh has devices of this process."""
    return not is_multiprocess() or jax.process_index() in {
        device.process_index for device in mesh.devices.flat
    }
