"""Structured pruning leaves an ordinary smaller model, equal to transformers'."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jaxllm
from jaxllm import models
from jaxllm.convert.hf import write_hf
from jaxllm.convert.registry import open_path
from jaxllm.errors import ConfigError
from jaxllm.research.pruning import layer_pruning, salience, structured_pruning
from jaxllm.research.pruning.parameter_groups import Groups, group_slices
from jaxllm.weights.paths import map_leaves
from tests.tiny_models import (
    Twin,
    assert_close,
    load_twin,
    our_arrays,
    random_model,
    save_random,
    tokens,
)

KEPT = {"heads": [[1, 3], [0, 2]], "channels": [[*range(0, 50, 3)], [*range(17)]]}
FAMILIES = {
    "llama": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "gpt2": {"n_layer": 2},
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    """Return a family's model in both libraries, loaded anew because tests modify it."""
    folder = tmp_path_factory.mktemp("twins")
    for family, changes in FAMILIES.items():
        save_random(folder / family, family, **changes)
    return lambda family: load_twin(folder / family)


def written(twin: Twin, smaller: structured_pruning.SmallerModel, folder: Path) -> Any:
    """The model saved, written as Hugging Face's, and opened by transformers."""
    config, params = smaller
    lm = jaxllm.load(twin.directory)
    made = dataclasses.replace(lm, config=config, params=params, model=models.build(config))
    made.save(folder / "native")
    assert jaxllm.load(folder / "native").config == config
    write_hf(folder / "theirs", open_path(folder / "native"))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "theirs", dtype=torch.float32, attn_implementation="eager"
    ).eval()


def theirs(model: Any, token_BT: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor(token_BT)).logits.numpy()
    return found


