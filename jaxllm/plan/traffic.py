"""The collectives of a step, by kind, axis, number and bytes.

Tests compare them with compiled programs (`mesh.counts`). All-reduces and gathered logits are
float32, like the results of matmuls. Independent all-reduces over the same devices count as one,
since XLA combines them.
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
    """Return how many of `rows` rows a device runs."""
    return rows // _among(axes, rows)


def _among(axes: Axes, rows: int) -> int:
    """Return the number of groups of devices with different rows."""
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
    """Return the collectives of a step of `tokens` tokens per row, with the logits of one of them.

    Expert buffers are those for balanced routing; with context parallelism, `tokens` counts as
    divisible by `sequence`.

    Args:
      slots: of the cache.
      groups: microbatches of a pipeline.
    """
    among = _among(axes, rows)
    each = _Step(config, precision, axes, rows // among, among, tokens, slots, exact, groups)
    return [c for c in each.all() if c.over > 1 and c.count > 0]


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step. rows: of a device. among: number of groups of devices with different rows."""

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
        # XLA combines "is any slot filled" with this collective. With stages it does not: it writes
        # the groups of the two in different forms.
        alone = text.marks and self.axes.stage > 1
        said = self.tokens + (text.marks and not alone)
        yield Collective("padding mask", "all-reduce", "data", self.among, 1, said)
        yield Collective("is any slot filled", "all-reduce", "data", self.among, int(alone), 1)
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
        """The bytes per activation."""
        return np.dtype(self.precision.activations).itemsize

    @property
    def columns(self) -> int:
        """The tokens of a row that a device runs."""
        return Way(self.tokens, self.axes.sequence, self.axes.exchange).here

    @property
    def run(self) -> list[int]:
        """The layers that a device runs at once."""
        way = Way(self.tokens, self.axes.sequence, self.axes.exchange)
        return layers_run(self.config, self.axes.stage, way.at_once)

    @property
    def routed(self) -> int:
        """The number of these layers that have experts."""
        config = self.config
        return sum(map(config.routed, self.run)) if isinstance(config, MixtureConfig) else 0

    @property
    def turns(self) -> int:
        """The number of times that a device runs its layers: the ticks of a pipeline."""
        return self.groups + self.axes.stage - 1 if self.axes.stage > 1 else 1

    @property
    def each(self) -> int:
        """The tokens that layers run at once."""
        return -(-self.rows // self.groups) * self.columns

    def ends(self) -> Iterator[Collective]:
        """Yield those of embeddings and logits; the vocabulary is sharded over tensor and stage."""
        c, p, over = self.config, self.axes.stage, self.tensor * self.axes.stage
        axis = "stage" if self.axes.stage > 1 else "tensor"
        table = parse(self.precision.format_at(f"{family(c.model_type).tokens}.weight", 2)).exact_in
        whole = self.rows * self.columns * c.hidden_size * np.dtype(DTYPES[table]).itemsize
        if self.streams:
            own = whole // self.tensor
            yield Collective("embeddings", "reduce-scatter", "tensor", self.tensor, 1, own)
            yield Collective("embeddings over stages", "all-reduce", "stage", p, 1, own)
            norm = self.rows * self.columns * c.hidden_size * self.width
            yield Collective("final norm", "all-gather", "tensor", self.tensor, 1, norm)
        else:
            yield Collective("embeddings", "all-reduce", axis, over, 1, whole)
        logits = self.rows * -(-c.vocab_size // over) * over * 4
        yield Collective("logits", "all-gather", axis, over, 1, logits)

    @property
    def streams(self) -> bool:
        """Whether norms and sums are sharded by tokens (sequence parallelism)."""
        return self.axes.stream and self.columns > 1 and self.columns % self.tensor == 0

    def layers(self) -> Iterator[Collective]:
        """Yield two all-reduces per layer, or the all-gathers that replace them in exact mode."""
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
            yield self._layer("attention, MLP: inputs", "all-gather", 2 * count, read)
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
        """Yield those of norms over all heads: sums of squares; if exact, inputs and weights."""
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
            elif copies:  # keys are sharded over fewer devices than queries
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
        yield Collective("stage outputs", "collective-permute", "stage", p, 1, block, self.turns)
        whole = self.rows * self.columns // own * token
        yield Collective("last stage's output", "all-reduce", "stage", p, 1, whole)

    def experts(self) -> Iterator[Collective]:
        """Yield the all-to-alls to experts and back, or an all-reduce if rows do not divide.

        Buffers are 1.5 times an even share; less balanced routing needs more than is counted here.
        """
        c, e = self.config, self.axes.expert
        count, sum_ = self.routed, self.room * c.hidden_size * 4
        if self.among < self.axes.data * e:
            yield Collective("expert outputs", "all-reduce", "expert", e, count, sum_, self.turns)
            return
        given = self.room * c.hidden_size * self.width
        for what, size in (
            ("to experts", given),
            ("expert ids", 4 * self.room),
            ("from experts", sum_),
        ):
            yield Collective(what, "all-to-all", "expert", e, count, size, self.turns)
        if self.room < e * self.chosen:
            yield Collective("largest expert load", "all-reduce", "expert", e, count, 4, self.turns)

    @property
    def chosen(self) -> int:
        """The number of rows for experts: tokens times experts per token."""
        k = self.config.num_experts_per_tok if isinstance(self.config, MixtureConfig) else 1
        return self.each * k

    @property
    def room(self) -> int:
        """The rows that a device's experts run in total."""
        e = self.axes.expert
        if e == 1 or self.among < self.axes.data * e:
            return self.chosen
        return e * min(self.chosen, math.ceil(int(AMPLE * self.chosen) / e))


def _expert_size(config: ModelConfig) -> int:
    return config.expert_size if isinstance(config, MixtureConfig) else 0
