"""What devices send each other in a step: its collectives, by kind, axis, number and bytes.

Counted as the compiled programs have them (`mesh.counts`), which the tests compare: sums and
gathered logits are float32, as products are. Rings: of n bytes an all-reduce over t devices sends
2 n (t - 1) / t from each, gathering or scattering n bytes n (t - 1) / t (Patarasuk and Yuan 2009).
"""

import dataclasses
from typing import Literal

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.mesh.axes import Axes
from jaxllm.models import family
from jaxllm.models.experts import MixtureConfig
from jaxllm.weights.formats import parse
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.precision import Precision

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One that a step runs `count` times. over: how many devices; bytes: of its result on each."""

    what: str
    kind: Kind
    axis: str
    over: int
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends for all of them."""
        share = (self.over - 1) / self.over
        times = {
            "all-reduce": 2 * share,
            "all-gather": share,
            "reduce-scatter": self.over * share,  # its result is a share
            "all-to-all": share,
            "collective-permute": 1.0,
        }
        return self.count * self.bytes * times[self.kind]


def step(
    config: ModelConfig,
    precision: Precision,
    axes: Axes,
    rows: int,
    tokens: int,
    *,
    exact: bool = False,
    groups: int = 1,
) -> list[Collective]:
    """The collectives of running so many tokens of so many rows, the logits of one each.

    groups: microbatches that a pipeline runs.
    """
    rows = -(-rows // axes.data)
    each = rows * tokens  # tokens of a device's rows
    width = np.dtype(precision.activations).itemsize
    tensor, D = axes.tensor * axes.copies, config.hidden_size
    layers = config.num_hidden_layers // axes.stage
    found: list[Collective] = []
    if tensor > 1:
        table = parse(precision.format_at(f"{family(config.model_type).tokens}.weight", 2)).exact_in
        rows_of = each * D * np.dtype(DTYPES[table]).itemsize
        found.append(Collective("embeddings", "all-reduce", "tensor", tensor, 1, rows_of))
        logits = rows * -(-config.vocab_size // tensor) * tensor * 4
        found.append(Collective("logits", "all-gather", "tensor", tensor, 1, logits))
        inputs = (
            ("attention", config.num_attention_heads * config.head_dim),
            ("MLP", config.intermediate_size),
        )
        for what, features in inputs:
            if not exact:
                sums = Collective(what, "all-reduce", "tensor", tensor, layers, each * D * 4)
                found.append(sums)
                continue
            given = each * features * width
            found.append(
                Collective(f"{what}: inputs", "all-gather", "tensor", tensor, layers, given)
            )
            found.append(
                Collective(f"{what}: outputs", "all-gather", "tensor", tensor, layers, each * D * 4)
            )
    if axes.stage > 1:
        ticks = groups + axes.stage - 1
        block = -(-rows // groups) * tokens * D * width
        found.append(Collective("stages", "collective-permute", "stage", axes.stage, ticks, block))
    if axes.sequence > 1:
        keys = 2 * each // axes.sequence * config.num_key_value_heads // axes.tensor
        block = keys * config.head_dim * width
        hops = layers * (axes.sequence - 1)
        found.append(
            Collective("ring", "collective-permute", "sequence", axes.sequence, hops, block)
        )
    if axes.expert > 1 and isinstance(config, MixtureConfig):
        routed = each * config.num_experts_per_tok * D * width
        found.append(Collective("experts", "all-to-all", "expert", axes.expert, 2 * layers, routed))
    return found


def gradients(held: int, axes: Axes) -> Collective | None:
    """The sum of gradients over rows' devices; held: a device's bytes of them."""
    if axes.data == 1:
        return None
    return Collective("gradients", "all-reduce", "data", axes.data, 1, held)
