"""Load and run exported steps: StableHLO, weights and a manifest.

Does not import the models, so that the exported program runs, not the current code.
"""

import dataclasses
import hashlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.export
import msgspec
import numpy as np

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import check_memory, open_regular, path_exists, path_inside, read_bytes, read_json
from jaxllm.files.versions import EXPORT
from jaxllm.runtime.schema import as_schema
from jaxllm.runtime.validation import check_int, check_int_array, check_token_ids
from jaxllm.weights.safetensors import open_tensors

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
_TOKEN_INPUTS = ("input_ids", "position_ids", "slots", "length")  # inputs that `token_inputs` fills
NATIVE = "jaxllm.ops.native"  # registers the native kernels that some exports call by name
Shapes = dict[str, jax.ShapeDtypeStruct]

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class _ArrayEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Name, shape and dtype of a program's array."""

    name: str
    shape: Annotated[list[_Count], msgspec.Meta(max_length=8)]
    dtype: Literal[
        "float32", "bfloat16", "float16", "float64", "int32", "int64", "int16", "int8",
        "uint32", "uint64", "uint16", "uint8", "bool",
    ]  # fmt: skip


class _FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A file of the export and its hash."""

    file: str
    sha256: str


class _WeightsEntry(_FileEntry, forbid_unknown_fields=True):
    tensors: list[_ArrayEntry]


class _StepEntry(_FileEntry, forbid_unknown_fields=True):
    inputs: list[_ArrayEntry]
    outputs: list[_ArrayEntry]
    feeds: dict[str, str]


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """manifest.json. `model`, `precision` and `form` are metadata; `compare` reads `form`."""

    format: str
    version: int
    jax: str
    calling_convention_version: int
    platforms: Annotated[
        list[Literal["cpu", "cuda", "rocm", "tpu"]], msgspec.Meta(min_length=1, max_length=4)
    ]
    custom_calls: list[str]
    model: dict[str, Any]
    precision: dict[str, Any]
    form: dict[str, Any]
    batch: _Count
    num_tokens: _Count
    capacity: _Count
    steps: dict[str, _StepEntry]
    weights: _WeightsEntry


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedStep:
    """One step with static shapes, from named arrays to named arrays.

    Attributes:
        feeds: maps outputs to inputs of the next step.
        vocab_size: last axis of the logits.
    """

    name: str
    inputs: Shapes
    outputs: Shapes
    feeds: Mapping[str, str]
    weights: Mapping[str, jax.Array] = dataclasses.field(repr=False)
    run: Callable[..., dict[str, jax.Array]] = dataclasses.field(repr=False)
    vocab_size: int

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Run the step. Raises ConfigError with all missing, unknown and misshapen inputs."""
        complaints = [f"{name} is missing" for name in self.inputs if name not in inputs]
        for name, x in inputs.items():
            if name not in self.inputs:
                complaints.append(f"{name} is not an input")
                continue
            want = self.inputs[name]
            shape, dtype = np.shape(x), np.dtype(getattr(x, "dtype", np.asarray(x).dtype))
            if (want.shape, want.dtype) != (shape, dtype):
                complaints.append(f"{name} must be {want.dtype} {want.shape}, got {dtype} {shape}")
        if complaints:
            raise ConfigError(f"step {self.name}: {'; '.join(complaints)}")
        return self.run(dict(self.weights), dict(inputs))

    def next_past(self, outputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the cache inputs of the next step from a step's outputs."""
        return {name: outputs[output] for output, name in self.feeds.items()}

    def blank_inputs(self) -> dict[str, np.ndarray]:
        """Return inputs without tokens: all padding, all slots empty."""
        empty = {"position_ids": -1, "past_position_ids": -1}
        empty["slots"] = self.inputs["past_key_values.0.key"].shape[1]
        return {n: np.full(s.shape, empty.get(n, 0), s.dtype) for n, s in self.inputs.items()}

    def token_inputs(self, tokens: Any, start: int = 0) -> dict[str, np.ndarray]:
        """Return ids, positions and slots of new tokens, to replace those of `blank_inputs`.

        Args:
            tokens: Ids `[B, T]`, at most as many per row as the step takes; the rest is padding.
            start: Number of tokens before these. A token's slot is its position.

        Raises:
            ConfigError: For ids of another shape or outside the vocabulary, a start beyond the
                slots, and a step with another signature (embeddings, a mask or angles).
        """
        if (
            "cos" in self.inputs
            or not {*_TOKEN_INPUTS[:3], "past_position_ids"} <= self.inputs.keys()
        ):
            raise ConfigError(
                f"step {self.name} does not take token ids and positions. Fill in"
                f" {', '.join(n for n in self.inputs if '.' not in n)} yourself"
            )
        B, T = self.inputs["slots"].shape
        slots = self.inputs["past_key_values.0.key"].shape[1]
        token_BT = check_int_array("tokens", tokens, ConfigError)
        width = token_BT.shape[-1] if token_BT.ndim == 2 else 0
        if token_BT.shape[:1] != (B,) or not 1 <= width <= T:
            raise ConfigError(
                f"step {self.name}: tokens must be [{B}, 1 to {T}], got {list(token_BT.shape)}"
            )
        start = check_int("start", start, 0, slots, error=ConfigError)
        check_token_ids(token_BT, self.vocab_size, f"step {self.name}: ", error=ConfigError)
        inputs = {n: x for n, x in self.blank_inputs().items() if n in _TOKEN_INPUTS}
        position_T = np.arange(start, start + width, dtype=np.int32)
        inputs["input_ids"][:, :width] = token_BT
        inputs["position_ids"][:, :width] = position_T
        inputs["slots"][:, :width] = np.minimum(position_T, slots)
        if "length" in inputs:
            inputs["length"][:] = start + width
        return inputs


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedModel:
    """An export: steps by name ("prefill", "decode"), and the manifest."""

    steps: Mapping[str, ExportedStep]
    manifest: Mapping[str, Any] = dataclasses.field(repr=False)

    def __getitem__(self, name: str) -> ExportedStep:
        if name not in self.steps:
            raise ConfigError(
                f"no step {name!r:.40} was exported, expected one of {', '.join(self.steps)}"
            )
        return self.steps[name]


def load(directory: str | Path) -> ExportedModel:
    """Load an export of `jaxllm export`; every file is checked against its hash in the manifest.

    An export is a program: load one only from a source that you trust with what it computes. Its
    StableHLO is first parsed in another process, because MLIR's parser can crash on a bad file.

    Raises CheckpointError, naming the file, for a file that is missing, damaged or not part of this
    export, and for steps that were exported for another platform.
    """
    directory = Path(directory)
    data = read_manifest(directory)
    manifest: _Manifest = as_schema(data, _Manifest, str(directory / MANIFEST))
    weights = _load_weights(directory, manifest.weights)
    steps = {
        name: _load_step(directory, name, entry, weights, manifest)
        for name, entry in manifest.steps.items()
    }
    return ExportedModel(steps, data)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest. Raises CheckpointError if it is missing or has another format."""
    path = directory / MANIFEST
    if not path_exists(path):
        raise CheckpointError(f"{directory} has no {MANIFEST}: not an export")
    manifest = read_json(path_inside(directory, MANIFEST))
    EXPORT.check(manifest, directory)
    return manifest


def digest(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(directory: Path, entry: _FileEntry) -> Path:
    """Check a file's hash against the manifest; return its path."""
    path = path_inside(directory, entry.file)
    if digest(path) != entry.sha256:
        raise CheckpointError(f"{path} is damaged or not part of this export: wrong SHA-256")
    return path


def _parse_shapes(entries: list[_ArrayEntry], where: str) -> Shapes:
    shapes = {
        f.name: jax.ShapeDtypeStruct(tuple(f.shape), jax.numpy.dtype(f.dtype)) for f in entries
    }
    if len(shapes) != len(entries):
        raise CheckpointError(f"{where}: two arrays have the same name")
    nbytes = sum(math.prod(s.shape) * s.dtype.itemsize for s in shapes.values())
    check_memory(nbytes, f"{where}: its arrays", CheckpointError)
    return shapes


def _load_weights(directory: Path, entry: _WeightsEntry) -> dict[str, jax.Array]:
    path = _check_file(directory, entry)
    expected = _parse_shapes(entry.tensors, f"{directory / MANIFEST}: weights")
    tensors = open_tensors(path)
    forms = [{n: (x.shape, x.dtype) for n, x in some.items()} for some in (tensors, expected)]
    if forms[0] != forms[1]:
        raise CheckpointError(f"{path}: tensors differ from those in {MANIFEST}")
    return {name: jax.device_put(tensors[name].read()) for name in expected}


def _load_step(
    directory: Path,
    name: str,
    entry: _StepEntry,
    weights: Mapping[str, jax.Array],
    manifest: _Manifest,
) -> ExportedStep:
    path, where = _check_file(directory, entry), f"{directory / MANIFEST}: steps.{name}"
    here = jax.export.default_export_platform()
    if here not in manifest.platforms:
        raise CheckpointError(
            f"{path} was exported for {', '.join(manifest.platforms)}; this process runs on {here}"
        )
    _check_custom_calls(path, manifest.custom_calls)
    inputs, outputs = _parse_shapes(entry.inputs, where), _parse_shapes(entry.outputs, where)
    if unknown := [
        f"{output} to {name}"
        for output, name in entry.feeds.items()
        if output not in outputs or name not in inputs
    ]:
        raise CheckpointError(f"{where}: feeds names unknown arrays, {unknown[0]:.100}")
    for name_of, arrays in ("past_key_values.0.key", inputs), ("logits", outputs):
        if name_of not in arrays:
            raise CheckpointError(f"{where}: no {name_of}")
    if len(outputs["logits"].shape) != 3:
        raise CheckpointError(f"{where}: logits must have 3 axes, got {outputs['logits'].shape}")
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in weights.items()}
    program = _load_program(path, manifest, abstract, inputs, outputs)
    _check_readable(path, program.mlir_module_serialized, manifest.custom_calls)
    run = jax.jit(program.call)
    try:
        run.lower(abstract, inputs)
    except Exception as error:  # parsing an untrusted program may raise anything
        message = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: not a valid step: {message}") from None
    return ExportedStep(
        name, inputs, outputs, entry.feeds, weights, run, outputs["logits"].shape[2]
    )


