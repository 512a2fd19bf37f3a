"""Attach an adapter to parameters for training, extract it again, or merge it into the weights.

A new adapter does not change the model's output: one of its two matrices is zero.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import models
from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.adapters.targets import HEAD, LoraSpec, resolve_targets
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.runtime.validation import check_dtype
from jaxllm.weights.formats import as_format
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.lora import LoraWeight


class LoraMatrices(NamedTuple):
    """LoRA matrices of one module, as in `LoraWeight`: a `[K, I]`, b `[O, K]`, DoRA's magnitude."""

    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter: its configuration, and its matrices by our module paths."""

    config: LoraConfig
    matrices: Mapping[str, LoraMatrices]

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(x.size for m in self.matrices.values() for x in m if x is not None)


def attach_new_lora(
    config: ModelConfig, params: Params, lora: LoraConfig, key: jax.Array, *, dtype: str = "float32"
) -> Params:
    """Attach a new adapter to parameters, for training. key: random key of the initialization.

    Untargeted weights, and the base weights inside targeted ones, are the same objects as before.
    Raises ConfigError for targets that do not exist.
    """
    return attach_adapter(config, params, init_adapter(config, params, lora, key, dtype=dtype))


def init_adapter(
    config: ModelConfig, params: Params, lora: LoraConfig, key: jax.Array, *, dtype: str = "float32"
) -> Adapter:
    """Return a new adapter that does not change the model's output (see `LoraConfig`).

    dtype: dtype of the matrices, as for `jaxllm.load`. params: base weights, which initialize
    DoRA's magnitudes. Raises ConfigError if these weights are missing.
    """
    dtype = check_dtype("an adapter's dtype", dtype)
    weights = dict(flatten(params))
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).reshape(-1))
    adapted = {}
    for module, low in resolve_targets(config, lora).items():
        (rows, columns), rank, array_type = low.target.shape, low.rank, DTYPES[dtype]
        if low.target.site == "rows":
            a_KI = rng.standard_normal((rank, columns))
        elif lora.init_lora_weights == "gaussian":
            a_KI = rng.standard_normal((rank, columns)) / rank
        else:
            a_KI = rng.uniform(-1.0, 1.0, (rank, columns)) / columns**0.5
        a_KI, b_OK = jax.device_put((a_KI.astype(array_type), np.zeros((rows, rank), array_type)))
        matrices = LoraMatrices(a_KI, b_OK, None)
        if lora.use_dora:
            weight = weights.get(low.target.path)
            if weight is None or weight.shape != low.target.shape:  # in a pipeline's stages
                raise ConfigError(
                    f"DoRA needs the row norms of {low.target.path}, which these parameters do not"
                    " contain as a separate weight. Train LoRA, or use a mesh with stage=1"
                )
            leaf = make_leaf(weight, low, matrices, lora)
            matrices = matrices._replace(magnitude=row_norms(leaf))
        adapted[module] = matrices
    return Adapter(lora, adapted)


def resolve_adapter(config: ModelConfig, adapter: Adapter) -> dict[str, LoraSpec]:
    """Return rank and scale of an adapter's modules, by our module paths.

    Raises ConfigError, naming what differs, for an adapter of another model.
    """
    specs, held = resolve_targets(config, adapter.config), adapter.matrices
    differ = [f"it has nothing for {name}" for name in specs if name not in held]
    differ += [f"its {name} is not in the model" for name in held if name not in specs]
    for name, spec in specs.items():
        if name in held and (fits := (len(held[name].b), held[name].a.shape[1])) != (
            shape := spec.target.shape
        ):
            differ.append(f"{name} has shape {shape}, the adapter fits {fits}")
    if differ:
        raise ConfigError(
            f"the adapter belongs to another model: {differ[0]} ({len(differ)} modules differ)."
            " Use it with the configuration that it was made or read for"
        )
    return specs


def check_params(config: ModelConfig, params: Params) -> None:
    """Raise ConfigError, naming what differs, for parameters of another model."""
    shapes = {path: x.shape for path, x in flatten(models.param_shapes(models.build(config)))}
    own_shapes = {path: tuple(leaf.shape) for path, leaf in flatten(params)}
    differ = [path for path in {**shapes, **own_shapes} if shapes.get(path) != own_shapes.get(path)]
    if differ:
        raise ConfigError(
            f"the parameters belong to another model than this {config.model_type} configuration:"
            f" {differ[0]} is {own_shapes.get(differ[0], 'missing')}, expected"
            f" {shapes.get(differ[0], 'nothing')}"
        )


def attach_adapter(config: ModelConfig, params: Params, adapter: Adapter) -> Params:
    """Attach an adapter to parameters, for training.

    Raises ConfigError if they have one already, and for an adapter of another model.
    """
    return map_leaves(make_attacher(config, adapter), params)


def make_attacher(config: ModelConfig, adapter: Adapter) -> Callable[[str, Any], Any]:
    """Return a function (path, weight) that wraps targeted weights and passes others through.

    It raises ConfigError for a weight that already has an adapter. Raises ConfigError for an
    adapter of another model.
    """
    specs = resolve_adapter(config, adapter)

    def attach_leaf(path: str, weight: Any) -> Any:
        if isinstance(weight, LoraWeight):
            raise ConfigError(f"{path} has an adapter already: train it, or merge it first")
        for module, spec in specs.items():
            if spec.target.path == path:
                weight = make_leaf(weight, spec, adapter.matrices[module], adapter.config)
        return weight

    return attach_leaf


def with_config(config: ModelConfig, adapter: Adapter, lora: LoraConfig) -> Adapter:
    """Return the adapter with another, equivalent configuration.

    Raises:
        ConfigError: if the configurations differ in modules, ranks, scales or DoRA, or the adapter
            is one of another model.
    """
    if not isinstance(adapter, Adapter):
        raise ConfigError(f"an adapter must be an Adapter (read_adapter), got {adapter!r:.60}")
    if not isinstance(lora, LoraConfig):
        raise ConfigError(f"an adapter's configuration must be a LoraConfig, got {lora!r:.60}")
    own_targets, wanted = ((resolve_targets(config, c), c.use_dora) for c in (adapter.config, lora))
    differ = [
        f"{name}: the adapter has {_describe(own_targets, name)}, the configuration"
        f" {_describe(wanted, name)}"
        for name in sorted(own_targets[0].keys() | wanted[0].keys())
        if _describe(own_targets, name) != _describe(wanted, name)
    ]
    if differ:
        raise ConfigError(
            f"the configurations differ in {len(differ)} modules. {differ[0]}. Use the adapter's"
            " own configuration (adapter.config)"
        )
    resolve_adapter(config, adapter)
    return dataclasses.replace(adapter, config=lora)


def _describe(planned: tuple[Mapping[str, LoraSpec], bool], name: str) -> str:
    """Describe a configuration's adapter of one module."""
    lows, dora = planned
    if name not in lows:
        return "nothing"
    kind = "DoRA" if dora else "LoRA"
    return f"{kind} of rank {lows[name].rank}, scale {lows[name].scale:g}"