def ours(smaller: structured_pruning.SmallerModel, token_BT: np.ndarray) -> jax.Array:
    config, params = smaller
    return jaxllm.forward(models.build(config), params, None, token_BT).logits


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "heads"), ("llama", "channels"), ("gpt2", "channels")]
)
def test_dropped_groups_equal_masked_model(
    family: str, kind: Groups, twins: Any, tmp_path: Path
) -> None:
    """Dropping heads or channels gives the logits of masking them, and transformers loads the
    result with equal logits.
    """
    twin, token_BT = twins(family), tokens(2, 24)
    dense = twin.logits(token_BT)
    smaller = structured_pruning.cut_groups(twin.config, twin.params, kind, KEPT[kind])
    twin.torch_model.requires_grad_(False)
    for number, kept in enumerate(KEPT[kind]):  # mask the weights that read dropped groups
        if family == "gpt2":
            twin.torch_model.transformer.h[number].mlp.c_proj.weight[
                [c for c in range(52) if c not in kept]
            ] = 0
        elif kind == "channels":
            dropped = [c for c in range(56) if c not in kept]
            twin.torch_model.model.layers[number].mlp.down_proj.weight[:, dropped] = 0
        else:  # 4 groups of 2 query heads of 6
            dropped = [12 * g + i for g in range(4) if g not in kept for i in range(12)]
            twin.torch_model.model.layers[number].self_attn.o_proj.weight[:, dropped] = 0
    masked = twin.logits(token_BT)
    assert np.abs(masked - dense).max() > 0.05
    assert_close(ours(smaller, token_BT), masked)
    opened = written(twin, smaller, tmp_path)
    assert_close(theirs(opened, token_BT), masked)
    config = smaller[0]
    if kind == "heads":
        assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
        assert (config.head_dim, opened.config.head_dim) == (6, 6)
    else:
        assert config.intermediate_size == 17


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropped_layer_equals_transformers_without_it(
    family: str, twins: Any, tmp_path: Path
) -> None:
    twin, token_BT = twins(family), tokens(2, 24)
    smaller = layer_pruning.cut_layers(twin.config, twin.params, [1])
    opened = written(twin, smaller, tmp_path)
    inside = twin.torch_model.model if family == "llama" else twin.torch_model.transformer
    name = "layers" if family == "llama" else "h"
    setattr(inside, name, torch.nn.ModuleList([getattr(inside, name)[1]]))
    twin.torch_model.config.num_hidden_layers = 1
    cut = twin.logits(token_BT, use_cache=False)
    assert_close(ours(smaller, token_BT), cut)
    assert_close(theirs(opened, token_BT), cut)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_salience_equals_torch(family: str, twins: Any) -> None:
    """Every salience of heads and channels equals the sum over weights, gradients and inputs taken
    from torch.
    """
    twin, token_NT = twins(family), tokens(2, 24)
    torch_model = twin.torch_model.requires_grad_(True)
    layers = torch_model.model.layers if family == "llama" else torch_model.transformer.h
    inputs: dict[Any, torch.Tensor] = {}
    for module in layers.modules():
        module.register_forward_hook(lambda m, x, _: inputs.__setitem__(m, x[0]) if x else None)
    grads: list[dict[str, np.ndarray]] = []
    norms: dict[Any, np.ndarray] = {}
    parameters = dict(torch_model.named_parameters())
    for row in torch.tensor(token_NT):
        logits = torch_model(row[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row[1:])
        found = torch.autograd.grad(loss, list(parameters.values()))
        grads.append(our_arrays(twin, dict(zip(parameters, found, strict=True))))
        for module, x in inputs.items():
            squares = (x.detach().numpy()[0].astype(np.float64) ** 2).sum(axis=0)
            norms[module] = norms.get(module, 0) + squares
    weights = our_arrays(twin, parameters)
    prefix = "model." if family == "llama" else "transformer."
    modules = {m: name.removeprefix(prefix) for name, m in torch_model.named_modules()}
    inputs_of = {name: np.sqrt(norms[m]) for m, name in modules.items() if m in norms}

    def expected(by: str, path: str) -> np.ndarray:
        """Return the salience of each number, in the layout of our weights."""
        w = weights[path].astype(np.float64)
        each = np.array([one[path] for one in grads], np.float64)
        g, f = each.mean(axis=0), np.square(each).mean(axis=0)
        module, _, what = path.rpartition(".")
        size = np.sqrt(token_NT.size) if what == "bias" else inputs_of[module][None]
        return {
            "magnitude": np.abs(w),
            "inputs": np.abs(w) * size,
            "first": np.abs(w * g),
            "second": np.abs(w * g - w * f * w / 2),
        }[by]

    def shared(by: str, kind: str, number: int) -> np.ndarray:
        """Return each group's sum, in the layout of the architecture."""
        at = f"{'layers' if family == 'llama' else 'h'}.{number}"

        def rows(name: str) -> np.ndarray:
            weight, bias = (expected(by, f"{at}.{name}.{what}") for what in ("weight", "bias"))
            return weight.sum(axis=1) + bias

        def columns(name: str) -> np.ndarray:
            return expected(by, f"{at}.{name}.weight").sum(axis=0)

        if family == "gpt2":
            if kind == "channels":
                return rows("mlp.c_fc") + columns("mlp.c_proj")
            qkv, out = rows("attn.c_attn"), columns("attn.c_proj")
            return qkv.reshape(3, 8, 5).sum(axis=(0, 2)) + out.reshape(8, 5).sum(axis=1)
        if kind == "channels":
            return rows("mlp.gate_proj") + rows("mlp.up_proj") + columns("mlp.down_proj")
        wide = rows("self_attn.q_proj") + columns("self_attn.o_proj")
        narrow = rows("self_attn.k_proj") + rows("self_attn.v_proj")
        return wide.reshape(4, 12).sum(axis=1) + narrow.reshape(4, 6).sum(axis=1)

    kinds: tuple[Groups, ...] = ("heads", "channels")
    for kind in kinds:
        for by in salience.SALIENCES:
            made = salience.measure_salience(twin.model, twin.params, kind, by, token_NT)
            for number in range(2):
                np.testing.assert_allclose(made[number], shared(by, kind, number), rtol=2e-4)


def test_influence_equals_torch_hidden_states(twins: Any) -> None:
    """Block influence and angular distance equal those of transformers' hidden states."""
    twin, token_NT = twins("llama"), tokens(2, 24)
    ends: list[torch.Tensor] = []
    twin.torch_model.model.norm.register_forward_hook(lambda _, x, __: ends.append(x[0]))
    with torch.no_grad():
        states = twin.torch_model(torch.tensor(token_NT), output_hidden_states=True).hidden_states
    stream = [x.double() for x in (*states[:-1], ends[0])]
    cosine = torch.nn.functional.cosine_similarity
    wanted = [1 - float(cosine(a, b, dim=-1).mean()) for a, b in itertools.pairwise(stream)]
    found = layer_pruning.block_influence(twin.model, twin.params, token_NT)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    turned = [torch.arccos(cosine(a, b, dim=-1)[:, -1]) for a, b in itertools.pairwise(stream)]
    found = layer_pruning.angular_distance(twin.model, twin.params, token_NT, 1)
    np.testing.assert_allclose(found, [float(t.mean()) / np.pi for t in turned], rtol=1e-4)


def test_least_influential_layers_are_dropped() -> None:
    """Layers of least influence or runs of least distance are dropped, except at the protected
    ends.
    """
    each = np.array([0.1, 0.5, 0.2, 0.9, 0.3, 0.0])
    assert layer_pruning.keep_most_influential(each, 2, 0, 0) == [1, 2, 3, 4]
    assert layer_pruning.keep_most_influential(each, 2, 1, 1) == [0, 1, 3, 5]
    runs = np.array([0.4, 0.3, 0.2, 0.1])  # of three layers of six
    assert layer_pruning.keep_outside_run(runs, 3, 0, 0) == [0, 1, 2]
    assert layer_pruning.keep_outside_run(runs, 3, 0, 1) == [0, 1, 5]
    assert [layer_pruning.default_ends(n) for n in (32, 22, 6)] == [(4, 2), (3, 1), (1, 0)]
    for count, first, last in ((0, 0, 0), (6, 0, 0), (3, 2, 2), (1, -1, 0)):
        with pytest.raises(ConfigError, match="cannot drop"):
            layer_pruning.keep_most_influential(each, count, first, last)
    found = salience.keep_most_salient(np.array([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 1.0]]), 2)
    assert [layer.tolist() for layer in found] == [[0, 2], [2, 3]]


