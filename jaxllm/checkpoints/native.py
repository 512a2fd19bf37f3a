"""Native checkpoints: `model.safetensors` with our parameter names, `config.json`, tokenizer files.

Tensors are aligned to 64 bytes, so that XLA can use the memory-mapped file without a copy. Loading
and checking lazy tensors is shared with `convert`.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.files import (
    atomic_directory,
    check_vacant,
    copy_files,
    path_exists,
    path_inside,
    read_json,
    write_json,
)
from jaxllm.files.versions import CHECKPOINT
from jaxllm.ops import native
from jaxllm.ops.compile_cache import is_known, remember
from jaxllm.runtime import multihost
from jaxllm.runtime.progress import bytes_bar
from jaxllm.runtime.schema import as_schema
from jaxllm.weights.formats import Weight, as_weight, parse_format, to_dense
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.lazy_gather import peek_weight, to_lazy_tensors
from jaxllm.weights.load import NotLocal, ParamPlacer, read_weight, report_non_finite
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.precision import Precision
from jaxllm.weights.safetensors import first_non_finite, open_tensors, write_tensors
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.block_weight import map_blocks

WEIGHTS = "model.safetensors"
HF_FORMAT, GGUF_FORMAT = "Hugging Face", "GGUF"  # other values of `Checkpoint.file_format`
READ_AHEAD = 2  # quantized weights that other threads read while one is placed
SEARCHERS = 2  # threads that look for NaN

Pieces = dict[str, np.ndarray]  # the arrays of a quantized weight, by their names in files


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint whose tensors have not been read yet.

    Attributes:
        tensors: by our parameter paths, in the shapes that the configuration requires.
        generation: generation_config.json, or the same settings from an older config.json.
        precision: the dtypes of the stored weights, unless the checkpoint specifies others.
        formats: formats of the quantized weights, by path; `tensors` holds their pieces (see
            `weights.types`).
        file_format: the file format.
        recipe: the compression steps applied so far, one line per step.
        ignored: names of settings in the files that jaxllm does not use.
        blocks: bytes of some quantized weights, by path, as a `BlockWeight` holds them: native
            kernels read them in place of the pieces.
        settings: the values in the header of a GGUF file, by key.
    """

    directory: Path
    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    generation: Mapping[str, Any]
    precision: Precision
    formats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file_format: str = CHECKPOINT.format
    recipe: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    blocks: Mapping[str, LazyTensor] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights: of `blocks` where there are some, else of the tensors."""
        pieces = {
            f"{path}{name}"
            for path in self.blocks
            for name in parse_format(self.formats[path]).array_specs((1, 1))
        }
        tensors = [tensor for name, tensor in self.tensors.items() if name not in pieces]
        return sum(tensor.nbytes for tensor in (*tensors, *self.blocks.values()))


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of a native config.json. formats: of quantized tensors, by path. recipe: the
    compression steps applied, if any.
    """

    format: Literal["jaxllm"]
    version: int
    model: dict[str, Any]
    precision: dict[str, Any]
    formats: dict[str, str] = {}
    recipe: list[str] = []


_TokenId = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]  # some files write -1 for none


class _SpecialTokenIds(msgspec.Struct):
    """Token ids in generation_config.json; its other fields are generation options."""

    bos_token_id: _TokenId | None = None
    eos_token_id: _TokenId | list[_TokenId] | None = None
    pad_token_id: _TokenId | list[_TokenId] | None = None


