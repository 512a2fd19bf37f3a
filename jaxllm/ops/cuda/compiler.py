"""Kernels as machine code: a variant is compiled when it is first used, for the card that is there.

That takes about a second, and a model has a handful. They are kept beside compiled programs.
"""

import hashlib
from functools import cache
from pathlib import Path

from jaxllm.ops import compile_cache
from jaxllm.ops.cuda import nvrtc

SOURCES = Path(__file__).parent / "csrc"


def find_key(source: str, architecture: str) -> int:
    """Return the key of a kernel from everything that it is made from."""
    digest = hashlib.sha256(repr((source, architecture, _hash_sources())).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def compile_kernel(source: str, architecture: str) -> bytes:
    """Return the machine code of a kernel for an architecture, as "sm_90a".

    Raises:
        ConfigError: if NVRTC is missing or refuses the source.
    """
    options = [f"--gpu-architecture={architecture}", "--std=c++17", f"-I{SOURCES}"]

    def make_kernel() -> bytes:
        return nvrtc.compile_source(source, options)

    facts = (source, architecture, _hash_sources(), nvrtc.find_version())
    machine_code: bytes = compile_cache.load_or_make(facts, make_kernel)
    return machine_code


@cache
def _hash_sources() -> str:
    files = sorted(file for file in SOURCES.iterdir() if file.suffix in (".h", ".cu"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
