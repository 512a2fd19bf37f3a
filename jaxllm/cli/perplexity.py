"""`jaxllm perplexity`: perplexity of a text, and divergence between two models on it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm import distributed
from jaxllm.cli.console import note, write
from jaxllm.cli.corpus import (
    Bos,
    Documents,
    Limit,
    Protocol,
    Rows,
    Separate,
    Stride,
    Text,
    Window,
    described,
    encode,
    make_loader,
    read_corpus,
)
from jaxllm.cli.options import (
    Adapters,
    AsJson,
    Dtype,
    Exact,
    Mesh,
    Model,
    Quantize,
    SelfExtend,
    check_writable,
    dtype_named,
    load_model,
)
from jaxllm.errors import ConfigError, TokenError

if TYPE_CHECKING:
    from jaxllm.api import LM
    from jaxllm.cli.corpus import Corpus
    from jaxllm.evaluate.likelihood.data import Loader
    from jaxllm.evaluate.likelihood.divergence import Divergence
    from jaxllm.evaluate.likelihood.perplexity import Estimate, Perplexity
    from jaxllm.evaluate.likelihood.positions import Bucket

EXAMPLES = """
Examples:

  jaxllm perplexity demo:llama --text @story.txt --window 128 --other-quantize int4

  jaxllm perplexity demo:llama --text @story.txt --by-position --picture losses.png
"""


def perplexity(
    model: Model = "demo:llama",
    text: Text = None,
    documents: Documents = None,
    separate: Separate = False,
    window: Window = None,
    stride: Stride = None,
    protocol: Protocol = "strided",
    bos: Bos = "auto",
    batch: Rows = None,
    limit: Limit = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    adapter: Adapters = None,
    mesh: Mesh = None,
    exact: Exact = False,
    self_extend: SelfExtend = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Other model, compared with MODEL as the reference [default: MODEL]."),
    ] = None,
    other_dtype: Annotated[
        str | None,
        typer.Option(callback=dtype_named, help="Dtype of the other model [default: --dtype]."),
    ] = None,
    other_quantize: Annotated[
        str | None, typer.Option(help="Weight format of the other model.")
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="File that stores the numbers of every batch; a second run resumes from it."
        ),
    ] = None,
    by_position: Annotated[
        bool,
        typer.Option(
            "--by-position",
            help="Report the loss by position in the window, too.",
        ),
    ] = False,
    buckets: Annotated[
        int | None,
        typer.Option(help="Number of equal buckets of --by-position [default: 1, 2-3, 4-7, ...]."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="PNG file to draw: the loss by position.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a text: perplexity, KL divergence.

    Prints the perplexity with its standard error, and the KL divergence of another model.

    The error is that of the mean negative log-likelihood, s / sqrt(n) over n tokens taken as
    independent, times the perplexity (to first order), as llama-perplexity's "+/-".
    """
    from jaxllm.files import finite_json

    check_writable("--journal", journal)
    alone = compare is None and other_dtype is None and other_quantize is None
    _check_by_position(by_position, alone, buckets, picture)
    if journal is not None and distributed.several():
        raise ConfigError("--journal cannot be combined with --distributed: leave one out")
    corpus = read_corpus(text, documents, separate)
    lm = load_model(
        model,
        dtype,
        quantize=quantize,
        adapters=adapter,
        mesh=mesh,
        exact=exact,
        self_extend=self_extend,
    )
    from jaxllm.evaluate.likelihood.divergence import check_pair, divergence
    from jaxllm.evaluate.likelihood.perplexity import Perplexity, token_logprobs

    loader, facts = make_loader(
        lm,
        corpus,
        window=window,
        stride=stride,
        protocol=protocol,
        bos=bos,
        batch=batch,
        limit=limit,
    )
    report: dict[str, Any] = {"model": model, "dtype": dtype, "quantize": quantize, **facts}
    if alone:
        borders = _borders(loader.width, buckets) if by_position else []
        logprob_N = token_logprobs(lm.model, lm.params, loader, journal=journal)
        found = Perplexity.of(logprob_N)
        report |= _numbers(found)
        rows = [("text", described(facts)), *_lines(found)]
        if by_position:
            each = _each_position(logprob_N, loader, borders)
            report["by_position"] = [_bucket(b) for b in each]
            rows += [("position", "tokens   nats per token"), *map(_bucket_line, each)]
            if picture is not None:
                from jaxllm.evaluate.likelihood.positions import plot

                plot(each, found.nll.mean, picture, f"{model}: loss by position")
                note(f"{picture} written")
    else:
        other = load_model(compare or model, other_dtype or dtype, quantize=other_quantize)
        check_pair(lm.model, other.model)
        _check_tokenizers(lm, other, corpus)
        both = divergence(lm.model, lm.params, other.model, other.params, loader, journal=journal)
        names = {"model": compare or model, "dtype": other_dtype or dtype}
        report |= _numbers(both.reference)
        report["other"] = {**names, "quantize": other_quantize, **_numbers(both.other)}
        report["divergence"] = differences(both)
        rows = [("text", described(facts)), *_lines(both.reference), *_compared(both)]
    if as_json:
        write(json.dumps(finite_json(report)) + "\n")
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        write(f"{name:{width}}  {value}\n")


