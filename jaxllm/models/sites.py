"""Sites: the named places of a model whose arrays can be read and edited.

A site of a layer is named `blocks.L.SITE`, such as `blocks.3.attn.pattern`. A block makes one
`SiteRecorder`, calls it at each of its sites, and returns its record: there is no state outside of
the block, so remat, scan and pipelines run it as they do any function.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
from flax import struct

from jaxllm.models.interventions import Edit


class Site(NamedTuple):
    """The value at a site.

    Attributes:
        axes: B rows, T new tokens, S all cache slots and then the new tokens, D model, N query
            heads, K key/value heads, H head, F hidden channels of the MLP, E experts, V vocabulary.
        alias: TransformerLens' name; None if it has no site with these numbers.
        read_only: Whether the array is computed for reading alone.
    """

    axes: str
    alias: str | None = None
    read_only: bool = False


LAYER_SITES: dict[str, Site] = {
    "resid_pre": Site("BTD", "hook_resid_pre"),
    "attn_norm": Site("BTD"),
    "attn.q": Site("BTNH", "attn.hook_q"),
    "attn.k": Site("BTKH", "attn.hook_k"),
    "attn.v": Site("BTKH", "attn.hook_v"),
    "attn.rot_q": Site("BTNH", "attn.hook_rot_q"),
    "attn.rot_k": Site("BTKH", "attn.hook_rot_k"),
    "attn.scores": Site("BNTS", "attn.hook_attn_scores"),
    "attn.pattern": Site("BNTS", "attn.hook_pattern"),
    "attn.z": Site("BTNH", "attn.hook_z"),
    "attn.result": Site("BTND", "attn.hook_result", read_only=True),
    "attn.output": Site("BTD"),
    "attn_out": Site("BTD", "hook_attn_out"),
    "resid_mid": Site("BTD", "hook_resid_mid"),
    "mlp_norm": Site("BTD"),
    "mlp.pre": Site("BTF", "mlp.hook_pre"),
    "mlp.post": Site("BTF", "mlp.hook_post"),
    "router": Site("BTE"),
    "mlp.output": Site("BTD"),
    "mlp_out": Site("BTD", "hook_mlp_out"),
    "resid_post": Site("BTD", "hook_resid_post"),
}
MODEL_SITES: dict[str, Site] = {
    "embed": Site("BTD", "hook_embed"),
    "pos_embed": Site("BTD", "hook_pos_embed"),
    "final_norm": Site("BTD"),
    "logits": Site("BTV"),
}
SITES = LAYER_SITES | MODEL_SITES
WEIGHT_SITES = ("attn.scores", "attn.pattern")
# Between linears, where `ParallelHooks.gather_tokens` has not gathered the tokens.
STREAM_SITES = frozenset(
    name for name, site in SITES.items() if site.axes == "BTD" and not name.endswith("_norm")
)


class Edits(struct.PyTreeNode):
    """Checked edits, in order of application (`site_inputs.check_edits`).

    Attributes:
        sites: The names of the sites of each edit, in full. Static.
        edits: Each fits all of its sites (`Edit.fit`).
    """

    sites: tuple[tuple[str, ...], ...] = struct.field(pytree_node=False, default=())
    edits: tuple[Edit, ...] = ()

    def at(self, name: str) -> list[Edit]:
        """Return the edits of one site."""
        return [edit for sites, edit in zip(self.sites, self.edits, strict=True) if name in sites]


NO_EDITS = Edits()


class SiteRecorder:
    """Visits the sites of one layer, or of the model itself: applies edits, and records.

    Attributes:
        recorded: The arrays of the sites that are read, after edits.
    """

    def __init__(
        self, layer: int | None, position_BT: jax.Array, edits: Edits, read: frozenset[str]
    ) -> None:
        self._prefix = "" if layer is None else f"blocks.{layer}."
        self._position_BT, self._edits, self._read = position_BT, edits, read
        self.recorded: dict[str, jax.Array] = {}

    def __call__(self, site: str, x: jax.Array, position_BT: jax.Array | None = None) -> jax.Array:
        """Return the array of a site, edited.

        position_BT: of the tokens; None: all new ones.
        """
        at_BT = self._position_BT if position_BT is None else position_BT
        for edit in self._edits.at(self._prefix + site):
            x = edit.apply(x, SITES[site].axes, at_BT)
        if site in self._read:
            self.recorded[site] = x
        return x

    def reads(self, *sites: str) -> bool:
        """Return whether any of these sites is read."""
        return not self._read.isdisjoint(sites)

    def edits(self, *sites: str) -> bool:
        """Return whether any of these sites is edited."""
        return any(self._edits.at(self._prefix + site) for site in sites)

    def touches(self, *sites: str) -> bool:
        """Return whether any of these sites is read or edited."""
        return self.reads(*sites) or self.edits(*sites)


def split_name(name: str) -> tuple[int | None, str]:
    """Return the layer and the site of a full name; None for a site of the model itself."""
    if name in MODEL_SITES:
        return None, name
    _, layer, site = name.split(".", 2)
    return int(layer), site


def sites_to_record(names: Iterable[str]) -> frozenset[str]:
    """Return the names without their layers, except for the sites that every trace has."""
    return frozenset(split_name(name)[1] for name in names) - {"final_norm", "logits"}


def expand_alias(pattern: str) -> str:
    """Replace TransformerLens' name at the end of a pattern by ours."""
    for site_name, site in SITES.items():
        if site.alias is not None and f".{pattern}".endswith(f".{site.alias}"):
            return pattern.removesuffix(site.alias) + site_name
    return pattern
