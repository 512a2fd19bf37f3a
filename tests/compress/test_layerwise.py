"""Layer-by-layer compression: inputs, exactness and gains of the methods."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import models
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.compress import calibration
from jaxllm.compress.layerwise import LayerInputs, get_module, map_layers, replace_leaves
from jaxllm.compress.methods.awq import search_scale
from jaxllm.compress.recipe import ModelState, StepContext, parse_line
from jaxllm.compress.registry import find_steps
from jaxllm.errors import NonFiniteError
from jaxllm.weights.formats import as_format, to_dense, weight_format
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.types.int_weight import IntWeight, parse

FAMILIES = ("llama", "gpt2")
ONE = pytest.mark.parametrize("lm", ["gpt2"], indirect=True)  # what no family changes
SQUARE = r"on=.*(q_proj|o_proj|attn\.c_proj)"  # equal shapes, to compile little


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request: pytest.FixtureRequest, shallow_demos: Path) -> jaxllm.LM:
    return jaxllm.load(shallow_demos / request.param, dtype="float32")


@pytest.fixture(scope="module")
def rows(lm: jaxllm.LM) -> calibration.Calibration:
    """Random token rows."""
    prompt = jax.random.randint(jax.random.key(0), (24, 1), 3, lm.config.vocab_size)
    tokens = np.random.default_rng(0).integers(3, lm.config.vocab_size, (24, 48))
    tokens[:, :1] = prompt
    return calibration.from_tokens(tokens)


def logits(lm: jaxllm.LM, params: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jaxllm.forward(lm.model, params, None, tokens).logits)


def run_step(lm: jaxllm.LM, line: str, rows: Any, subject: ModelState | None = None) -> ModelState:
    """Run a step of a recipe on a model, or on the state that another step has left."""
    read = parse_line(line, find_steps())
    subject = subject or ModelState(lm.config, lm.params, lm.model.precision)
    return read.step.run(
        StepContext(subject, read.argument, read.options, rows, TensorStore(), False, print)
    )


def mean_kl(lm: jaxllm.LM, made: ModelState, tokens: np.ndarray) -> float:
    """Return the mean KL divergence from the original model."""
    p = jax.nn.log_softmax(logits(lm, lm.params, tokens))
    q = jax.nn.log_softmax(jaxllm.forward(made.model, made.params, None, tokens).logits)
    return float((jnp.exp(p) * (p - q)).sum(-1).mean())


def test_layerwise_pass_equals_full_forward(lm: jaxllm.LM, rows: Any) -> None:
    """Layer inputs, activations and input statistics of the layerwise pass equal those of the full
    model.
    """
    tokens = rows.token_NT[:2]
    position = jnp.broadcast_to(jnp.arange(48, dtype=jnp.int32), tokens.shape)
    length = jnp.full((2,), 48, jnp.int32)
    read = frozenset({"attn_norm", "attn.z", "mlp_norm", "mlp.post"})
    trace: Any = lm.model.apply({"params": lm.params}, tokens, position, length, read=read)
    seen: list[LayerInputs] = []

    def visit(stage: LayerInputs) -> Any:
        seen.append(stage)
        return stage.params

    map_layers(lm.model, lm.params, tokens, visit, name="looking", show_progress=False)
    entering = [trace.embeddings, *(layer.x for layer in trace.layers)]
    for stage, x, layer in zip(seen, entering, trace.layers, strict=False):
        np.testing.assert_allclose(stage.x_NTD, x, atol=1e-5)
        for site in stage.sites:
            got = stage.trace_entry(stage.params, site.input)
            want = layer.sites[site.input].reshape(2, 48, -1)
            np.testing.assert_allclose(got, want, atol=1e-5)
            moments = stage.input_stats(stage.params, site)
            x_RI = np.asarray(want).reshape(-1, want.shape[-1])
            np.testing.assert_allclose(moments.gram_II, x_RI.T @ x_RI, rtol=1e-3, atol=1e-3)


def test_later_layers_see_modified_earlier_layers(lm: jaxllm.LM, rows: Any) -> None:
    inputs: list[np.ndarray] = []

    def blank(stage: LayerInputs) -> Any:
        inputs.append(stage.x_NTD)
        return map_leaves(lambda _, x: jnp.zeros_like(x), stage.params)

    map_layers(lm.model, lm.params, rows.token_NT, blank, name="blank", show_progress=False)
    np.testing.assert_array_equal(inputs[0], inputs[1])  # a layer of zeros adds nothing


@ONE
def test_nan_is_reported_by_layer(lm: jaxllm.LM, rows: Any) -> None:
    family = models.get_family(lm.config.model_type)
    path = f"{family.layers}.1"
    linear = family.linear_groups[-1].linears[0]
    weight = get_module(lm.params[path], linear)["weight"].at[3, 5].set(jnp.nan)
    broken = {**lm.params, path: replace_leaves(lm.params[path], linear, weight=weight)}
    with pytest.raises(NonFiniteError, match=rf"{family.layers}\.1 returned NaN"):
        map_layers(
            lm.model, broken, rows.token_NT, lambda s: s.params, name="", show_progress=False
        )


def test_awq_beats_rounding_and_protects_large_channels(
    lm: jaxllm.LM, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ's scales have no more loss than rounding, protect an amplified channel, and dequantize
    the int8 weight once per search.
    """
    family, to = models.get_family(lm.config.model_type), parse("int3-g64-zp")
    assert to is not None
    site = family.linear_groups[0]
    checked: list[int] = []
    widened: list[int] = []
    dense_of, last = IntWeight.to_dense, family.linear_groups[-1].linears[0]

    def counted(leaf: IntWeight, dtype: Any = None) -> jax.Array:
        widened.append(leaf.bits)
        return dense_of(leaf, dtype)

    monkeypatch.setattr(IntWeight, "to_dense", counted)

    def visit(stage: LayerInputs) -> Any:
        norm = get_module(stage.params, str(site.source))
        amplified = norm["weight"].at[7].multiply(100.0)
        params = replace_leaves(stage.params, str(site.source), **{**norm, "weight": amplified})
        params = replace_leaves(
            params, last, weight=as_format(get_module(params, last)["weight"], "int8")
        )
        moments = stage.input_stats(params, site)
        widened.clear()
        best_I = search_scale(stage, params, site, moments, to)
        assert widened.count(8) == 1  # once for all that is tried
        weight = get_module(params, site.linears[0])["weight"]
        scale_I = best_I[None]
        plain, guarded = (
            np.abs(np.asarray(q - weight))[:, 7].mean()
            for q in (
                to.quantize(weight).to_dense(),
                to.quantize(weight * scale_I).to_dense() / scale_I,
            )
        )
        assert (best_I != 1).any() and guarded < plain
        checked.append(stage.number)
        return stage.params

    map_layers(lm.model, lm.params, rows.token_NT[:8], visit, name="awq", show_progress=False)
    assert checked == [0, 1]