def _check_by_position(asked: bool, alone: bool, buckets: int | None, picture: Path | None) -> None:
    """Raise ConfigError for options that cannot be combined, before anything is loaded."""
    if not asked and (buckets is not None or picture is not None):
        raise ConfigError("--buckets and --picture require --by-position")
    if asked and not alone:
        raise ConfigError(
            "--by-position measures one model: run it once for each, and leave out --compare and"
            " --other-*"
        )
    check_writable("--picture", picture)
    if picture is not None:
        from jaxllm.compress.picture import check_plot

        check_plot("--picture")


def _borders(width: int, buckets: int | None) -> list[int]:
    from jaxllm.evaluate.likelihood.positions import edges

    return edges(width, buckets)


def _each_position(logprob_N: Any, loader: "Loader", borders: list[int]) -> "list[Bucket]":
    from jaxllm.evaluate.likelihood.positions import by_position, token_positions

    return by_position(logprob_N, token_positions(loader), borders)


def _bucket(found: "Bucket") -> dict[str, Any]:
    nll = found.nll
    return {
        "start": found.start,
        "stop": found.stop,
        "tokens": found.tokens,
        "nll_total": found.total,
        "nll": None if nll is None else nll.mean,
        "nll_error": None if nll is None else nll.error,
    }


def _bucket_line(found: "Bucket") -> tuple[str, str]:
    last = found.stop - 1
    name = str(last) if last == found.start else f"{found.start}-{last}"
    shown = "none" if found.nll is None else _shown(found.nll)
    return f"  {name}", f"{found.tokens:<8,} {shown}"


def _check_tokenizers(lm: "LM", other: "LM", corpus: "Corpus") -> None:
    """Raise TokenError if the other model encodes the text differently."""
    if lm.tokenizer is None or other.tokenizer is None or lm.path == other.path:
        return
    if encode(lm, corpus) != encode(other, corpus):
        raise TokenError(f"{lm.path} and {other.path} encode the text to different tokens")


def _numbers(found: "Perplexity") -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "perplexity": found.perplexity.mean,
        "perplexity_error": found.perplexity.error,
        "nll": found.nll.mean,
        "nll_error": found.nll.error,
    }


def differences(found: "Divergence") -> dict[str, Any]:
    return {
        "kl": found.kl.mean,
        "kl_error": found.kl.error,
        "kl_median": found.kl_median,
        "kl_p99": found.kl_p99,
        "kl_max": found.kl_max,
        "same_top": found.same_top.mean,
        "same_top_error": found.same_top.error,
        "perplexity_ratio": found.ratio.mean,
        "perplexity_ratio_error": found.ratio.error,
        "delta_p": found.delta_p.mean,
        "delta_p_error": found.delta_p.error,
        "delta_p_rms": found.delta_p_rms,
    }


def _lines(found: "Perplexity", whose: str = "") -> list[tuple[str, str]]:
    return [
        (f"tokens scored{whose}", f"{found.tokens:,}"),
        (f"negative log-likelihood{whose}", f"{_shown(found.nll)} nats per token"),
        (f"perplexity{whose}", _shown(found.perplexity)),
    ]


def _compared(found: "Divergence") -> list[tuple[str, str]]:
    quantiles = f"median {found.kl_median:.3g}, p99 {found.kl_p99:.3g}, max {found.kl_max:.3g}"
    return [
        _lines(found.other, ", other")[-1],
        ("perplexity ratio", _shown(found.ratio)),
        ("KL divergence", f"{found.kl.mean:.3g} +/- {found.kl.error:.2g} nats; {quantiles}"),
        ("same top-1", f"{found.same_top.mean:.2%} +/- {found.same_top.error:.2%}"),
        ("change of p", f"{_shown(found.delta_p)}; RMS {found.delta_p_rms:.5f}"),
    ]


def _shown(estimate: "Estimate") -> str:
    return f"{estimate.mean:.5f} +/- {estimate.error:.5f}"
