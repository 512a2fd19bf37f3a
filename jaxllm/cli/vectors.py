"""`jaxllm vectors`: write golden test vectors of a model, and check another version by them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxllm.cli.console import log, write, write_json
from jaxllm.cli.option_groups import ReferenceWeightOptions
from jaxllm.cli.options import AsJson, Model, check_folder

if TYPE_CHECKING:
    from jaxllm.evaluate.parity.activations import JaxBackend

EXAMPLE = """
Examples:

  jaxllm vectors make demo:llama story-vectors

  jaxllm vectors check demo:llama story-vectors
"""
TEXTS = ("Once upon a time", "One day")


def vectors(
    action: Annotated[Literal["make", "check"], typer.Argument()],
    model: Model,
    directory: Annotated[Path, typer.Argument(metavar="DIR")],
    source: Annotated[Literal["jaxllm", "transformers"], typer.Option("--from")] = "jaxllm",
    new_tokens: Annotated[int, typer.Option("--tokens", "-n")] = 4,
    tolerance: float | None = None,
    other_weights: bool = False,
    as_json: AsJson = False,
    *,
    loading: ReferenceWeightOptions,
) -> None:
    """Write test vectors of a model, or check a model against them.

    The exit status is 1 if they differ.

    The vectors are every named activation, the logits and the greedy tokens of two short texts,
    with their ids and positions: alone, as a batch padded on the left or the right, and with a
    cache. They are stored as safetensors and JSON, so that checking needs neither torch nor jaxllm.

    Args:
        action: Make vectors, or check a model against them.
        directory: Directory of the vectors.
        source: make: source of the numbers.
        new_tokens: make: number of greedy tokens after each text.
        tolerance: check: tolerance, as for verify [default: by dtype].
        other_weights: check: compare only the numbers, not the weights.
    """
    if action == "make":
        check_folder(directory)
        from jaxllm.files import check_vacant

        check_vacant(directory, "vectors.json", "vectors")
    lm = loading.load(model)
    from jaxllm.evaluate.parity.activations import JaxBackend

    backend = JaxBackend(f"jaxllm, {model}", lm.model, lm.params)
    if action == "check":
        _check(backend, directory, tolerance, other_weights, as_json)
        return
    from jaxllm.evaluate.parity.golden import make

    texts = (
        [lm.tokenizer.encode(text, bos=lm.tokenizer.adds_bos) for text in TEXTS]
        if lm.tokenizer
        else [[1, 2, 3, 4, 5], [6, 7, 8]]
    )
    if source == "jaxllm":
        make(directory, backend, texts, new_tokens=new_tokens)
    else:
        from jaxllm.evaluate.parity.activations import on_process_zero
        from jaxllm.evaluate.parity.transformers_backend import TransformersBackend
        from jaxllm.evaluate.verify import transformers_directory

        with transformers_directory(model, lm, loading.dtype) as hf:
            reference = on_process_zero(lambda: TransformersBackend.load(hf, loading.dtype))
            make(directory, backend, texts, new_tokens=new_tokens, source=reference)
    log(f"wrote {directory}")


def _check(
    side: "JaxBackend", directory: Path, tolerance: float | None, other_weights: bool, as_json: bool
) -> None:
    from jaxllm.evaluate.parity.compare import Tolerance, to_json
    from jaxllm.evaluate.parity.golden import check, read

    bound = None if tolerance is None else Tolerance(tolerance)
    checked = check(read(directory), side, tolerance=bound)
    holds = checked.numbers_hold if other_weights else checked.holds
    if as_json:
        cases = {name: to_json(report) for name, report in checked.reports.items()}
        write_json({"holds": holds, "differs": checked.model_mismatches, "cases": cases})
    else:
        for name in checked.model_mismatches:
            write(f"{name} differ{'s' * (name != 'weights')} from those of the vectors\n")
        for name, report in checked.reports.items():
            stages = f"{len(report.stages)} stages hold"
            if first := report.first:
                numbers = f"{first.beyond:,} of {first.count:,} numbers"
                stages = f"first to differ: {first.name} ({numbers})"
            greedy = f"{report.greedy.agreed} of {report.greedy.compared} greedy tokens"
            worst = max(d.relative_max for d in report.differences)
            write(f"{name}: {stages}, {greedy}; largest relative error {worst:.1e}\n")
        write("holds\n" if holds else "DOES NOT HOLD\n")
    if not holds:
        raise typer.Exit(1)
