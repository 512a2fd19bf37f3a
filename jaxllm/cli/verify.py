"""`jaxllm verify`: compare a checkpoint with transformers, or with another variant of it."""

from functools import partial
from typing import Annotated

import typer

from jaxllm.cli.console import log, write, write_json
from jaxllm.cli.option_groups import ReferenceWeightOptions
from jaxllm.cli.options import AsJson, Model, Plot, parse_dtype

EXAMPLE = """
Examples:

  jaxllm verify demo:llama

  jaxllm verify demo:llama --quantize int8 --against demo:llama --tolerance 0.05

  jaxllm verify demo:llama --dtype bfloat16 --invariance
"""
TRANSFORMERS = "transformers"


def verify(
    model: Model,
    against: str = TRANSFORMERS,
    against_dtype: Annotated[str | None, typer.Option(callback=parse_dtype)] = None,
    new_tokens: Annotated[int, typer.Option("--tokens", "-n")] = 32,
    length: int = 48,
    tolerance: float | None = None,
    as_json: AsJson = False,
    plot: Plot = None,
    invariance: bool = False,
    *,
    loading: ReferenceWeightOptions,
) -> None:
    """Compare a model with transformers, stage by stage.

    Compares every stage, the cache and the greedy text; the exit status is 1 if they differ.

    Two prompts of different lengths run as one batch, padded on the left. By default the reference
    is transformers with the same weights in the same dtype (quantized ones dequantized), and both
    compute in float32, where a difference is an error rather than rounding. The tolerance is the
    same at every stage: 1e-5 of the stage's largest number plus 1e-4 of each number in float32,
    5e-3 in float16, 1e-2 in bfloat16. In the last two, two correct programs can differ by more: a
    stage then still passes if jaxllm is at most 1.5 times as far from float32 as transformers is,
    which the logits must be in any case. A quantized model differs from an unquantized reference by
    design: set --tolerance. So do activations that --precision rounds; the weight formats that it
    names also apply to the reference.

    Args:
        against: Reference: "transformers", or a checkpoint (also MODEL itself).
        against_dtype: Dtype of the reference [default: --dtype for transformers, else float32].
        new_tokens: Greedy tokens per row.
        length: Length in tokens of the longer of the two prompts.
        tolerance: Tolerance, times max(1, largest number of a stage) [default: by dtype].
        plot: PNG file to draw: the error by stage.
        invariance: Compare the model with itself instead: a text alone, and the same text in
            batches, chunks and caches, speculated and served. All bits must be equal
            (docs/same_bits.md).
    """
    if invariance:
        return _verify_invariance(loading, model, length, new_tokens, as_json)
    lm = loading.load(model)
    from jaxllm.evaluate.parity.compare import Tolerance, to_json, to_png, to_text
    from jaxllm.evaluate.verify import verify as compare

    report = compare(
        lm,
        against,
        name=f"{model} ({loading.quantize or loading.dtype})",
        files=model,
        dtype=loading.dtype,
        reference_dtype=against_dtype,
        length=length,
        new_tokens=new_tokens,
        tolerance=None if tolerance is None else Tolerance(tolerance),
    )
    write_json(to_json(report)) if as_json else write(to_text(report))
    if plot is not None:
        to_png(report, plot)
        log(f"wrote {plot}")
    if not report.holds:
        raise typer.Exit(1)


def _verify_invariance(
    loading: ReferenceWeightOptions, model: str, length: int, new_tokens: int, as_json: bool
) -> None:
    from jaxllm.evaluate.invariance import Comparison, check_invariance

    def show(case: Comparison) -> None:
        result = f"{case.stage} differs by {case.error:.1e}" if case.stage else "same bits"
        if not as_json:
            write(f"{case.way:<30}{result}\n")

    load = partial(loading.load, model, show_progress=False, invariant=True)
    workers = load if loading.mesh is None else None
    report = check_invariance(load(), length=length, new_tokens=new_tokens, load=workers, show=show)
    if as_json:
        write_json([case._asdict() for case in report.comparisons])
    if not report.promised:
        log("equal bits are not promised for this model here (docs/same_bits.md)")
    if not report.holds:
        raise typer.Exit(1)
