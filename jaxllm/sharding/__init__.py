"""Models sharded over several devices: the mesh is a property of the model, sharding of its params.

`ShardedModel` has the same interface as any model: steps call its `apply`. It runs the same Flax
module, built with one device's share of the configuration, inside one `jax.shard_map` that is
manual over all axes. Each device holds a shard of the parameters, of the cache segments and of the
rows, and the module does not see the other devices; so the kernels get plain local arrays. Weights
that need communication are wrapped in a parallel weight class. Outside of `apply`, commits,
sampling, beam search, cache edits and serving are ordinary compiled code on global arrays with a
sharding: logits come out unsharded, and the same random numbers choose the same tokens.

Training needs no changes: gradients are the same as on one device (see `CallSharding.run` for the
reason) and have the sharding of the weights, and so has the optimizer state. With `fsdp`, matrices
are also sharded over `data` and gathered for one product at a time.

mesh_spec: the mesh that users write, and JAX's mesh. partition_rules: the table of partition
rules, derived from each family's metadata, and the configuration that one device runs.
shard_params: shards parameters while they are read, one tensor at a time. partition_specs:
`PartitionSpec`s of all other inputs and outputs of a model. fsdp: matrices sharded over `data`.
shard_list: parameters that are stored as a list of shards. tensor_parallel, expert_parallel:
weights with products that communicate. model_sharding: what a sharded model is made of.
local_params: the parameters as one device uses them. call: how a call is sharded over rows and
tokens, and the call itself. sharded_model: the model, its parameters gathered, and what loading and
training ask of any model about its mesh. collective_stats: statistics of the collectives in a
compiled program. context_parallel/: sharding by tokens, attention above all.

To add an axis, add its name to `mesh_spec.AXES` and a field to `MeshSpec` (the last axes get the
nearest devices), then rows of `partition_rules` or `partition_specs` for what it shards. If a
package has what it takes, add the axis to `mesh_spec.PLUGIN_AXES`: the package has a subclass of
`ShardedModel`.
Communication inside the module goes into a weight class (`local_params`), or, for a sharded stream,
around the module's call (`CallSharding.run`). Meshes hash by their sizes, so a program compiled for
one is never used for another; with several devices, no program is saved to disk
(`ops.compile_cache`).
"""

from typing import Any

import jax

from jaxllm import models
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.runtime.multihost import is_multiprocess
from jaxllm.sharding.mesh_spec import MeshSpec as MeshSpec, parse_mesh
from jaxllm.sharding.sharded_model import (
    ShardedModel as ShardedModel,
    make_sharded_model as make_sharded_model,
)
from jaxllm.weights.load import ParamPlacer
from jaxllm.weights.paths import Placement, check_place
from jaxllm.weights.precision import Precision


def build_model(
    config: ModelConfig,
    precision: Precision,
    place: Placement | None,
    mesh: str | MeshSpec | None,
    exact: bool,
    fsdp: bool = False,
) -> tuple[Any, ParamPlacer | None]:
    """Build the model, and the placer of its parameters; None: they stay where they are read.

    Raises:
        ConfigError: for an impossible mesh, or arguments that exclude each other.
    """
    if mesh is None:
        if is_multiprocess():
            raise ConfigError(
                "mesh is missing: several processes run one model on a mesh of all"
                f" {jax.device_count()} devices. Set --mesh (mesh=)"
            )
        for name, requested in (("exact", exact), ("fsdp", fsdp)):
            if requested:
                raise ConfigError(f"{name} requires a mesh. Set mesh=, or drop {name}")
        check_place(place)
        return models.build(config, precision), None if place is None else ParamPlacer(place)
    if place is not None:
        raise ConfigError("mesh= and place= cannot be combined: both place every array. Drop one")
    axes = mesh if isinstance(mesh, MeshSpec) else parse_mesh(mesh)
    model = make_sharded_model(config, precision, axes, exact=exact, fsdp=fsdp)
    return model, model.make_placer()
