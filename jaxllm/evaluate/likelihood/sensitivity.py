"""Which parts of a model suffer most from a lower precision: one group lowered at a time.

A variant's weights are quantized and run as the numbers that they then stand for, so that all
variants, whatever their formats, share the programs of the model that they are compared with.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Loader
from jaxllm.evaluate.likelihood.divergence import (
    Differences,
    Divergence,
    counted,
    differences,
    joined,
)
from jaxllm.evaluate.likelihood.score import check_loader, logits
from jaxllm.files import writing
from jaxllm.inputs import check_model
from jaxllm.progress import steps_bar
from jaxllm.weights.formats import dense, parse
from jaxllm.weights.paths import Params, Placed, among_of, first_match, flatten, map_leaves
from jaxllm.weights.quantize import quantize

BY = ("layer", "kind", "module")
_IN_LAYER = re.compile(r"(\w+)\.(\d+)\.(.+)\.weight")


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What lowering one group of matrices does.

    regex: over whole parameter paths, for the rules of `quantize`. divergence: from the unchanged
    model. bytes_before, bytes_after: of the group.
    """

    group: str
    regex: str
    divergence: Divergence
    bytes_before: int
    bytes_after: int


def groups(params: Params, by: str) -> dict[str, str]:
    """The groups of matrices, in the order of the model: `{name: regex over whole paths}`.

    by: "layer" (`layers.3`), "kind" (`mlp.down_proj` of all layers) or "module" (each matrix). What
    is in no layer (embeddings, head) is a group of its own. Raises ConfigError for another `by`.
    """
    if by not in BY:
        raise ConfigError(f"by must be one of {', '.join(BY)}, got {by!r}")
    found = {}
    for path, leaf in flatten(params):
        if leaf.ndim != 2:
            continue
        module, inside = path.removesuffix(".weight"), _IN_LAYER.fullmatch(path)
        if by == "layer" and inside:
            found[f"{inside[1]}.{inside[2]}"] = rf"{inside[1]}\.{inside[2]}\..*"
        elif by == "kind" and inside:
            found[inside[3]] = rf"{inside[1]}\.\d+\.{re.escape(inside[3])}\.weight"
        else:
            found[module] = re.escape(path)
    return found


def sensitivity(
    model: nn.Module,
    params: Params,
    loader: Loader,
    format: str,
    *,
    by: str = "layer",
    show_progress: bool | None = None,
) -> list[Sensitivity]:
    """Lower each group of matrices to `format`, by itself; the worst (by mean KL) comes first.

    format: a name in `weights.formats`. params: not quantized. Products run in float32 where
    matrices are concerned, so that the numbers of a format are not rounded once more.

    Memory: float32 weights, one group of them twice, and the float32 logits of the loader's whole
    text, `4 * tokens * V` bytes; of a model on a mesh the weights are on each host, too. Raises
    ConfigError for an unknown format or `by`, else what `perplexity` raises.
    """
    parse(format)
    check_model(model, params)
    check_loader(model, loader)
    many = model if isinstance(model, Placed) else None
    params = params if many is None else many.whole(params)
    names = groups(params, by)
    wide = map_leaves(lambda _, leaf: _wide(leaf), params)

    def run(params: Params) -> Iterator[jax.Array]:
        """The logits of each batch, of parameters that are whole."""
        there = params if many is None else many.shared(params)
        for batch in batches:
            yield _logits(model, there, batch.token_BT, batch.position_BT)

    batches = [batch for batch, _ in loader.batches()]
    found = []
    with steps_bar(f"{format}, one {by} at a time", len(names) + 1, show_progress) as done:
        references = list(run(wide))
        done()
        for name, regex in names.items():
            variant, before, after = _lowered(params, wide, regex, format)
            parts: list[Differences] = []
            for batch, p_BTV, q_BTV in zip(batches, references, run(variant), strict=True):
                rows = among_of(model, len(batch.token_BT))
                each = _differences(p_BTV, q_BTV, batch.token_BT, rows)
                parts.append(counted(each, batch))
            found.append(Sensitivity(name, regex, Divergence.of(joined(parts)), before, after))
            done()
    return sorted(found, key=lambda s: -s.divergence.kl.mean)


def plot(rows: list[Sensitivity], path: Path, title: str) -> None:
    """Write a bar chart of mean KL divergence, with its standard error, as a PNG file.

    Raises ConfigError where matplotlib is not installed, CheckpointError where the file cannot be
    written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a plot needs matplotlib: pip install 'jaxllm[notebooks]', or leave out --plot"
        ) from None
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names, means = [s.group for s in rows], [s.divergence.kl.mean for s in rows]
    axes.barh(names, means, xerr=[s.divergence.kl.error for s in rows], color="tab:blue")
    axes.set(xlabel="mean KL divergence (nats a token)", title=title)
    axes.invert_yaxis()
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def _wide(leaf: Any) -> Any:
    return jnp.asarray(dense(leaf, jnp.float32)) if leaf.ndim >= 2 else leaf


def _lowered(params: Params, wide: Params, regex: str, format: str) -> tuple[Params, int, int]:
    """The float32 weights with one group as `format` keeps it; its bytes before and after."""
    old, quantized = dict(flatten(params)), dict(flatten(quantize(params, [(regex, format)])))
    changed = [p for p, leaf in old.items() if leaf.ndim >= 2 and first_match([(regex, True)], p)]
    variant = map_leaves(lambda p, leaf: _wide(quantized[p]) if p in changed else leaf, wide)
    before, after = (sum(int(leaves[p].nbytes) for p in changed) for leaves in (old, quantized))
    return variant, before, after


# Two programs, the first of which the reference has compiled already.
_logits = jax.jit(logits, static_argnums=0)


_differences = jax.jit(differences, static_argnums=3)
