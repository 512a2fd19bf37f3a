"""A Llama as pure functions, in one file: what jaxllm is, without what makes it general and fast.

    python examples/minimal.py DIRECTORY "Once upon a time"

A model is three things: numbers of its configuration, a dict of arrays, and a function. The cache
is a value: `forward` reads it and returns the new keys and values, `commit` returns another cache
with them in it. So a cache can be kept, branched and compared, and a step cannot change it.

The last letters of a name are the axes of its array: B rows, T new tokens, S slots of the cache,
D width, H query heads, K key heads, E width of a head, F width of the MLP, V tokens.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer

Params = dict[str, jax.Array]  # by the checkpoint's own names


class Config(NamedTuple):
    """What the functions need of config.json."""

    num_layers: int
    num_heads: int
    num_key_heads: int
    head_width: int
    rope_theta: float
    norm_eps: float


class Cache(NamedTuple):
    """Keys (rotated) and values of the tokens so far, a pair of `[B, S, K, E]` for each layer.

    Attributes:
        length: Slots that are written, the same in all rows. int32.
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    length: jax.Array


Delta = tuple[tuple[jax.Array, jax.Array], ...]  # keys and values `[B, T, K, E]` of each layer


def load(directory: Path) -> tuple[Config, Params]:
    """Return the configuration and the parameters of a Llama, as float32."""
    given = json.loads((directory / "config.json").read_text("utf-8"))
    heads = given["num_attention_heads"]
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SystemExit(f"{directory}: scaled rotary embeddings are not in this file")
    config = Config(
        num_layers=given["num_hidden_layers"],
        num_heads=heads,
        num_key_heads=given.get("num_key_value_heads") or heads,
        head_width=given.get("head_dim") or given["hidden_size"] // heads,
        rope_theta=rope.get("rope_theta") or given.get("rope_theta", 10000.0),
        norm_eps=given["rms_norm_eps"],
    )
    params: Params = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "flax") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                params[name] = tensors.get_tensor(name).astype("float32")
    return config, params


def init_cache(config: Config, rows: int, slots: int) -> Cache:
    """Return an empty cache."""
    empty = jnp.zeros((rows, slots, config.num_key_heads, config.head_width))
    return Cache(((empty, empty),) * config.num_layers, jnp.int32(0))


def forward(
    config: Config, params: Params, cache: Cache, token_BT: jax.Array
) -> tuple[jax.Array, Delta]:
    """Return logits `[B, T, V]` of new tokens, and their keys and values. Nothing is changed."""
    position_T = cache.length + jnp.arange(token_BT.shape[1])
    x_BTD = params["model.embed_tokens.weight"][token_BT]
    delta = []
    for i, past in enumerate(cache.layers):
        layer = f"model.layers.{i}"
        y_BTD = norm(config, params[f"{layer}.input_layernorm.weight"], x_BTD)
        attended_BTD, new = attend(config, params, layer, y_BTD, past, cache.length, position_T)
        x_BTD += attended_BTD
        y_BTD = norm(config, params[f"{layer}.post_attention_layernorm.weight"], x_BTD)
        x_BTD += mlp(params, f"{layer}.mlp", y_BTD)
        delta.append(new)
    x_BTD = norm(config, params["model.norm.weight"], x_BTD)
    head_VD = params.get("lm_head.weight", params["model.embed_tokens.weight"])  # it may be tied
    return x_BTD @ head_VD.T, tuple(delta)


def commit(cache: Cache, delta: Delta) -> Cache:
    """Return the cache with the keys and values of new tokens behind the others."""

    def write(old_BSKE: jax.Array, new_BTKE: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old_BSKE, new_BTKE, (0, cache.length, 0, 0))

    layers = jax.tree.map(write, cache.layers, delta)
    return Cache(layers, cache.length + delta[0][0].shape[1])


