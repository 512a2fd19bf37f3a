"""The instruction sets that this machine runs, one after the other."""

from collections.abc import Iterator

from jaxllm.errors import ConfigError
from jaxllm.ops import native

INSTRUCTION_SETS = ("portable", "avx2", "avx512")


def each_isa() -> Iterator[str]:
    """Takes one after the other, leaving out what the machine has not."""
    for name in INSTRUCTION_SETS:
        try:
            native.isa(name)
        except ConfigError:
            continue
        yield name
