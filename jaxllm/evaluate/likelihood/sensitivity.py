"""Sensitivity of parts of a model to quantization: quantizes one group of matrices at a time.

A variant's weights are quantized and dequantized, so that all variants, whatever their format, run
the compiled programs of the reference.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import Loader
from jaxllm.evaluate.likelihood.divergence import Divergence, logits_divergence, run_logits
from jaxllm.evaluate.likelihood.score import check_loader
from jaxllm.files.plots import check_plot, save_figure
from jaxllm.models.inputs import check_model
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.formats import parse_format, to_dense
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, first_match, flatten, map_leaves
from jaxllm.weights.quantize import quantize

GROUPINGS = ("layer", "kind", "module")
_IN_LAYER = re.compile(r"(\w+)\.(\d+)\.(.+)\.weight")


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The effect of quantizing one group of matrices.

    regex: over whole parameter paths, for the rules of `quantize`. divergence: from the original
    model. bytes_before, bytes_after: size of the group.
    """

    group: str
    regex: str
    divergence: Divergence
    bytes_before: int
    bytes_after: int


def matrix_groups(params: Params, group_by: str) -> dict[str, str]:
    """Return the groups of matrices in the model's order: `{name: regex over whole paths}`.

    group_by: "layer" (`layers.3`), "kind" (`mlp.down_proj` of all layers) or "module" (each
    matrix). Embeddings and head, which are in no layer, are separate groups. Raises ConfigError for
    any other `group_by`.
    """
    if group_by not in GROUPINGS:
        raise ConfigError(f"by must be one of {', '.join(GROUPINGS)}, got {group_by!r}")
    groups = {}
    for path, leaf in flatten(params):
        if leaf.ndim != 2:
            continue
        module, inside = path.removesuffix(".weight"), _IN_LAYER.fullmatch(path)
        if group_by == "layer" and inside:
            groups[f"{inside[1]}.{inside[2]}"] = rf"{inside[1]}\.{inside[2]}\..*"
        elif group_by == "kind" and inside:
            groups[inside[3]] = rf"{inside[1]}\.\d+\.{re.escape(inside[3])}\.weight"
        else:
            groups[module] = re.escape(path)
    return groups


def measure_sensitivity(
    model: Model,
    params: Params,
    loader: Loader,
    format: str,
    *,
    group_by: str = "layer",
) -> list[Sensitivity]:
    """Quantize each group of matrices in turn, and sort the groups by mean KL, worst first.

    Matrices are float32 in these runs, so that dequantized values are not rounded again.

    Memory: float32 weights, one group of them twice, and the float32 logits of the loader's whole
    text, `4 * tokens * V` bytes; for a model on a mesh, also the weights on each host.

    Args:
        params: Not quantized.
        format: A name in `weights.formats`.
        group_by: As for `matrix_groups`.

    Raises:
        ConfigError: For an unknown format or `group_by`; other errors as in `perplexity`.
    """
    parse_format(format)
    check_model(model, params)
    check_loader(model, loader)
    params = model.gather(params)
    names = matrix_groups(params, group_by)
    wide = map_leaves(lambda _, leaf: _to_float32(leaf), params)

    def run_batches(params: Params) -> Iterator[jax.Array]:
        """Yield the logits of each batch, given unsharded parameters."""
        sharded = model.shard(params)
        for batch in batches:
            yield run_logits(model, sharded, batch.token_BT, batch.position_BT)

    batches = list(loader.batches())
    results = []
    with steps_bar(f"{format}, one {group_by} at a time", len(names) + 1) as done:
        references = list(run_batches(wide))
        done()
        for name, regex in names.items():
            variant, before, after = _quantize_group(params, wide, regex, format)
            divergence = logits_divergence(model, batches, references, run_batches(variant))
            results.append(Sensitivity(name, regex, divergence, before, after))
            done()
    return sorted(results, key=lambda s: -s.divergence.kl.mean)


def plot(rows: list[Sensitivity], path: Path, title: str) -> None:
    """Write a bar chart of mean KL divergence, with its standard error, as a PNG file.

    Raises ConfigError if matplotlib is not installed, CheckpointError if the file cannot be
    written.
    """
    check_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.22 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names, means = [s.group for s in rows], [s.divergence.kl.mean for s in rows]
    axes.barh(names, means, xerr=[s.divergence.kl.error for s in rows], color="tab:blue")
    axes.set(xlabel="mean KL divergence (nats per token)", title=title)
    axes.invert_yaxis()
    save_figure(figure, path)


def _to_float32(leaf: Any) -> Any:
    return jnp.asarray(to_dense(leaf, jnp.float32)) if leaf.ndim >= 2 else leaf


def _quantize_group(
    params: Params, wide: Params, regex: str, format: str
) -> tuple[Params, int, int]:
    """Return the float32 weights with one group quantized, and its bytes before and after."""
    old, quantized = dict(flatten(params)), dict(flatten(quantize(params, [(regex, format)])))
    changed = [p for p, leaf in old.items() if leaf.ndim >= 2 and first_match([(regex, True)], p)]
    variant = map_leaves(lambda p, leaf: _to_float32(quantized[p]) if p in changed else leaf, wide)
    before, after = (sum(int(leaves[p].nbytes) for p in changed) for leaves in (old, quantized))
    return variant, before, after
