"""Checks that several processes have the same weights, in every number.

Processes on one machine that opened the same file do, and read nothing. Other copies are compared
in full: a single different number changes the output, and a sample would miss it. Each copy is read
once more, in parts by the processes that share it. Blocks are compared by CRC-32, against accidents
and not forgery: a single different number is always detected, several are missed once in 4 billion
cases. Nothing that was read is kept.
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
    same = [bool(copy) and copy == copies[number] for copy in copies]
    sharing = [n for n, with_us in enumerate(same) if with_us or n == number]
    if len(sharing) == len(copies):
        return
    names = divide_tensors(tensors, len(sharing))[sharing.index(number)]
    checksums = multihost.all_gather_objects(
        checksum_tensors({name: tensors[name] for name in names}, show_progress)
    )
    if complaint := describe_differences(list(zip(copies, checksums, strict=True))):
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


def divide_tensors(tensors: Tensors, processes: int) -> list[list[str]]:
    """Divide the names among the processes, with about the same number of bytes for each."""
    parts: list[list[str]] = [[] for _ in range(processes)]
    sizes = [0] * processes
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = sizes.index(min(sizes))
        parts[least].append(name)
        sizes[least] += tensors[name].nbytes
    return parts


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


def describe_differences(checksums: Sequence[tuple[Any, Checksums]]) -> str:
    """Describe in words how the copies differ from that of process 0.

    Args:
        checksums: the copy of each process, and the checksums that it computed.
    """
    complete: list[Checksums] = []
    for copy, computed in checksums:
        shared = [sums for other, sums in checksums if other and other == copy]
        complete.append({name: x for sums in shared or [computed] for name, x in sums.items()})
    differences = []
    for number, sums in enumerate(complete):
        if differing := sorted(name for name, x in complete[0].items() if sums[name] != x):
            more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
            named = f"{', '.join(differing[:MAX_NAMED])}{more}"
            differences.append(
                f"the weights {named} in process {number} differ from those in process 0"
            )
    return "; ".join(differences)
