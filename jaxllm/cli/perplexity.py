"""`jaxllm perplexity`: perplexity of a text, and divergence between two models on it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxllm.cli.console import log, spinner, write_json, write_rows
from jaxllm.cli.eval_data import BOS, Corpus, describe_text, encode_corpus
from jaxllm.cli.option_groups import AdapterOptions, EvalTextOptions
from jaxllm.cli.options import (
    AsJson,
    Attention,
    Model,
    NewFile,
    Plot,
    check_choice,
    load_model,
    parse_dtype,
)
from jaxllm.errors import ConfigError, TokenError
from jaxllm.runtime import multihost

if TYPE_CHECKING:
    from jaxllm.evaluate.likelihood.perplexity import Bucket, Estimate, Perplexity
    from jaxllm.lm import LM

EXAMPLE = """
Examples:

  jaxllm perplexity demo:llama --text @story.txt --window 128 --other-quantize int4

  jaxllm perplexity demo:llama --text @story.txt --by-position --picture losses.png
"""


def perplexity(
    eval_text: EvalTextOptions,
    loading: AdapterOptions,
    model: Model = "demo:llama",
    separate: bool = False,
    protocol: str = "strided",
    bos: str = "auto",
    limit: int | None = None,
    attention: Attention = None,
    compare: str | None = None,
    other_dtype: Annotated[str | None, typer.Option(callback=parse_dtype)] = None,
    other_quantize: str | None = None,
    journal: NewFile = None,
    by_position: bool = False,
    buckets: int | None = None,
    picture: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Score a text: perplexity, KL divergence.

    Prints the perplexity with its standard error, and the KL divergence of another model.

    The error is that of the mean negative log-likelihood, s / sqrt(n) over n tokens taken as
    independent, times the perplexity (to first order), as llama-perplexity's "+/-".

    Args:
        separate: Score each of --documents separately.
        protocol: Tokens to score: strided: those not in an earlier window (Hugging Face's guide);
            second-half: the second half of each window (llama-perplexity); rolling: all, the last
            window overlaps (lm-evaluation-harness).
        bos: Begin-of-text token: first (once, before a text), each (it also replaces every window's
            first token), none; auto: none if the tokenizer adds none, first for rolling, else each.
        limit: Maximum number of windows.
        compare: Other model, compared with MODEL as the reference [default: MODEL].
        other_dtype: Dtype of the other model [default: --dtype].
        other_quantize: Weight format of the other model.
        journal: File that stores the numbers of every batch; a second run resumes from it.
        by_position: Report the loss by position in the window, too.
        buckets: Number of equal buckets of --by-position [default: 1, 2-3, 4-7, ...].
        picture: PNG file to draw: the loss by position.
    """
    alone = compare is None and other_dtype is None and other_quantize is None
    if not by_position and (buckets is not None or picture is not None):
        raise ConfigError("--buckets and --picture require --by-position")
    if by_position and not alone:
        raise ConfigError(
            "--by-position measures one model: run it once for each, and leave out --compare and"
            " --other-*"
        )
    if journal is not None and multihost.is_multiprocess():
        raise ConfigError("--journal cannot be combined with --distributed: leave one out")
    corpus = eval_text.read(separate)
    with spinner("starting"):
        from jaxllm.evaluate.likelihood.data import PROTOCOLS
        from jaxllm.weights.precision import freeze_rules

    check_choice("--protocol", protocol, PROTOCOLS)
    check_choice("--bos", bos, BOS)
    if other_quantize is not None:
        freeze_rules(other_quantize)
    lm = loading.load(model, attention=attention)
    from jaxllm.evaluate.likelihood import perplexity as positions
    from jaxllm.evaluate.likelihood.divergence import check_pair, divergence
    from jaxllm.evaluate.likelihood.perplexity import Perplexity, measures_to_json, token_logprobs

    loader, facts = eval_text.make_loader(lm, corpus, protocol=protocol, bos=bos, limit=limit)
    dtype, quantize = loading.dtype, loading.quantize
    report: dict[str, Any] = {"model": model, "dtype": dtype, "quantize": quantize, **facts}
    rows = [("text", describe_text(facts))]
    if alone:
        edges = positions.bucket_edges(loader.width, buckets) if by_position else []
        logprob_N = token_logprobs(lm.model, lm.params, loader, journal=journal)
        result = Perplexity.from_logprobs(logprob_N)
        report |= measures_to_json(result)
        rows += _perplexity_lines(result)
        if by_position:
            losses = positions.bucket_losses(logprob_N, positions.token_positions(loader), edges)
            report["by_position"] = [_bucket_json(bucket) for bucket in losses]
            rows += [("position", "tokens   nats per token"), *map(_bucket_line, losses)]
            if picture is not None:
                title = f"{model}: loss by position"
                positions.plot(losses, result.nll.mean, picture, title)
                log(f"{picture} written")
    else:
        names = {"model": compare or model, "dtype": other_dtype or dtype}
        other = load_model(compare or model, names["dtype"], quantize=other_quantize)
        check_pair(lm.model, other.model)
        _check_tokenizers(lm, other, corpus)
        both = divergence(lm.model, lm.params, other.model, other.params, loader, journal=journal)
        report |= measures_to_json(both.reference)
        report["other"] = {**names, "quantize": other_quantize, **measures_to_json(both.other)}
        report["divergence"] = measures_to_json(both)
        quantiles = f"median {both.kl_median:.3g}, p99 {both.kl_p99:.3g}, max {both.kl_max:.3g}"
        kl, same = both.kl, both.same_top
        rows += [
            *_perplexity_lines(both.reference),
            ("perplexity, other", _format_estimate(both.other.perplexity)),
            ("perplexity ratio", _format_estimate(both.perplexity_ratio)),
            ("KL divergence", f"{kl.mean:.3g} +/- {kl.error:.2g} nats; {quantiles}"),
            ("same top-1", f"{same.mean:.2%} +/- {same.error:.2%}"),
            ("change of p", f"{_format_estimate(both.delta_p)}; RMS {both.delta_p_rms:.5f}"),
        ]
    write_json(report) if as_json else write_rows(rows)


def _bucket_json(bucket: "Bucket") -> dict[str, Any]:
    nll = bucket.nll
    return {
        "start": bucket.start,
        "stop": bucket.stop,
        "tokens": bucket.tokens,
        "nll_total": bucket.total,
        "nll": None if nll is None else nll.mean,
        "nll_error": None if nll is None else nll.error,
    }


def _bucket_line(bucket: "Bucket") -> tuple[str, str]:
    last = bucket.stop - 1
    name = str(last) if last == bucket.start else f"{bucket.start}-{last}"
    shown = "none" if bucket.nll is None else _format_estimate(bucket.nll)
    return f"  {name}", f"{bucket.tokens:<8,} {shown}"


def _check_tokenizers(lm: "LM", other: "LM", corpus: Corpus) -> None:
    """Raise TokenError if the other model encodes the text differently."""
    if lm.tokenizer is None or other.tokenizer is None or lm.path == other.path:
        return
    if encode_corpus(lm, corpus) != encode_corpus(other, corpus):
        raise TokenError(f"{lm.path} and {other.path} encode the text to different tokens")


def _perplexity_lines(result: "Perplexity") -> list[tuple[str, str]]:
    return [
        ("tokens scored", f"{result.tokens:,}"),
        ("negative log-likelihood", f"{_format_estimate(result.nll)} nats per token"),
        ("perplexity", _format_estimate(result.perplexity)),
    ]


def _format_estimate(estimate: "Estimate") -> str:
    return f"{estimate.mean:.5f} +/- {estimate.error:.5f}"
