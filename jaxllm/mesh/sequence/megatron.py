"""Megatron's sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

Under tensor parallelism every device runs the norms and sums of all tokens. Here each has some of
them: what the rows of linears read is gathered, and of what their columns sum each device takes its
own tokens. The same bytes are sent as by sums that all get, and what a device keeps of the stream
is 1 / n.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.models import family
from jaxllm.models.layers import Across
from jaxllm.weights.leaves.parted import Over, of_all, own_rows


def takes(axes: Axes, over: Over, columns: int) -> bool:
    """Whether so many columns of a device are split over these axes: not those of decoding."""
    parts = axes.over(over)
    return axes.stream and parts > 1 and columns > 1 and columns % parts == 0


def check(config: ModelConfig, axes: Axes, exact: bool) -> None:
    """Raise ConfigError for models whose stream is not split."""
    if not axes.stream:
        return
    if exact:
        raise ConfigError(f"mesh {axes} sums parts, and exact=True none: leave :tokens out")
    if family(config.model_type).router is not None:
        raise ConfigError(
            f"the experts of {config.model_type} send tokens on by themselves: leave :tokens out of"
            f" mesh {axes}"
        )


def run(apply: Callable[..., Any], over: Over, *, across: Across, **by_row: Any) -> Any:
    """The trace of a model whose stream is split: whole again, where it is asked for."""
    if (given := by_row.get("embeddings_BTD")) is not None:
        by_row = {**by_row, "embeddings_BTD": own_rows(given, over)}
    trace = apply(across=across._replace(whole=partial(of_all, over=over)), **by_row)

    def whole(x: jax.Array) -> jax.Array:
        return of_all(x, over)

    layers = tuple(
        layer._replace(
            attention=layer.attention._replace(x=whole(layer.attention.x)),
            mlp=whole(layer.mlp),
            x=whole(layer.x),
        )
        for layer in trace.layers
    )
    return trace.replace(embeddings=whole(trace.embeddings), layers=layers)
