"""Steps as StableHLO with the weights beside them, for runtimes and compilers without this code.

Weights are inputs of the steps, never constants. `jaxllm.fixed.exported` runs what is written here.
"""

import dataclasses
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.export
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.files import as_schema, check_vacant, write_json, writing, writing_directory
from jaxllm.fixed import FixedShapeRunner, Form, input_shapes
from jaxllm.fixed.exported import FORMAT, MANIFEST, VERSION, WEIGHTS, Shapes, digest, load
from jaxllm.fixed.runner import check_lengths
from jaxllm.fixed.step import check_form, feeds, run_step
from jaxllm.models import family
from jaxllm.ops.native import disabled
from jaxllm.progress import bytes_bar, steps_bar
from jaxllm.steps import forward
from jaxllm.weights.files import write_tensors
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params, named_arrays
from jaxllm.whole import whole

WHAT = ("prefill", "decode")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
Native = Literal["keep", "leave-out"]


def export(
    model: nn.Module,
    params: Params,
    directory: str | Path,
    *,
    num_tokens: int,
    max_tokens: int,
    what: Sequence[str] = WHAT,
    form: Form | None = None,
    batch: int = 1,
    platforms: Sequence[str] | None = None,
    native: Native = "leave-out",
    text: bool = False,
    show_progress: bool | None = None,
) -> dict[str, Any]:
    """Write steps of fixed shapes into a directory, all or nothing; returns the manifest.

    "prefill" runs num_tokens tokens a row, "decode" one, both against the same
    `max_tokens - num_tokens` slots of keys and values, which go in and come out: what one step
    returns, either takes. form: their inputs, as `fixed.input_shapes` lists them. platforms: any of
    cpu, cuda, rocm and tpu in one program; by default that of this process. native: whether the
    CPU's own kernels are called by name, or left out for what XLA has. text: write each step as a
    readable `.mlir` too.

    Beside the steps (`NAME.stablehlo`, StableHLO's portable bytecode by `jax.export`) lie the
    weights, as safetensors under the names of the parameters, and `manifest.json`: each file's
    hash; names, shapes and dtypes in the order of the program's arguments, which are the weights,
    then the inputs, each by name (before them, where there are several platforms, an int32 scalar
    that says which).

    Raises ConfigError for what cannot be exported, CheckpointError where the directory already
    holds an export, or cannot be written.
    """
    form = form or Form()
    check_form(model, form)
    check_lengths(model, num_tokens, max_tokens)
    platforms = tuple(platforms or (jax.export.default_export_platform(),))
    _check_names("a step", what, WHAT)
    _check_names("a platform", platforms, PLATFORMS)
    _check_names("native", [native], ("keep", "leave-out"))
    batch = whole("batch", batch, 1, error=ConfigError)
    directory = Path(directory)
    check_vacant(directory, MANIFEST, "an export")
    capacity = max_tokens - num_tokens
    weights, tree = _named(params)
    steps, calls = {}, set()
    with writing_directory(directory, MANIFEST) as made:
        with steps_bar(f"exporting to {directory.name}", len(what), show_progress) as advance:
            for name in what:
                width = num_tokens if name == "prefill" else 1
                shapes = input_shapes(model, form, batch=batch, num_tokens=width, capacity=capacity)
                program, found = _lowered(model, form, weights, tree, shapes, platforms, native)
                calls |= found
                steps[name] = {
                    **_written(made / f"{name}.stablehlo", program.mlir_module_serialized),
                    "inputs": _listed({n: shapes[n] for n in sorted(shapes)}),
                    "outputs": _listed(_outputs(program)),
                    "feeds": feeds(form, model.config.num_hidden_layers),
                }
                if text:
                    _written(made / f"{name}.mlir", program.mlir_module().encode())
                advance()
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "jax": jax.__version__,
            "calling_convention_version": program.calling_convention_version,
            "platforms": platforms,
            "custom_calls": sorted(calls),
            "model": model.config.to_dict(),
            "precision": dataclasses.asdict(model.precision),
            "form": dataclasses.asdict(form),
            "batch": batch,
            "num_tokens": num_tokens,
            "capacity": capacity,
            "steps": steps,
            "weights": _weights(made / WEIGHTS, weights, show_progress),
        }
        write_json(made / MANIFEST, manifest)
    return manifest


