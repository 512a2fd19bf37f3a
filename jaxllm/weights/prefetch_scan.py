"""Background scan of weights for NaN, in threads, while other work runs.

`begin_scan` needs no JAX: a command with a known checkpoint starts the scan, which also maps the
file's pages, while JAX is imported. The result is reported as always, when the weight is loaded.
"""

import dataclasses
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from jaxllm.errors import JaxllmError
from jaxllm.files import path_exists, path_inside, read_json
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import FLOATS, first_non_finite, open_tensors

Tensors = dict[str, LazyTensor]
RUN_BYTES = 1 << 28  # bytes that one call scans, of several tensors if they are smaller

_SCANS: dict[Path, Future[tuple[object, Tensors]]] = {}


def start_scan(tensors: Mapping[str, LazyTensor], threads: int = 2) -> Tensors:
    """Start threads that look for non-finite numbers; return tensors with their results."""
    found: dict[str, Future[int | None]] = {
        n: Future() for n, t in tensors.items() if _needs_scan(t)
    }
    runs = iter(_group_runs({name: tensors[name] for name in found}))  # its `next` is atomic

    def look() -> None:
        for run in runs:
            try:
                arrays = {name: tensors[name].read() for name in run}
                clean = (
                    first_non_finite(_view_as_one(list(arrays.values())), block=RUN_BYTES) is None
                )
                for name, array in arrays.items():
                    found[name].set_result(None if clean else first_non_finite(array))
            except BaseException as error:  # raised where the result is read
                for name in run:
                    found[name].set_exception(error)

    for _ in range(threads):
        threading.Thread(target=look, daemon=True).start()
    return {
        name: dataclasses.replace(t, scan_result=found[name].result) if name in found else t
        for name, t in tensors.items()
    }


def _group_runs(tensors: Tensors) -> list[list[str]]:
    """Group names of adjacent tensors of one dtype, so that a few calls scan them all.

    A thread that has to reacquire Python's lock after each small piece makes no progress next to
    one that imports modules.
    """
    runs: list[list[str]] = []
    end, size, dtype = 0, 0, None
    for name, tensor in tensors.items():
        begin = tensor.read().ctypes.data
        if not runs or begin != end or tensor.dtype != dtype or size + tensor.nbytes > RUN_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(name)
        end, size, dtype = begin + tensor.nbytes, size + tensor.nbytes, tensor.dtype
    return runs


def _view_as_one(arrays: list[np.ndarray]) -> np.ndarray:
    """View adjacent arrays as one, without a copy."""
    size = sum(array.size for array in arrays)
    return np.lib.stride_tricks.as_strided(arrays[0].reshape(-1), (size,), writeable=False)


def begin_scan(directory: str) -> None:
    """Start to scan the checkpoint in a directory, if it is a native one; never waits."""
    file = Path(directory) / "model.safetensors"
    future: Future[tuple[object, Tensors]] = Future()

    def look() -> None:
        try:
            identity = _file_identity(file)
            tensors = open_tensors(path_inside(Path(directory), file.name), mapped=True)
            future.set_result((identity, start_scan(tensors, threads=1)))
        except (OSError, JaxllmError) as error:  # loading will raise it again
            future.set_exception(error)

    try:
        if (
            not path_exists(file)
            or read_json(file.with_name("config.json")).get("format") != "jaxllm"
        ):
            return
    except JaxllmError:
        return
    _SCANS[file] = future
    threading.Thread(target=look, daemon=True).start()


def open_scanned(file: Path) -> Tensors:
    """Return the tensors of a memory-mapped safetensors file, with the scan if `begin_scan` started
    one.

    Raises:
        CheckpointError: for a file that is not well-formed safetensors.
    """
    begun = _SCANS.pop(file, None)
    if begun is not None and begun.exception() is None:
        identity, tensors = begun.result()
        if identity == _file_identity(file):
            return tensors
    return open_tensors(file, mapped=True)


def _needs_scan(tensor: LazyTensor) -> bool:
    return tensor.scan_result is None and tensor.dtype.name in FLOATS


def _file_identity(file: Path) -> object:
    """Return facts that change when a file is replaced or written to."""
    about = os.stat(file)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
