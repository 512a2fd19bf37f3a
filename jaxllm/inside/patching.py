"""Activation patching: which sites carry what makes the output of one text differ from another's.

A sweep runs a text once per cell (a layer, tokens, a head), with the values of a source text in
that cell. One decision: cells are rows of one batch, which share the keys and values of all tokens
before the patched ones. So a sweep costs the suffix times the cells, and one program serves all
cells of a suffix.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv import KVCache, check_no_state, init_cache
from jaxllm.cache.operations import rewind
from jaxllm.errors import ConfigError, TokenError
from jaxllm.models.interventions import Add, Set
from jaxllm.models.site_inputs import check_edits, find_sites
from jaxllm.models.sites import SITES, WEIGHT_SITES, Edits, sites_to_record, split_name
from jaxllm.ops.padding import next_power_of_two, pad_rows
from jaxllm.runtime.progress import steps_bar
from jaxllm.runtime.validation import check_int
from jaxllm.steps import Segments, forward, prefill, run_model
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

Metric = Callable[[jax.Array], jax.Array]  # from a text's last logits [V] to one number
Edited = dict[str, Any]  # from sites' names to edits
_Run = tuple[jax.Array, dict[str, jax.Array]]  # logits and sites
_SHORTEST = 16  # tokens of a suffix: shorter ones would each compile
# What a layer adds to the stream, and the stream. No frozen site of the same layer comes after one.
SENDERS = (
    "attn.z", "attn.output", "attn_out", "mlp.output", "mlp_out",
    "resid_pre", "resid_mid", "resid_post",
)  # fmt: skip


class Patches(NamedTuple):
    """The value of a metric under each patch.

    Attributes:
        metric: float32 `[layers, positions]`, or `[layers, positions, heads]`.
        layers: The layers of the first axis.
        base: The metric of the text without a patch.
        source: The metric of the source text.
    """

    metric: np.ndarray
    layers: tuple[int, ...]
    base: float
    source: float

    @property
    def effect(self) -> np.ndarray:
        """The metric on a scale where 0 is the text's and 1 the source's, in the same shape.

        Raises:
            ConfigError: If both texts have the same metric.
        """
        if self.base == self.source:
            raise ConfigError(
                f"the metric of both texts is {self.base:g}, so patches have no scale"
            )
        return (self.metric - self.base) / (self.source - self.base)


def patch_sites(
    model: Model,
    params: Params,
    ids: Sequence[int],
    source_ids: Sequence[int],
    metric: Metric,
    site: str,
    *,
    layers: Iterable[int] | None = None,
    positions: Iterable[Any] | None = None,
    heads: Iterable[int] | None = None,
    batch_tokens: int = 1024,
    show_progress: bool | None = None,
) -> Patches:
    """Run a text once per layer, position and head, with a source's values there.

    Also called interchange intervention and causal tracing (Vig et al. 2020, arXiv 2004.12265; Meng
    et al. 2022, arXiv 2202.05262).

    Args:
        ids, source_ids: Token ids of two texts of one length, `[T]`.
        metric: A JAX function of the last token's logits `[V]`, such as a logit difference.
        site: A site of a layer, without the layer: "resid_post".
        layers: Default: all that have the site.
        positions: Each a position, or a list of positions to patch at once. Default: all, singly.
        heads: Heads to patch singly, at sites that have heads. Default: all at once.
        batch_tokens: Most tokens that run at once, which bounds memory.
        show_progress: None shows a progress bar on a terminal or in a notebook.

    Raises:
        ConfigError: for an unknown site, layer, position or head, and attention scores and weights.
        TokenError: for texts of different lengths, and what `prefill` refuses.
        CacheMismatchError: for models with a memory.
    """
    sweep = _Sweep(model, params, ids, source_ids, metric, site, layers)
    return sweep.run(_Suffix.run, positions, heads, batch_tokens, show_progress)


def patch_paths(
    model: Model,
    params: Params,
    ids: Sequence[int],
    source_ids: Sequence[int],
    metric: Metric,
    site: str,
    receivers: Mapping[str, Iterable[int] | None],
    *,
    freeze: Sequence[str] = ("attn.z", "mlp_out"),
    layers: Iterable[int] | None = None,
    positions: Iterable[Any] | None = None,
    heads: Iterable[int] | None = None,
    batch_tokens: int = 1024,
    show_progress: bool | None = None,
) -> Patches:
    """Run a text with only the paths from each sender to the receivers patched.

    A first pass patches the sender, keeps `freeze` at the text's own values, and reads the
    receivers; a second pass sets the receivers to what was read (Wang et al. 2022, arXiv
    2211.00593; Goldowsky-Dill et al. 2023, arXiv 2304.05969).

    Args:
        site: The senders' site, one of `SENDERS`; layers, positions and heads select the senders.
        receivers: From names of sites, such as "blocks.3.attn.q", to their heads; None: all.
        freeze: Sites that keep their values in all layers. Wang et al. let MLPs pass the change on:
            `("attn.z",)`.

    Other arguments, results and errors are those of `patch_sites`.
    """
    if not isinstance(receivers, Mapping) or not receivers:
        raise ConfigError(
            f"receivers must be a dict from site names to heads, got {receivers!r:.60}"
        )
    reads = {n: heads for key, heads in receivers.items() for n in find_sites(model.config, key)}
    frozen = [n for key in freeze for n in find_sites(model.config, f"blocks.*.{key}")]
    sweep = _Sweep(model, params, ids, source_ids, metric, site, layers, frozen)
    if (kind := split_name(sweep.names[0])[1]) not in SENDERS:
        raise ConfigError(f"a sender must be one of {', '.join(SENDERS)}: got {kind}")
    if unfit := [n for n in reads if n == "logits" or split_name(n)[1] in WEIGHT_SITES]:
        raise ConfigError(f"{unfit[0]} cannot be a receiver")

    def run(suffix: "_Suffix", edits: Edited) -> _Run:
        held: Edited = {name: [Set(suffix.cut(sweep.base_sites[name]))] for name in frozen}
        for name, edit in edits.items():
            held[name] = [*held.get(name, ()), edit]
        _, sites = suffix.run(held, tuple(reads))
        return suffix.run({name: Set(x, heads=reads[name]) for name, x in sites.items()})

    return sweep.run(run, positions, heads, batch_tokens, show_progress)


def attribute_patches(
    model: Model,
    params: Params,
    ids: Sequence[int],
    source_ids: Sequence[int],
    metric: Metric,
    site: str,
    *,
    layers: Iterable[int] | None = None,
) -> Patches:
    """Estimate `patch_sites` at all positions and heads by one gradient.

    The change of the metric is `(source - x) . d metric / d x` at each token, the first order of
    its Taylor series (Nanda 2023; Syed et al. 2023, arXiv 2310.10348): exact for small changes.
    Arguments and errors are those of `patch_sites`.
    """
    sweep = _Sweep(model, params, ids, source_ids, metric, site, layers)
    base, source = sweep.base_sites, sweep.source_sites

    def measure(change: dict[str, jax.Array]) -> jax.Array:
        edits = {name: Add(x) for name, x in change.items()}
        logits_BTV = forward(model, params, None, sweep.token_1T, edits=edits).logits
        return metric(logits_BTV[0, -1])

    slopes = jax.grad(measure)({name: jnp.zeros_like(base[name]) for name in sweep.names})
    changes = [
        ((source[name] - base[name]).astype(jnp.float32) * slopes[name])[0].sum(axis=-1)
        for name in sweep.names
    ]
    return sweep.patches(sweep.base + np.asarray(jnp.stack(changes), np.float32))


class _Suffix(NamedTuple):
    """The last tokens of a text, to run in rows after the cached ones.

    Attributes:
        start: The position of the first.
        segments: The cache of the tokens before it, of one row.
        token_BT: The tokens, the same in each row.
    """

    model: Model
    params: Params
    start: int
    segments: Segments
    token_BT: np.ndarray

    def cut(self, x_1T: jax.Array) -> jax.Array:
        """Return the part of a site's array at these tokens."""
        return x_1T[:, self.start :]

    def run(self, edits: Edited, names: tuple[str, ...] = ()) -> _Run:
        """Return the last logits `[B, V]` and sites `[B, T, ...]` under edits."""
        B, T = self.token_BT.shape
        position_BT = np.broadcast_to(np.arange(T, dtype=np.int32) + self.start, (B, T))
        checked = check_edits(self.model, edits, B, T, None)
        run: _Run = _run_rows(
            self.model, self.params, self.segments, self.token_BT, position_BT, checked, names
        )
        return run


