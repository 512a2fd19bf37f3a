"""Megatron's sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

Under tensor parallelism every device runs the norms and sums of all tokens. Here each has some of
them: what the rows of linears read is gathered, and of what their columns sum each device takes its
own tokens. The same bytes are sent as by sums that all get, and what a device keeps of the stream,
and hands on to the next stage of a pipeline, is 1 / n. Routers read the gathered tokens, too, as
the experts that they choose do.
"""

from collections.abc import Callable
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.rules import HEADS
from jaxllm.models.layers import Across
from jaxllm.weights.leaves.parted import Tokens


def tokens_of(axes: Axes, columns: int) -> Tokens | None:
    """How so many columns of a device are shared out; None, as in decoding: each has them all."""
    parts = axes.over(HEADS)
    split = axes.stream and parts > 1 and columns > 1 and columns % parts == 0
    return Tokens(HEADS, columns) if split else None


def check(axes: Axes, exact: bool) -> None:
    """Raise ConfigError where sums are not to be split."""
    if axes.stream and exact:
        raise ConfigError(f"mesh {axes} sums parts, and exact=True none: leave :tokens out")


def run(apply: Callable[..., Any], split: Tokens, *, across: Across, **by_row: Any) -> Any:
    """The trace of a model whose stream is split: whole again, where it is asked for."""
    if (given := by_row.get("embeddings_BTD")) is not None:
        by_row = {**by_row, "embeddings_BTD": split.own(given)}
    trace, whole = apply(across=across._replace(whole=split.of_all), **by_row), split.of_all
    layers = tuple(
        layer._replace(
            attention=layer.attention._replace(x=whole(layer.attention.x)),
            mlp=whole(layer.mlp),
            x=whole(layer.x),
        )
        for layer in trace.layers
    )
    return trace.replace(embeddings=whole(trace.embeddings), layers=layers)
