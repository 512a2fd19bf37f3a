"""Exported steps, run without the model's code: StableHLO, weights and a manifest that binds them.

Imports nothing of the models, so that what runs is what was written.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import read_json

FORMAT, VERSION = "jaxllm-export", 1
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
NATIVE = "jaxllm.ops.native"  # the module that registers what exports call by name, where they do
Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedStep:
    """One step: named arrays in, named arrays out, shapes fixed.

    feeds: which output is which input of the next step.
    """

    name: str
    inputs: Shapes
    outputs: Shapes
    feeds: Mapping[str, str]
    weights: Mapping[str, jax.Array] = dataclasses.field(repr=False)
    run: Callable[..., dict[str, jax.Array]] = dataclasses.field(repr=False)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Run it. Raises ConfigError with every input that is missing, unknown or misshapen."""
        complaints = [f"{name} is missing" for name in self.inputs if name not in inputs]
        for name, x in inputs.items():
            if name not in self.inputs:
                complaints.append(f"{name} is no input")
                continue
            want, got = (
                self.inputs[name],
                (np.shape(x), np.dtype(getattr(x, "dtype", np.asarray(x).dtype))),
            )
            if (want.shape, want.dtype) != got:
                complaints.append(
                    f"{name} must be {want.dtype} {want.shape}, got {got[1]} {got[0]}"
                )
        if complaints:
            raise ConfigError(f"step {self.name}: {'; '.join(complaints)}")
        return self.run(dict(self.weights), dict(inputs))

    def past(self, outputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What the outputs of one step put into the next."""
        return {name: outputs[output] for output, name in self.feeds.items()}

    def blank(self) -> dict[str, np.ndarray]:
        """Inputs of a text without a single token: all padding, all slots empty."""
        empty = {"position_ids": -1, "past_position_ids": -1}
        empty["slots"] = self.inputs["past_key_values.0.key"].shape[1]
        return {n: np.full(s.shape, empty.get(n, 0), s.dtype) for n, s in self.inputs.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Exported:
    """What a directory holds: steps by name ("prefill", "decode"), and the manifest."""

    steps: Mapping[str, ExportedStep]
    manifest: Mapping[str, Any] = dataclasses.field(repr=False)

    def __getitem__(self, name: str) -> ExportedStep:
        if name not in self.steps:
            raise ConfigError(
                f"no step {name!r:.40} was exported: there is {', '.join(self.steps)}"
            )
        return self.steps[name]


def load(directory: str | Path) -> Exported:
    """Open what `jaxllm export` wrote; every file is compared with its hash in the manifest.

    Raises CheckpointError, naming the file, for one that is missing, damaged, or not of this
    export, and where the steps were exported for another platform than this process runs on.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    try:
        weights = _weights(directory, manifest["weights"])
        steps = {
            name: _step(directory, name, entry, weights, manifest)
            for name, entry in manifest["steps"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is incomplete: {error!r:.80}") from None
    return Exported(steps, manifest)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest. Raises CheckpointError where there is none, or it is of another format."""
    path = directory / MANIFEST
    if not path.exists():
        raise CheckpointError(f"{directory} has no {MANIFEST}: not an export")
    manifest = read_json(path)
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is of format {manifest.get('format')!r:.40}, version"
            f" {manifest.get('version')!r:.20}; this reads {FORMAT}, version {VERSION}"
        )
    return manifest


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sound(directory: Path, entry: Mapping[str, Any]) -> Path:
    """The path of a file of the export whose content is what the manifest says."""
    name = entry["file"]
    path = directory / name
    if Path(name).name != name:
        raise CheckpointError(f"{directory / MANIFEST}: {name!r:.60} is not a plain file name")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if digest(path) != entry["sha256"]:
        raise CheckpointError(f"{path} is damaged, or not of this export: its hash is another")
    return path


def _shapes(entries: list[Mapping[str, Any]]) -> Shapes:
    return {
        e["name"]: jax.ShapeDtypeStruct(tuple(e["shape"]), jax.numpy.dtype(e["dtype"]))
        for e in entries
    }


def _weights(directory: Path, entry: Mapping[str, Any]) -> dict[str, jax.Array]:
    path, expected = _sound(directory, entry), _shapes(entry["tensors"])
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            found: dict[str, Any] = {n: jax.device_put(file.get_tensor(n)) for n in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from None
    forms = [{n: (x.shape, x.dtype) for n, x in some.items()} for some in (found, expected)]
    if forms[0] != forms[1]:
        raise CheckpointError(f"{path}: not the tensors that {MANIFEST} lists")
    return found


def _step(
    directory: Path,
    name: str,
    entry: Mapping[str, Any],
    weights: Mapping[str, jax.Array],
    manifest: Mapping[str, Any],
) -> ExportedStep:
    path, platforms = _sound(directory, entry), tuple(manifest["platforms"])
    here = jax.export.default_export_platform()
    if here not in platforms:
        raise CheckpointError(
            f"{path} was exported for {', '.join(platforms)}; this process runs on {here}"
        )
    _check_custom_calls(path, manifest["custom_calls"])
    inputs, outputs = _shapes(entry["inputs"]), _shapes(entry["outputs"])
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in weights.items()}
    run = jax.jit(_program(path, manifest, abstract, inputs, outputs).call)
    try:
        run.lower(abstract, inputs)
    except Exception as error:  # whatever the reader of foreign bytes says
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: not a step that can run: {said}") from None
    return ExportedStep(name, inputs, outputs, entry["feeds"], weights, run)


def _program(
    path: Path, manifest: Mapping[str, Any], weights: Shapes, inputs: Shapes, outputs: Shapes
) -> jax.export.Exported:
    """The step as JAX calls one: a program of these shapes, with the file's code put in its place.

    (JAX's own container would need the flatbuffers package, and no compiler but JAX's reads it.)
    """

    def stand_in(weights: Shapes, inputs: Shapes) -> dict[str, jax.Array]:
        return {name: jax.numpy.zeros(s.shape, s.dtype) for name, s in outputs.items()}

    version = manifest["calling_convention_version"]
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if not oldest <= version <= newest:
        raise CheckpointError(
            f"{path}: written in version {version} of JAX's calling convention; jax"
            f" {jax.__version__} reads {oldest} to {newest}"
        )
    jitted = jax.jit(stand_in, keep_unused=True)
    template = jax.export.export(jitted, platforms=manifest["platforms"])(weights, inputs)
    return dataclasses.replace(
        template,
        mlir_module_serialized=path.read_bytes(),
        calling_convention_version=version,
        disabled_safety_checks=tuple(
            jax.export.DisabledSafetyCheck.custom_call(name) for name in manifest["custom_calls"]
        ),
    )


def _check_custom_calls(path: Path, names: list[str]) -> None:
    """Native kernels are their module's business, which whoever wants them has imported himself."""
    native = sys.modules.get(NATIVE)
    if names and (native is None or native.kernels() is None):
        raise CheckpointError(
            f"{path} calls native kernels ({', '.join(names)}): import {NATIVE} first, on a"
            " machine that has them, or export with --native leave-out"
        )
