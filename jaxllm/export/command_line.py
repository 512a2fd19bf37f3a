"""Export steps as StableHLO with separate weights, for other runtimes and compilers.

Weights are inputs of the steps, never constants. `jaxllm.export.runtime` loads and runs exports.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import jax
import jax.export
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.export import FixedShapeRunner, StepSignature, input_shapes
from jaxllm.export.runner import check_lengths
from jaxllm.export.runtime import MANIFEST, WEIGHTS, Shapes, digest, load
from jaxllm.export.step import check_signature, output_feeds, run_step
from jaxllm.files import atomic_directory, atomic_file, check_vacant, write_json
from jaxllm.files.versions import EXPORT
from jaxllm.models import get_family
from jaxllm.ops.native import disable_kernels
from jaxllm.runtime.progress import bytes_bar, steps_bar
from jaxllm.runtime.schema import as_schema
from jaxllm.runtime.validation import check_int
from jaxllm.steps import forward
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.linear import embed
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, list_arrays
from jaxllm.weights.safetensors import write_tensors

STEP_NAMES = ("prefill", "decode")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
Native = Literal["keep", "leave-out"]


def export(
    model: Model,
    params: Params,
    directory: str | Path,
    *,
    num_tokens: int,
    max_tokens: int,
    step_names: Sequence[str] = STEP_NAMES,
    signature: StepSignature | None = None,
    batch: int = 1,
    platforms: Sequence[str] | None = None,
    native: Native = "leave-out",
    write_mlir: bool = False,
    show_progress: bool | None = None,
) -> dict[str, Any]:
    """Export static-shape steps to a directory, atomically; return the manifest.

    "prefill" runs num_tokens tokens per row, "decode" one. Both take and return keys and values in
    the same `max_tokens - num_tokens` slots, so the output of either is an input of both.

    The directory contains the steps (`NAME.stablehlo`, portable StableHLO bytecode from
    `jax.export`), the weights as safetensors under their parameter names, and `manifest.json`. The
    manifest lists each file's hash, and names, shapes and dtypes in the order of the program's
    arguments: the weights, then the inputs, each sorted by name. With several platforms, an int32
    platform index precedes them.

    Args:
        num_tokens: Tokens per row of the prefill step.
        max_tokens: Maximum text length: slots plus num_tokens.
        step_names: Steps to export.
        signature: Inputs of the steps, as listed by `constants.input_shapes`.
        batch: Number of rows.
        platforms: Any of cpu, cuda, rocm and tpu, in one program; default: this process's platform.
        native: Whether to "keep" calls to our CPU kernels, by name, or to "leave-out" these for
            XLA's operations.
        write_mlir: Also write each step as a readable `.mlir` file.

    Raises:
        ConfigError: For a model or options that cannot be exported.
        CheckpointError: If the directory already holds an export, or cannot be written.
    """
    signature = signature or StepSignature()
    check_signature(model, signature)
    check_lengths(model, num_tokens, max_tokens)
    platforms = tuple(platforms or (jax.export.default_export_platform(),))
    _check_names("a step", step_names, STEP_NAMES)
    _check_names("a platform", platforms, PLATFORMS)
    _check_names("native", [native], ("keep", "leave-out"))
    batch = check_int("batch", batch, 1, error=ConfigError)
    directory = Path(directory)
    check_vacant(directory, MANIFEST, "an export")
    capacity = max_tokens - num_tokens
    weights, tree = _name_arrays(params)
    steps, calls = {}, set()
    with atomic_directory(directory, MANIFEST) as folder:
        with steps_bar(f"exporting to {directory.name}", len(step_names), show_progress) as advance:
            for name in step_names:
                width = num_tokens if name == "prefill" else 1
                shapes = input_shapes(
                    model, signature, batch=batch, num_tokens=width, capacity=capacity
                )
                program, step_calls = _export_step(
                    model, signature, weights, tree, shapes, platforms, native
                )
                calls |= step_calls
                steps[name] = {
                    **_write_file(folder / f"{name}.stablehlo", program.mlir_module_serialized),
                    "inputs": _array_entries(dict(sorted(shapes.items()))),
                    "outputs": _array_entries(
                        jax.tree.unflatten(program.out_tree, program.out_avals)
                    ),
                    "feeds": output_feeds(signature, model.config.num_hidden_layers),
                }
                if write_mlir:
                    _write_file(folder / f"{name}.mlir", program.mlir_module().encode())
                advance()
        manifest = {
            **EXPORT.mark,
            "jax": jax.__version__,
            "calling_convention_version": program.calling_convention_version,
            "platforms": platforms,
            "custom_calls": sorted(calls),
            "model": model.config.to_dict(),
            "precision": dataclasses.asdict(model.precision),
            "form": dataclasses.asdict(signature),
            "batch": batch,
            "num_tokens": num_tokens,
            "capacity": capacity,
            "steps": steps,
            "weights": _write_weights(folder / WEIGHTS, weights, show_progress),
        }
        write_json(folder / MANIFEST, manifest)
    return manifest


def compare_logits(model: Model, params: Params, directory: str | Path) -> dict[str, float]:
    """Return each exported step's maximum logit error against `forward`, on random tokens.

    The error is relative to the largest logit, or absolute if that is below 1. Each step runs a
    text of up to 4 * num_tokens tokens, as far as its slots allow. Raises what
    `jaxllm.export.runtime.load` raises.
    """
    exported = load(directory)
    m, config = exported.manifest, model.config
    form: StepSignature = as_schema(m["form"], StepSignature, f"{Path(directory) / MANIFEST}: form")
    rng = np.random.default_rng(0)
    length = min(m["capacity"] + 1, 4 * m["num_tokens"])
    ids = rng.integers(0, config.vocab_size, (m["batch"], length))
    inputs: dict[str, Any] = {"tokens": ids}
    if form.embeddings:
        table = params[get_family(config.model_type).token_table]["weight"]
        inputs = {"embeddings": np.asarray(embed(table, jax.numpy.asarray(ids)), np.float32)}
    expected = np.asarray(forward(model, params, None, ids).logits)
    errors = {}
    for name, step in exported.steps.items():
        width = step.inputs["slots"].shape[1]
        kinds: dict[str, Any] = {"rotary": form.rotary, "mask": form.mask}
        runner = FixedShapeRunner(model, params, width, width + m["capacity"], step=step, **kinds)
        logits = runner(**inputs).logits
        errors[name] = float(np.abs(logits - expected).max() / max(1.0, np.abs(expected).max()))
    return errors


def _name_arrays(params: Params) -> tuple[dict[str, jax.Array], Any]:
    """Return the weights' arrays by name (several per quantized weight), and the tree structure."""
    arrays, tree = list_arrays(params)
    named = dict(arrays)
    if len(named) != len(arrays):
        raise ConfigError("two parameters have the same name")
    return named, tree


