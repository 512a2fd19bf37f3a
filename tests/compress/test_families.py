"""Steps of a recipe on every family: its norms, biases, multipliers and experts."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import models
from jaxllm.compress.calibration import from_tokens
from jaxllm.compress.channel_scaling import can_fold, fold_scale
from jaxllm.compress.layerwise import LayerInputs, get_module, map_layers, replace_leaves
from jaxllm.compress.methods import awq
from jaxllm.compress.pipeline import compress
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.models.family import LinearGroup
from jaxllm.research.pruning import structured_pruning
from jaxllm.weights.formats import Weight, as_format, parse_format, to_dense
from jaxllm.weights.paths import Params, flatten
from jaxllm.weights.types.int_weight import IntFormat
from tests.compress.models import tiny
from tests.tiny_models import (
    INVARIANT,
    KINDS,
    LATENTS,
    RECURRENT,
    SHARED_CODE,
    assert_close,
    tokens,
)

# mistral is the llama model.
FAMILIES = ("gemma3_text", *sorted(KINDS.keys() - {"gemma3_text", "mistral"}))
# Gemma's norms have an offset, and OLMo's follow the linears.
FULL = set(SHARED_CODE) - {"gemma3_text", "olmo2"}
LINES = ("smooth: smoothquant", "quantize: awq int4-g32")
TEXT = from_tokens(tokens(4, 16))
NORMS = ("attn_norm", "mlp_norm")
# The sites that have a source whose channels can be scaled, where they are not those of Llama with
# grouped queries: the two norms, and the gate's product.
FOLDABLE = {
    "gpt2": {*NORMS, "attn.z"},  # no gate, a head of values for each head of queries
    "gpt_neox": {*NORMS, "attn.z"},
    "olmo2": {"mlp.post"},  # no norms before the linears
    "olmo3": {"mlp.post"},
    "exaone4": {"mlp.post"},
    "cohere2": {"mlp.post"},  # attention and MLP read one norm
    "mixtral": {"attn_norm"},  # the MLP's norm is read by the router, too
    "gpt_oss": {"attn_norm"},
    "granitemoehybrid_moe": {"attn_norm", "mlp.post"},
    "qwen3_5_moe_text": {"attn_norm", "mlp.post"},
}
EXPERTS = (
    "glm4_moe", "gpt_oss", "granitemoehybrid_moe", "lfm2_moe", "mixtral", "qwen3_5_moe_text",
    "qwen3_moe", "qwen3_next",
)  # fmt: skip
# They have no norm whose channels can be scaled.
UNSMOOTHED = ("cohere2", "exaone4", "olmo2", "olmo3")
INT4 = IntFormat(4, None)


def logits(lm: LM) -> np.ndarray:
    return np.asarray(jaxllm.forward(lm.model, lm.params, None, TEXT.token_NT).logits)


def random_scale(columns: int, seed: int = 0) -> jax.Array:
    return jnp.exp(jnp.asarray(np.random.default_rng(seed).standard_normal(columns), jnp.float32))


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.full] * (f in FULL)) for f in FAMILIES]
)
def test_folded_scales_preserve_layer_outputs(family: str) -> None:
    """In float32, folding scales changes no layer's output, and rounding after it gives what the
    search of AWQ saw.
    """
    lm = tiny(family, **INVARIANT.get(family, {}))  # layers that run alone
    offset, seen = lm.config.norm_weight_offset, set[str]()

    def change(layer: LayerInputs) -> Params:
        params = layer.params
        for site in layer.sites:
            if not can_fold(params, site):
                continue
            seen.add(site.input)
            before = get_module(params, site.linears[0])["weight"]
            scale_I = random_scale(before.shape[1])
            folded, used_I = fold_scale(params, site, scale_I, offset)
            np.testing.assert_allclose(used_I, scale_I, rtol=1e-4)
            rounded, tried = folded, params
            for linear in site.linears:
                weights = (get_module(x, linear)["weight"] for x in (folded, params))
                after, before = weights
                rounded = replace_leaves(rounded, linear, weight=INT4.quantize(after).to_dense())
                searched = awq._round_scaled(before, used_I, INT4)
                tried = replace_leaves(tried, linear, weight=searched)
            for ours, theirs in ((folded, params), (rounded, tried)):
                assert_close(
                    layer.trace_entry(ours, "resid_post"), layer.trace_entry(theirs, "resid_post")
                )
            params = folded
        return params

    token_NT = TEXT.token_NT
    map_layers(lm.model, lm.params, token_NT, change, name="folding", show_progress=False)
    assert seen == FOLDABLE.get(family, {*NORMS, "mlp.post"})


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "line"),
    [
        pytest.param(
            family,
            LINES[1] if family in UNSMOOTHED else line,
            marks=[pytest.mark.full] * (family in FULL),
        )
        for family, line in zip(FAMILIES, itertools.cycle(LINES), strict=False)
    ],
)
def test_methods_preserve_function_before_rounding(
    family: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmoothQuant, and AWQ without its rounding, leave the logits as they are; heads and channels
    that are dropped equal zeros. Every family runs with one of the two.
    """
    lm = tiny(family, **INVARIANT.get(family, {}))  # layers that run alone
    exact = logits(lm)

    def keep(weight: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return weight

    dense = " on=.*self_attn.*" if family in EXPERTS else ""
    if family in LATENTS:  # nor are those of the linears of heads
        dense = " on=.*(q_proj|q_a_proj|with_mqa|o_proj).*"
    if family in RECURRENT and not dense:  # the inputs of their output projections are no sites
        dense = " on=.*(self_attn|mlp).*"
    monkeypatch.setattr(awq, "round_to_nearest", keep)
    made = compress(lm, [line + dense], calibration=TEXT)
    pairs = zip(flatten(lm.params), flatten(made.params), strict=True)
    assert any(not np.array_equal(to_dense(a), to_dense(b)) for (_, a), (_, b) in pairs)
    assert_close(logits(made), exact)
    kinds: tuple[Any, ...] = ("heads", "channels")
    for kind in kinds:
        _check_dropped(lm, kind)


def _check_dropped(lm: LM, kind: Any) -> None:
    """Check that the model without half of the groups equals the one with zeros for them."""
    count = structured_pruning.group_count(lm.config, kind)
    kept = [range(count // 2)] * lm.config.num_hidden_layers
    try:
        config, params = structured_pruning.cut_groups(lm.config, lm.params, kind, kept)
    except ConfigError as error:
        assert "cannot be dropped" in str(error)
        return
    family, masked = models.get_family(lm.config.model_type), dict(lm.params)
    name = {"heads": "attn.z", "channels": "mlp.post"}[kind]
    site = next(group for group in family.linear_groups if group.input == name)
    for number in range(lm.config.num_hidden_layers):
        path = f"{family.layers}.{number}"
        weight = get_module(masked[path], site.linears[0])["weight"]
        begin = weight.shape[1] * (count // 2) // count
        weight = weight.at[:, begin:].set(0)
        masked[path] = replace_leaves(masked[path], site.linears[0], weight=weight)
    smaller = dataclasses.replace(lm, config=config, params=params, model=models.build(config))
    assert_close(logits(smaller), logits(dataclasses.replace(lm, params=masked)))


def fold(source: Weight, scale_I: jax.Array, offset: float) -> tuple[Params, Weight]:
    """Fold a scale out of a source and into a matrix of ones in float32."""
    columns = len(scale_I)
    params = {"source": {"weight": source}, "linear": {"weight": jnp.ones((3, columns))}}
    site = LinearGroup("in", ("linear",), "out", "source")
    assert can_fold(params, site)
    made, _ = fold_scale(params, site, scale_I, offset)
    return made["linear"]["weight"], made["source"]["weight"]


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_folded_norm_in_bfloat16_keeps_products(offset: float) -> None:
    """The scale is that of the stored norm, also where a norm close to minus one cannot hold it."""
    norm_I = (jnp.asarray(np.linspace(0.004, 3, 64), jnp.float32) - offset).astype(jnp.bfloat16)
    weight, stored = fold(norm_I, random_scale(64) * 8, offset)
    wide_I = stored.astype(jnp.float32) + offset
    np.testing.assert_allclose(wide_I * weight[0], norm_I.astype(jnp.float32) + offset, rtol=1e-6)
    assert stored.dtype == jnp.bfloat16 and (stored != norm_I).sum() > 32


@pytest.mark.parametrize("name", ["int4-g32-zp", "int8", "offset/int4-g32-zp"])
def test_folded_integer_source_keeps_products(name: str) -> None:
    """A source of integers is scaled with its offsets."""
    dense = jax.random.normal(jax.random.key(0), (24, 64))
    format, scale_I = parse_format(name.removeprefix("offset/")), random_scale(24)
    source = format.quantize(dense)
    if name.startswith("offset"):
        source = source.replace(offset=jnp.ones_like(source.scale))
    _, stored = fold(source, scale_I, 0.0)
    np.testing.assert_allclose(to_dense(stored) * scale_I[:, None], to_dense(source), atol=1e-6)
    assert stored.format == source.format
    nf4 = {"source": {"weight": as_format(dense, "nf4")}, "linear": {"weight": dense.T}}
    assert not can_fold(nf4, LinearGroup("in", ("linear",), "out", "source"))
