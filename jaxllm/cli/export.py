"""`jaxllm export`: steps as StableHLO, weights beside them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import note, write
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
            metavar="OUT", callback=check_folder, help="Where to write; must hold no export yet."
        ),
    ],
    what: Annotated[str, typer.Option(help="prefill, decode, or both.")] = "prefill,decode",
    form: Annotated[
        str,
        typer.Option(
            help="Inputs of the steps: tokens or embeddings; rotary for cosines and sines;"
            " positions, boolean or additive for what a token sees."
        ),
    ] = "tokens,positions",
    num_tokens: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = 32,
    max_tokens: Annotated[
        int | None, typer.Option(help="These and the slots of the past. Default: the context.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Rows.")] = 1,
    platforms: Annotated[
        str | None, typer.Option(help="Of cpu, cuda, rocm, tpu; by default this machine's.")
    ] = None,
    native: Annotated[
        str, typer.Option(help="The CPU's own kernels: keep (called by name) or leave-out.")
    ] = "leave-out",
    dtype: Dtype = None,
    quantize: Quantize = None,
    precision: PrecisionFile = None,
    mlir: Annotated[bool, typer.Option("--mlir", help="Write readable .mlir files too.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Load what was written and compare its logits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write prefill and decode steps as StableHLO.

    For runtimes without this code: StableHLO, safetensors, JSON.

    Keys and values go in and come out in fixed shapes; jaxllm.fixed.exported runs them from Python.
    """
    inputs = _form(form)
    from jaxllm.files import check_vacant

    check_vacant(directory, "manifest.json", "an export")
    lm = load_model(model, dtype, quantize=quantize, precision=precision)
    from jaxllm.fixed import Form
    from jaxllm.fixed import export as exporting

    manifest = exporting.export(
        lm.model,
        lm.params,
        directory,
        what=_words(what),
        form=Form(**inputs),
        num_tokens=num_tokens,
        max_tokens=lm.config.context_length if max_tokens is None else max_tokens,
        batch=batch,
        platforms=_words(platforms) if platforms else None,
        native=native,  # type: ignore[arg-type]
        text=mlir,
    )
    report: dict[str, Any] = {
        "directory": str(directory),
        "steps": {n: (directory / s["file"]).stat().st_size for n, s in manifest["steps"].items()},
        "weights": (directory / manifest["weights"]["file"]).stat().st_size,
        "platforms": manifest["platforms"],
        "custom_calls": manifest["custom_calls"],
    }
    if check:
        report["difference"] = exporting.compare(lm.model, lm.params, directory)
    if as_json:
        write(json.dumps(report) + "\n")
        return
    for name, size in report["steps"].items():
        write(f"{name}.stablehlo  {size:,} bytes\n")
        names = [i["name"] for i in manifest["steps"][name]["inputs"]]
        few = [n for n in names if not n.startswith("past_key_values")]
        note(f"{name} takes {', '.join(few)}, past_key_values.N.key and .value")
    write(f"weights.safetensors  {report['weights']:,} bytes\n")
    activations = lm.model.precision.activations
    for name, difference in report.get("difference", {}).items():
        write(f"{name} differs from forward by {difference:.1e} of the largest logit")
        write(f" ({activations})\n")


# What each word of --form says.
FORMS: dict[str, dict[str, Any]] = {
    "tokens": {"embeddings": False},
    "embeddings": {"embeddings": True},
    "rotary": {"rotary": True},
    "positions": {"mask": "positions"},
    "boolean": {"mask": "boolean"},
    "additive": {"mask": "additive"},
}


def _form(text: str) -> dict[str, Any]:
    form: dict[str, Any] = {}
    for word in _words(text):
        if word not in FORMS:
            raise ConfigError(f"--form takes {', '.join(FORMS)}; got {word!r:.40}")
        for name, value in FORMS[word].items():
            if form.setdefault(name, value) != value:
                raise ConfigError(f"--form {text!r:.60}: {word} contradicts what is before it")
    return form


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
