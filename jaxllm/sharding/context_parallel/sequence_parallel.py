"""Megatron's sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

With tensor parallelism alone, every device runs norms and residual sums on all tokens. Here each
runs them on its slice of the tokens: the inputs of column-parallel linears are all-gathered, and
the outputs of row-parallel ones are reduce-scattered. That sends the same bytes as all-reduce, and
what a device stores of the stream, and sends to the next pipeline stage, is 1 / n. Routers read the
gathered tokens too, as the experts that they select do.
"""

from collections.abc import Callable
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.models.layers import ParallelHooks
from jaxllm.models.sites import STREAM_SITES
from jaxllm.sharding.mesh_spec import MeshSpec
from jaxllm.sharding.partition_rules import HEAD_AXES
from jaxllm.sharding.tensor_parallel import SequenceSlice


def make_token_slice(axes: MeshSpec, columns: int) -> SequenceSlice | None:
    """Return each device's slice of the columns; None, as in decoding: each has all."""
    parts = axes.num_shards(HEAD_AXES)
    split = axes.sequence_parallel and parts > 1 and columns > 1 and columns % parts == 0
    return SequenceSlice(HEAD_AXES, columns) if split else None


def check(axes: MeshSpec, exact: bool) -> None:
    """Raise ConfigError if sums cannot be scattered."""
    if axes.sequence_parallel and exact:
        raise ConfigError(
            f"mesh {axes} and exact=True cannot be combined: :tokens sums partial products, exact"
            " does not. Drop one"
        )


def run(
    apply: Callable[..., Any], token_slice: SequenceSlice, *, hooks: ParallelHooks, **by_row: Any
) -> Any:
    """Run a model with a split stream, and gather its trace where outputs need all tokens."""
    if (embeddings_BTD := by_row.get("embeddings_BTD")) is not None:
        by_row = {**by_row, "embeddings_BTD": token_slice.take_local(embeddings_BTD)}
    gather = token_slice.gather

    def gather_sites(sites: dict[str, Any]) -> dict[str, Any]:
        return {name: gather(x) if name in STREAM_SITES else x for name, x in sites.items()}

    trace = apply(hooks=hooks._replace(gather_tokens=gather), **by_row)
    layers = tuple(
        layer._replace(
            attention=layer.attention._replace(x=gather(layer.attention.x)),
            x=gather(layer.x),
            sites=gather_sites(layer.sites),
        )
        for layer in trace.layers
    )
    sites = gather_sites(trace.sites)
    return trace.replace(embeddings=gather(trace.embeddings), layers=layers, sites=sites)
