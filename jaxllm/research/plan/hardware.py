"""Device specifications, by name or by numbers.

The numbers are peak values from data sheets. For the RTX card: dense products with float32 sums,
and PCIe x16 as the link. For TPUs also from "How to Scale Your Model" (Austin et al. 2025, table of
chapter 2). Real programs do not reach them, so a plan is a bound.
"""

import dataclasses
import math
import re

from jaxllm.errors import ConfigError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device, and its links.

    Attributes:
        flops: bfloat16 matmul flops per second.
        memory: bytes per device.
        bandwidth: of the memory, bytes per second.
        link: bytes per second that a device sends within its node, in one direction.
        node: number of devices in a node.
        across: bytes per second that a device sends to other nodes.
        latency: minimum seconds of a collective.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    node: float = 8
    across: float = 50e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name == "latency" else 1
            if not math.isfinite(value) or value < least:
                raise ConfigError(f"hardware: {name} must be at least {least}, got {value!r:.40}")


HARDWARE = {
    "a100": Hardware(flops=312e12, memory=80e9, bandwidth=2.039e12, link=300e9, across=25e9),
    "h100": Hardware(flops=989e12, memory=80e9, bandwidth=3.35e12, link=450e9),
    "h200": Hardware(flops=989e12, memory=141e9, bandwidth=4.8e12, link=450e9),
    "b200": Hardware(flops=2250e12, memory=180e9, bandwidth=8e12, link=900e9),
    "mi300x": Hardware(flops=1307e12, memory=192e9, bandwidth=5.3e12, link=448e9),
    "l40s": Hardware(flops=362e12, memory=48e9, bandwidth=864e9, link=32e9),
    "rtx4090": Hardware(flops=165.2e12, memory=24e9, bandwidth=1.008e12, link=32e9),
    "tpu-v5e": Hardware(
        flops=197e12, memory=16e9, bandwidth=8.1e11, link=90e9, node=256, across=3.1e9
    ),
    "tpu-v5p": Hardware(
        flops=459e12, memory=96e9, bandwidth=2.8e12, link=180e9, node=8960, across=6.25e9
    ),
    "tpu-v6e": Hardware(
        flops=918e12, memory=32e9, bandwidth=1.6e12, link=180e9, node=256, across=12.5e9
    ),
}
FIELDS = tuple(f.name for f in dataclasses.fields(Hardware))


def parse_hardware(text: str) -> Hardware:
    """Parse a device: a name, numbers, or a name with some numbers changed.

    Examples: `h100`, `h100,memory=94g`, or `flops=1t,memory=16g,bandwidth=20g,link=10g`. Numbers
    may end in k, m, g, t or p, for powers of 1,000. Raises ConfigError for other texts.
    """
    named, *rest = [part.strip() for part in text.split(",")]
    known: dict[str, float] = {}
    if "=" in named:
        rest = [named, *rest]
    elif named.lower() in HARDWARE:
        known = dataclasses.asdict(HARDWARE[named.lower()])
    else:
        raise ConfigError(
            f"hardware {named!r:.40} is unknown: use {', '.join(HARDWARE)}, or numbers, as in"
            " flops=1t,memory=16g,bandwidth=20g,link=10g"
        )
    for part in rest:
        name, equals, number = part.partition("=")
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)([kmgtp]?)b?", number.strip().lower())
        if not equals or name not in FIELDS or not match:
            raise ConfigError(
                f"hardware: {part!r:.60} must be NAME=NUMBER, with NAME one of {', '.join(FIELDS)}"
            )
        known[name] = float(match[1]) * _UNITS[match[2]]
    lacking = [f.name for f in dataclasses.fields(Hardware) if f.default is dataclasses.MISSING]
    if missing := [name for name in lacking if name not in known]:
        raise ConfigError(f"hardware: {', '.join(missing)} must be given")
    return Hardware(**known)
