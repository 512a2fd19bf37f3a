"""What devices send each other in a step: its collectives, by kind, axis, number and bytes.

Counted as the compiled programs have them (`mesh.counts`), which the tests compare: sums and
gathered logits are float32, as products are. Sums over the same devices that do not wait for each
other are one, as XLA makes them.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.pipeline.places import layers_run
from jaxllm.mesh.sequence.ways import Way
from jaxllm.mesh.specs import rows_over
from jaxllm.models import family
from jaxllm.models.experts import MixtureConfig
from jaxllm.plan.collective import Collective, Kind
from jaxllm.plan.split_texts import Split
from jaxllm.weights.formats import parse
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.leaves.owned import AMPLE
from jaxllm.weights.precision import Precision


def rows_of(axes: Axes, rows: int) -> int:
    """How many of so many rows a device runs."""
    return rows // _among(axes, rows)


def _among(axes: Axes, rows: int) -> int:
    """How many devices have rows of their own."""
    return axes.over(rows_over(axes, rows) or ())


def step(
    config: ModelConfig,
    precision: Precision,
    axes: Axes,
    rows: int,
    tokens: int,
    slots: int,
    *,
    exact: bool = False,
    groups: int = 1,
) -> list[Collective]:
    """The collectives of running so many tokens of so many rows against a cache of so many slots,
    the logits of one of each row.

    groups: microbatches that a pipeline runs. Of experts' buffers those for even routes are
    counted, and of a split prompt a chunk that `sequence` divides.
    """
    among = _among(axes, rows)
    each = _Step(config, precision, axes, rows // among, among, tokens, slots, exact, groups)
    return [c for c in each.all() if c.over > 1 and c.count > 0]


@dataclasses.dataclass(frozen=True)
class _Step:
    """rows: of a device. among: how many have rows of their own."""

    config: ModelConfig
    precision: Precision
    axes: Axes
    rows: int
    among: int
    tokens: int
    slots: int
    exact: bool
    groups: int

    def all(self) -> Iterator[Collective]:
        text = self.text
        # Whether any slot is filled is said with it, but among stages: XLA names the groups of both
        # otherwise there, and does not see that they are the same.
        alone = text.marks and self.axes.stage > 1
        said = self.tokens + (text.marks and not alone)
        yield Collective("which columns are real", "all-reduce", "data", self.among, 1, said)
        yield Collective("whether a row is cached", "all-reduce", "data", self.among, int(alone), 1)
        yield from self.ends()
        yield from self.layers()
        if self.axes.stage > 1:
            yield from self.stages()
        if self.axes.expert > 1:
            yield from self.experts()
        if self.axes.sequence > 1:
            yield from text.all()

    @property
    def text(self) -> Split:
        sizes = (self.rows, self.tokens, self.slots, self.width)
        return Split(self.config, self.axes, *sizes, self.precision.cache, self.groups)

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
        return Way(self.tokens, self.axes.sequence, self.axes.exchange).here

    @property
    def run(self) -> list[int]:
        """The layers that a device runs at once."""
        way = Way(self.tokens, self.axes.sequence, self.axes.exchange)
        return layers_run(self.config, self.axes.stage, way.at_once)

    @property
    def routed(self) -> int:
        """How many of them have experts."""
        config = self.config
        return sum(map(config.routed, self.run)) if isinstance(config, MixtureConfig) else 0

    @property
    def turns(self) -> int:
        """How often a device runs its layers: in each tick of a pipeline."""
        return self.groups + self.axes.stage - 1 if self.axes.stage > 1 else 1

    @property
    def each(self) -> int:
        """Tokens that layers run at once."""
        return -(-self.rows // self.groups) * self.columns

    def ends(self) -> Iterator[Collective]:
        """The vocabulary is split over tensor and stages, of which each has tokens of its own or
        all: what one of them has of others' rows is summed among its likes.
        """
        c, p, over = self.config, self.axes.stage, self.tensor * self.axes.stage
        axis = "stage" if self.axes.stage > 1 else "tensor"
        table = parse(self.precision.format_at(f"{family(c.model_type).tokens}.weight", 2)).exact_in
        whole = self.rows * self.columns * c.hidden_size * np.dtype(DTYPES[table]).itemsize
        if self.streams:
            own = whole // self.tensor
            yield Collective("embeddings", "reduce-scatter", "tensor", self.tensor, 1, own)
            yield Collective("embeddings of stages", "all-reduce", "stage", p, 1, own)
            norm = self.rows * self.columns * c.hidden_size * self.width
            yield Collective("last norm", "all-gather", "tensor", self.tensor, 1, norm)
        else:
            yield Collective("embeddings", "all-reduce", axis, over, 1, whole)
        logits = self.rows * -(-c.vocab_size // over) * over * 4
        yield Collective("logits", "all-gather", axis, over, 1, logits)

    @property
    def streams(self) -> bool:
        """Whether norms and sums are split by tokens."""
        return self.axes.stream and self.columns > 1 and self.columns % self.tensor == 0

    def layers(self) -> Iterator[Collective]:
        """Two sums a layer, or what the exact mode gathers in their place."""
        c, t = self.config, self.tensor
        count, routed = len(self.run), self.routed
        out = self.each * c.hidden_size * 4
        if self.exact:
            for what, number, features, some in (
                ("attention", count, c.num_attention_heads * c.head_dim, self.each),
                ("MLP", count - routed, c.intermediate_size, self.each),
                ("experts", routed, _expert_size(c), self.room),
            ):
                given, whole = some * features * self.width, some * c.hidden_size * 4
                yield self._layer(f"{what}: inputs", "all-gather", number, given)
                yield self._layer(f"{what}: outputs", "all-gather", number, whole)
        elif self.streams:
            read = self.each * c.hidden_size * self.width
            yield self._layer("attention, MLP: read", "all-gather", 2 * count, read)
            yield self._layer("attention, MLP", "reduce-scatter", 2 * count, out // t)
        elif getattr(c, "use_parallel_residual", False):  # neither waits for the other
            yield self._layer("attention and MLP", "all-reduce", count, 2 * out)
        else:
            yield self._layer("attention", "all-reduce", count, out)
            yield self._layer("MLP", "all-reduce", count - routed, out)
            yield self._layer("experts", "all-reduce", routed, out)
        if family(c.model_type).norms:
            yield from self.norms(count)

    def norms(self, count: int) -> Iterator[Collective]:
        """Of norms over all heads each token's sum of squares, or what is normed, and weights."""
        c, copies = self.config, self.axes.copies > 1
        squares = self.each * 4
        for member in family(c.model_type).norms:
            over = self.axes.tensor if member.grouped else self.tensor
            heads = c.num_key_value_heads if member.grouped else c.num_attention_heads
            features = heads * c.head_dim
            what = "norm of keys" if member.grouped else "norm of queries"
            if self.exact:
                kept = self.precision.format_at("norm.weight", 1)
                weights = features * np.dtype(DTYPES[kept]).itemsize
                wide = self.each * features * self.width
                yield self._layer(what, "all-gather", count, wide, over)
                yield self._layer(f"{what}: weights", "all-gather", count, weights, over)
            elif copies:  # which keys' devices are fewer
                yield self._layer(what, "all-reduce", count, squares, over)
        if not self.exact and not copies:
            both = squares * len(family(c.model_type).norms)
            yield self._layer("norms", "all-reduce", count, both)

    def _layer(
        self, what: str, kind: Kind, number: int, size: int, over: int | None = None
    ) -> Collective:
        return Collective(what, kind, "tensor", over or self.tensor, number, size, self.turns)

    def stages(self) -> Iterator[Collective]:
        p, own = self.axes.stage, self.tensor if self.streams else 1
        token = self.config.hidden_size * self.width
        block = self.each // own * token
        yield Collective("stages", "collective-permute", "stage", p, 1, block, self.turns)
        whole = self.rows * self.columns // own * token
        yield Collective("last output", "all-reduce", "stage", p, 1, whole)

    def experts(self) -> Iterator[Collective]:
        """Rows go to their experts and back, in buffers of half as much again as an even share; of
        what is more uneven, more. Where rows do not divide, each device runs its own experts.
        """
        c, e = self.config, self.axes.expert
        count, sum_ = self.routed, self.room * c.hidden_size * 4
        if self.among < self.axes.data * e:
            yield Collective("experts' rows", "all-reduce", "expert", e, count, sum_, self.turns)
            return
        given = self.room * c.hidden_size * self.width
        for what, size in (
            ("to experts", given),
            ("which", 4 * self.room),
            ("from experts", sum_),
        ):
            yield Collective(what, "all-to-all", "expert", e, count, size, self.turns)
        if self.room < e * self.chosen:
            yield Collective("the fullest", "all-reduce", "expert", e, count, 4, self.turns)

    @property
    def chosen(self) -> int:
        """How many rows experts are given: of each token one for each of its experts."""
        k = self.config.num_experts_per_tok if isinstance(self.config, MixtureConfig) else 1
        return self.each * k

    @property
    def room(self) -> int:
        """Rows that a device's experts run in all."""
        e = self.axes.expert
        if e == 1 or self.among < self.axes.data * e:
            return self.chosen
        return e * min(self.chosen, math.ceil(int(AMPLE * self.chosen) / e))


def _expert_size(config: ModelConfig) -> int:
    return config.expert_size if isinstance(config, MixtureConfig) else 0
