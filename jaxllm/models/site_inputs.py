"""Validation of `read=` and `edits=` on the host: names, globs, shapes, and the cache's own edits.

A cache holds keys and values, which depend on the edits under which they were computed. So it
carries a fingerprint of them for each row (`KVCache.edits_B`), and is refused under others.
"""

import fnmatch
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import jax
import numpy as np

from jaxllm.cache.kv import KVCache, check_usable, merge_labels
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, suggest_name
from jaxllm.models import get_family
from jaxllm.models.inputs import array_namespace
from jaxllm.models.interventions import as_edits
from jaxllm.models.sites import (
    LAYER_SITES,
    MODEL_SITES,
    NO_EDITS,
    SITES,
    Edits,
    expand_alias,
    split_name,
)
from jaxllm.weights.model import Model


@cache
def site_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the full names of all sites of a model, in order of computation."""
    has_table = get_family(config.model_type).position_table is not None
    names = ["embed", "pos_embed"] if has_table else ["embed"]
    for layer in range(config.num_hidden_layers):
        names += [f"blocks.{layer}.{site}" for site in layer_sites(config, layer)]
    return (*names, "final_norm", "logits")


def layer_sites(config: ModelConfig, layer: int) -> list[str]:
    """Return the sites of a layer, without its number."""
    moe: Any = config
    mixes = is_mixture(config, layer)
    absent = set() if mixes else {"router"}
    if mixes and not moe.shared_expert_size:
        absent = {"mlp.pre", "mlp.post"}
    if not config.value_heads(layer):
        absent |= {"attn.v"}
    if not config.kv_heads(layer):
        shares = config.kv_source(layer) != layer
        attention = {site for site in LAYER_SITES if site.startswith("attn.")} - {"attn.output"}
        absent |= {"attn.k", "attn.v", "attn.rot_k"} if shares else attention
    return [site for site in LAYER_SITES if site not in absent]


def is_mixture(config: Any, layer: int) -> bool:
    """Return whether a layer is a mixture of experts."""
    return get_family(config.model_type).router is not None and config.is_moe_layer(layer)


def find_sites(config: ModelConfig, pattern: Any) -> tuple[str, ...]:
    """Return the sites that a name, an alias or a glob selects, in order of computation.

    Raises ConfigError if there are none.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"a site is a name such as blocks.0.resid_post, got {pattern!r:.60}")
    name_pattern, names = expand_alias(pattern), site_names(config)
    if matches := tuple(fnmatch.filter(names, name_pattern)):
        return matches
    block, _, site = name_pattern.removeprefix("blocks.").partition(".")
    if name_pattern.startswith("blocks.") and site in LAYER_SITES:
        if block.isdigit() and int(block) >= config.num_hidden_layers:
            raise ConfigError(
                f"site {pattern}: layer {block} is out of range, expected 0 to"
                f" {config.num_hidden_layers - 1}"
            )
        raise ConfigError(
            f"site {pattern}: this {config.model_type} model computes no {site} there"
        )
    if name_pattern in MODEL_SITES:
        raise ConfigError(f"site {pattern}: a {config.model_type} model computes no {name_pattern}")
    raise ConfigError(f"unknown site {pattern!r:.80}{suggest_name(name_pattern, names)}")


def check_read(
    model: Model, read: Any, refused: Sequence[str] = (), why: str = ""
) -> tuple[str, ...]:
    """Return the sites to read.

    read: names, aliases and globs. refused: sites without layers that cannot be read here; `why`
    is the message, with {} for the name. Raises ConfigError.
    """
    if isinstance(read, str) or not isinstance(read, Iterable):
        raise ConfigError(f"read must be a list of site names, got {read!r:.60}")
    sites = (name for pattern in read for name in find_sites(model.config, pattern))
    names = tuple(dict.fromkeys(sites))
    if unfit := [name for name in names if split_name(name)[1] in refused]:
        raise ConfigError(why.format(unfit[0]))
    model.check_sites(read=names)
    return names


def check_edits(model: Model, edits: Any, rows: int, tokens: int, slots: int | None) -> Edits:
    """Return the edits of a call, fitted to its arrays.

    Args:
        edits: A mapping from names, aliases and globs to edits or functions, or to lists of them;
            None: no edits.
        tokens: New tokens of each row: 1 if a call runs them in pieces.
        slots: Cache slots and new tokens; None if they change during the call.

    Raises:
        ConfigError: for unknown sites and for values that do not fit them.
    """
    if edits is None or isinstance(edits, Edits):
        return NO_EDITS if edits is None else edits
    if not isinstance(edits, Mapping):
        raise ConfigError(f"edits must be a dict from site names to edits, got {edits!r:.60}")
    sites, fitted = list[tuple[str, ...]](), list[Any]()
    for pattern, edit_list in edits.items():
        groups = dict[tuple[str, tuple[int, ...]], list[str]]()  # by axes and their sizes
        for name in find_sites(model.config, pattern):
            site = SITES[split_name(name)[1]]
            shape = _site_shape(model.config, name, B=rows, T=tokens, S=slots or 1)
            groups.setdefault((site.axes, shape), []).append(name)
            if site.read_only:
                raise ConfigError(
                    f"site {name} is computed for reading only. Edit attn.z or attn_out instead"
                )
        for edit in as_edits(edit_list):
            for (axes, shape), names in groups.items():
                try:
                    fitted.append(edit.fit(axes, shape))
                except ConfigError as error:
                    raise ConfigError(f"{type(edit).__name__} at {pattern}: {error}") from None
                sites.append(tuple(names))
    checked = Edits(tuple(sites), tuple(fitted))
    model.check_sites(edited=tuple(name for names in sites for name in names))
    return checked


