"""`jaxllm export`: prefill and decode steps as StableHLO, with their weights."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import log, write
from jaxllm.cli.options import (
    AsJson,
    Dtype,
    Model,
    PrecisionFile,
    Quantize,
    check_folder,
    load_model,
)
from jaxllm.errors import ConfigError

EXAMPLE = "Example: jaxllm export demo:llama story-graph --num-tokens 8 --max-tokens 128 --check"


def export(
    model: Model,
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", callback=check_folder, help="Directory to write; without an export."
        ),
    ],
    what: Annotated[
        str, typer.Option(help="Steps to export: prefill, decode, or both.")
    ] = "prefill,decode",
    form: Annotated[
        str,
        typer.Option(
            help="Inputs of the steps: tokens or embeddings; rotary for RoPE cosines and sines; and"
            " the attention mask as positions, boolean or additive."
        ),
    ] = "tokens,positions",
    num_tokens: Annotated[int, typer.Option(help="Tokens per prefill step.")] = 32,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum length in tokens: --num-tokens and the cache [default: the context]."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Rows per batch.")] = 1,
    platforms: Annotated[
        str | None,
        typer.Option(
            help="Platforms: cpu, cuda, rocm, tpu, comma-separated [default: this machine's]."
        ),
    ] = None,
    native: Annotated[
        str,
        typer.Option(
            help="Native CPU kernels: keep (as custom calls) or leave-out (XLA operations)."
        ),
    ] = "leave-out",
    dtype: Dtype = None,
    quantize: Quantize = None,
    precision: PrecisionFile = None,
    mlir: Annotated[bool, typer.Option("--mlir", help="Write readable .mlir files, too.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Load the export and compare its logits with the model's."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write prefill and decode steps as StableHLO.

    For runtimes without jaxllm: StableHLO, safetensors, JSON.

    Each step takes and returns keys and values of fixed shapes; jaxllm.export.runtime runs the
    steps from Python.
    """
    inputs = _parse_form(form)
    from jaxllm.files import check_vacant

    check_vacant(directory, "manifest.json", "an export")
    lm = load_model(model, dtype, quantize=quantize, precision=precision)
    from jaxllm.export import StepSignature, command_line as exporting

    manifest = exporting.export(
        lm.model,
        lm.params,
        directory,
        step_names=_split_words(what),
        signature=StepSignature(**inputs),
        num_tokens=num_tokens,
        max_tokens=lm.config.context_length if max_tokens is None else max_tokens,
        batch=batch,
        platforms=_split_words(platforms) if platforms else None,
        native=native,  # type: ignore[arg-type]
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
        write(json.dumps(report) + "\n")
        return
    for name, size in report["steps"].items():
        write(f"{name}.stablehlo  {size:,} bytes\n")
        names = [i["name"] for i in manifest["steps"][name]["inputs"]]
        few = [n for n in names if not n.startswith("past_key_values")]
        log(f"{name} takes {', '.join(few)}, past_key_values.N.key and .value")
    write(f"weights.safetensors  {report['weights']:,} bytes\n")
    activations = lm.model.precision.activations
    for name, difference in report.get("difference", {}).items():
        write(f"{name} differs from forward by {difference:.1e} of the largest logit")
        write(f" ({activations})\n")


# The input signature that each word of --form selects.
FORMS: dict[str, dict[str, Any]] = {
    "tokens": {"embeddings": False},
    "embeddings": {"embeddings": True},
    "rotary": {"rotary": True},
    "positions": {"mask": "positions"},
    "boolean": {"mask": "boolean"},
    "additive": {"mask": "additive"},
}


def _parse_form(text: str) -> dict[str, Any]:
    form: dict[str, Any] = {}
    for word in _split_words(text):
        if word not in FORMS:
            raise ConfigError(f"--form must be words of {', '.join(FORMS)}: got {word!r:.40}")
        for name, value in FORMS[word].items():
            if form.setdefault(name, value) != value:
                raise ConfigError(f"--form {text!r:.60}: {word} contradicts an earlier word")
    return form


def _split_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
