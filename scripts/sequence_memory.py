"""What a device needs for a text that is split over several: bytes of compiled programs.

    JAX_NUM_CPU_DEVICES=8 python scripts/sequence_memory.py --lengths 4096,8192,16384,32768

Nothing is run, and so nothing depends on the machine: XLA says of each program what its arguments
and its temporary arrays take on one device.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxllm import ops, steps
from jaxllm.cache import init_cache
from jaxllm.config import Rope
from jaxllm.mesh import meshed
from jaxllm.mesh.axes import parse
from jaxllm.mesh.sequence import ring
from jaxllm.models import build, param_shapes
from jaxllm.models.llama import LlamaConfig
from jaxllm.progress import steps_bar
from jaxllm.train.data.rows import Rows
from jaxllm.train.objective import NextToken
from jaxllm.weights.precision import Precision

HEADS, GROUPS, SIZE = 8, 2, 64
RULES: Any = {"scale": SIZE**-0.5, "window": None}


def attention(T: int, devices: int) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """Attention of T tokens, and the forms of what it is given."""
    mesh = jax.make_mesh(
        (devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    split = jax.P(None, "x")

    def form(heads: int) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, split)
        return jax.ShapeDtypeStruct((1, T, heads, SIZE), jnp.float32, sharding=sharding)

    at = jax.ShapeDtypeStruct((1, T), jnp.int32, sharding=jax.NamedSharding(mesh, split))
    given = (form(HEADS), form(GROUPS), form(GROUPS), at)
    if devices == 1:
        return lambda q, k, v, at: ops.attend(q, at, [ops.Part(k, v, at)], **RULES)[0], given

    def around(q: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array) -> jax.Array:
        return ring.attend(q, at, ops.Part(k, v, at), axis="x", **RULES)[0]

    return jax.shard_map(around, mesh=mesh, in_specs=(split,) * 4, out_specs=split), given


def gradient(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(q: Any, k: Any, v: Any, at: Any) -> jax.Array:
        return (attend(q, k, v, at) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))


def model_of(T: int, devices: int) -> tuple[Any, Any]:
    """A model of two layers, whose blocks run again in a gradient; and the forms of its params."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=HEADS * SIZE, intermediate_size=4 * HEADS * SIZE,
        num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=SIZE,
        hidden_act="silu", max_position_embeddings=T, norm_eps=1e-5, tie_word_embeddings=False,
        rope=Rope(rope_type="default", rope_theta=10000.0),
    )  # fmt: skip
    model: Any = build(config, Precision())
    if devices > 1:
        model = meshed(config, Precision(), parse(f"sequence={devices}"))
    return model.clone(remat=True), param_shapes(build(config, Precision()))


def prompt(T: int, devices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A prompt in one chunk, and a cache that it fills."""
    model, params = model_of(T, devices)
    form = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def prefill(params: Any, cache: Any, token: Any, at: Any) -> Any:
        last = jnp.full((1,), T - 1, jnp.int32)
        return steps.run_and_commit(model, params, (), cache, token, at, column_B=last)[:2]

    return prefill, (params, init_cache(model, 1, T), form, form)


def training(T: int, devices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of the loss of one text."""
    model, params = model_of(T, devices)
    form = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(params: Any, rows: Rows) -> jax.Array:
        return NextToken()(model, params, None, rows, jax.random.key(0)).total

    return jax.grad(loss), (params, Rows(form, form, form, form))


def measured(function: Callable[..., Any], given: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes of arguments and of temporary arrays on one device."""
    found = jax.jit(function).lower(*given).compile().memory_analysis()
    return found.argument_size_in_bytes, found.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--devices", default="1,2,4,8")
    asked = parser.parse_args()
    lengths, numbers = (
        [int(x) for x in text.split(",")] for text in (asked.lengths, asked.devices)
    )
    print("| tokens | devices | attention | its gradient | a model's prompt | a model's gradient |")
    print("|---|---|---|---|---|---|")
    with steps_bar("compiling", len(lengths) * len(numbers)) as advance:
        for T, devices in itertools.product(lengths, numbers):
            attend, given = attention(T, devices)
            programs: tuple[Any, ...] = (attend, given), (gradient(attend), given)
            programs += prompt(T, devices), training(T, devices)
            cells = [f"{sum(measured(*program)) / 2**20:,.0f} MiB" for program in programs]
            print(f"| {T:,} | {devices} | {' | '.join(cells)} |", flush=True)
            advance()


if __name__ == "__main__":
    main()
