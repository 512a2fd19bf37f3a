"""A plan as text, or as values for JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxllm.research.plan import memory
from jaxllm.research.plan.collective import Collective
from jaxllm.research.plan.estimate import Plan


def format_plan(plan: Plan) -> str:
    """Format a plan as text."""
    asked, h = plan.query, plan.query.hardware
    lines = [
        f"{asked.checkpoint.directory.name} on {asked.axes}, {asked.batch} rows of {asked.context}"
        " tokens",
        "",
        "bytes on each device",
        f"  weights    {_format_bytes(plan.weights.total):>10}   a step reads"
        f" {_format_bytes(plan.weights.read_per_step)}",
        f"  cache      {_format_bytes(plan.cache_bytes):>10}",
        f"  working    {_format_bytes(plan.working_bytes):>10}   estimated, within a factor of"
        f" {memory.ERROR_FACTOR:g} of compiled steps",
        f"  total      {_format_bytes(plan.total_bytes):>10}   of {_format_bytes(h.memory)}:"
        f" {'fits' if plan.fits else 'DOES NOT FIT'}",
        "",
        "communication of a decoding step, on each device",
        *_format_collectives(plan.decode),
        "communication of a prompt chunk",
        *_format_collectives(plan.prefill),
    ]
    if plan.stages > 1:
        lines += [
            "",
            f"pipeline of {plan.stages} stages, {asked.prompt_groups} microbatches of a prompt:"
            f" idle in {plan.idle_fraction:.1%} of all ticks, {plan.bubble_overhead:.1%} of the"
            " ideal time",
        ]
    lines += [
        "",
        "bounds from the devices' peak rates",
        f"  token      {_format_seconds(plan.token_time):>10}   reading"
        f" {_format_seconds(plan.read_time)}, arithmetic"
        f" {_format_seconds(plan.compute_time)}, communication"
        f" {_format_seconds(plan.traffic_time)}",
        f"  all rows   {plan.tokens_per_second:>10,.0f}   tokens per second",
        f"  prompt     {_format_seconds(plan.prompt_time):>10}   of {asked.context} tokens in"
        " each row",
        f"  largest    {plan.max_batch:>10,}   rows of {asked.context} tokens;"
        f" or {plan.max_context:,} tokens in {asked.batch} rows",
    ]
    return "\n".join(lines) + "\n"


def format_ranking(plans: Sequence[Plan], count: int = 8) -> str:
    """Format several plans of one model, a line each."""
    rows = [("mesh", "bytes/device", "token", "tokens/s", "communication", "prompt", "max rows")]
    rows += [
        (
            f"{plan.query.axes}{'' if plan.fits else ' (does not fit)'}",
            _format_bytes(plan.total_bytes),
            _format_seconds(plan.token_time),
            f"{plan.tokens_per_second:,.0f}",
            _format_bytes(sum(c.bytes_sent for c in plan.decode)),
            _format_seconds(plan.prompt_time),
            f"{plan.max_batch:,}",
        )
        for plan in plans[:count]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        + "\n"
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {
        "mesh": str(plan.query.axes),
        "batch": plan.query.batch,
        "context": plan.query.context,
        "hardware": dataclasses.asdict(plan.query.hardware),
        "weights_bytes": plan.weights.total,
        "cache_bytes": plan.cache_bytes,
        "working_bytes": plan.working_bytes,
        "total_bytes": plan.total_bytes,
        "fits": plan.fits,
        "decode": [{**dataclasses.asdict(c), "sent": round(c.bytes_sent)} for c in plan.decode],
        "prefill": [{**dataclasses.asdict(c), "sent": round(c.bytes_sent)} for c in plan.prefill],
        "idle": plan.idle_fraction,
        "overhead": plan.bubble_overhead,
        "token_seconds": plan.token_time,
        "tokens_per_second": plan.tokens_per_second,
        "prompt_seconds": plan.prompt_time,
        "largest_batch": plan.max_batch,
        "largest_context": plan.max_context,
    }


def _format_collectives(collectives: Sequence[Collective]) -> list[str]:
    if not collectives:
        return ["  none"]
    return [
        f"  {c.count:>4} x {c.kind:<18} over {c.axis}={c.over:<3} of {_format_bytes(c.bytes):>9}:"
        f" sends {_format_bytes(c.bytes_sent):>9}   {c.what}"
        for c in collectives
    ]


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _format_seconds(seconds: float) -> str:
    for unit, times in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * times >= 1:
            return f"{seconds * times:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
