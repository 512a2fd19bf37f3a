"""Bytes that a training step needs on a device, by whether logits are gathered: nothing is run.

    python scripts/logits_memory.py --meshes tensor=2 tensor=4 data=2,tensor=4

Divided: as training has it, each device with the logits of its part of the vocabulary. Gathered:
the same step of an objective that asks for whole ones. Temporary is what XLA says that the compiled
program takes beside what it is given; sent, its all-gathers and reduce-scatters, a device's results
together. The model is a small Llama with a vocabulary of real size. Each mesh has a process of its
own, in which one processor passes for its devices.
"""

import argparse

from passing_for import said

from jaxllm.progress import steps_bar

CHILD = """
import dataclasses, json, sys
import jax, numpy as np
from jaxllm.config import Rope
from jaxllm.mesh import meshed
from jaxllm.mesh.axes import parse
from jaxllm.mesh.counts import counts
from jaxllm.models.llama import LlamaConfig
from jaxllm.train.data.rows import Rows
from jaxllm.train.distill.student import fresh
from jaxllm.train.losses import cross_entropy
from jaxllm.train.objective import Measured, NextToken, run
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.step import Setup, start, train_step
from jaxllm.train.trained import ALL, split
from jaxllm.weights.precision import Precision

@dataclasses.dataclass(frozen=True)
class Gathered:
    def __call__(self, model, params, given, rows, key):
        return Measured(*cross_entropy(run(model, params, rows, whole=True).logits, rows.label_BT))

mesh, vocabulary, rows, length = sys.argv[1], *map(int, sys.argv[2:])
config = LlamaConfig(
    vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=8, head_dim=8, hidden_act="silu",
    max_position_embeddings=length, norm_eps=1e-5, tie_word_embeddings=False,
    rope=Rope(rope_type="default", rope_theta=10000.0),
)
model = meshed(config, Precision(), parse(mesh))
trained, rest = split(model.shared(fresh(config, 0)), ALL, None, model.names)
ids = np.ones((1, rows, length), np.int32)
place = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
given, found = Rows(ids, ids, place, np.zeros_like(ids)), []
for objective in (Gathered(), NextToken()):
    setup = Setup(model, objective, Optimizer(steps=3))
    args = start(trained, setup), rest, None, given, jax.random.key(0)
    compiled = train_step.lower(*args, setup=setup).compile()
    said = counts(compiled.as_text())
    sent = sum(said[kind].bytes for kind in ("all-gather", "reduce-scatter") if kind in said)
    found += [compiled.memory_analysis().temp_size_in_bytes, sent]
print(json.dumps(found))
"""


def measured(mesh: str, vocabulary: int, rows: int, length: int) -> list[int]:
    """Of a device, bytes that are temporary and that are gathered and scattered, with whole logits
    and then with divided ones.
    """
    return said(CHILD, mesh, mesh, vocabulary, rows, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--meshes", nargs="+", default=["tensor=2", "tensor=4", "data=2,tensor=4"])
    parser.add_argument("--vocabulary", type=int, default=32000, help="tokens (32000)")
    parser.add_argument("--rows", type=int, default=8, help="of a batch (8)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (128)")
    asked = parser.parse_args()
    print("| mesh | temporary, MB: gathered | divided | sent, MB: gathered | divided |")
    print("|---|---|---|---|---|")
    with steps_bar("compiling", len(asked.meshes)) as advance:
        for mesh in asked.meshes:
            found = measured(mesh, asked.vocabulary, asked.rows, asked.length)
            whole, sent, part, part_sent = (f"{x / 1e6:.1f}" for x in found)
            print(f"| {mesh} | {whole} | {part} | {sent} | {part_sent} |", flush=True)
            advance()


if __name__ == "__main__":
    main()