def _export_step(
    model: Model,
    signature: StepSignature,
    weights: dict[str, jax.Array],
    tree: Any,
    shapes: Shapes,
    platforms: tuple[str, ...],
    native: Native,
) -> tuple[jax.export.Exported, set[str]]:
    """Return a step as an exported program, and the names of native kernels that it calls."""
    names = list(weights)

    def step(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, jax.Array]:
        return run_step(model, signature, tree.unflatten([weights[n] for n in names]), inputs)

    jitted = jax.jit(step, keep_unused=True)  # the arguments must match the manifest
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in weights.items()}
    calls: set[str] = set()
    with nullcontext() if native == "keep" else disable_kernels():
        if native == "keep":
            lowered = jitted.trace(abstract, shapes).lower(lowering_platforms=platforms)
            calls = set(re.findall(r"custom_call @(jaxllm_\w+)", lowered.as_text()))
        known = [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(calls)]
        exporter = jax.export.export(jitted, platforms=platforms, disabled_checks=known)
        try:
            program = exporter(abstract, shapes)
        except ValueError as error:  # a custom call that jax.export does not guarantee
            message = " ".join(str(error).split())[:300]
            raise ConfigError(f"this step cannot be exported: {message}") from None
    return program, calls


def _array_entries(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(x.shape), "dtype": str(x.dtype)} for name, x in arrays.items()
    ]


def _write_file(path: Path, content: bytes) -> dict[str, str]:
    """Write a file atomically; return its manifest entry."""
    with atomic_file(path) as file:
        file.write(content)
    return {"file": path.name, "sha256": digest(path)}


def _write_weights(path: Path, weights: dict[str, jax.Array], show: bool | None) -> dict[str, Any]:
    """Write the weights; return their manifest entry, in the order of the arguments."""
    ordered = dict(sorted(weights.items()))
    tensors = {name: _as_lazy(x) for name, x in ordered.items()}
    with bytes_bar(f"writing {path.name}", sum(t.nbytes for t in tensors.values()), show) as done:
        write_tensors(
            path, tensors, aligned=False, metadata={"format": EXPORT.format}, progress=done
        )
    return {"file": path.name, "sha256": digest(path), "tensors": _array_entries(ordered)}


def _as_lazy(array: jax.Array) -> LazyTensor:
    return LazyTensor(np.dtype(array.dtype), array.shape, lambda: np.asarray(array))


def _check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        got = repr(wrong[0])[:40] if wrong else "none"
        raise ConfigError(f"{kind} must be one of {', '.join(known)}; got {got}")