@partial(jax.jit, static_argnums=(0, 6))
def _run_rows(
    model: Model,
    params: Params,
    segments: Segments,
    token_BT: jax.Array,
    position_BT: jax.Array,
    edits: Edits,
    names: tuple[str, ...],
) -> _Run:
    B, T = token_BT.shape
    trace, _, _ = run_model(
        model, params, segments, token_BT, position_BT, column_B=jnp.full(B, T - 1, jnp.int32),
        edits=edits, read=sites_to_record(names),
    )  # fmt: skip
    return trace.logits[:, 0], trace.read_sites(names)


class _Sweep:
    """Both texts, run once, and the sites to patch.

    Attributes:
        token_1T: The text.
        names: The sites' names, by layer.
        base_sites, source_sites: Their arrays `[1, T, ...]` in the text, which also has `kept`, and
            in the source.
        base, source: The metric of each.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        ids: Sequence[int],
        source_ids: Sequence[int],
        metric: Metric,
        site: str,
        layers: Iterable[int] | None,
        frozen: Sequence[str] = (),
    ) -> None:
        self._model, self._params, self._metric = model, params, metric
        self.token_1T, source_1T = (np.asarray(x)[None] for x in (ids, source_ids))
        if self.token_1T.shape != source_1T.shape:
            sizes = " and ".join(f"{x.size:,}" for x in (self.token_1T, source_1T))
            raise TokenError(f"a text and its source must have one length, got {sizes} tokens")
        which = ["*"] if layers is None else _as_list("layers", layers)
        sites = [n for layer in which for n in find_sites(model.config, f"blocks.{layer}.{site}")]
        self.names = tuple(dict.fromkeys(sites))
        kind, *others = {split_name(name)[1] for name in sites}
        if others or "S" in SITES[kind].axes:
            raise ConfigError(
                f"cannot patch {site}. Name one site of a layer that has an array for each token"
            )
        self.base, self.base_sites, self._cache = self._run(self.token_1T, (*self.names, *frozen))
        self.source, self.source_sites, _ = self._run(source_1T, self.names)

    def _run(
        self, token_1T: np.ndarray, names: Sequence[str]
    ) -> tuple[float, dict[str, jax.Array], KVCache]:
        cache = init_cache(self._model, 1, max(token_1T.size, 1))
        check_no_state(cache, "patching")
        out = prefill(self._model, self._params, cache, token_1T, read=names, donate=True)
        return float(self._measure(out.logits)[0]), out.sites, out.cache

    def _measure(self, logits_BV: jax.Array) -> np.ndarray:
        measured = jax.vmap(self._metric)(logits_BV)
        if measured.shape != logits_BV.shape[:1]:
            raise ConfigError(f"a metric must return one number, got an array {measured.shape[1:]}")
        return np.asarray(measured, np.float32)

    def patches(self, metric: np.ndarray) -> Patches:
        layers = tuple(split_name(name)[0] or 0 for name in self.names)
        return Patches(metric, layers, self.base, self.source)

    def run(
        self,
        run: Callable[[_Suffix, Edited], _Run],
        positions: Iterable[Any] | None,
        heads: Iterable[int] | None,
        batch_tokens: int,
        show_progress: bool | None,
    ) -> Patches:
        """Measure the logits `[B, V]` that `run` returns for the edits of each batch of cells."""
        batch_tokens = check_int("batch_tokens", batch_tokens, 1, error=ConfigError)
        at_Pn = _as_positions(positions, self.token_1T.size)
        head_H = np.arange(1) if heads is None else np.array(_as_list("heads", heads))
        shape = (len(self.names), len(at_Pn), len(head_H))
        metric_C = np.zeros(shape, np.float32).reshape(-1)
        layer_C, place_C, head_C = (x.reshape(-1) for x in np.indices(shape))
        batches = [*self._split(at_Pn, place_C, batch_tokens)]
        with steps_bar("patching", len(batches), show_progress) as advance:
            for suffix, cells in batches:
                at_Bn = at_Pn[place_C[cells]]
                edits: Edited = {}
                for layer, name in enumerate(self.names):
                    here_B1 = (layer_C[cells] == layer)[:, None]
                    edits[name] = Set(
                        suffix.cut(self.source_sites[name]),
                        positions=np.where(here_B1, at_Bn, -1),
                        heads=None if heads is None else head_H[head_C[cells]][:, None],
                    )
                metric_C[cells] = self._measure(run(suffix, edits)[0])
                advance()
        return self.patches(metric_C.reshape(shape[: 2 if heads is None else 3]))

    def _split(
        self, at_Pn: np.ndarray, place_C: np.ndarray, batch_tokens: int
    ) -> Iterator[tuple[_Suffix, np.ndarray]]:
        """Yield batches: the suffix to run, and the numbers of its rows' cells.

        Suffixes have a power of two of tokens, or all, so that few programs are compiled. The last
        cell of a suffix fills its last batch.
        """
        total = self.token_1T.size
        first_P = np.where(at_Pn < 0, total, at_Pn).min(axis=1)
        width_P = np.array(
            [min(next_power_of_two(total - p, _SHORTEST), total) for p in first_P.tolist()]
        )
        for width in np.unique(width_P):
            cells = np.flatnonzero(width_P[place_C] == width)
            rows = min(max(batch_tokens // int(width), 1), len(cells))
            start = total - int(width)
            suffix = _Suffix(
                self._model,
                self._params,
                start,
                rewind(self._cache, to=start).segments if start else (),
                np.repeat(self.token_1T[:, start:], rows, axis=0).astype(np.int32),
            )
            padding = np.repeat(cells[-1:], -len(cells) % rows)
            for batch in np.concatenate([cells, padding]).reshape(-1, rows):
                yield suffix, batch


def _as_positions(positions: Iterable[Any] | None, total: int) -> np.ndarray:
    """Return lists of positions, padded with -1, int32 `[P, n]`. Raises ConfigError."""
    chosen = range(total) if positions is None else _as_list("positions", positions)
    lists = [_as_list("positions", p) if isinstance(p, Iterable) else [p] for p in chosen]
    for at in (at for places in lists for at in places):
        check_int("a position", at, 0, total - 1, ConfigError)
    return pad_rows(lists, fill=-1)


def _as_list(name: str, x: Any) -> list[Any]:
    if not isinstance(x, Iterable) or not (items := [*x]):
        raise ConfigError(f"{name} must be a list of integers, got {x!r:.60}")
    return items
