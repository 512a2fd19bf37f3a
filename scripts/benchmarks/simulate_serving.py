"""The tables of docs/scale.md: plans of a 70B model from one device to many, and fleets simulated.

    python scripts/benchmarks/simulate_serving.py docs/scale.md

Nothing is run but arithmetic: times are bounds from data sheets (`jaxllm.plan`), arrivals a Poisson
process with a seed. The same numbers on every machine.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from jaxllm.checkpoints.native import Checkpoint
from jaxllm.convert.hf import read_config
from jaxllm.plan.estimate import Plan, PlanQuery, plan
from jaxllm.plan.hardware import HARDWARE
from jaxllm.plan.simulate import Fleet, Machine, Request, Workload, simulate
from jaxllm.sharding.mesh_spec import MeshSpec, parse_mesh
from jaxllm.sharding.partition_rules import fit_mesh
from jaxllm.weights.precision import Precision

SHAPE = {  # of Llama 3 70B, as its config.json says it
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CONTEXT = 8192
PLACES = (  # what it is, its mesh, rows, devices of what kind
    ("one machine with 8 GPUs", "tensor=8", 16, "h100"),
    ("the same, int4", "tensor=8", 16, "h100"),
    ("64 GPUs, a copy a machine", "data=8,tensor=8", 128, "h100"),
    ("64 GPUs, stages across machines", "stage=8,tensor=8", 128, "h100"),
    ("a pod of 256 TPU v5e", "data=8,tensor=32", 128, "tpu-v5e"),
)
LOAD = Workload(rate=12.0, count=2000, prompt=4096, answer=256, shared=3072, groups=12)


def asked(mesh: str, rows: int, kind: str, quantize: str | None = None) -> PlanQuery:
    config, _ = read_config(SHAPE)
    precision = dataclasses.replace(Precision.uniform("bfloat16"), quantize=quantize)
    opened = Checkpoint(Path("llama-70b"), config, {}, {}, precision)
    axes: MeshSpec = fit_mesh(parse_mesh(mesh), config)
    return PlanQuery(opened, precision, HARDWARE[kind], axes, rows, CONTEXT)


def plans() -> Iterator[tuple[str, Plan]]:
    for name, mesh, rows, kind in PLACES:
        yield name, plan(asked(mesh, rows, kind, "int4" if "int4" in name else None))


@cache
def replica(rows: int) -> Plan:
    """A machine of 8 H100 that so many rows are running on, halfway through their answers."""
    base = asked("tensor=8", rows, "h100")
    return plan(dataclasses.replace(base, context=LOAD.prompt + LOAD.answer // 2))


def machine(prefixes: int) -> Machine:
    """That of a plan. Keys and values move between machines over the network between them."""
    whole = replica(1)
    prompt = whole.prompt_time / whole.query.context
    moved = whole.cache_bytes / whole.query.hardware.across
    rows = min(64, replica(1).max_batch)
    return Machine(
        prompt_time=lambda tokens: tokens * prompt,
        step_time=lambda n: replica(n).token_time,
        rows=rows,
        prefixes=prefixes,
        move_time=moved,
    )


FLEETS = (
    ("4 replicas", 0, Fleet(replicas=4)),
    ("prefixes kept (4 of 12 on each)", 4, Fleet(replicas=4)),
    ("and requests go where theirs is", 4, Fleet(replicas=4, route_by_prefix=True)),
    ("3 for prompts, 1 for answers", 0, Fleet(replicas=1, prefill_replicas=3)),
    ("one of the 4 fails for a minute", 0, Fleet(replicas=4, failures=((60.0, 0, 60.0),))),
)


def fleets() -> Iterator[tuple[str, list[Request]]]:
    for name, prefixes, fleet in FLEETS:
        yield name, simulate(LOAD, machine(prefixes), fleet)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables() -> dict[str, str]:
    """The page's tables, by name."""
    places = [
        [
            name,
            str(p.query.axes),
            str(p.query.batch),
            f"{p.weights.total / 1e9:.1f} + {p.cache_bytes / 1e9:.1f}",
            f"{p.token_time * 1e3:.1f}",
            f"{p.tokens_per_second:,.0f}",
            f"{p.traffic_time / p.token_time:.0%}",
            f"{p.idle_fraction:.0%}",
            f"{p.max_batch:,}",
        ]
        for name, p in plans()
    ]
    served = []
    for name, requests in fleets():
        first = np.array([r.first_token_time - r.arrival for r in requests])
        pace = np.array([(r.end_time - r.first_token_time) / (LOAD.answer - 1) for r in requests])
        computed = sum(r.prompt_computed for r in requests) / (LOAD.count * LOAD.prompt)
        served.append(
            [
                name,
                f"{np.median(first):.2f}",
                f"{np.quantile(first, 0.99):.2f}",
                f"{np.median(pace) * 1e3:.0f}",
                f"{np.quantile(pace, 0.99) * 1e3:.0f}",
                f"{computed:.0%}",
            ]
        )
    return {
        "places": table(
            ["70B in bfloat16, 8,192 tokens a row", "mesh", "rows", "GB a device: weights + cache",
             "ms a token", "tokens/s", "of it communication", "idle in prompts", "most rows"],
            places,
        ),
        "fleets": table(
            ["fleet", "first token, s: median", "99 %", "then ms a token: median", "99 %",
             "prompt tokens run"],
            served,
        ),
    }  # fmt: skip


def filled(text: str) -> str:
    """A page with each table after the line that names it, in place of one that is there."""
    for name, rows in tables().items():
        mark = f"<!-- table: {name}, by scripts/benchmarks/simulate_serving.py -->\n"
        before, _, after = text.partition(mark)
        rest = after.lstrip("\n")
        while rest.startswith("|"):
            rest = rest.partition("\n")[2]
        text = f"{before}{mark}\n{rows}{rest if rest.startswith(chr(10)) else chr(10) + rest}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path, nargs="?", help="the page whose tables are made again")
    page = parser.parse_args().page
    if page is None:
        print("\n".join(tables().values()), end="")
    else:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
