"""The tables of docs/scale.md: plans of a 70B model on several clusters, and simulated fleets.

    python scripts/benchmarks/simulate_serving.py docs/scale.md

One decision: no model runs, so the numbers are the same on every machine. Times are bounds from
data sheets (`jaxllm.plan`), arrivals a seeded Poisson process.
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

SHAPE = {  # config.json of Llama 3 70B
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
CLUSTERS = (  # name, mesh, rows, device kind
    ("one machine with 8 GPUs", "tensor=8", 16, "h100"),
    ("the same, int4", "tensor=8", 16, "h100"),
    ("64 GPUs, a replica per machine", "data=8,tensor=8", 128, "h100"),
    ("64 GPUs, stages across machines", "stage=8,tensor=8", 128, "h100"),
    ("a pod of 256 TPU v5e", "data=8,tensor=32", 128, "tpu-v5e"),
)
LOAD = Workload(rate=12.0, count=2000, prompt=4096, answer=256, shared=3072, groups=12)


def make_query(mesh: str, rows: int, kind: str, quantize: str | None = None) -> PlanQuery:
    config, _ = read_config(SHAPE)
    precision = dataclasses.replace(Precision.uniform("bfloat16"), quantize=quantize)
    opened = Checkpoint(Path("llama-70b"), config, {}, {}, precision)
    axes: MeshSpec = fit_mesh(parse_mesh(mesh), config)
    return PlanQuery(opened, precision, HARDWARE[kind], axes, rows, CONTEXT)


def plan_clusters() -> Iterator[tuple[str, Plan]]:
    for name, mesh, rows, kind in CLUSTERS:
        yield name, plan(make_query(mesh, rows, kind, "int4" if "int4" in name else None))


@cache
def plan_replica(rows: int) -> Plan:
    """Plan a machine of 8 H100 that runs `rows` requests, halfway through their answers."""
    base = make_query("tensor=8", rows, "h100")
    return plan(dataclasses.replace(base, context=LOAD.prompt + LOAD.answer // 2))


def make_machine(prefixes: int) -> Machine:
    """Make a machine from its plan; keys and values move over the network between machines."""
    replica = plan_replica(1)
    token_time = replica.prompt_time / replica.query.context
    return Machine(
        prompt_time=lambda tokens: tokens * token_time,
        step_time=lambda n: plan_replica(n).token_time,
        rows=min(64, replica.max_batch),
        prefixes=prefixes,
        move_time=replica.cache_bytes / replica.query.hardware.across,
    )


FLEETS = (
    ("4 replicas", 0, Fleet(replicas=4)),
    ("cached prefixes (4 of 12 on each)", 4, Fleet(replicas=4)),
    ("cached prefixes, requests routed to them", 4, Fleet(replicas=4, route_by_prefix=True)),
    ("3 for prefill, 1 for decoding", 0, Fleet(replicas=1, prefill_replicas=3)),
    ("one of the 4 fails for a minute", 0, Fleet(replicas=4, failures=((60.0, 0, 60.0),))),
)


def simulate_fleets() -> Iterator[tuple[str, list[Request]]]:
    for name, prefixes, fleet in FLEETS:
        yield name, simulate(LOAD, make_machine(prefixes), fleet)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def make_tables() -> dict[str, str]:
    """Return the page's tables, by name."""
    clusters = [
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
        for name, p in plan_clusters()
    ]
    fleets = []
    for name, requests in simulate_fleets():
        first = np.array([r.first_token_time - r.arrival for r in requests])
        pace = np.array([(r.end_time - r.first_token_time) / (LOAD.answer - 1) for r in requests])
        computed = sum(r.prompt_computed for r in requests) / (LOAD.count * LOAD.prompt)
        fleets.append(
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
        "clusters": format_table(
            ["70B in bfloat16, 8,192 tokens per row", "mesh", "rows",
             "GB per device: weights + cache", "ms/token", "tokens/s", "communication",
             "idle in prompts", "max rows"],
            clusters,
        ),
        "fleets": format_table(
            ["fleet", "first token, s: median", "99 %", "then ms/token: median", "99 %",
             "prompt tokens run"],
            fleets,
        ),
    }  # fmt: skip


def replace_tables(text: str) -> str:
    """Return a page with each table after its marker line, replacing an older one."""
    for name, rows in make_tables().items():
        mark = f"<!-- table: {name}, by scripts/benchmarks/simulate_serving.py -->\n"
        before, _, after = text.partition(mark)
        rest = after.lstrip("\n")
        while rest.startswith("|"):
            rest = rest.partition("\n")[2]
        text = f"{before}{mark}\n{rows}{rest if rest.startswith(chr(10)) else chr(10) + rest}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "page", type=Path, nargs="?", help="page whose tables to replace (default: print them)"
    )
    page = parser.parse_args().page
    if page is None:
        print("\n".join(make_tables().values()), end="")
    else:
        page.write_text(replace_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
