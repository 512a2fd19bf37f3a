"""Direct logit attribution: what each part of the model writes into a logit.

The stream is a sum: embeddings, heads, biases, MLPs. The final norm is linear in it once its scale
is frozen, and so is the output matrix. Neither is known here by family: a norm's derivative at zero
is its linear part, and so is the head's, where a soft cap is the identity. See Elhage et al. 2021,
"A Mathematical Framework for Transformer Circuits".
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.models import get_family
from jaxllm.models.inputs import Array, check_inputs, check_model
from jaxllm.models.interventions import Set
from jaxllm.models.site_inputs import site_names
from jaxllm.steps import forward
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params


def decompose_stream(model: Model, params: Params, tokens_BT: Array) -> dict[str, jax.Array]:
    """Return the parts of the final norm's output, which add up to it, its scale frozen.

    The keys are sites: `embed`, `pos_embed`, `blocks.L.attn.result` (`[B, T, N, D]`, by head),
    `blocks.L.attn.bias` (attention's output without the heads), or for a recurrent layer
    `blocks.L.attn_out`; `blocks.L.mlp_out`, `blocks.L.layer_embed` (the layer's own embedding of
    the token, in Gemma 4), and `final_norm.bias`. All others are float32 `[B, T, D]`.

    Raises what `jaxllm.forward` raises.
    """
    check_model(model, params)
    tokens_BT, _ = check_inputs(model, None, tokens_BT, None)
    return _decompose(model, params, tokens_BT)


def attribute_logits(
    model: Model,
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    others_BT: Array | None = None,
) -> dict[str, jax.Array]:
    """Return what each part of the stream adds to the logit of a token at each position.

    The parts add up to the logit before any soft cap.

    Args:
        tokens_BT: Integer ids `[B, T]`.
        targets_BT: Tokens; their logits are explained, `[B, T]`.
        others_BT: Tokens; their logits are subtracted, and the parts explain the difference.

    Returns:
        float32 `[B, T]` by the keys of `decompose_stream`; `[B, T, N]` for heads.

    Raises:
        ConfigError: if targets have another shape than the tokens.
        TokenError: for ids outside the vocabulary.
    """
    check_model(model, params)
    tokens_BT, _ = check_inputs(model, None, tokens_BT, None)
    chosen = [x for x in (targets_BT, others_BT) if x is not None]
    chosen = [check_inputs(model, None, x, None)[0] for x in chosen]
    for x in chosen:
        if x.shape != tokens_BT.shape:
            raise ConfigError(f"targets must have the tokens' shape {tokens_BT.shape}: {x.shape}")
    return _attribute(model, params, tokens_BT, tuple(chosen))


@partial(jax.jit, static_argnums=0)
def _decompose(model: Model, params: Params, token_BT: jax.Array) -> dict[str, jax.Array]:
    layers, known = range(model.config.num_hidden_layers), site_names(model.config)
    family = get_family(model.config.model_type)
    last = f"blocks.{layers[-1]}.resid_post"
    names = [name for name in ("embed", "pos_embed") if name in known] + [last, "final_norm"]
    for layer in layers:
        around = ("resid_mid", "resid_post") if family.output_scale else ()
        sites = ("attn.result", "attn.output", "attn_out", "mlp_out", *around)
        names += [name for site in sites if (name := f"blocks.{layer}.{site}") in known]
    read = forward(model, params, None, token_BT, read=names).sites
    site = {name: x.astype(jnp.float32) for name, x in read.items()}
    parts = {name: x for name, x in site.items() if name in ("embed", "pos_embed")}
    for layer, at in enumerate(f"blocks.{layer}" for layer in layers):
        # After attention there is at most a norm without bias and a factor: a product by channel.
        output_BTD, added_BTD = site[f"{at}.attn.output"], site[f"{at}.attn_out"]
        divisor_BTD = jnp.where(output_BTD == 0, 1, output_BTD)
        scale_BTD = jnp.where(output_BTD == 0, 0, added_BTD / divisor_BTD)
        if (heads := site.get(f"{at}.attn.result")) is None:
            parts[f"{at}.attn_out"] = added_BTD
        else:
            parts[f"{at}.attn.result"] = heads * scale_BTD[:, :, None]
            parts[f"{at}.attn.bias"] = added_BTD - parts[f"{at}.attn.result"].sum(axis=2)
        parts[f"{at}.mlp_out"] = site[f"{at}.mlp_out"]
        if family.output_scale:
            scale = params[f"{family.layers}.{layer}"][family.output_scale][0].astype(jnp.float32)
            parts = {name: x * scale for name, x in parts.items()}
            before_BTD = site[f"{at}.resid_mid"] + site[f"{at}.mlp_out"]
            parts[f"{at}.layer_embed"] = site[f"{at}.resid_post"] - scale * before_BTD

    def norm(x_BTD: jax.Array) -> jax.Array:
        out = forward(model, params, None, token_BT, read=["final_norm"], edits={last: Set(x_BTD)})
        return out.sites["final_norm"].astype(jnp.float32)

    bias_BTD, linear = jax.linearize(norm, jnp.zeros_like(site[last]))
    whole_BTD = linear(site[last])
    scale_BT1 = ((site["final_norm"] - bias_BTD) * whole_BTD).sum(axis=-1, keepdims=True)
    scale_BT1 = scale_BT1 / jnp.square(whole_BTD).sum(axis=-1, keepdims=True)
    by_head = jax.vmap(lambda x_BTD: linear(x_BTD) * scale_BT1, in_axes=2, out_axes=2)
    scaled = {
        name: by_head(x) if x.ndim == 4 else linear(x) * scale_BT1 for name, x in parts.items()
    }
    return scaled | {"final_norm.bias": bias_BTD}


@partial(jax.jit, static_argnums=0)
def _attribute(
    model: Model, params: Params, token_BT: jax.Array, chosen: tuple[jax.Array, ...]
) -> dict[str, jax.Array]:
    parts: Any = _decompose(model, params, token_BT)

    def read_out(y_BTD: jax.Array) -> jax.Array:
        return forward(model, params, None, token_BT, edits={"final_norm": Set(y_BTD)}).logits

    _, pull_back = jax.vjp(read_out, jnp.zeros_like(parts["final_norm.bias"]))
    wanted_BTV = jax.nn.one_hot(chosen[0], model.config.vocab_size, dtype=jnp.float32)
    if len(chosen) > 1:
        wanted_BTV -= jax.nn.one_hot(chosen[1], model.config.vocab_size, dtype=jnp.float32)
    (column_BTD,) = pull_back(wanted_BTV)
    heads = column_BTD[:, :, None]
    return {
        name: (x * (heads if x.ndim == 4 else column_BTD)).sum(axis=-1) for name, x in parts.items()
    }