def test_fused_attention_groups_span_three_slices() -> None:
    """A head of GPT-2's fused matrix consists of its slices in queries, keys and values."""
    model, params = random_model("gpt2")  # 8 heads of 5
    shares = group_slices(model.config, "heads", params["h.0"], "h.0")
    found = {f"{share.module}.{share.name}": share for share in shares}
    assert set(found) == {"attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight"}
    own = [5 * 3 + i for i in range(5)]
    for fused in (found["attn.c_attn.weight"], found["attn.c_attn.bias"]):
        assert fused.axis == 0
        assert fused.index_Gn[3].tolist() == [40 * part + i for part in range(3) for i in own]
    assert found["attn.c_proj.weight"].axis == 1
    assert found["attn.c_proj.weight"].index_Gn[3].tolist() == own


def test_invalid_cuts_are_refused() -> None:
    model, params = random_model("gpt2")
    with pytest.raises(ConfigError, match=r"heads of gpt2 cannot be dropped: .*hidden_size \(40\)"):
        structured_pruning.cut_groups(model.config, params, "heads", [[0], [0]])
    for kept, says in (
        ([[0], [0, 1]], "the same number of channels"), ([[0]], "all 2 layers"),
        ([[52], [0]], "indices from 0 to 51"), ([[-1], [0]], "indices from 0 to 51"),
        ([[], []], "must be 1 to 52"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            structured_pruning.cut_groups(model.config, params, "channels", kept)
    quantized = jaxllm.quantize(params, [(r"h\.1\.mlp\.c_fc.*", "int8")])
    with pytest.raises(ConfigError, match=r"h\.1\.mlp\.c_fc\.weight is int8: drop channels before"):
        structured_pruning.cut_groups(model.config, quantized, "channels", [[0], [0]])
    for layers in ([], [2], [-1]):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            layer_pruning.cut_layers(model.config, params, layers)
    model, params = random_model("gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ConfigError, match="layer 1 of this gpt2 cannot become layer 0"):
        layer_pruning.cut_layers(model.config, params, [1])
    assert layer_pruning.cut_layers(model.config, params, [0])[0].num_hidden_layers == 1


def test_removal_counts_round_and_list_valid_values() -> None:
    """Shares become counts; impossible counts raise an error that lists the valid ones."""
    assert structured_pruning.count_removed(4, 0.25, "heads") == 1
    assert structured_pruning.count_removed(8, 6, "heads") == 6
    assert structured_pruning.count_removed(5632, 0.3, "channels") == 1690
    assert structured_pruning.count_removed(6, 0.33, "layers") == 2
    with pytest.raises(ConfigError, match=r"got 25.0% of them, .* 1 \(16.7%\), 2 \(33.3%\)"):
        structured_pruning.count_removed(6, 0.25, "layers")
    with pytest.raises(ConfigError, match=r"got 16, expected .* 8 \(50.0%\), \.\.\. 15"):
        structured_pruning.count_removed(16, 16, "channels")
    for wanted in (0, 6, 7, 0.001, 0.999):
        with pytest.raises(ConfigError, match="expected 1"):
            structured_pruning.count_removed(6, wanted, "layers")
    with pytest.raises(ConfigError, match="cannot be dropped: the model has 1"):
        structured_pruning.count_removed(1, 0.5, "heads")


def test_bfloat16_salience_is_computed_in_float32() -> None:
    model, params = random_model("llama", precision=jaxllm.Precision.uniform("bfloat16"))
    narrow = map_leaves(lambda _, x: x.astype(jnp.bfloat16), params)
    found = salience.measure_salience(model, narrow, "channels", "magnitude", tokens(2, 24))
    wide = map_leaves(lambda _, x: x.astype(jnp.float32), narrow)
    np.testing.assert_array_equal(
        found, salience.measure_salience(model, wide, "channels", "magnitude", tokens(2, 24))
    )
