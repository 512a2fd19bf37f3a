"""A step with static shapes: `step(params, inputs) -> outputs`, on dicts of named arrays.

Everything that varies (lengths, padding, cache slots) is a value of an input, so one compiled graph
runs every text. Names are those of transformers and its ONNX exports.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.cache.kv import Segment
from jaxllm.errors import ConfigError
from jaxllm.models.layers import Trace
from jaxllm.ops.slot_update import write_slots
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

Arrays = Mapping[str, Any]
Mask = Literal["positions", "boolean", "additive"]
MASKS = ("positions", "boolean", "additive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSignature:
    """Input signature of a step, besides keys and values.

    Attributes:
        embeddings: Take `inputs_embeds` instead of `input_ids`.
        rotary: Take the RoPE `cos` and `sin` as inputs.
        mask: "positions": tokens attend to positions up to their own. "boolean", "additive": take
            an `attention_mask` with True or 0 where a token attends.

    Raises:
        ConfigError: For an unknown mask.
    """

    embeddings: bool = False
    rotary: bool = False
    mask: Mask = "positions"

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ConfigError(f"mask must be one of {', '.join(MASKS)}, got {self.mask!r:.40}")


def make_step(
    model: Model, signature: StepSignature
) -> Callable[[Params, Arrays], dict[str, jax.Array]]:
    """Return the pure function `step(params, inputs) -> outputs` with a signature.

    inputs: see `input_shapes`. outputs: `logits` float32 `[B, T, V]`; `present.N.key` and `.value`,
    the past with the new tokens written to their slots, in the shape of the next step's
    `past_key_values.N.key` and `.value`; and `present_position_ids` if the mask is "positions".

    Raises:
        ConfigError: For a signature that the model does not support.
    """
    check_signature(model, signature)
    return partial(run_step, model, signature)


def check_signature(model: Model, signature: StepSignature) -> None:
    """Raise ConfigError for a signature that the model does not support."""
    if signature.rotary and len(model.config.ropes) != 1:
        kinds = "several kinds of RoPE" if model.config.ropes else "no RoPE"
        raise ConfigError(f"{model.config.model_type} has {kinds}. Omit rotary (cos and sin)")
    if model.config.links_layers or len(model.config.head_dims) > 1:
        raise ConfigError(
            f"static-shape steps do not support {model.config.model_type}: its heads differ by"
            " layer, or its layers read each other's keys"
        )
    kind = model.config.attention
    if signature.mask != "positions" and kind is not None:
        raise ConfigError(
            f"attention of kind {kind.kind!r} uses positions and takes no mask. Omit mask"
        )
    windows = {model.config.window(i) for i in range(model.config.num_hidden_layers)}
    if signature.mask != "positions" and len(windows) > 1:
        raise ConfigError("layers with different windows cannot share one mask. Omit mask")
    if model.precision.cache == "int8":
        raise ConfigError(
            "static-shape steps do not support an int8 cache. Use a Precision with a float cache"
        )


def input_shapes(
    model: Model, signature: StepSignature, *, batch: int, num_tokens: int, capacity: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a step's inputs by name; B is batch, T num_tokens, S the capacity of the past.

    - `input_ids` int32 `[B, T]`, 0 for padding, or `inputs_embeds` `[B, T, D]`.
    - `position_ids` int32 `[B, T]`, -1 for padding; absent if both angles and mask are inputs.
    - `cos`, `sin` float32 `[B, 1, T, F]` if rotary; otherwise `length` int32 `[B]`, the length of
      the whole text, if RoPE depends on it.
    - `past_position_ids` int32 `[B, S]`, -1 if empty, or `attention_mask` `[B, 1, T, S + T]`, bool
      or float32, over the past's slots and then the new tokens.
    - `slots` int32 `[B, T]`: the slot to write each new token to; S drops it.
    - `past_key_values.N.key` and `.value` `[B, S, K, H]`, keys after RoPE.
    """
    c, p = model.config, model.precision
    B, T, S = batch, num_tokens, capacity

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    inputs = {}
    if signature.embeddings:
        inputs["inputs_embeds"] = array(p.activations, B, T, c.hidden_size)
    else:
        inputs["input_ids"] = array(jnp.int32, B, T)
    if signature.mask == "positions" or not signature.rotary:
        inputs["position_ids"] = array(jnp.int32, B, T)
    if signature.rotary:
        inputs["cos"] = inputs["sin"] = array(
            jnp.float32, B, 1, T, c.ropes[0].rotary_dim(c.head_dim) // 2
        )
    elif c.rope_depends_on_length:
        inputs["length"] = array(jnp.int32, B)
    if signature.mask == "positions":
        inputs["past_position_ids"] = array(jnp.int32, B, S)
    else:
        dtype = jnp.bool_ if signature.mask == "boolean" else jnp.float32
        inputs["attention_mask"] = array(dtype, B, 1, T, S + T)
    inputs["slots"] = array(jnp.int32, B, T)
    for i in range(c.num_hidden_layers):
        for name, heads in (("key", c.kv_heads(i)), ("value", c.value_heads(i))):
            inputs[f"past_key_values.{i}.{name}"] = array(p.cache, B, S, heads, c.head_dim)
    return inputs


def run_step(
    model: Model, signature: StepSignature, params: Params, inputs: Arrays
) -> dict[str, jax.Array]:
    """Run a step on valid inputs."""
    layers = range(model.config.num_hidden_layers)
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}
    past_k = tuple(inputs[f"past_key_values.{i}.key"] for i in layers)
    past_v = tuple(inputs[f"past_key_values.{i}.value"] for i in layers)
    slot_BT = inputs["slots"]
    B, S = past_k[0].shape[:2]
    position_BT = inputs.get("position_ids", jnp.zeros_like(slot_BT))
    past_position_BS = inputs.get("past_position_ids", jnp.zeros((B, S), jnp.int32))
    optional: dict[str, Any] = {}
    if signature.embeddings:
        optional["embeddings_BTD"] = inputs["inputs_embeds"]
    if signature.rotary:
        optional["angles"] = ((inputs["cos"][:, 0], inputs["sin"][:, 0]),)
    if signature.mask != "positions":
        optional["mask_BTS"] = inputs["attention_mask"][:, 0]
    past = Segment(
        past_k,
        past_v,
        past_position_BS,
        jnp.zeros((B, S), jnp.int32),
        jnp.zeros((B, S), bool),
    )
    trace = model.apply(
        {"params": params},
        inputs.get("input_ids", jnp.zeros_like(slot_BT)),
        position_BT,
        inputs.get("length", position_BT.max(axis=1) + 1),
        (past,),
        **optional,
    )
    assert isinstance(trace, Trace)
    outputs = {"logits": trace.logits}
    for i in layers:
        outputs[f"present.{i}.key"] = write_slots(past_k[i], trace.k[i], slot_BT)
        outputs[f"present.{i}.value"] = write_slots(past_v[i], trace.v[i], slot_BT)
    if signature.mask == "positions":
        outputs["present_position_ids"] = write_slots(past_position_BS, position_BT, slot_BT)
    return outputs


def output_feeds(signature: StepSignature, layers: int) -> dict[str, str]:
    """Map each output of a step that the next step needs to the name of its input."""
    names = {
        f"present.{i}.{what}": f"past_key_values.{i}.{what}"
        for i in range(layers)
        for what in ("key", "value")
    }
    if signature.mask == "positions":
        names["present_position_ids"] = "past_position_ids"
    return names
