"""What devices send each other in a step: its collectives, by kind, axis, number and bytes.

Counted as the compiled programs have them (`mesh.counts`), which the tests compare: sums and
gathered logits are float32, as products are. Rings: of n bytes an all-reduce over t devices sends
2 n (t - 1) / t from each, gathering or scattering n bytes n (t - 1) / t (Patarasuk and Yuan 2009).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.rules import share_of
from jaxllm.models import family
from jaxllm.models.experts import MixtureConfig
from jaxllm.weights.formats import parse
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.precision import Precision

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One that a program has `count` times. axis: the outermost that it is over, with all within it
    that share its work; over: how many devices; bytes: of its result on each. times: how often a
    loop runs it.
    """

    what: str
    kind: Kind
    axis: str
    over: int
    count: int
    bytes: int
    times: int = 1

    @property
    def calls(self) -> int:
        """How many of them a step waits for."""
        return self.count * self.times

    @property
    def sent(self) -> float:
        """Bytes that a device sends for all of them."""
        share = (self.over - 1) / self.over
        parts = {
            "all-reduce": 2 * share,
            "all-gather": share,
            "reduce-scatter": self.over * share,  # its result is a share
            "all-to-all": share,
            "collective-permute": 1.0,
        }
        return self.calls * self.bytes * parts[self.kind]