def stack_rows(by_row: Mapping[int, Edits], rows: int) -> Edits:
    """Return the edits of a batch whose rows have their own, each checked for one row.

    Rows with edits of one structure share a program; the others' edits are added to it, masked.
    """
    kinds = dict[str, dict[int, Edits]]()
    for row, edits in by_row.items():
        switched = [
            x if x.rows is not None else x.replace(rows=np.ones(1, bool)) for x in edits.edits
        ]
        edits = edits.replace(edits=tuple(switched))
        leaves, structure = jax.tree.flatten(edits)
        kinds.setdefault(f"{structure} {[x.shape for x in leaves]}", {})[row] = edits
    sites, stacked = list[tuple[str, ...]](), list[Any]()
    for _, group in sorted(kinds.items()):
        first, *_ = group.values()
        sites += first.sites
        place = partial(_place_rows, rows, np.array([*group]))
        stacked += jax.tree.map(place, *(edits.edits for edits in group.values()))
    return Edits(tuple(sites), tuple(stacked))


def _place_rows(rows: int, at: np.ndarray, *leaves: Any) -> jax.Array:
    """Return arrays `[1, ...]` as one `[rows, ...]`, at these rows; zeros elsewhere."""
    x = np.zeros((rows, *leaves[0].shape[1:]), leaves[0].dtype)
    x[at] = np.concatenate([np.asarray(leaf) for leaf in leaves])
    return jax.device_put(x)


def _site_shape(config: ModelConfig, name: str, **sizes: int) -> tuple[int, ...]:
    """Return the shape of the array at a site. sizes: of B, T and S."""
    (layer, site), moe = split_name(name), cast(Any, config)
    mixes = layer is not None and is_mixture(config, layer)
    head_size = config.value_dim if site == "attn.z" else config.layer_head_dim
    sizes |= {
        "D": config.hidden_size,
        "N": config.num_attention_heads,
        "K": config.kv_heads(layer or 0),
        "H": head_size(layer or 0),
        "F": moe.shared_expert_size if mixes else config.mlp_size(layer or 0),
        "V": config.vocab_size,
        "E": getattr(config, "num_experts", 1),
    }
    return tuple(sizes[axis] for axis in SITES[site].axes)


def fingerprint(edits: Edits, rows: int) -> Any:
    """Return a hash of the sites and numbers of edits for each row, uint32 `[B]`; None for none.

    It is never 0, the value of rows without edits in a cache where others have some. In a compiled
    program it is traced. Functions count by name.
    """
    if not edits.edits:
        return None
    leaves, structure = jax.tree.flatten(edits)
    xp = array_namespace(*leaves)
    hash_B = xp.full((rows,), zlib.crc32(repr((edits.sites, _names(structure))).encode()), "uint32")
    for leaf in leaves:
        x = xp.asarray(leaf)
        is_exact = x.dtype == bool or xp.issubdtype(x.dtype, np.integer)
        bits = x.astype("uint32") if is_exact else x.astype("float32").view("uint32")
        bits = bits.reshape(bits.shape[0] if bits.shape and bits.shape[0] in (1, rows) else 1, -1)
        place = xp.arange(1, bits.shape[1] + 1, dtype="uint32")[None] * np.uint32(0x9E3779B1)
        hash_B = _mix(hash_B ^ _mix(bits ^ place).sum(axis=1, dtype="uint32"))
    return hash_B | np.uint32(1)


def _mix(x: Any) -> Any:
    """Return hashes of 32-bit numbers (the finalizer of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _names(structure: Any) -> list[str]:
    """Return the names of the types and functions in a pytree structure."""
    node = structure.node_data()
    names = [] if node is None else [node[0].__name__, *_function_names(node[1])]
    return names + [name for child in structure.children() for name in _names(child)]


def _function_names(data: Any) -> list[str]:
    return [getattr(x, "__qualname__", "") for x in (data if isinstance(data, tuple) else (data,))]


def label_cache(cache: KVCache, edits: Edits) -> KVCache:
    """Return the cache marked with the edits of a call that extends it.

    An unmarked cache takes any edits: they begin with the next token. Raises CacheMismatchError if
    its keys were computed under others.
    """
    return cache.replace(edits_B=merge_labels(cache.edits_B, fingerprint(edits, cache.batch)))


def assign_edits(model: Model, cache: KVCache, edits: Any = None) -> KVCache:
    """Return the cache declared to be of these edits; None: of none.

    For a cache whose edited tokens were culled, or one whose keys do not depend on the edits that
    follow. No key changes.

    Raises:
        ConfigError: As `forward` does.
    """
    check_usable(cache)
    checked = check_edits(model, edits, cache.batch, 1, None)
    labelled: KVCache = cache.replace(edits_B=fingerprint(checked, cache.batch))
    return labelled