def norm(config: Config, weight_D: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Root mean square layer norm (https://arxiv.org/abs/1910.07467)."""
    mean_square_BT1 = jnp.mean(x_BTD**2, axis=-1, keepdims=True)
    return weight_D * x_BTD * jax.lax.rsqrt(mean_square_BT1 + config.norm_eps)


def mlp(params: Params, name: str, x_BTD: jax.Array) -> jax.Array:
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""
    gate_FD, up_FD, down_DF = (params[f"{name}.{x}_proj.weight"] for x in ("gate", "up", "down"))
    return (jax.nn.silu(x_BTD @ gate_FD.T) * (x_BTD @ up_FD.T)) @ down_DF.T


def attend(
    config: Config,
    params: Params,
    layer: str,
    x_BTD: jax.Array,
    past: tuple[jax.Array, jax.Array],
    length: jax.Array,
    position_T: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the attention of new tokens to the cache and to themselves, and their keys and values.

    Several query heads share a key head (https://arxiv.org/abs/2305.13245).
    """

    def project(name: str, heads: int) -> jax.Array:
        y_BTN = x_BTD @ params[f"{layer}.self_attn.{name}_proj.weight"].T
        return y_BTN.reshape(*y_BTN.shape[:2], heads, config.head_width)

    q_BTHE = rotate(config, project("q", config.num_heads), position_T)
    k_BTKE = rotate(config, project("k", config.num_key_heads), position_T)
    v_BTKE = project("v", config.num_key_heads)
    keys, values = (
        jnp.concatenate([old, new], axis=1) for old, new in zip(past, (k_BTKE, v_BTKE), strict=True)
    )
    group = config.num_heads // config.num_key_heads
    q_BTKGE = q_BTHE.reshape(*q_BTHE.shape[:2], config.num_key_heads, group, config.head_width)
    score_BKGTS = jnp.einsum("BTKGE,BSKE->BKGTS", q_BTKGE, keys) * config.head_width**-0.5
    # A written slot's position is its number; that of an empty one is behind every token.
    slot_S = jnp.arange(past[0].shape[1])
    slot_position_S = jnp.where(slot_S < length, slot_S, jnp.iinfo(jnp.int32).max)
    is_seen_TS = jnp.concatenate([slot_position_S, position_T]) <= position_T[:, None]
    weight_BKGTS = jax.nn.softmax(jnp.where(is_seen_TS, score_BKGTS, -jnp.inf), axis=-1)
    y_BTKGE = jnp.einsum("BKGTS,BSKE->BTKGE", weight_BKGTS, values)
    o_DN = params[f"{layer}.self_attn.o_proj.weight"]
    return y_BTKGE.reshape(*x_BTD.shape[:2], -1) @ o_DN.T, (k_BTKE, v_BTKE)


def rotate(config: Config, x_BTHE: jax.Array, position_T: jax.Array) -> jax.Array:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864): pairs are half a head apart."""
    half = config.head_width // 2
    frequency_P = config.rope_theta ** (-jnp.arange(half) / half)
    angle_T1P = position_T[:, None, None] * frequency_P
    first, second = x_BTHE[..., :half], x_BTHE[..., half:]
    cos, sin = jnp.cos(angle_T1P), jnp.sin(angle_T1P)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@partial(jax.jit, static_argnums=(0, 4))
def generate(
    config: Config, params: Params, cache: Cache, prompt_BT: jax.Array, count: int
) -> tuple[jax.Array, Cache]:
    """Return the likeliest next tokens `[B, count]`, and the cache behind them: one program."""

    def step(carry: tuple[Cache, jax.Array], _: None) -> tuple[tuple[Cache, jax.Array], jax.Array]:
        cache, token_BT = carry
        logits_BTV, delta = forward(config, params, cache, token_BT)
        next_B1 = jnp.argmax(logits_BTV[:, -1:], axis=-1)
        return (commit(cache, delta), next_B1), next_B1[:, 0]

    carry, first_B = step((cache, prompt_BT), None)
    (cache, _), rest_NB = jax.lax.scan(step, carry, length=count - 1)
    return jnp.concatenate([first_B[:, None], rest_NB.T], axis=1), cache


def main(directory: str, text: str) -> None:
    config, params = load(Path(directory))
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    prompt_BT = np.array([tokenizer.encode(text).ids], np.int32)
    cache = init_cache(config, rows=1, slots=prompt_BT.shape[1] + 40)
    token_BN, _ = generate(config, params, cache, prompt_BT, 40)
    print(text + tokenizer.decode(token_BN[0].tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
