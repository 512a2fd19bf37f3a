"""Models sharded over several devices: the mesh is a property of the model, sharding of its params.

`Meshed` has the same interface as any model: steps call its `apply`. It runs the same Flax module,
built with one device's share of the configuration, inside one `jax.shard_map` that is manual over
all axes. Each device holds a shard of the parameters, of the cache segments and of the rows, and
the module does not see the other devices; so the kernels get plain local arrays. Weights that need
communication are wrapped in a parallel weight class (`weights.leaves.parted`). Outside of `apply`,
commits, sampling, beam search, cache edits and serving are ordinary compiled code on global arrays
with a sharding: logits come out unsharded, and the same random numbers choose the same tokens.

Training needs no changes: gradients are the same as on one device (see `Layout.run` for the reason)
and have the sharding of the weights, and so has the optimizer state. With `fsdp`, matrices are also
sharded over `data` and gathered for one product at a time.

axes: the mesh that users write, and JAX's mesh. rules: the table of partition rules, derived from
each family's metadata, and the configuration that one device runs. placing: shards parameters while
they are read, one tensor at a time. specs: `PartitionSpec`s of all other inputs and outputs of a
model. fsdp: matrices sharded over `data`. joined: gathers parameters, to write them. beside: places
new adapters for training. local: the parameters as one device uses them. layout: how a call is
sharded over rows, layers and tokens, and the call itself. meshed: the model. counts: statistics of
the collectives in a compiled program. sequence/: sharding by tokens, attention above all.
pipeline/: layers in stages.

To add an axis, add its name to `axes.AXES` and a field to `Axes` (the last axes get the nearest
devices), then rows of `rules` or specs for what it shards. Communication inside the module goes
into a weight class (`local`), or, for a sharded stream, around the module's call (`Layout.run`).
Meshes hash by their sizes, so a program compiled for one is never used for another; with several
devices, no program is saved to disk (`programs`).
"""

import flax.linen as nn
import jax

from jaxllm import models
from jaxllm.config import ModelConfig
from jaxllm.distributed import several
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes as Axes
from jaxllm.mesh.axes import parse
from jaxllm.mesh.meshed import Meshed as Meshed
from jaxllm.mesh.meshed import meshed as meshed
from jaxllm.weights.paths import Place, check_place
from jaxllm.weights.precision import Precision
from jaxllm.weights.reading import Whole


def placed(
    config: ModelConfig,
    precision: Precision,
    place: Place | None,
    mesh: str | Axes | None,
    exact: bool,
    fsdp: bool = False,
) -> tuple[nn.Module, Whole | None]:
    """Build the model, and the placer of its parameters; None: they stay where they are read.

    Raises:
        ConfigError: for an impossible mesh, or arguments that exclude each other.
    """
    if mesh is None:
        if several():
            raise ConfigError(
                "mesh is missing: several processes run one model on a mesh of all"
                f" {jax.device_count()} devices. Set --mesh (mesh=)"
            )
        for name, asked in (("exact", exact), ("fsdp", fsdp)):
            if asked:
                raise ConfigError(f"{name} requires a mesh. Set mesh=, or drop {name}")
        check_place(place)
        return models.build(config, precision), None if place is None else Whole(place)
    if place is not None:
        raise ConfigError("mesh= and place= cannot be combined: both place every array. Drop one")
    axes = mesh if isinstance(mesh, Axes) else parse(mesh)
    model = meshed(config, precision, axes, exact=exact, fsdp=fsdp)
    return model, model.reader()