def open_native(directory: Path, data: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a directory that `save` wrote. Raises CheckpointError with all complaints.

    data: the contents of its config.json, if already read.
    """
    data, where = data or read_model_json(directory), f"{directory / 'config.json'}"
    CHECKPOINT.check(data, directory)
    header: _Header = as_schema(data, _Header, where)
    config = models.config_from_dict(header.model, f"{where}: model")
    precision = Precision.from_dict(header.precision, f"{where}: precision")
    if precision.quantize == "int4" and "int4-g64" in header.formats.values():
        precision = dataclasses.replace(precision, quantize="int4-g64")  # what it meant up to 0.9
    tensors = open_tensors(path_inside(directory, WEIGHTS), mapped=True)
    check_tensors(tensors, config, str(directory), header.formats)
    generation = read_generation_config(directory)
    return Checkpoint(
        directory,
        config,
        tensors,
        generation,
        precision,
        header.formats,
        recipe=tuple(header.recipe),
    )


def save(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    files: Iterable[Path] = (),
    show_progress: bool | None = None,
) -> None:
    """Write a checkpoint in the native format, atomically.

    files: more files to copy (the tokenizer's). Raises CheckpointError if `directory` already holds
    a checkpoint or cannot be written.
    """
    check_output_directory(directory)
    header: dict[str, Any] = {
        **CHECKPOINT.mark,
        "model": checkpoint.config.to_dict(),
        "precision": dataclasses.asdict(checkpoint.precision),
        "formats": dict(checkpoint.formats),
    }
    if checkpoint.recipe:
        header["recipe"] = list(checkpoint.recipe)
    write_checkpoint(
        directory,
        checkpoint.tensors,
        {"generation_config.json": checkpoint.generation, "config.json": header},
        metadata={"format": CHECKPOINT.format},
        files=files,
        show_progress=show_progress,
    )


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, LazyTensor],
    json_files: Mapping[str, Any],
    *,
    metadata: Mapping[str, str],
    aligned: bool = True,
    files: Iterable[Path] = (),
    show_progress: bool | None = None,
) -> None:
    """Write a checkpoint directory in any format, atomically.

    json_files: contents of the JSON files, by name. metadata, aligned: as for `write_tensors`.
    files: files to copy.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    with atomic_directory(directory) as made:
        with bytes_bar(f"writing {directory.name}", total, show_progress) as advance:
            write_tensors(
                made / WEIGHTS, tensors, aligned=aligned, metadata=metadata, progress=advance
            )
        copy_files(files, made)
        for name, data in json_files.items():
            write_json(made / name, data)


def check_output_directory(directory: Path) -> None:
    """Raise CheckpointError if no checkpoint can be written there; call it before long work."""
    check_vacant(directory, "config.json", "a checkpoint")


def load_params(
    checkpoint: Checkpoint,
    precision: Precision,
    *,
    placer: ParamPlacer | None = None,
    show_progress: bool | None = None,
) -> Params:
    """Read every tensor and convert it to the format that `precision` specifies.

    placer: places each tensor on its devices, one after the other. Memory: the parameters, plus a
    block of rows if a tensor's format changes. Raises CheckpointError with every tensor that holds
    NaN or infinity, or that overflows a narrower format. Tensors that are used as they are stored
    are checked once: if a compile cache is enabled, it remembers files that have passed.
    """
    shapes = models.param_shapes(models.build(checkpoint.config))
    complaints: list[str] = []
    placed = placer or ParamPlacer()
    files = _identify_files(checkpoint.directory), repr(precision)
    passed = is_known(files)
    in_place = placer is None and native.is_enabled() and jax.default_backend() == "cpu"
    blocks = checkpoint.blocks if in_place else {}
    total = dataclasses.replace(checkpoint, blocks=blocks).nbytes
    quantized = [
        partial(_read_pieces, checkpoint, path, shape.shape)
        for path, shape in flatten(shapes)
        if path in checkpoint.formats and path not in blocks and placed.is_local(path)
    ]
    searched: list[tuple[str, np.ndarray, Future[int | None]]] = []
    with (
        bytes_bar(f"loading {checkpoint.directory.name}", total, show_progress) as advance,
        closing(_run_ahead(quantized)) as pieces,
        ThreadPoolExecutor(SEARCHERS) as threads,
    ):

        def search(path: str, array: np.ndarray) -> None:
            searched.append((path, array, threads.submit(first_non_finite, array)))

        def read(path: str, shape: jax.ShapeDtypeStruct) -> Weight | NotLocal:
            if not placed.is_local(path):
                return NotLocal()
            if path in checkpoint.formats:
                format = parse_format(checkpoint.formats[path])
                if path in blocks:
                    stored = map_blocks(path, format, shape.shape, blocks[path], passed=passed)
                else:
                    stored = format.from_file(path, shape.shape, next(pieces))
                leaf = precision.cast(path, stored)
                advance(leaf.nbytes)
                return placed.place_weight(path, leaf)
            tensor = checkpoint.tensors[path]
            formats = precision.format_chain(path, tensor.shape)
            # A placer may copy a matrix: only without one, it stays in memory until it is searched.
            later = search if placer is None and not passed else None
            how: Any = {"passed": passed, "search": later}
            made = placed.load_tensor(
                path,
                tensor,
                partial(read_weight, path, formats=formats, complaints=complaints, **how),
                parse_format(formats[-1]).sliceable_axes,
            )
            if not searched or searched[-1][0] != path:
                advance(tensor.nbytes)
            return made

        params = map_leaves(read, shapes)
        for path, array, count in searched:
            report_non_finite(path, array, count.result(), 0, complaints)
            advance(array.nbytes)
    if complaints := list(
        dict.fromkeys(itertools.chain(*multihost.all_gather_objects(complaints)))
    ):
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(complaints)}")
    if not passed:
        remember(files)
    return params


def _identify_files(path: Path) -> tuple[Any, ...]:
    """Return names, sizes and times of a checkpoint's files; any change of one changes it.

    For a file, those of its folder with the same suffix: it may be one part of several.
    """
    files = path.iterdir() if path.is_dir() else path.parent.glob(f"*{path.suffix}")
    stats = [(str(file.absolute()), file.stat()) for file in sorted(files) if file.exists()]
    return tuple((name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)


def _run_ahead(jobs: Iterable[Callable[[], Pieces]]) -> Generator[Pieces, None, None]:
    """Yield the jobs' results in order, while other threads run the next `READ_AHEAD` jobs."""
    with ThreadPoolExecutor(READ_AHEAD) as threads:
        running = deque[Future[Pieces]]()
        try:
            for job in jobs:
                running.append(threads.submit(job))
                if len(running) > READ_AHEAD:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def with_params(checkpoint: Checkpoint, params: Params, precision: Precision) -> Checkpoint:
    """Return the checkpoint with other parameters, for `save`; a `LazyWeight` is read when
    written.
    """
    formats: dict[str, str] = {}
    tensors: dict[str, LazyTensor] = {}
    for path, weight in flatten(params):
        pieces = to_lazy_tensors(weight)
        if "" not in pieces:
            formats[path] = peek_weight(weight).format
        tensors |= {f"{path}{name}": piece for name, piece in pieces.items()}
    return dataclasses.replace(
        checkpoint, tensors=tensors, precision=precision, formats=formats, blocks={}
    )


def dequantize_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with quantized matrices as plain arrays, dequantized when read.

    Integer formats become float32, packed weights bfloat16; both are lossless.
    """
    shapes = dict(flatten(models.param_shapes(models.build(checkpoint.config))))

    def as_array(path: str) -> LazyTensor:
        shape = shapes[path].shape
        dtype = parse_format(checkpoint.formats[path]).lossless_dtype

        def read() -> np.ndarray:
            return np.asarray(to_dense(_read_quantized(checkpoint, path, shape)))

        def parts(rows: int) -> Iterator[np.ndarray]:
            whole = _read_quantized(checkpoint, path, shape)
            stack = range(shape[0]) if len(shape) == 3 else (...,)
            for leaf in (as_weight(jax.tree.map(lambda x, i=i: x[i], whole)) for i in stack):
                for begin in range(0, shape[-2], rows):
                    yield np.asarray(leaf.take(jnp.arange(begin, min(begin + rows, shape[-2]))))
            release()

        def cut(begin: int, end: int) -> LazyTensor:
            def read() -> np.ndarray:
                whole = _read_quantized(checkpoint, path, shape)
                return np.asarray(to_dense(jax.tree.map(lambda x: x[begin:end], whole)))

            some = (end - begin, *shape[1:])
            return LazyTensor(np.dtype(DTYPES[dtype]), some, read, release)

        def release() -> None:
            for key in parse_format(checkpoint.formats[path]).array_specs(shape):
                checkpoint.tensors[f"{path}{key}"].release()

        stack = cut if len(shape) == 3 else None
        return LazyTensor(np.dtype(DTYPES[dtype]), shape, read, release, parts, slice_rows=stack)

    tensors = {
        path: as_array(path) if path in checkpoint.formats else checkpoint.tensors[path]
        for path in shapes
    }
    precision = checkpoint.precision.without_quantization()
    return dataclasses.replace(
        checkpoint, tensors=tensors, precision=precision, formats={}, blocks={}
    )


def _read_quantized(checkpoint: Checkpoint, path: str, shape: tuple[int, ...]) -> Weight:
    format = parse_format(checkpoint.formats[path])
    weight: Weight = format.from_file(path, shape, _read_pieces(checkpoint, path, shape))
    return weight


def _read_pieces(checkpoint: Checkpoint, path: str, shape: tuple[int, ...]) -> Pieces:
    specs = parse_format(checkpoint.formats[path]).array_specs(shape)
    return {key: checkpoint.tensors[f"{path}{key}"].read() for key in specs}


def native_precision(tensors: Mapping[str, LazyTensor]) -> Precision:
    """Return a uniform precision: the dtype that stores most of the bytes."""
    sizes = {name: 0 for name in DTYPES}
    for tensor in tensors.values():
        if tensor.dtype.name in sizes:
            sizes[tensor.dtype.name] += tensor.nbytes
    return Precision.uniform(max(sizes, key=lambda name: sizes[name]))


def check_tensors(
    tensors: Mapping[str, LazyTensor],
    config: ModelConfig,
    source: str,
    formats: Mapping[str, str] | None = None,
    known_problems: Sequence[str] = (),
) -> None:
    """Raise CheckpointError for missing and unexpected tensors, wrong shapes and wrong dtypes.

    formats: of the quantized leaves, by path. found: complaints to report along.
    """
    leaves, formats = dict(flatten(models.param_shapes(models.build(config)))), formats or {}
    complaints = list(known_problems)
    complaints += [
        f"{path} is quantized, but not part of this model"
        for path in formats.keys() - leaves.keys()
    ]
    expected: dict[str, tuple[tuple[int | None, ...], Any]] = {}
    for path, leaf in leaves.items():
        if path not in formats:
            expected[path] = (leaf.shape, None)
        elif len(leaf.shape) < 2:
            complaints.append(f"{path} is quantized, but not a matrix")
        else:
            pieces = parse_format(formats[path]).array_specs(leaf.shape)
            expected |= {f"{path}{name}": piece for name, piece in pieces.items()}
    complaints += [f"{path} is missing" for path in expected if path not in tensors]
    for path, tensor in tensors.items():
        if path not in expected:
            complaints.append(f"{path} is not part of this model")
            continue
        shape, dtype = expected[path]
        if len(shape) != len(tensor.shape) or any(
            want not in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
        ):
            complaints.append(f"{path} has shape {tensor.shape}, expected {shape}")
        elif dtype is not None and tensor.dtype != np.dtype(dtype):
            complaints.append(f"{path} has dtype {tensor.dtype.name}, expected {np.dtype(dtype)}")
        elif dtype is None and tensor.dtype.name not in (*DTYPES, "float64"):
            complaints.append(f"{path} has dtype {tensor.dtype.name}, expected floating point")
    if complaints:
        shown = "\n  ".join(complaints[:50])
        more = f"\n  and {len(complaints) - 50} more" if len(complaints) > 50 else ""
        raise CheckpointError(f"{source} does not match its configuration:\n  {shown}{more}")


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return the contents of generation_config.json; empty if there is none.

    Raises CheckpointError for an invalid token id.
    """
    name = "generation_config.json"
    if not path_exists(directory / name):
        return {}
    return check_special_ids(read_json(path_inside(directory, name)), str(directory / name))


def check_special_ids(generation: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings unchanged. Raises CheckpointError for an invalid token id."""
    as_schema(generation, _SpecialTokenIds, source)
    return generation


def read_model_json(directory: Path) -> dict[str, Any]:
    """Return config.json. Raises CheckpointError if it is missing or not a JSON object."""
    if not path_exists(directory / "config.json"):
        hint = ""
        if path_exists(directory / "adapter_config.json"):
            hint = f". It is an adapter: load its base model with --adapter {directory}"
        raise CheckpointError(f"{directory} is not a model directory: it has no config.json{hint}")
    return read_json(path_inside(directory, "config.json"))
