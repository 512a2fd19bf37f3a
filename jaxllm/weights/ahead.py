"""Weights that are looked through for NaN by threads, beside whatever else has to be done.

`begin` needs no JAX: a command that knows its checkpoint looks through it, and has the system map
its pages, while JAX is imported. What is found is told where it always was: when it is loaded.
"""

import dataclasses
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from jaxllm.errors import JaxllmError
from jaxllm.files import inside, is_there, read_json
from jaxllm.weights.files import FLOATS, first_non_finite, open_tensors
from jaxllm.weights.lazy import LazyTensor

Tensors = dict[str, LazyTensor]
RUN = 1 << 28  # bytes that one call looks at, where tensors are smaller

_begun: dict[Path, Future[tuple[object, Tensors]]] = {}


def scanned(tensors: Mapping[str, LazyTensor], threads: int = 2) -> Tensors:
    """The same tensors; threads have begun to find the first number of each that is not finite."""
    found: dict[str, Future[int | None]] = {n: Future() for n, t in tensors.items() if _new(t)}
    runs = iter(_runs({name: tensors[name] for name in found}))  # whose `next` is atomic

    def look() -> None:
        for run in runs:
            try:
                arrays = {name: tensors[name].read() for name in run}
                clean = first_non_finite(_joined(list(arrays.values())), block=RUN) is None
                for name, array in arrays.items():
                    found[name].set_result(None if clean else first_non_finite(array))
            except BaseException as error:  # told to whoever asks
                for name in run:
                    found[name].set_exception(error)

    for _ in range(threads):
        threading.Thread(target=look, daemon=True).start()
    return {
        name: dataclasses.replace(t, found=found[name].result) if name in found else t
        for name, t in tensors.items()
    }


def _runs(tensors: Tensors) -> list[list[str]]:
    """Names of tensors of one format that lie end to end, so many that few calls look at all.

    A thread that has to ask for Python's lock again after each small piece gets nowhere beside one
    that imports.
    """
    runs: list[list[str]] = []
    end, size, dtype = 0, 0, None
    for name, tensor in tensors.items():
        begin = tensor.read().ctypes.data
        if not runs or begin != end or tensor.dtype != dtype or size + tensor.nbytes > RUN:
            runs.append([])
            size = 0
        runs[-1].append(name)
        end, size, dtype = begin + tensor.nbytes, size + tensor.nbytes, tensor.dtype
    return runs


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Arrays that lie end to end as one, without a copy."""
    size = sum(array.size for array in arrays)
    return np.lib.stride_tricks.as_strided(arrays[0].reshape(-1), (size,), writeable=False)


def begin(directory: str) -> None:
    """Look through the checkpoint in a directory, if it is one of ours; says nothing, waits for
    nothing."""
    file = Path(directory) / "model.safetensors"
    future: Future[tuple[object, Tensors]] = Future()

    def look() -> None:
        try:
            identity = _identity(file)
            tensors = open_tensors(inside(Path(directory), file.name), mapped=True)
            future.set_result((identity, scanned(tensors, threads=1)))
        except (OSError, JaxllmError) as error:  # which opening it will meet again
            future.set_exception(error)

    try:
        if not is_there(file) or read_json(file.with_name("config.json")).get("format") != "jaxllm":
            return
    except JaxllmError:
        return
    _begun[file] = future
    threading.Thread(target=look, daemon=True).start()


def mapped(file: Path) -> Tensors:
    """The tensors of a safetensors file in memory's map, those that `begin` began with once.

    Raises CheckpointError for a file that is not well-formed safetensors.
    """
    begun = _begun.pop(file, None)
    if begun is not None and begun.exception() is None:
        identity, tensors = begun.result()
        if identity == _identity(file):
            return tensors
    return open_tensors(file, mapped=True)


def _new(tensor: LazyTensor) -> bool:
    return tensor.found is None and tensor.dtype.name in FLOATS


def _identity(file: Path) -> object:
    """What a file that has been replaced or written to does not share with what it was."""
    about = os.stat(file)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
