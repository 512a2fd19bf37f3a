"""`jaxllm recall`: needle-in-a-haystack test by depth, length and cache policy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import log, write
from jaxllm.cli.option_groups import AdapterOptions, with_options
from jaxllm.cli.options import (
    AsJson,
    CacheDtype,
    Model,
    SelfExtend,
    check_writable,
    parse_self_extend,
)
from jaxllm.errors import ConfigError, TokenError

EXAMPLE = (
    "Example: jaxllm recall demo:llama --lengths 96,192,384"
    " --policies full,heavy,pooled,self-extend --slots 96 --picture recall.png"
)


@with_options
def recall(
    model: Model = "demo:llama",
    lengths: Annotated[
        str, typer.Option(help="Text lengths in tokens, question included, comma-separated.")
    ] = "96,192,384",
    depths: Annotated[
        str, typer.Option(help="Depths of the fact, from 0 (start) to 1 (end), comma-separated.")
    ] = "0,0.25,0.5,0.75,1",
    policies: Annotated[
        str,
        typer.Option(
            help="Cache policies, comma-separated: full (a slot for every token), slide (restart"
            " from the recent half), window, sinks (the first tokens and a window), heavy (the most"
            " attended tokens), pooled, pooled-by-use (four older tokens per slot), self-extend"
            " (full, with grouped positions), segments (Infini-attention: drops finished segments)."
        ),
    ] = "full",
    slots: Annotated[
        int | None,
        typer.Option(
            help="Cache slots of all policies but full [default: half the shortest length]."
        ),
    ] = None,
    tries: Annotated[int, typer.Option(help="Number of texts per length and depth.")] = 8,
    texts: Annotated[
        str,
        typer.Option(
            help="Haystack: passkey (a number in filler text), story (a name in a story in the demo"
            " models' grammar), meetings (one of several names, for models of"
            " scripts/demo_models/train_long.py), auto (story for the demo models, else passkey)."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Random seed of the texts.")] = 0,
    cache_dtype: CacheDtype = None,
    self_extend: SelfExtend = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write: all numbers.")] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG file to draw: heat maps.")] = None,
    as_json: AsJson = False,
    *,
    loading: AdapterOptions,
) -> None:
    """Hide a fact in texts and ask for it at the end.

    Reports recall by depth, length and cache policy.

    Prints two percentages of texts, right / greedy: the right answer is the most likely of the
    choices / is what greedy decoding generates.
    """
    from jaxllm.files import finite_json

    check_writable("--out", out)
    check_writable("--picture", picture)
    chosen = [name.strip() for name in policies.split(",") if name.strip()]
    if self_extend is not None and "self-extend" not in chosen:
        raise ConfigError("--self-extend requires --policies self-extend")
    asked_lengths = _parse_numbers("--lengths", lengths, int)
    asked_depths = _parse_numbers("--depths", depths, float)
    if picture is not None:
        from jaxllm.files.plots import check_plot

        check_plot("--picture")
    lm = loading.load(model, cache_dtype=cache_dtype)
    from jaxllm.evaluate.needle import grid, report

    if lm.tokenizer is None:
        raise TokenError(f"{lm.path} has no tokenizer, which recall requires. Add its files there")
    if texts == "auto":
        texts = "story" if model.startswith("demo:") else "passkey"
    extended = None
    if grid.SELF_EXTEND in chosen:
        numbers = grid.default_extension(lm.config, max(asked_lengths))
        if self_extend is not None:
            numbers = dict(zip(numbers, parse_self_extend(self_extend), strict=True))
        extended = lm.with_self_extend(**numbers).model
    slots = max(16, min(asked_lengths) // 2) if slots is None else slots
    cells = grid.recall(
        lm.model,
        lm.params,
        lm.encode,
        style=texts,
        lengths=asked_lengths,
        depths=asked_depths,
        policies=chosen,
        slots=slots,
        tries=tries,
        seed=seed,
        extended_model=extended,
    )
    facts: dict[str, Any] = {"model": model, "texts": texts, "slots": slots, "seed": seed}
    told = json.dumps(finite_json({**facts, "cells": report.to_records(cells)}))
    if out is not None:
        from jaxllm.files import atomic_file

        with atomic_file(out, "w") as file:
            file.write(told + "\n")
        log(f"{out} written")
    if picture is not None:
        maps = report.group_by_policy(cells)
        report.plot(maps, picture, f"{model}: {texts} recalled, {slots} slots (except full)")
        log(f"{picture} written")
    if as_json:
        write(told + "\n")
        return
    log(
        f"{texts}: % of {tries} texts whose right answer is the most likely of {cells[0].choices}"
        f" (chance: {100 / cells[0].choices:.0f}%) / generated by greedy decoding; {slots} cache"
        " slots (except full)"
    )
    for line in report.table(cells):
        write(line + "\n")


def _parse_numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Parse comma-separated numbers, without duplicates."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{option} must be comma-separated numbers: got {text!r:.60}")
    return list(dict.fromkeys(found))