@pytest.mark.parametrize(
    ("lm", "line"),
    [
        ("llama", "quantize: gptq int3-g64"),
        ("gpt2", "quantize: gptq int3-g64 act_order=false"),
        ("llama", "quantize: gptq int3-g64 static_groups=false"),
        ("gpt2", "quantize: awq int3-g64"),
    ],
    indirect=["lm"],
)
def test_calibrated_quantization_beats_rounding(line: str, lm: jaxllm.LM, rows: Any) -> None:
    """GPTQ and AWQ have a smaller KL divergence than rounding to nearest."""
    made, plain = (
        run_step(lm, f"{one} {SQUARE}", rows) for one in (line, "quantize: rtn int3-g64")
    )
    assert mean_kl(lm, made, rows.token_NT) < mean_kl(lm, plain, rows.token_NT)
    found = {weight_format(x) for p, x in flatten(made.params) if x.ndim == 2}
    assert found == {"float32", "ordered/int3-g64" if "static" in line else "int3-g64"}


@ONE
def test_pruned_weights_stay_pruned_after_quantization(lm: jaxllm.LM, rows: Any) -> None:
    """2:4 zeros survive GPTQ, storing as int8-2:4 keeps the codes, and SparseGPT beats Wanda and
    magnitude.
    """
    pruned = run_step(lm, f"prune: sparsegpt 2:4 {SQUARE}", rows)
    joint = run_step(lm, f"prune: sparsegpt 2:4 quantize=int8 {SQUARE}", rows)
    after = run_step(lm, f"quantize: gptq int8 {SQUARE}", rows, pruned)
    family = models.get_family(lm.config.model_type)
    for made in (pruned, joint, after):
        linear = family.linear_groups[1].linears[0]
        weight = np.asarray(
            to_dense(get_module(made.params[f"{family.layers}.1"], linear)["weight"])
        )
        assert (weight.reshape(len(weight), -1, 4) == 0).sum(-1).min() >= 2
    stored = run_step(lm, f"store: int8-2:4 {SQUARE}", rows, after)
    for (path, a), (_, b) in zip(flatten(after.params), flatten(stored.params), strict=True):
        np.testing.assert_array_equal(to_dense(a), to_dense(b))  # the integers that GPTQ chose
        assert (weight_format(b) == "int8-2:4") == (weight_format(a) == "int8"), path
    others = [run_step(lm, f"prune: {one} 2:4 {SQUARE}", rows) for one in ("wanda", "magnitude")]
    assert mean_kl(lm, pruned, rows.token_NT) < min(
        mean_kl(lm, one, rows.token_NT) for one in others
    )


@ONE
def test_model_scope_prunes_by_one_threshold(lm: jaxllm.LM, rows: Any) -> None:
    """With scope=model one threshold prunes the requested share overall, and the layers' shares
    differ.
    """
    made = run_step(lm, "prune: magnitude 40% scope=model", rows)
    chosen = [np.asarray(x) for p, x in flatten(made.params) if x.ndim == 2 and p.count(".") > 2]
    zero = sum((x == 0).sum() for x in chosen) / sum(x.size for x in chosen)
    assert zero == pytest.approx(0.4, abs=1e-3)
    shares = [float((x == 0).mean()) for x in chosen]
    assert max(shares) - min(shares) > 0.01
