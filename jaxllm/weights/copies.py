"""Whether several processes have the same weights, in every number.

Processes of one machine that opened one file have, and read nothing for it. Copies are compared in
full, since one number that differs changes what is said, and a sample would not find it: each copy
is read once, by the processes that share it, a part each, beside what loading reads. A block is
summed up by CRC-32, against accidents and not forgery: one number that differs in it is always
found, several but for one case in 4 billion. Nothing that was read is kept.
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxllm import distributed
from jaxllm.errors import ConfigError
from jaxllm.files import is_there
from jaxllm.progress import bytes_bar
from jaxllm.weights.files import bytes_of
from jaxllm.weights.lazy import LazyTensor

THREADS = 2  # one sums up while another one's bytes come
NAMED = 3  # of the tensors that differ
_RUNNING = Path("/proc/sys/kernel/random/boot_id")  # one machine, whatever containers are on it

Tensors = Mapping[str, LazyTensor]
Sums = dict[str, int]


def check_same(tensors: Tensors, path: Path, show_progress: bool | None = None) -> None:
    """Compare the tensors of a checkpoint with those of other processes; one alone has none.

    All have the same names, shapes and formats. path: the checkpoint's directory or file. Raises
    ConfigError in all processes, with what differs and where.
    """
    if not distributed.several():
        return
    copies, number = distributed.each(copy_of(path)), distributed.number()
    same = [bool(copy) and copy == copies[number] for copy in copies]
    sharing = [n for n, with_us in enumerate(same) if with_us or n == number]
    if len(sharing) == len(copies):
        return
    mine = shared_out(tensors, len(sharing))[sharing.index(number)]
    found = distributed.each(sums_of({name: tensors[name] for name in mine}, show_progress))
    if complaint := differences(list(zip(copies, found, strict=True))):
        raise ConfigError(f"processes must have the same of everything: {complaint}")


def copy_of(path: Path) -> list[Any]:
    """What only processes have that see the same files of one machine; nothing where it is not
    known which machine this is.
    """
    if not is_there(_RUNNING):
        return []
    folder = path if path.is_dir() else path.parent
    about = [os.stat(file) for file in sorted(folder.glob("*")) if file.is_file()]
    known = [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns] for s in about]
    return [_RUNNING.read_text().strip(), known]


def shared_out(tensors: Tensors, processes: int) -> list[list[str]]:
    """Names of about as many bytes for each of so many processes."""
    parts: list[list[str]] = [[] for _ in range(processes)]
    sizes = [0] * processes
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = sizes.index(min(sizes))
        parts[least].append(name)
        sizes[least] += tensors[name].nbytes
    return parts


def sums_of(tensors: Tensors, show_progress: bool | None = None) -> Sums:
    """A CRC-32 of each tensor's blocks' CRC-32s."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    with bytes_bar("comparing weights", total, show_progress) as advance:

        def summed(tensor: LazyTensor) -> int:
            found = 0
            for block in bytes_of(tensor):
                found = zlib.crc32(block, found)
                advance(len(block))
            tensor.release()
            return found

        with ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(tensors, threads.map(summed, tensors.values()), strict=True))


def differences(found: Sequence[tuple[Any, Sums]]) -> str:
    """What copies have that is not as process 0's has it, in words. found: of each process its
    copy, and what it has summed up of it.
    """
    whole: list[Sums] = []
    for copy, own in found:
        shared = [sums for other, sums in found if other and other == copy]
        whole.append({name: x for sums in shared or [own] for name, x in sums.items()})
    said = []
    for number, sums in enumerate(whole):
        if apart := sorted(name for name, x in whole[0].items() if sums[name] != x):
            more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
            named = f"{', '.join(apart[:NAMED])}{more}"
            said.append(f"the weights {named} in process {number} are not those in process 0")
    return "; ".join(said)