def compare(model: nn.Module, params: Params, directory: str | Path) -> dict[str, float]:
    """The largest difference of each exported step's logits from `forward`'s, on random tokens.

    In units of the largest logit. Every step runs a text as long as its slots allow. Raises what
    `jaxllm.fixed.exported.load` raises.
    """
    exported = load(directory)
    m, config = exported.manifest, model.config
    form: Form = as_schema(m["form"], Form, f"{Path(directory) / MANIFEST}: form")
    rng = np.random.default_rng(0)
    length = min(m["capacity"] + 1, 4 * m["num_tokens"])
    ids = rng.integers(0, config.vocab_size, (m["batch"], length))
    given: dict[str, Any] = {"tokens": ids}
    if form.embeddings:
        given = {"embeddings": _embedded(model, params, ids)}
    expected = np.asarray(forward(model, params, None, ids).logits)
    found = {}
    for name, step in exported.steps.items():
        width = step.inputs["slots"].shape[1]
        runner = FixedShapeRunner(
            model,
            params,
            width,
            width + m["capacity"],
            rotary=form.rotary,
            mask=form.mask,
            step=step,
        )
        ours = runner(**given).logits
        found[name] = float(np.abs(ours - expected).max() / max(1.0, np.abs(expected).max()))
    return found


def _embedded(model: nn.Module, params: Params, ids: np.ndarray) -> np.ndarray:
    """The embedding table's rows, as a step of embeddings takes them."""
    from jaxllm.weights.linear import embed

    table = params[family(model.config.model_type).tokens]["weight"]
    return np.asarray(embed(table, jax.numpy.asarray(ids)), np.float32)


def _named(params: Params) -> tuple[dict[str, jax.Array], Any]:
    """The weights' arrays by name (a quantized one has several), and the tree they hang on."""
    found, tree = named_arrays(params)
    named = dict(found)
    if len(named) != len(found):
        raise ConfigError("two parameters have one name")
    return named, tree


def _lowered(
    model: nn.Module,
    form: Form,
    weights: dict[str, jax.Array],
    tree: Any,
    shapes: Shapes,
    platforms: tuple[str, ...],
    native: Native,
) -> tuple[jax.export.Exported, set[str]]:
    """A step as an exported program, and the native kernels that it calls by name."""
    names = list(weights)

    def step(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, jax.Array]:
        return run_step(model, form, tree.unflatten([weights[n] for n in names]), inputs)

    jitted = jax.jit(step, keep_unused=True)  # arguments stay those of the manifest
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in weights.items()}
    calls: set[str] = set()
    with nullcontext() if native == "keep" else disabled():
        if native == "keep":
            lowered = jitted.trace(abstract, shapes).lower(lowering_platforms=platforms)
            calls = set(re.findall(r"custom_call @(jaxllm_\w+)", lowered.as_text()))
        known = [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(calls)]
        exporter = jax.export.export(jitted, platforms=platforms, disabled_checks=known)
        try:
            program = exporter(abstract, shapes)
        except ValueError as error:  # a custom call that nobody else knows
            said = " ".join(str(error).split())[:300]
            raise ConfigError(f"this step cannot be exported: {said}") from None
    return program, calls


def _outputs(program: jax.export.Exported) -> Shapes:
    leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.out_avals]
    return dict(jax.tree.unflatten(program.out_tree, leaves))


def _listed(shapes: Shapes) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(s.shape), "dtype": str(s.dtype)} for name, s in shapes.items()
    ]


def _written(path: Path, content: bytes) -> dict[str, str]:
    """Write a file, whole or not at all; its entry in the manifest."""
    with writing(path) as file:
        file.write(content)
    return {"file": path.name, "sha256": digest(path)}


def _weights(path: Path, weights: dict[str, jax.Array], show: bool | None) -> dict[str, Any]:
    """Write the weights; their entry in the manifest, in the order of the arguments."""
    ordered = {name: weights[name] for name in sorted(weights)}
    tensors = {name: _lazy(x) for name, x in ordered.items()}
    with bytes_bar(f"writing {path.name}", sum(t.nbytes for t in tensors.values()), show) as done:
        write_tensors(path, tensors, aligned=False, metadata={"format": FORMAT}, progress=done)
    return {"file": path.name, "sha256": digest(path), "tensors": _listed(_shapes_of(ordered))}


def _lazy(array: jax.Array) -> LazyTensor:
    return LazyTensor(np.dtype(array.dtype), array.shape, lambda: np.asarray(array))


def _shapes_of(arrays: dict[str, jax.Array]) -> Shapes:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def _check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        got = repr(wrong[0])[:40] if wrong else "none"
        raise ConfigError(f"{kind} is one of {', '.join(known)}; got {got}")