# Parses a program from stdin as JAX does, and prints its custom calls; fails if it is invalid.
_PROBE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (300, 300))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
with ir.Context() as context:
    try:
        module = stablehlo.deserialize_portable_artifact(context, sys.stdin.buffer.read())
        if not module.operation.verify():
            raise ValueError("it does not verify")
        def visit(operation):
            if operation.name == "stablehlo.custom_call":
                print(operation.attributes["call_target_name"].value)
            return ir.WalkResult.ADVANCE
        module.operation.walk(visit)
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))
"""
_READABLE: set[str] = set()  # hashes of programs that passed the check


def _check_readable(path: Path, program: bytes, custom_calls: list[str]) -> None:
    """Raise CheckpointError if MLIR cannot parse a program, or it has undeclared custom calls.

    Uses a child process, because MLIR crashes on some inputs.
    """
    if (sha256 := hashlib.sha256(program).hexdigest()) in _READABLE or not sys.executable:
        return
    paths = os.pathsep.join(path for path in sys.path if path)
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE],
        input=program,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if probe.returncode:
        errors = re.findall(r"error: (.*)", probe.stderr.decode(errors="replace"))
        message = f"{errors[0] if errors else 'not read':.200}"
        if probe.returncode < 0:
            message = f"the parser was killed by signal {-probe.returncode}"
        raise CheckpointError(f"{path}: not a valid step: {message}")
    if foreign := sorted({*probe.stdout.decode(errors="replace").split()} - {*custom_calls}):
        raise CheckpointError(f"{path} calls {foreign[0]:.80}, which {MANIFEST} does not declare")
    _READABLE.add(sha256)


def _load_program(
    path: Path, manifest: _Manifest, weights: Shapes, inputs: Shapes, outputs: Shapes
) -> jax.export.Exported:
    """Return the step as a JAX exported program: a template of these shapes with the file's code.

    JAX's own serialization needs the flatbuffers package, and only JAX can read it.
    """

    def placeholder(weights: Shapes, inputs: Shapes) -> dict[str, jax.Array]:
        return {name: jax.numpy.zeros(s.shape, s.dtype) for name, s in outputs.items()}

    version = manifest.calling_convention_version
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if not oldest <= version <= newest:
        raise CheckpointError(
            f"{path}: version {version} of JAX's calling convention is not supported; jax"
            f" {jax.__version__} supports {oldest} to {newest}"
        )
    jitted = jax.jit(placeholder, keep_unused=True)
    template = jax.export.export(jitted, platforms=manifest.platforms)(weights, inputs)
    return dataclasses.replace(
        template,
        mlir_module_serialized=read_bytes(path),
        calling_convention_version=version,
        disabled_safety_checks=tuple(
            jax.export.DisabledSafetyCheck.custom_call(name) for name in manifest.custom_calls
        ),
    )


def _check_custom_calls(path: Path, names: list[str]) -> None:
    """Raise CheckpointError if an export calls native kernels and their module is not imported."""
    native = sys.modules.get(NATIVE)
    if names and (native is None or native.load_kernels() is None):
        raise CheckpointError(
            f"{path} calls native kernels ({', '.join(names)}). Import {NATIVE} first, on a"
            " machine that has them, or export with --native leave-out"
        )