def rows_of(axes: Axes, rows: int) -> int:
    """How many of so many rows a device runs: as `Meshed.rows_over`, where they divide."""
    for over in (axes.data * axes.expert, axes.data):
        if rows % over == 0:
            return rows // over
    return rows


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

    groups: microbatches that a pipeline runs. Of a prompt that `sequence` splits the ring's own are
    counted, and not the exchanges that bring tokens into its order and back.
    """
    each = _Step(config, precision, axes, rows_of(axes, rows), tokens, exact, groups)
    return [c for c in each.all() if c.over > 1 and c.count > 0]


@dataclasses.dataclass(frozen=True)
class _Step:
    config: ModelConfig
    precision: Precision
    axes: Axes
    rows: int
    tokens: int
    exact: bool
    groups: int

    def all(self) -> Iterator[Collective]:
        yield from self.ends()
        yield from self.layers()
        if self.axes.stage > 1:
            yield from self.stages()
        if self.axes.expert > 1:
            yield from self.experts()
        if self.axes.sequence > 1:
            yield from self.text()

    @property
    def tensor(self) -> int:
        return self.axes.tensor * self.axes.copies

    @property
    def width(self) -> int:
        """Bytes of a number of what layers are given."""
        return np.dtype(self.precision.activations).itemsize

    @property
    def columns(self) -> int:
        """Tokens of a row that a device runs."""
        split = self.axes.sequence if self.splits else 1
        return self.tokens // split

    @property
    def splits(self) -> bool:
        """Whether a text's tokens are split: one alone is not."""
        return self.tokens > 1 and self.tokens % self.axes.sequence == 0

    @property
    def ticks(self) -> int:
        return self.groups + self.axes.stage - 1

    def ends(self) -> Iterator[Collective]:
        """The vocabulary is split over tensor and stages."""
        c, over = self.config, self.tensor * self.axes.stage
        axis = "stage" if self.axes.stage > 1 else "tensor"
        table = parse(self.precision.format_at(f"{family(c.model_type).tokens}.weight", 2)).exact_in
        whole = self.rows * self.columns * c.hidden_size * np.dtype(DTYPES[table]).itemsize
        if self.streams:
            yield Collective("embeddings", "reduce-scatter", axis, over, 1, whole // over)
            norm = self.rows * self.columns * c.hidden_size * self.width
            yield Collective("last norm", "all-gather", axis, over, 1, norm)
        else:
            yield Collective("embeddings", "all-reduce", axis, over, 1, whole)
        logits = self.rows * -(-c.vocab_size // over) * over * 4
        yield Collective("logits", "all-gather", axis, over, 1, logits)

    @property
    def streams(self) -> bool:
        """Whether norms and sums are split by tokens."""
        return self.axes.stream and self.tokens > 1 and self.tokens % self.tensor == 0

    def layers(self) -> Iterator[Collective]:
        """Two sums a layer, or what the exact mode gathers in their place."""
        c, t = self.config, self.tensor
        count = c.num_hidden_layers // self.axes.stage
        each = -(-self.rows // self.groups) * self.columns
        routed = _routed(c) // self.axes.stage
        inputs = (
            ("attention", count, c.num_attention_heads * c.head_dim, each),
            ("MLP", count - routed, c.intermediate_size, each),
            ("experts", routed, _expert_size(c), self.room),  # before they are weighed
        )
        for what, number, features, some in inputs:
            out, given = some * c.hidden_size * 4, some * features * self.width
            if self.exact:
                yield self._layer(f"{what}: inputs", "all-gather", number, given)
                yield self._layer(f"{what}: outputs", "all-gather", number, out)
            elif self.streams:
                read = each * c.hidden_size * self.width
                yield self._layer(f"{what}: read", "all-gather", number, read)
                yield self._layer(what, "reduce-scatter", number, out // t)
            else:
                yield self._layer(what, "all-reduce", number, out)

        if not self.exact:  # of a norm over all heads, each token's sum of squares
            norms = len(family(c.model_type).norms)
            yield self._layer("norms", "all-reduce", count * norms, each * 4)

    def _layer(self, what: str, kind: Kind, number: int, size: int) -> Collective:
        times = self.ticks if self.axes.stage > 1 else 1
        return Collective(what, kind, "tensor", self.tensor, number, size, times)

    def stages(self) -> Iterator[Collective]:
        p, D = self.axes.stage, self.config.hidden_size
        block = -(-self.rows // self.groups) * self.tokens * D * self.width
        yield Collective("stages", "collective-permute", "stage", p, 1, block, self.ticks)
        whole = self.rows * self.tokens * D * self.width
        yield Collective("last output", "all-reduce", "stage", p, 1, whole)

    def experts(self) -> Iterator[Collective]:
        """Rows go to their experts and back, in buffers of half as much again as an even share; of
        what is more uneven, more. Where rows do not divide, each device runs its own experts.
        """
        c, e, room = self.config, self.axes.expert, self.room
        count = _routed(c) // self.axes.stage
        row = c.hidden_size * self.width
        yield Collective("to experts", "all-to-all", "expert", e, count, room * row)
        yield Collective("which", "all-to-all", "expert", e, count, room * 4)
        yield Collective("from experts", "all-to-all", "expert", e, count, room * row)

    @property
    def room(self) -> int:
        """Rows that a device's experts run in all."""
        routed = -(-self.rows // self.groups) * self.columns * _chosen(self.config)
        if self.axes.expert == 1:
            return routed
        return self.axes.expert * min(routed, math.ceil(1.5 * routed / self.axes.expert))

    def text(self) -> Iterator[Collective]:
        """A ring for prompts; sums of softmaxes for a token, or its heads."""
        c, n = self.config, self.axes.sequence
        share, count = share_of(c, self.axes), c.num_hidden_layers
        heads, kept = share.num_attention_heads, share.num_key_value_heads
        if self.axes.exchange:
            heads, kept = c.num_attention_heads // self.tensor, c.num_key_value_heads
            kept //= self.axes.tensor
            if not self.splits:
                size = self.rows * heads * c.head_dim * self.width
                yield Collective("heads", "all-gather", "sequence", n, count, size)
                return
            for what, number in (
                ("queries", heads),
                ("out", heads),
                ("keys", kept),
                ("values", kept),
            ):
                size = self.rows * self.columns * number * c.head_dim * self.width
                yield Collective(what, "all-to-all", "sequence", n, count, size)
            return
        if not self.splits:
            softmax = self.rows * heads * 4
            yield Collective("largest", "all-reduce", "sequence", n, count, softmax)
            mixed = softmax * (c.head_dim + 1)
            yield Collective("sums", "all-reduce", "sequence", n, count, mixed)
            return
        block = self.rows * self.columns * kept * c.head_dim * self.width
        yield Collective("ring", "collective-permute", "sequence", n, 2 * count, block, n - 1)


def _routed(config: ModelConfig) -> int:
    """How many layers have experts."""
    if not isinstance(config, MixtureConfig):
        return 0
    return sum(map(config.routed, range(config.num_hidden_layers)))


def _chosen(config: ModelConfig) -> int:
    return config.num_experts_per_tok if isinstance(config, MixtureConfig) else 1


def _expert_size(config: ModelConfig) -> int:
    return config.expert_size if isinstance(config, MixtureConfig) else 0
