"""Places of a pipeline: one layer of each stage, which may differ in kind, or be missing.

A place is the number of a layer within its stage. All stages run one program, and a parameter of a
place is a stack with an entry for each stage. So the layers in one place must have parameters of
equal shapes. They may differ in all else (windows, rotary settings, kinds of attention): a stage
selects its own by `lax.switch`. If the layers do not divide evenly, the last place of the later
stages is empty: it copies its input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layers import AttentionContext, Layer
from jaxllm.models.run_blocks import run_blocks

AXIS = "stage"

LayerTable = Sequence[Sequence[int | None]]  # the layer numbers of each stage; None: an empty place


def assign_layers(config: ModelConfig, stages: int, chunks: int = 1) -> list[list[int | None]]:
    """Return the layer numbers of each stage, place by place.

    If the layers do not divide evenly, the first stages have one more than the others.

    Raises:
        ConfigError: for fewer layers than stages, for chunks that do not divide them, for layers in
            one place with parameters of different shapes, and for layers with a memory.
    """
    count, parts = config.num_hidden_layers, stages * chunks
    within = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
    if count < parts:
        raise ConfigError(
            f"num_hidden_layers {count} is too small for {within}: each needs at least one layer."
            " Use fewer stages"
        )
    if chunks > 1 and count % parts:
        raise ConfigError(
            f"num_hidden_layers {count} is not divisible into {within}: the chunks of a stage run"
            " in one program, so they need equal numbers of layers. Use one chunk"
        )
    if stages > 1 and any(config.state_shape(i) is not None for i in range(count)):
        raise ConfigError(
            "layers with a memory cannot be pipelined: it passes from segment to segment, not from"
            " stage to stage. Use a mesh with stage=1"
        )
    each, longer = divmod(count, parts)
    places = each + (longer > 0)

    def part_layers(part: int) -> list[int | None]:
        begin = part * each + min(part, longer)
        stage_size = each + (part < longer)
        return [begin + i if i < stage_size else None for i in range(places)]

    table = [
        [number for chunk in range(chunks) for number in part_layers(chunk * stages + stage)]
        for stage in range(stages)
    ]
    # An empty place has zeros in the shapes of the place before it (`stacked`).
    held = [[row[i - (n is None)] for i, n in enumerate(row)] for row in table]
    for first, *others in zip(*held, strict=True):
        for other in others:
            assert first is not None and other is not None
            if config.layer_template(first) != config.layer_template(other):
                raise ConfigError(
                    f"layers {first} and {other} would share one place of {within}, but their"
                    " parameters have different names or shapes. Use a number of stages at which"
                    " each stage starts at the same point of the layer pattern, or stage=1"
                )
    return table


def run_places(
    blocks: Sequence[nn.Module],
    table: LayerTable,
    places: range,
    x: jax.Array,
    context: AttentionContext,
    remat: bool,
) -> tuple[tuple[Layer, ...], jax.Array]:
    """Run a stage's layers in some of its places, inside `jax.shard_map`.

    Args:
        blocks: of all layers of the model, by number. Their parameters are there by place.

    Returns:
        The output of each place, and of the last one.
    """
    seen = _reorder_segments(context, table)
    layers = list[Layer]()
    for place in places:
        run = _make_place_runner(blocks, [row[place] for row in table], place, seen, remat)
        layers.append(run(x))
        x = layers[-1].x
    return tuple(layers), x


def layer_kinds(config: ModelConfig, numbers: Sequence[int | None]) -> list[int | None]:
    """Return for each layer of a place the first layer there that computes the same."""
    signatures = [None if n is None else config.layer_signature(n) for n in numbers]
    return [numbers[signatures.index(kind)] for kind in signatures]


def tick_layers(config: ModelConfig, stages: int, global_sync: bool) -> list[int]:
    """Return the numbers of the layers that the fullest stage runs at a tick.

    Args:
        global_sync: as in `models.layers.ParallelHooks`: if set, all kinds of layers in a place are
            run.
    """
    table = assign_layers(config, stages)
    if not global_sync:
        return [n for n in table[0] if n is not None]
    each = (layer_kinds(config, numbers) for numbers in zip(*table, strict=True))
    return [n for kinds in each for n in dict.fromkeys(kinds) if n is not None]


def _make_place_runner(
    blocks: Sequence[nn.Module],
    numbers: Sequence[int | None],
    place: int,
    context: AttentionContext,
    remat: bool,
) -> Callable[[jax.Array], Layer]:
    """Return the function that a stage runs in a place, where stages have layers `numbers`."""
    name = str(blocks[place].name)
    params = {name: blocks[place].variables["params"]}
    config: Any = blocks[place].config
    kinds = layer_kinds(config, numbers)

    def make_layer_runner(number: int | None) -> Callable[[jax.Array], Layer]:
        if number is None:
            return copy
        block = blocks[number].clone(parent=None, name=name)
        apply: Any = _NamedBlock(lambda: block, remat).apply
        return lambda x: apply({"params": params}, x, context)

    def copy(x: jax.Array) -> Layer:
        form = jax.eval_shape(runs[0], x)
        blank: Layer = jax.tree.map(lambda f: jnp.zeros(f.shape, f.dtype), form)
        return blank._replace(x=x)

    known = list(dict.fromkeys(kinds))  # the first stage has a layer in each place
    runs = [make_layer_runner(number) for number in known]
    if len(runs) == 1:
        return runs[0]

    def run(x: jax.Array) -> Layer:
        kind = jnp.asarray([known.index(n) for n in kinds], jnp.int32)[jax.lax.axis_index(AXIS)]
        if not context.hooks.global_sync:
            chosen: Layer = jax.lax.switch(kind, runs, x)
            return chosen
        # Every device must take part in a ring's collectives: all kinds are run, one is selected.
        layers = [one(x) for one in runs]
        taken: Layer = jax.tree.map(lambda *y: jax.lax.select_n(kind, *y), *layers)
        return taken

    return run


def _reorder_segments(context: AttentionContext, table: LayerTable) -> AttentionContext:
    """Reorder keys and values by layer number, as layers look them up, instead of by place."""
    place = {n: i for row in table for i, n in enumerate(row) if n is not None}
    order = [place[number] for number in sorted(place)]
    segments = [
        s.replace(k=tuple(s.k[i] for i in order), v=tuple(s.v[i] for i in order))
        for s in context.segments
    ]
    return context._replace(segments=tuple(segments))


class _NamedBlock(nn.Module):
    """A block under its own name, as a function that JAX can transform."""

    get_block: Callable[[], nn.Module]  # returns the block
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: AttentionContext) -> Layer:
        (layer,), _ = run_blocks([self.get_block().clone(parent=self)], x, context, self.remat)
        return layer
