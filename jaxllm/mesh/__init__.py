"""A model over many devices: a mesh is a property of the model, sharding a change of parameters.

`Meshed` is a model like others: steps call its `apply`, which runs the same Flax module, built with
the configuration of one device's share, inside one `jax.shard_map`, manual over all axes. Each
device has its share of parameters, of the cache's segments and of the rows, and the module does not
know of the others; so the kernels see arrays of their own. What needs a word from other devices is
said by leaves around a share (`weights.leaves.parted`). Outside of `apply`, commits, sampling,
beams, surgery and serving are ordinary compiled code on whole arrays that carry a sharding: logits
come out whole, and the same random numbers choose the same tokens.

Training runs on it as it is: gradients are one device's (why: in `Layout.run`) and come back where
the weights are, and there is what an optimiser keeps. With `fsdp` matrices are divided over `data`,
too, and gathered one product at a time.

axes: what users write, and the mesh of JAX's devices. rules: the table of shardings, made of what
families say of themselves, and what of a configuration one device runs. placing: parameters cut and
put there, one at a time as they are read. specs: where all else is that a model is given and gives
back. fsdp: matrices in parts over `data`. joined: parameters whole again, to be written. beside:
new adapters, to be trained. local: what one device computes with. layout: which axes divide a
call's rows, layers and tokens, and the call. meshed: the model. counts: the collectives of a
compiled program. sequence/: what is split by tokens, attention above all. pipeline/: layers in
stages.

To add an axis: its name in `axes.AXES` and field in `Axes` (order is nearness: the last are
neighbours), what it divides as rows of `rules` or as specs, and what the module inside has to say
over it as a leaf (`local`) or, where a whole stream is split, around the module's call
(`Layout.run`). Meshes hash by their sizes, so what is compiled for one serves no other; on several
devices no program is kept on disk (`programs`).
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
    """The model, and where its parameters go as they are read; None: nowhere in particular.

    Raises ConfigError for a mesh that cannot be, and for what excludes another.
    """
    if mesh is None:
        if several():
            raise ConfigError(
                f"several processes run a model on a mesh of all {jax.device_count()} devices: give"
                " --mesh (mesh=)"
            )
        for name, asked in (("exact", exact), ("fsdp", fsdp)):
            if asked:
                raise ConfigError(f"{name} is of a mesh: give mesh=, or leave it out")
        check_place(place)
        return models.build(config, precision), None if place is None else Whole(place)
    if place is not None:
        raise ConfigError("mesh= says where every array is, and so does place=: give one of them")
    axes = mesh if isinstance(mesh, Axes) else parse(mesh)
    model = meshed(config, precision, axes, exact=exact, fsdp=fsdp)
    return model, model.reader()
