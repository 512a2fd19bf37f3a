"""Who sees whom, layer by layer: dense attention, a window, and LongNet's dilated kinds.

One decision: the pictures are derivatives of real (random, tiny) models, so a border is white
because nothing crosses it, whatever the configuration says.
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from jaxllm import models
from jaxllm.cli import run_command
from jaxllm.cli.console import write
from jaxllm.config import Rope
from jaxllm.evaluate.receptive import receptive_field
from jaxllm.longer import LongAttention
from jaxllm.models.llama import LlamaConfig
from jaxllm.weights.paths import Params, map_leaves

EXAMPLE = "Example: python scripts/receptive_field.py --out docs/receptive_field.png"
LAYERS = 3
PAIRS = {"segment_lengths": (4, 16, 32), "dilated_ratios": (1, 2, 4)}
ROWS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window of 4": {"sliding_window": 4},
    "dilated, by pairs (the paper's)": {"attention": LongAttention(kind="dilated", **PAIRS)},
    "dilated, by heads": {"attention": LongAttention(kind="dilated", by="heads", **PAIRS)},
    "dilated, by layers": {"attention": LongAttention(kind="dilated", by="layers", **PAIRS)},
}


def tiny(**fields: Any) -> tuple[Any, Params]:
    """A random model of three layers and twelve heads."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=4,
        hidden_act="silu",
        max_position_embeddings=1024,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        rope=Rope(rope_type="default", rope_theta=1e4),
        **fields,
    )
    model, rng = models.build(config), np.random.default_rng(0)

    def leaf(path: str, shape: Any) -> jax.Array:
        centre = 1.0 if "norm" in path else 0.0
        return jax.numpy.asarray(centre + 0.2 * rng.standard_normal(shape.shape, np.float32))

    return model, map_leaves(leaf, models.param_shapes(model))


def draw(length: int, out: Path) -> None:
    """One row of pictures for each kind, one column for each layer; borders are lines."""
    figure = Figure(figsize=(3.2 * LAYERS, 3.2 * len(ROWS)), layout="constrained")
    axes = figure.subplots(len(ROWS), LAYERS, squeeze=False)
    for row, (name, fields) in zip(axes, ROWS.items(), strict=True):
        model, params = tiny(**fields)
        field = receptive_field(model, params, np.zeros(length, int), jax.random.key(0))
        kind: LongAttention | None = fields.get("attention")
        period = kind.period if kind is not None else None
        borders = range(period, length, period) if period else range(0)
        for layer, plot in enumerate(row):
            seen = np.where(field[layer] > 0, field[layer], np.nan)
            plot.imshow(seen, cmap="viridis", norm=LogNorm(), interpolation="nearest")
            for border in borders:
                plot.axhline(border - 0.5, color="red", linewidth=0.8)
                plot.axvline(border - 0.5, color="red", linewidth=0.8)
            plot.set_title(f"{name}\nafter layer {layer + 1}", fontsize=8)
            plot.set_xlabel("is seen", fontsize=7)
            plot.set_ylabel("sees", fontsize=7)
            plot.tick_params(labelsize=6)
        crossing = sum(int((field[-1][b:, :b] > 0).sum()) for b in borders)
        below = (np.tril(field[-1]) > 0).sum() / (length * (length + 1) // 2)
        write(f"{name}: {below:.0%} of the past seen after {LAYERS} layers")
        write(f"; {crossing} crossings of {len(borders)} borders\n" if borders else "\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(
    length: Annotated[int, typer.Option(min=2, help="Tokens of the text.")] = 96,
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("docs/receptive_field.png"),
) -> None:
    """Draw who sees whom after each layer; red lines are borders that nothing crosses."""
    draw(length, out)


if __name__ == "__main__":
    run_command(main, "receptive_field.py", EXAMPLE)
