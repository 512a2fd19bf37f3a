"""The axes of a mesh of devices, as users write them: `data=2,tensor=4`.

A mesh is said by the sizes of its axes alone, which hash and print; the devices are the first that
JAX has. An axis that is not named has size 1.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxllm.errors import ConfigError

# name -> what it divides, the outermost first: neighbours on the last are the nearest devices.
AXES = {
    "data": "rows of a batch",
    "stage": "layers",
    "sequence": "tokens of a text, and slots of its cache",
    "expert": "experts of a mixture",
    "tensor": "heads, hidden numbers of MLPs, tokens of the vocabulary",
}
# name -> how else it may do so, and the field of `Axes` that says so.
HOW = {"sequence": ("heads", "exchange"), "tensor": ("tokens", "stream")}
MOST = 1 << 20  # devices of an axis: a typo, not a policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """Sizes of a mesh's axes, the outermost first.

    copies: where there are fewer key/value heads than devices on `tensor`, each head is on so many
    of them, which divide its query heads (`rules.fitted`); users name the product of both.
    exchange: attention over `sequence` is Ulysses', which exchanges tokens for heads, and splits
    caches by heads; written `sequence=4:heads`. Otherwise it is a ring, and caches split by slots.
    stream: between linears, where there are norms and sums, prompts and training texts are split
    by tokens over `tensor` (Korthikanti et al. 2022, arXiv 2205.05198); `tensor=4:tokens`.
    """

    data: int = 1
    stage: int = 1
    sequence: int = 1
    expert: int = 1
    tensor: int = 1
    copies: int = 1
    exchange: bool = False
    stream: bool = False

    @property
    def devices(self) -> int:
        """How many there are in all."""
        return math.prod(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return (*AXES, "copies")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def over(self, names: tuple[str, ...]) -> int:
        """How many shares there are of what several axes divide."""
        return math.prod(getattr(self, name) for name in names)

    def __str__(self) -> str:
        asked = {name: getattr(self, name) for name in AXES} | {"tensor": self.tensor * self.copies}
        said = (f"{name}={size}{self._how(name)}" for name, size in asked.items() if size > 1)
        return ",".join(said) or "tensor=1"

    def _how(self, name: str) -> str:
        how, field = HOW.get(name, ("", ""))
        return f":{how}" if field and getattr(self, field) else ""


def parse(text: str) -> Axes:
    """The axes that `name=size,name=size` says.

    Raises ConfigError for an axis that there is not, or twice, and for what is no size.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a mesh is written as data=2,tensor=4, got {text!r:.60}")
    sizes: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, size = (part.strip() for part in item.partition("="))
        if not equals or name not in AXES:
            known = "; ".join(f"{axis} divides {what}" for axis, what in AXES.items())
            raise ConfigError(
                f"a mesh is written as data=2,tensor=4 ({known}), got {item.strip()!r:.60}"
            )
        if name in sizes:
            raise ConfigError(f"mesh {text!r:.60} names the axis {name} twice")
        size, colon, how = size.partition(":")
        if colon and (name not in HOW or how != HOW[name][0]):
            known = ", ".join(f"{axis}=4:{how}" for axis, (how, _) in HOW.items())
            raise ConfigError(f"after its size an axis says {known} or nothing; got {item!r:.60}")
        if not (size.isascii() and size.isdigit() and 1 <= int(size[:9]) <= MOST):
            raise ConfigError(
                f"the axis {name} of a mesh is over a whole number of devices from 1 up, got"
                f" {size!r:.20}"
            )
        sizes[name] = int(size)
        if colon:
            sizes[HOW[name][1]] = True
    return Axes(**sizes)


def check_devices(axes: Axes) -> None:
    """Raises ConfigError for a mesh of more devices than there are; of several processes, of fewer
    too, or one would have nothing of the model.
    """
    there, platform, processes = jax.device_count(), jax.default_backend(), jax.process_count()
    if processes > 1 and axes.devices != there:
        raise ConfigError(
            f"mesh {axes} is of {axes.devices} devices, and the {processes} processes have {there}:"
            " a mesh of several processes is over all of them"
        )
    if axes.devices <= there:
        return
    more = (
        f". To try a mesh on one machine, start with JAX_NUM_CPU_DEVICES={axes.devices} in the"
        " environment: one processor then passes for so many devices"
        if platform == "cpu"
        else ""
    )
    named = f"{there} {platform} device{'s are' if there > 1 else ' is'} there"
    raise ConfigError(f"mesh {axes} is of {axes.devices} devices, {named}{more}")


@cache
def mesh_of(axes: Axes) -> Mesh:
    """The mesh over JAX's first devices. Raises ConfigError where there are not so many."""
    check_devices(axes)
    kinds = (AxisType.Auto,) * len(axes.names)
    devices = jax.devices()[: axes.devices]
    return jax.make_mesh(axes.sizes, axes.names, axis_types=kinds, devices=devices)
