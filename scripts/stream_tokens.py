"""A long stream of tokens read by a model with a memory: resident bytes and time of each segment.

    python scripts/stream_tokens.py --tokens 1000000 --segment 128 --plot stream.png

The model is a dense one given a memory, or one that has it. Its cache has two segments of slots,
however long the stream: what is resident, and what a segment takes, should be flat lines. Tokens
are those of a text, again and again, or random ones: it makes no difference to either.
"""

import json
import resource
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import jaxllm
from jaxllm import process
from jaxllm.cli import run_command
from jaxllm.cli.options import check_writable, load_model
from jaxllm.compress.picture import check_plot
from jaxllm.decode.loops.endless import read_through
from jaxllm.files import writing
from jaxllm.progress import noted_bar
from jaxllm.train.infini import as_update, with_memory

EXAMPLE = "Example: python scripts/stream_tokens.py --tokens 100000 --segment 128 --plot s.png"
WARM = 2  # segments in which programs are compiled


def stream_tokens(
    model: Annotated[str, typer.Option(help="As --model of generate.")] = "demo:llama",
    tokens: Annotated[int, typer.Option(min=1, help="How many are read.")] = 1_000_000,
    segment: Annotated[int, typer.Option(min=1, help="Tokens of a segment, where it has none.")] = (
        128
    ),
    update: Annotated[str, typer.Option(help="Its rule, where it has none.")] = "linear",
    text: Annotated[Path | None, typer.Option(help="What is read; by default random tokens.")] = (
        None
    ),
    rows: Annotated[int, typer.Option(min=1, help="Of the table that is printed.")] = 10,
    plot: Annotated[Path | None, typer.Option(help="Draw both lines, as a PNG file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write each segment's numbers, JSON.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of random tokens.")] = 0,
) -> None:
    """Read a stream of tokens in a cache of two segments, and say what that takes."""
    for option, path in (("--plot", plot), ("--report", report)):
        check_writable(option, path)
    if plot is not None:
        check_plot()
    lm = load_model(model, "float32")
    if lm.config.segment_length is None:
        lm = with_memory(lm, segment, update=as_update(update))
    ids_T = _ids(lm, tokens, text, seed)
    read, found = measured(lm, ids_T)
    write_out(read, found, rows, plot, report, lm)


def resident() -> int:
    """Bytes of this process in memory; where the system does not say, the most there were."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measured(lm: Any, ids_T: np.ndarray) -> tuple[np.ndarray, dict[str, list[float]]]:
    """How many tokens were read after each segment, and the seconds and bytes of each."""
    length = lm.config.segment_length
    cache = jaxllm.init_cache(lm.model, 1, 2 * length)
    segments = -(-len(ids_T) // length)
    read, found = list[int](), {"seconds": list[float](), "resident": list[float]()}
    with noted_bar("streaming", segments) as say:
        before = time.perf_counter()

        def each(count: int, cache: Any) -> None:
            nonlocal before
            cache.cursor.block_until_ready()
            now = time.perf_counter()
            read.append(count)
            found["seconds"].append(now - before)
            found["resident"].append(resident())
            say(len(read), f"{count:,} tokens, {found['resident'][-1] / 1e6:,.0f} MB")
            before = time.perf_counter()

        logits_BV, cache = read_through(lm.model, lm.params, cache, ids_T[None], each=each)
    if not np.isfinite(logits_BV).all():
        raise jaxllm.errors.NonFiniteError("the stream ended in logits that are no numbers")
    return np.array(read), found


def write_out(
    read_S: np.ndarray,
    found: dict[str, list[float]],
    rows: int,
    plot: Path | None,
    report: Path | None,
    lm: Any,
) -> None:
    """The table, and the files that were asked for."""
    length = lm.config.segment_length
    rule = lm.config.attention.update or "linear"
    title = f"{rule} memory, segments of {length}, {read_S[-1]:,} tokens"
    table = Table("tokens read", "ms a segment (median)", "resident MB", title=title)
    shares = np.array_split(np.arange(min(WARM, len(read_S) - 1), len(read_S)), rows)
    for share in (share for share in shares if share.size):
        last = share[-1]
        middle = statistics.median(found["seconds"][i] for i in share)
        table.add_row(
            f"{read_S[last]:,}", f"{1e3 * middle:.2f}", f"{found['resident'][last] / 1e6:,.1f}"
        )
    Console().print(table)
    if report is not None:
        with writing(report, "w") as file:
            json.dump({"title": title, "tokens": read_S.tolist(), **found}, file)
    if plot is not None:
        _draw(read_S[WARM:], {name: x[WARM:] for name, x in found.items()}, plot, title)


def _draw(read_S: np.ndarray, found: dict[str, list[float]], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    lines = (("resident", 1e-6, "resident MB"), ("seconds", 1e3, "ms a segment"))
    for axes, (name, scale, label) in zip(figure.subplots(2, 1, sharex=True), lines, strict=True):
        axes.plot(read_S, scale * np.asarray(found[name]), linewidth=0.7)
        axes.set_ylim(0, 1.2 * scale * max(found[name]))
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    axes.set_xlabel("tokens read")
    figure.suptitle(title)
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=150)


def _ids(lm: Any, count: int, text: Path | None, seed: int) -> np.ndarray:
    if text is None:
        drawn = np.random.default_rng(seed).integers(0, lm.config.vocab_size, count)
        return drawn.astype(np.int32)
    ids = np.asarray(lm.tokenizer.encode(text.read_text(encoding="utf-8")), np.int32)
    return np.resize(ids, count)


if __name__ == "__main__":
    process.begin()
    run_command(stream_tokens, "python scripts/stream_tokens.py", EXAMPLE)
