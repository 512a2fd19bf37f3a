"""`jaxllm sensitivity`: which parts of a model lose most from lower precision."""

from jaxllm.cli.console import log, spinner, write, write_json
from jaxllm.cli.eval_data import describe_text
from jaxllm.cli.option_groups import EvalTextOptions
from jaxllm.cli.options import AsJson, Dtype, Exact, Mesh, Model, Plot, check_choice, load_model

EXAMPLE = "Example: jaxllm sensitivity demo:llama --text @story.txt --format int4 --by kind"


def sensitivity(
    eval_text: EvalTextOptions,
    model: Model = "demo:llama",
    format: str = "int4",
    by: str = "layer",
    limit: int = 8,
    dtype: Dtype = None,
    mesh: Mesh = None,
    exact: Exact = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Rank groups of matrices by the cost of lower precision.

    Lowers one group at a time.

    The cost is the mean KL divergence from the unchanged model, with its standard error. A group's
    regex, as --json prints it, is a rule for `jaxllm.quantize`.

    Args:
        format: Format to lower to: int8, int4, int4-g32, bfloat16, ...
        by: Groups: by layer, kind (q_proj of all layers, ...) or module (each matrix).
        limit: Maximum number of windows.
        plot: PNG file to draw: the ranking.
    """
    corpus = eval_text.read()
    with spinner("starting"):
        from jaxllm.evaluate.likelihood.sensitivity import GROUPINGS
        from jaxllm.weights.formats import parse_format
    check_choice("--by", by, GROUPINGS)
    parse_format(format)
    lm = load_model(model, dtype, mesh=mesh, exact=exact)
    from jaxllm.evaluate.likelihood.perplexity import measures_to_json
    from jaxllm.evaluate.likelihood.sensitivity import measure_sensitivity, plot as draw

    loader, facts = eval_text.make_loader(lm, corpus, limit=limit)
    rows = measure_sensitivity(lm.model, lm.params, loader, format, group_by=by)
    if plot is not None:
        draw(rows, plot, f"{model}: {format}, one {by} at a time")
        log(f"{plot} written")
    if as_json:
        report = {"model": model, "format": format, "by": by, "tokens": loader.tokens, **facts}
        named = ("group", "regex", "bytes_before", "bytes_after")
        groups = [
            {name: getattr(row, name) for name in named} | measures_to_json(row.divergence)
            for row in rows
        ]
        return write_json({**report, "groups": groups})
    log(f"{describe_text(facts)}; {loader.tokens:,} tokens scored")
    width = max(len("group"), *(len(row.group) for row in rows))
    write(
        f"{'group':{width}}  {'mean KL':>9} {'+/-':>8} {'p99':>8}  same top-1  ppl ratio    saves\n"
    )
    for row in rows:
        d, saved = row.divergence, row.bytes_before - row.bytes_after
        write(
            f"{row.group:{width}}  {d.kl.mean:9.3g} {d.kl.error:8.2g} {d.kl_p99:8.3g}"
            f"  {d.same_top.mean:10.2%}  {d.perplexity_ratio.mean:9.5f}  {saved / 1e6:7.2f} MB\n"
        )
