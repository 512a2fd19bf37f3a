"""The table of docs/scale.md: plans of a 70B model on several clusters.

    python scripts/benchmarks/cluster_table.py docs/scale.md

One decision: no model runs, so the numbers are the same on every machine. Times are bounds from
data sheets (`jaxllm.research.plan`).
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxllm.checkpoints.native import Checkpoint
from jaxllm.convert.hf import read_config
from jaxllm.research.plan.estimate import Plan, PlanQuery, plan
from jaxllm.research.plan.hardware import HARDWARE
from jaxllm.sharding.mesh_spec import MeshSpec, parse_mesh
from jaxllm.sharding.partition_rules import resolve_mesh
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


def make_query(mesh: str, rows: int, kind: str, quantize: str | None = None) -> PlanQuery:
    config, _ = read_config(SHAPE)
    precision = dataclasses.replace(Precision.uniform("bfloat16"), quantize=quantize)
    opened = Checkpoint(Path("llama-70b"), config, {}, {}, precision)
    axes: MeshSpec = resolve_mesh(parse_mesh(mesh), config)
    return PlanQuery(opened, precision, HARDWARE[kind], axes, rows, CONTEXT)


def plan_clusters() -> Iterator[tuple[str, Plan]]:
    for name, mesh, rows, kind in CLUSTERS:
        yield name, plan(make_query(mesh, rows, kind, "int4" if "int4" in name else None))


def make_table() -> str:
    """Return the table of clusters."""
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
    head = ["70B in bfloat16, 8,192 tokens per row", "mesh", "rows",
            "GB per device: weights + cache", "ms/token", "tokens/s", "communication",
            "idle in prompts", "max rows"]  # fmt: skip
    lines = [head, ["---"] * len(head), *clusters]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_table(text: str) -> str:
    """Return a page with the table after its marker line, replacing an older one."""
    mark = "<!-- table: clusters, by scripts/benchmarks/cluster_table.py -->\n"
    before, _, after = text.partition(mark)
    rest = after.lstrip("\n")
    while rest.startswith("|"):
        rest = rest.partition("\n")[2]
    return f"{before}{mark}\n{make_table()}\n{rest.lstrip(chr(10))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "page", type=Path, nargs="?", help="page whose table to replace (default: print it)"
    )
    page = parser.parse_args().page
    if page is None:
        print(make_table(), end="")
    else:
        page.write_text(replace_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
