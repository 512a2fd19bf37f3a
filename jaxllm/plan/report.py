"""A plan as text, or as values for JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxllm.plan import sizes
from jaxllm.plan.collective import Collective
from jaxllm.plan.estimate import Plan


def text(plan: Plan) -> str:
    """Format a plan as text."""
    asked, h = plan.asked, plan.asked.hardware
    lines = [
        f"{asked.opened.directory.name} on {asked.axes}, {asked.batch} rows of {asked.context}"
        " tokens",
        "",
        "bytes on each device",
        f"  weights    {_size(plan.weights.held):>10}   a step reads {_size(plan.weights.read)}",
        f"  cache      {_size(plan.cache):>10}",
        f"  working    {_size(plan.working):>10}   estimated, within a factor of"
        f" {sizes.WITHIN:g} of compiled steps",
        f"  total      {_size(plan.total):>10}   of {_size(h.memory)}:"
        f" {'fits' if plan.fits else 'DOES NOT FIT'}",
        "",
        "communication of a decoding step, on each device",
        *_collectives(plan.decode),
        "communication of a prompt chunk",
        *_collectives(plan.prefill),
    ]
    if plan.stages > 1:
        lines += [
            "",
            f"pipeline of {plan.stages} stages, {asked.prompt_groups} microbatches of a prompt:"
            f" idle in {plan.idle:.1%} of all ticks, {plan.overhead:.1%} of the ideal time",
        ]
    lines += [
        "",
        "bounds from the devices' peak rates",
        f"  token      {_time(plan.token_time):>10}   reading {_time(plan.read_time)}, arithmetic"
        f" {_time(plan.compute_time)}, communication {_time(plan.traffic_time)}",
        f"  all rows   {plan.tokens_per_second:>10,.0f}   tokens per second",
        f"  prompt     {_time(plan.prompt_time):>10}   of {asked.context} tokens in each row",
        f"  largest    {plan.most_batch:>10,}   rows of {asked.context} tokens;"
        f" or {plan.most_context:,} tokens in {asked.batch} rows",
    ]
    return "\n".join(lines) + "\n"


def ranking(plans: Sequence[Plan], count: int = 8) -> str:
    """Format several plans of one model, a line each."""
    rows = [("mesh", "bytes/device", "token", "tokens/s", "communication", "prompt", "max rows")]
    rows += [
        (
            f"{plan.asked.axes}{'' if plan.fits else ' (does not fit)'}",
            _size(plan.total),
            _time(plan.token_time),
            f"{plan.tokens_per_second:,.0f}",
            _size(sum(c.sent for c in plan.decode)),
            _time(plan.prompt_time),
            f"{plan.most_batch:,}",
        )
        for plan in plans[:count]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        + "\n"
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def values(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {
        "mesh": str(plan.asked.axes),
        "batch": plan.asked.batch,
        "context": plan.asked.context,
        "hardware": dataclasses.asdict(plan.asked.hardware),
        "weights_bytes": plan.weights.held,
        "cache_bytes": plan.cache,
        "working_bytes": plan.working,
        "total_bytes": plan.total,
        "fits": plan.fits,
        "decode": [{**dataclasses.asdict(c), "sent": round(c.sent)} for c in plan.decode],
        "prefill": [{**dataclasses.asdict(c), "sent": round(c.sent)} for c in plan.prefill],
        "idle": plan.idle,
        "overhead": plan.overhead,
        "token_seconds": plan.token_time,
        "tokens_per_second": plan.tokens_per_second,
        "prompt_seconds": plan.prompt_time,
        "largest_batch": plan.most_batch,
        "largest_context": plan.most_context,
    }


def _collectives(found: Sequence[Collective]) -> list[str]:
    if not found:
        return ["  none"]
    return [
        f"  {c.count:>4} x {c.kind:<18} over {c.axis}={c.over:<3} of {_size(c.bytes):>9}:"
        f" sends {_size(c.sent):>9}   {c.what}"
        for c in found
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _time(seconds: float) -> str:
    for unit, times in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * times >= 1:
            return f"{seconds * times:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
