"""Checks that several processes have the same weights, in every number.

Processes on one machine that opened the same file do, and read nothing. Other copies are compared
in full: a single different number changes the output, and a sample would miss it. One process reads
each copy once more. Tensors are compared by CRC-32, against accidents and not forgery: a single
different number is always detected, several are missed once in 4 billion cases. Nothing that was
read is kept.
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.files import path_exists
from jaxllm.runtime import multihost
from jaxllm.runtime.progress import bytes_bar
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import iter_bytes

THREADS = 2  # one computes a checksum while the other reads
MAX_NAMED = 3  # how many differing tensors an error names
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine

Tensors = Mapping[str, LazyTensor]
Checksums = dict[str, int]


def check_replicas(tensors: Tensors, path: Path, show_progress: bool | None = None) -> None:
    """Compare a checkpoint's tensors with those of the other processes, if there are any.

    All processes have the same names, shapes and dtypes.

    Args:
        path: the checkpoint's directory or file.

    Raises:
        ConfigError: in all processes, with the differing tensors and processes.
    """
    if not multihost.is_multiprocess():
        return
    copies, number = multihost.all_gather_objects(identify_copy(path)), multihost.process_index()
    if copies[0] and all(copy == copies[0] for copy in copies):
        return
    reads = not copies[number] or copies.index(copies[number]) == number  # first of its copy
    checksums = checksum_tensors(tensors, show_progress) if reads else {}
    if complaint := describe_differences(multihost.all_gather_objects(checksums)):
        raise ConfigError(f"all processes must use identical inputs: {complaint}")


def identify_copy(path: Path) -> list[Any]:
    """Return facts shared only by processes that see the same files on one machine.

    Empty if the machine cannot be identified.
    """
    if not path_exists(_BOOT_ID):
        return []
    folder = path if path.is_dir() else path.parent
    about = [os.stat(file) for file in sorted(folder.glob("*")) if file.is_file()]
    known = [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns] for s in about]
    return [_BOOT_ID.read_text().strip(), known]


def checksum_tensors(tensors: Tensors, show_progress: bool | None = None) -> Checksums:
    """Return a CRC-32 of each tensor's bytes."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    with bytes_bar("comparing weights", total, show_progress) as advance:

        def checksum_tensor(tensor: LazyTensor) -> int:
            checksum = 0
            for block in iter_bytes(tensor):
                checksum = zlib.crc32(block, checksum)
                advance(len(block))
            tensor.release()
            return checksum

        with ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(tensors, threads.map(checksum_tensor, tensors.values()), strict=True))


def describe_differences(checksums: Sequence[Checksums]) -> str:
    """Describe how the weights of other processes differ from those of process 0."""
    differences = []
    for number, sums in enumerate(checksums):
        if differing := sorted(name for name, x in sums.items() if checksums[0][name] != x):
            more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
            named = f"{', '.join(differing[:MAX_NAMED])}{more}"
            differences.append(
                f"the weights {named} in process {number} differ from those in process 0"
            )
    return "; ".join(differences)
