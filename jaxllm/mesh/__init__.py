"""A model over many devices: a mesh is a property of the *model*, sharding one of parameters."""

import flax.linen as nn

from jaxllm import models
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes as Axes
from jaxllm.mesh.axes import parse
from jaxllm.mesh.meshed import Meshed as Meshed
from jaxllm.mesh.meshed import meshed as meshed
from jaxllm.weights.paths import Place
from jaxllm.weights.precision import Precision
from jaxllm.weights.reading import Whole


def placed(
    config: ModelConfig,
    precision: Precision,
    place: Place | None,
    mesh: str | Axes | None,
    exact: bool,
) -> tuple[nn.Module, Whole | None]:
    """The model, and where its parameters go as they are read; None: nowhere in particular.

    Raises ConfigError for a mesh that cannot be, and for what excludes another.
    """
    if mesh is None:
        if exact:
            raise ConfigError("exact is of a mesh: give mesh=, or leave it out")
        return models.build(config, precision), None if place is None else Whole(place)
    if place is not None:
        raise ConfigError("mesh= says where every array is, and so does place=: give one of them")
    axes = parse(mesh) if isinstance(mesh, str) else mesh
    model = meshed(config, precision, axes, exact=exact)
    return model, model.reader()
