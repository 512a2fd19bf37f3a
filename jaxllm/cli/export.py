"""`jaxllm export`: prefill and decode steps as StableHLO, with their weights."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jaxllm.cli.console import log, spinner, write, write_json
from jaxllm.cli.options import (
    AsJson,
    BatchSize,
    Dtype,
    Model,
    PrecisionFile,
    Quantize,
    check_choice,
    check_new,
    load_model,
    split_commas,
)
from jaxllm.errors import ConfigError

EXAMPLE = "Example: jaxllm export demo:llama story-graph --num-tokens 8 --max-tokens 128 --check"


def export(
    model: Model,
    directory: Annotated[
        Path, typer.Argument(metavar="OUT", callback=check_new("manifest.json", "an export"))
    ],
    what: str = "prefill,decode",
    form: str = "tokens,positions",
    num_tokens: int = 32,
    max_tokens: int | None = None,
    batch: BatchSize = 1,
    platforms: str | None = None,
    native: Literal["keep", "leave-out"] = "leave-out",
    dtype: Dtype = None,
    quantize: Quantize = None,
    precision: PrecisionFile = None,
    mlir: bool = False,
    check: bool = False,
    as_json: AsJson = False,
) -> None:
    """Write prefill and decode steps as StableHLO.

    For runtimes without jaxllm: StableHLO, safetensors, JSON.

    Each step takes and returns keys and values of fixed shapes; jaxllm.export.runtime runs the
    steps from Python.

    Args:
        directory: Directory to write; without an export.
        what: Steps to export: prefill, decode, or both.
        form: Inputs of the steps: tokens or embeddings; rotary for RoPE cosines and sines; and the
            attention mask as positions, boolean or additive.
        num_tokens: Tokens per prefill step.
        max_tokens: Maximum length in tokens: --num-tokens and the cache [default: the context].
        batch: Rows per batch.
        platforms: Platforms: cpu, cuda, rocm, tpu, comma-separated [default: this machine's].
        native: Native CPU kernels: keep (as custom calls) or leave-out (XLA operations).
        mlir: Write readable .mlir files, too.
        check: Load the export and compare its logits with the model's.
    """
    inputs = _parse_form(form)
    with spinner("starting"):
        from jaxllm.export import StepSignature, command_line as exporting
    for step in split_commas(what):
        check_choice("--what", step, exporting.STEP_NAMES)
    lm = load_model(model, dtype, quantize=quantize, precision=precision)

    manifest = exporting.export(
        lm.model,
        lm.params,
        directory,
        step_names=split_commas(what),
        signature=StepSignature(**inputs),
        num_tokens=num_tokens,
        max_tokens=lm.config.context_length if max_tokens is None else max_tokens,
        batch=batch,
        platforms=split_commas(platforms) if platforms else None,
        native=native,
        write_mlir=mlir,
    )
    report: dict[str, Any] = {
        "directory": str(directory),
        "steps": {n: (directory / s["file"]).stat().st_size for n, s in manifest["steps"].items()},
        "weights": (directory / manifest["weights"]["file"]).stat().st_size,
        "platforms": manifest["platforms"],
        "custom_calls": manifest["custom_calls"],
    }
    if check:
        report["difference"] = exporting.compare_logits(lm.model, lm.params, directory)
    if as_json:
        return write_json(report)
    for name, size in report["steps"].items():
        write(f"{name}.stablehlo  {size:,} bytes\n")
        names = [i["name"] for i in manifest["steps"][name]["inputs"]]
        few = [n for n in names if not n.startswith("past_key_values")]
        log(f"{name} takes {', '.join(few)}, past_key_values.N.key and .value")
    write(f"weights.safetensors  {report['weights']:,} bytes\n")
    for name, difference in report.get("difference", {}).items():
        error = f"{difference:.1e} of the largest logit ({lm.model.precision.activations})"
        write(f"{name} differs from forward by {error}\n")


# The input signature that each word of --form selects.
FORMS: dict[str, tuple[str, Any]] = {
    "tokens": ("embeddings", False),
    "embeddings": ("embeddings", True),
    "rotary": ("rotary", True),
    **{mask: ("mask", mask) for mask in ("positions", "boolean", "additive")},
}


def _parse_form(text: str) -> dict[str, Any]:
    form: dict[str, Any] = {}
    for word in split_commas(text):
        check_choice("--form", word, FORMS)
        name, value = FORMS[word]
        if form.setdefault(name, value) != value:
            raise ConfigError(f"--form {text!r:.60}: {word} contradicts an earlier word")
    return form
