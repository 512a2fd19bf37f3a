"""One adapter beside a model's weights, to be trained; and the adapter out of the parameters again.

Step 0 is the model itself: one of the two matrices is zero.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.adapters.config import LoraConfig
from jaxllm.adapters.targets import Low, plan
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.leaves.arrays import DTYPES
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.whole import dtype_name


class Matrices(NamedTuple):
    """An adapter beside one module: a `[K, I]`, b `[O, K]`, and DoRA's lengths, as in its leaf."""

    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter: what it was asked to be, and its matrices by our paths of modules."""

    config: LoraConfig
    matrices: Mapping[str, Matrices]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(x.size for m in self.matrices.values() for x in m if x is not None)


def attach(
    config: ModelConfig, params: Params, lora: LoraConfig, key: jax.Array, *, dtype: str = "float32"
) -> Params:
    """The parameters with a new adapter beside them, for training. key: of what is drawn.

    Leaves that have none are the same objects, and so are the weights within those that have one.
    Raises ConfigError for targets that are not there.
    """
    return attached(config, params, fresh(config, params, lora, key, dtype=dtype))


def fresh(
    config: ModelConfig, params: Params, lora: LoraConfig, key: jax.Array, *, dtype: str = "float32"
) -> Adapter:
    """A new adapter, under which the model is as without it (see `LoraConfig`).

    dtype: of the matrices, as `jaxllm.load` takes it. params: what DoRA's lengths are those of.
    Raises ConfigError where they are not there.
    """
    dtype = dtype_name("an adapter's dtype", dtype)
    weights = dict(flatten(params))
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).reshape(-1))
    made = {}
    for module, low in plan(config, lora).items():
        (rows, columns), rank, kept = low.target.shape, low.rank, DTYPES[dtype]
        if low.target.site == "rows":
            a_KI = rng.standard_normal((rank, columns))
        elif lora.init_lora_weights == "gaussian":
            a_KI = rng.standard_normal((rank, columns)) / rank
        else:
            a_KI = rng.uniform(-1.0, 1.0, (rank, columns)) / columns**0.5
        a_KI, b_OK = jax.device_put((a_KI.astype(kept), np.zeros((rows, rank), kept)))
        matrices = Matrices(a_KI, b_OK, None)
        if lora.use_dora:
            weight = weights.get(low.target.path)
            if weight is None or weight.shape != low.target.shape:  # in a pipeline's stages
                raise ConfigError(
                    f"DoRA begins with the lengths of the rows of {low.target.path}, which these"
                    " parameters have not by itself: train LoRA, or use a mesh with stage=1"
                )
            leaf = leaf_of(weight, low, matrices, lora)
            matrices = matrices._replace(magnitude=norms(leaf))
        made[module] = matrices
    return Adapter(lora, made)


def attached(config: ModelConfig, params: Params, adapter: Adapter) -> Params:
    """The parameters with an adapter beside them, for training.

    Raises ConfigError where they have one already.
    """
    return map_leaves(around(config, adapter), params)


def around(config: ModelConfig, adapter: Adapter) -> Callable[[str, Any], Any]:
    """The leaf of a path's weight with its adapter; the weight itself where it has none.

    It raises ConfigError for a weight that has one already.
    """
    lows = [(low, adapter.matrices[name]) for name, low in plan(config, adapter.config).items()]

    def of(path: str, weight: Any) -> Any:
        if isinstance(weight, Adapted):
            raise ConfigError(f"{path} has an adapter already: train it, or merge it first")
        for low, matrices in lows:
            if low.target.path == path:
                weight = leaf_of(weight, low, matrices, adapter.config)
        return weight

    return of


def with_config(config: ModelConfig, adapter: Adapter, lora: LoraConfig) -> Adapter:
    """Return the adapter under another configuration that gives it the same meaning.

    Raises:
        ConfigError: if the configurations differ in modules, ranks, scales or DoRA.
    """
    if not isinstance(adapter, Adapter):
        raise ConfigError(f"an adapter must be an Adapter (read_adapter), got {adapter!r:.60}")
    if not isinstance(lora, LoraConfig):
        raise ConfigError(f"an adapter's configuration must be a LoraConfig, got {lora!r:.60}")
    made, wanted = ((plan(config, c), c.use_dora) for c in (adapter.config, lora))
    differ = [
        f"{name}: the adapter has {_facts(made, name)}, the configuration {_facts(wanted, name)}"
        for name in sorted(made[0].keys() | wanted[0].keys())
        if _facts(made, name) != _facts(wanted, name)
    ]
    if differ:
        raise ConfigError(
            f"the adapter is of another configuration ({len(differ)} modules differ). {differ[0]}."
            " Give the adapter's own configuration (adapter.config)"
        )
    for name, low in wanted[0].items():
        matrices = adapter.matrices.get(name)
        shape = matrices and (matrices.b.shape[0], matrices.a.shape[1])
        if shape != low.target.shape:
            raise ConfigError(
                f"the adapter is of another model: {name} has shape {low.target.shape}, the adapter"
                f" fits {shape}"
            )
    return dataclasses.replace(adapter, config=lora)


def _facts(planned: tuple[Mapping[str, Low], bool], name: str) -> str:
    """What a configuration makes beside a module."""
    lows, dora = planned
    if name not in lows:
        return "nothing"
    kind = "DoRA" if dora else "LoRA"
    return f"{kind} of rank {lows[name].rank}, scale {lows[name].scale:g}"


def taken(config: ModelConfig, params: Params, lora: LoraConfig) -> Adapter:
    """The adapter that `attached` parameters have. Raises ConfigError where they have none."""
    leaves, found = dict(flatten(params)), {}
    for module, low in plan(config, lora).items():
        leaf = leaves[low.target.path]
        while isinstance(leaf, Adapted) and leaf.site != low.target.site:
            leaf = leaf.weight
        if not isinstance(leaf, Adapted) or leaf.owner is not None:
            raise ConfigError(f"{low.target.path} has no adapter of its own in these parameters")
        found[module] = Matrices(leaf.a, leaf.b, leaf.magnitude)
    return Adapter(lora, found)


norms = jax.jit(Adapted.norms)  # one program for a shape, not one for each operation


def leaf_of(weight: Any, low: Low, matrices: Matrices, lora: LoraConfig) -> Adapted:
    """The leaf of a module with one adapter."""
    scale = jax.device_put(np.full(low.rank, low.scale, np.float32))
    site = low.target.site
    return Adapted(
        weight, *matrices[:2], scale, matrices.magnitude, site=site, dropout=lora.lora_dropout
    )