def extract_adapter(config: ModelConfig, params: Params, lora: LoraConfig) -> Adapter:
    """Extract the adapter from parameters.

    Raises ConfigError if they do not have it, or belong to another model.
    """
    leaves, extracted = dict(flatten(params)), {}
    for module, low in resolve_targets(config, lora).items():
        leaf = leaves.get(low.target.path)
        while isinstance(leaf, LoraWeight) and leaf.site != low.target.site:
            leaf = leaf.weight
        if not isinstance(leaf, LoraWeight) or leaf.owner is not None:
            raise ConfigError(f"{low.target.path} has no trainable adapter in these parameters")
        extracted[module] = LoraMatrices(leaf.a, leaf.b, leaf.magnitude)
    adapter = Adapter(lora, extracted)
    resolve_adapter(config, adapter)  # its shapes
    return adapter


row_norms = jax.jit(LoraWeight.norms)  # one program per shape, not one per operation


def make_leaf(weight: Any, spec: LoraSpec, matrices: LoraMatrices, lora: LoraConfig) -> LoraWeight:
    """Wrap a module's weight with an adapter."""
    scale = jax.device_put(np.full(spec.rank, spec.scale, np.float32))
    site = spec.target.site
    return LoraWeight(
        weight, *matrices[:2], scale, matrices.magnitude, site=site, dropout=lora.lora_dropout
    )


def merge_adapter(
    config: ModelConfig, params: Params, format: str = "float32"
) -> tuple[ModelConfig, Params]:
    """Merge the adapter into the weights; return the configuration and parameters.

    format: format of the merged matrices (any of `weights.formats`); those narrower than float32
    round the sum, so the output changes slightly. Other weights keep their format. A tied embedding
    with an adapter is untied, because its two uses differ.

    Raises ConfigError if there is no adapter, or if there are several and none is selected, and for
    parameters of another model.
    """
    check_params(config, params)
    leaves = dict(flatten(params))
    if not any(isinstance(leaf, LoraWeight) for leaf in leaves.values()):
        raise ConfigError("no adapter to merge: the parameters have none attached")
    tokens = f"{models.get_family(config.model_type).token_table}.weight"
    untied = config.tie_word_embeddings and isinstance(leaves[tokens], LoraWeight)

    def merge_leaf(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, LoraWeight):
            return leaf
        if leaf.idle:
            raise ConfigError("several adapters are attached. Choose the one to merge")
        return as_format(leaf.to_dense(jnp.float32), format)

    def merge_site(leaf: Any, site: str) -> Any:
        """Merge a tied embedding for one of its two uses."""
        while isinstance(leaf, LoraWeight) and leaf.site != site:
            leaf = leaf.weight
        return merge_leaf(tokens, leaf)

    if not untied:
        return config, map_leaves(merge_leaf, params)
    rest = {path: node for path, node in params.items() if f"{path}.weight" != tokens}
    changed = map_leaves(merge_leaf, rest)
    tables = {tokens.removesuffix(".weight"): "rows", HEAD: "head"}
    changed |= {m: {"weight": merge_site(leaves[tokens], site)} for m, site in tables.items()}
    config = dataclasses.replace(config, tie_word_embeddings=False)
    order = models.param_shapes(models.build(config))
    return config, {name: changed[name] for name in order}
