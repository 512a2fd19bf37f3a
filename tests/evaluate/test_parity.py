"""Parity reports: correct statistics, and the failing stage of a broken model."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm import ops
from jaxllm.errors import ConfigError, TokenError
from jaxllm.evaluate.parity.activations import (
    LOGITS,
    JaxBackend,
    ParityCase,
    activation_names,
    activations,
    pad_case,
    to_positions,
)
from jaxllm.evaluate.parity.compare import (
    TOLERANCES,
    Report,
    Tolerance,
    to_png,
    to_text,
    ulp_distance,
    verify,
)
from jaxllm.evaluate.parity.transformers_backend import TransformersBackend
from jaxllm.weights.paths import map_leaves
from tests.tiny_models import Twin, assert_close, load_twin, save_random, tokens

STRICT = TOLERANCES["float32"]
TEXTS = [tokens(1, 9)[0].tolist(), tokens(1, 6, 1)[0].tolist()]
CASE = pad_case(TEXTS)
NEW = 6


@dataclasses.dataclass(frozen=True)
class Pair:
    """One checkpoint in both backends."""

    twin: Twin
    ours: JaxBackend
    theirs: TransformersBackend


def _pair(
    folders: pytest.TempPathFactory, family: str, dtype: str = "float32", spread: float = 0.3
) -> Pair:
    directory = folders.mktemp(family)
    save_random(directory, family, spread=spread)
    twin = load_twin(directory, dtype)
    ours = JaxBackend("ours", twin.model, twin.params)
    return Pair(twin, ours, TransformersBackend.load(directory, dtype))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def report(pair: Pair) -> Report:
    return verify(pair.ours, pair.theirs, CASE, new_tokens=NEW)


# Statistics.


ENDS = (0, 1, 3, 15, 255, 4095, 65535, 2**63)  # last ULP distance of each histogram bucket


def test_report_statistics_equal_numpy(pair: Pair, report: Report) -> None:
    """Statistics, ULP histogram and worst position of stages equal NumPy's over real tokens."""
    mine, theirs = pair.ours.activations(CASE), pair.theirs.activations(CASE)
    assert [d.name for d in report.stages] == list(theirs)
    real = CASE.position_BT >= 0
    for found in report.stages:
        ours, other = mine[found.name], theirs[found.name]
        a = np.concatenate([x[keep].ravel() for x, keep in zip(ours, real, strict=True)])
        b = np.concatenate([x[keep].ravel() for x, keep in zip(other, real, strict=True)])
        a64, b64 = a.astype(np.longdouble), b.astype(np.longdouble)
        error = abs(a64 - b64)
        assert found.count == a.size == int(real.sum()) * int(np.prod(ours.shape[2:]))
        assert found.max_error == pytest.approx(float(max(error)), rel=1e-12, abs=0)
        rms = float(np.linalg.norm(a64 - b64)) / np.sqrt(a.size)
        assert found.rms_error == pytest.approx(rms, rel=1e-9, abs=1e-30)
        assert found.scale == pytest.approx(float(max(abs(b64))))
        assert found.relative_max == pytest.approx(float(max(error) / max(abs(b64))))
        reference_rms = float(np.linalg.norm(b64)) / np.sqrt(a.size)
        assert found.relative_rms == pytest.approx(rms / reference_rms)
        cosine = np.dot(a64, b64) / np.linalg.norm(a64) / np.linalg.norm(b64)
        assert found.cosine == pytest.approx(float(cosine), abs=1e-12)
        bound = 1e-5 * max(1.0, float(max(abs(b64)))) + 1e-4 * abs(b64)
        assert found.beyond == int((error > bound).sum())
        counts = [0] * len(ENDS)
        for steps in ulp_distance(a, b).tolist():
            counts[next(i for i, end in enumerate(ENDS) if steps <= end)] += 1
        assert found.ulps == tuple(counts)
        row, column, *rest = found.worst
        assert real[row, column]
        worst = abs(float(ours[(row, column, *rest)]) - float(other[(row, column, *rest)]))
        assert worst == pytest.approx(found.max_error, abs=0)


# Agreement of the two backends.


def test_models_match_transformers_at_every_stage(pair: Pair, report: Report) -> None:
    """Every stage, cache entry and greedy token agrees with transformers within the tolerance, and
    the report covers them all.
    """
    print(to_text(report))
    assert report.holds
    assert report.first is None
    assert report.greedy.agreed == report.greedy.compared == 2 * NEW
    assert max(d.relative_max for d in report.differences) < 1e-5
    layers = pair.twin.config.num_hidden_layers
    assert len(report.stages) == 3 + 10 * layers
    assert len(report.decoding) == 2 * layers + 1
    # All prompt positions and all generated tokens but the last, which is not run.
    entries = pair.twin.config.num_key_value_heads * pair.twin.config.head_dim
    fed = sum(map(len, TEXTS)) + 2 * (NEW - 1)
    assert {d.count for d in report.decoding[:-1]} == {fed * entries}


def test_transformers_activations_equal_its_own_outputs(pair: Pair) -> None:
    """Captured states, keys, values, heads and greedy tokens equal transformers' own outputs."""
    ids = tokens(2, 9)
    case = pad_case(ids.tolist())
    found = pair.theirs.activations(case)
    model = pair.twin.torch_model
    with torch.no_grad():
        plain = model(torch.tensor(ids), output_hidden_states=True, output_attentions=True)
    blocks = [n for n in found if n.rpartition(".")[2].isdigit()]
    states = [found[n] for n in [next(iter(found)), *blocks[:-1], list(found)[-2]]]
    for mine, other in zip(states, plain.hidden_states, strict=True):
        np.testing.assert_array_equal(mine, other.numpy())
    np.testing.assert_array_equal(found["logits"], plain.logits.numpy())
    for block, layer, weights in zip(
        blocks, plain.past_key_values.layers, plain.attentions, strict=True
    ):
        k, v = (x.transpose(1, 2).numpy() for x in (layer.keys, layer.values))
        np.testing.assert_array_equal(found[f"{block}.k"], k)
        np.testing.assert_array_equal(found[f"{block}.v"], v)
        # Queries: softmax of their scores with these keys equals transformers' attention weights.
        q, H = found[f"{block}.q"].astype(np.float64), k.shape[-1]
        k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        score = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
        score = np.where(np.tri(9, dtype=bool), score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        np.testing.assert_allclose(weight, weights.numpy(), atol=1e-5)
        heads = np.einsum("bnts,bsnh->btnh", weight, v)
        np.testing.assert_allclose(found[f"{block}.heads"], heads, rtol=1e-4, atol=1e-4)
    text = model.generate(torch.tensor(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    chosen_BN = pair.theirs.decode(case, NEW)[LOGITS].argmax(axis=2)
    np.testing.assert_array_equal(chosen_BN, text[:, 9:].numpy())
    assert model.config._attn_implementation == "eager"
    assert pair.theirs.model.config._attn_implementation == "eager"


def test_padding_and_caching_do_not_change_results(pair: Pair) -> None:
    """Left or right padding, cached or not: the same activations, keys and logits in both."""
    np.testing.assert_array_equal(
        to_positions(np.array([[7, 8, 9], [4, 5, 6]]), np.array([[-1, 1, 0], [0, 2, -3]])),
        [[9, 8, 0], [4, 0, 5]],
    )
    for side in (pair.ours, pair.theirs):
        whole, cached = (
            side.activations(CASE),
            side.activations(dataclasses.replace(CASE, num_cached=5)),
        )
        for name, x in cached.items():
            real = CASE.real_BT[:, 5:]
            assert_close(x[real], whole[name][:, 5:][real])
        left, right = side.decode(CASE, 2), side.decode(pad_case(TEXTS, "right"), 2)
        np.testing.assert_array_equal(left["held"], [[True] * 10, [True] * 7 + [False] * 3])
        for name, x in left.items():
            assert_close(x, right[name])
            if name.startswith("cache "):
                assert_close(x[1, :6], whole[name.removeprefix("cache ")][1, 3:])


def test_activations_equal_forward_outputs(llama: Pair) -> None:
    """Activations equal the forward pass's hidden states, keys and values, with a cache and
    without; attention equals o_proj computed by hand.
    """
    ids = tokens(2, 9)
    found = activations(llama.twin.model, llama.twin.params, None, ids)
    out = jaxllm.forward(llama.twin.model, llama.twin.params, None, ids, hidden_states=True)
    assert list(found) == activation_names("llama", 3)
    assert out.hidden_states is not None
    np.testing.assert_array_equal(found["layers.0"], out.hidden_states[1])
    assert_close(found["norm"], np.asarray(out.hidden_states[-1]))
    assert_close(found["layers.2.k"], np.asarray(out.delta.k[2]))
    o_proj = np.asarray(llama.twin.params["layers.1"]["self_attn"]["o_proj"]["weight"])
    heads = np.asarray(found["layers.1.heads"])
    assert_close(found["layers.1.attention"], heads.reshape(2, 9, -1) @ o_proj.T)
    cache = jaxllm.init_cache(llama.twin.config, 2, 16)
    cache = jaxllm.prefill(llama.twin.model, llama.twin.params, cache, ids[:, :5]).cache
    rest = activations(llama.twin.model, llama.twin.params, cache, ids[:, 5:])
    for name, x in rest.items():
        assert_close(x, np.asarray(found[name])[:, 5:])


def test_activation_names_refuses_unknown_family() -> None:
    with pytest.raises(ConfigError, match="model_type 'bert' is not supported"):
        activation_names("bert", 2)


# Broken weights and caches.


def change_weight(
    ours: JaxBackend, path: str, change: Callable[[jax.Array], jax.Array]
) -> JaxBackend:
    """Return a backend with one tensor changed."""
    changed = []

    def at(name: str, x: jax.Array) -> jax.Array:
        if name != path:
            return x
        changed.append(name)
        return change(x)

    params = map_leaves(at, ours.params)
    assert changed == [path]
    return dataclasses.replace(ours, params=params)


def _add_to_one(x: jax.Array) -> jax.Array:
    return x.at[(1,) * x.ndim].add(0.1)


STAGE_OF_WEIGHT = {
    "llama": {
        "layers.1.input_layernorm.weight": "layers.1.input_layernorm",
        "layers.0.self_attn.q_proj.weight": "layers.0.q",
        "layers.2.self_attn.k_proj.weight": "layers.2.k",
        "layers.1.self_attn.v_proj.weight": "layers.1.v",
        "layers.2.self_attn.o_proj.weight": "layers.2.attention",
        "layers.0.post_attention_layernorm.weight": "layers.0.post_attention_layernorm",
        "layers.2.mlp.up_proj.weight": "layers.2.mlp.down_proj.input",
        "layers.0.mlp.down_proj.weight": "layers.0.mlp",
        "norm.weight": "norm",
        "lm_head.weight": "logits",
    },
    "gpt2": {
        "h.1.ln_1.bias": "h.1.ln_1",
        "h.2.attn.c_proj.bias": "h.2.attn",
        "h.0.ln_2.weight": "h.0.ln_2",
        "h.1.mlp.c_fc.bias": "h.1.mlp.c_proj.input",
        "ln_f.bias": "ln_f",
    },
}


def test_changed_weight_is_located_at_its_stage(pair: Pair) -> None:
    """One weight changed by 0.1 makes the first failing stage the one that uses it."""
    for path, stage in STAGE_OF_WEIGHT[pair.twin.config.model_type].items():
        found = verify(change_weight(pair.ours, path, _add_to_one), pair.theirs, CASE, new_tokens=2)
        assert found.first is not None, path
        assert found.first.name == stage, path
        assert not found.holds


@dataclasses.dataclass(frozen=True)
class WrongCache(JaxBackend):
    """A backend with one wrong cache entry: layer 1's v of row 0 at position 7."""

    def decode(
        self, case: ParityCase, steps: int, forced_BN: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        right = super().decode(case, steps, forced_BN)
        right["cache layers.1.v"][0, 7, 1, 2] += 0.01
        return right


def test_wrong_cache_entry_is_located(llama: Pair) -> None:
    """One wrong number in a cache is reported with its layer and index."""
    side = WrongCache("ours", llama.twin.model, llama.twin.params)
    found = verify(side, llama.theirs, CASE, new_tokens=2)
    assert found.first is not None
    assert found.first.name == "cache layers.1.v"
    assert found.first.beyond == 1
    assert found.first.worst == (0, 7, 1, 2)


def test_worst_place_counts_cached_columns(llama: Pair) -> None:
    """Of a case with cached columns, a place is a column of the whole case."""
    case = dataclasses.replace(CASE, num_cached=5)
    broken = change_weight(llama.ours, "norm.weight", lambda x: x + 1)
    found = verify(broken, llama.theirs, case, new_tokens=1)
    assert found.first is not None and found.first.name == "norm"
    ours, theirs = (side.activations(case)["norm"] for side in (broken, llama.theirs))
    error = np.where(case.real_BT[:, 5:, None], abs(ours - theirs), 0)
    row, column, index = np.unravel_index(error.argmax(), error.shape)
    assert found.first.worst == (row, column + 5, index)


# Lower precision.


@pytest.fixture(scope="module")
def bfloat16_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(tmp_path_factory, "llama", "bfloat16", spread=0.06)


def test_bfloat16_is_judged_by_drift_from_float32(bfloat16_pair: Pair) -> None:
    """Drift is our logits' distance from float32 over that of transformers in bfloat16; a broken
    layer is still located.
    """
    exact = TransformersBackend.load(bfloat16_pair.twin.directory, "float32")
    found = verify(bfloat16_pair.ours, bfloat16_pair.theirs, CASE, new_tokens=3, exact=exact)
    print(to_text(found))
    assert found.holds
    assert found.dtype == "bfloat16"
    assert {d.dtype for d in found.differences} == {"bfloat16"}

    def off(side: Any) -> float:
        right, real = exact.activations(CASE)["logits"], CASE.position_BT >= 0
        return float(
            np.linalg.norm((side.activations(CASE)["logits"].astype(np.float64) - right)[real])
        )

    assert found.drift == pytest.approx(off(bfloat16_pair.ours) / off(bfloat16_pair.theirs))
    assert found.drift <= 1.5
    broken = change_weight(
        bfloat16_pair.ours, "layers.1.mlp.down_proj.weight", lambda x: x.at[3].multiply(2)
    )
    wrong = verify(broken, bfloat16_pair.theirs, CASE, new_tokens=3, exact=exact)
    assert wrong.first is not None
    assert wrong.first.name == "layers.1.mlp"


def test_verify_compares_two_jaxllm_backends(llama: Pair) -> None:
    """A bfloat16 model fails against float32 by the strict tolerance and holds by a loose one."""
    half = jaxllm.Precision.uniform("bfloat16")
    model = jaxllm.build(llama.twin.config, half)
    ours = JaxBackend("bfloat16", model, jaxllm.cast(llama.twin.params, half))
    strict = verify(ours, llama.ours, CASE, new_tokens=2, tolerance=STRICT)
    assert strict.first is not None
    assert strict.first.name == "embed_tokens"
    assert strict.exact is None
    loose = verify(ours, llama.ours, CASE, new_tokens=2, tolerance=Tolerance(0.5))
    assert loose.first is None
    assert loose.dtype == "bfloat16"


# Errors.


def test_verify_refuses_invalid_cases(llama: Pair, pair: Pair) -> None:
    """Invalid ids, positions, shapes, cached counts, lengths and mismatched models raise errors."""
    for case, words in (
        (pad_case([[1, 131]]), "token id 131"),
        (ParityCase(np.ones((1, 3), np.int32), np.int32([[0, 1]])), "shapes"),
        (ParityCase(np.ones((1, 3), np.int32), np.int32([[-2, 0, 1]])), "position -2"),
        (dataclasses.replace(pad_case([[1, 2, 3], [4]]), num_cached=2), "every row"),
    ):
        with pytest.raises(TokenError, match=words):
            verify(llama.ours, llama.theirs, case, new_tokens=1)
    if pair.twin.config.model_type == "gpt2":
        with pytest.raises(TokenError, match="context is 97"):
            verify(pair.ours, pair.theirs, CASE, new_tokens=90)
        with pytest.raises(ConfigError, match="different activations"):
            verify(llama.ours, pair.theirs, CASE, new_tokens=1)
    with pytest.raises(ConfigError, match="new_tokens"):
        verify(llama.ours, llama.theirs, CASE, new_tokens=0)


def test_missing_dependency_errors_name_package(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch the error gives the pip command, and without matplotlib it names matplotlib."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[test\]'"):
        TransformersBackend.load(Path("nowhere"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib"):
        to_png(report, Path("nowhere.png"))


# The command.


def verdict(run: Any, *command: Any) -> tuple[bool, str]:
    """Run a comparison; return whether it holds, by its status and last line, and its output."""
    status, out, err = run(*command)
    last = out.splitlines()[-1] if out else err
    assert (status, last) in ((0, "holds"), (1, "DOES NOT HOLD"))
    return status == 0, out


def test_verify_command_holds_on_stories260k(run: Any, data: Any, tmp_path: Path) -> None:
    """On a published model, every greedy token agrees with transformers; a plot is written."""
    picture = tmp_path / "error.png"
    status, out, err = run(
        "verify", data("stories260K"), "-n", 8, "--length", 16, "--json", "--plot", picture
    )
    found = json.loads(out)
    print(max(d["relative_max"] for d in found["stages"]))
    assert status == 0
    assert found["holds"] is True
    assert found["greedy"]["agreed"] == found["greedy"]["compared"] == 16
    assert found["reference"].startswith("transformers")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert [p.name for p in tmp_path.iterdir()] == ["error.png"]
    assert "error.png" in err


def test_verify_command_measures_quantization_error(run: Any, llama: Pair, tmp_path: Path) -> None:
    """int8 equals transformers on its dequantized weights and differs from the original checkpoint
    by at most half a step.
    """
    directory = llama.twin.directory
    common = ("verify", directory, "--quantize", "int8", "-n", 2, "--length", 9)
    assert verdict(run, *common)[0]
    holds, out = verdict(run, *common, "--against", directory)
    assert not holds
    assert "first to diverge: embed_tokens" in out
    status, out, _ = run(*common, "--against", directory, "--tolerance", 2, "--json")
    assert status == 0
    # int8 per row: half a step is 1/254 of the row's largest value.
    table = np.asarray(llama.twin.params["embed_tokens"]["weight"])
    first = json.loads(out)["stages"][0]
    assert 0 < first["max_error"] <= np.abs(table).max() / 254 * 1.01


def test_verify_command_applies_precision_table(run: Any, llama: Pair, tmp_path: Path) -> None:
    """Weight formats in the table also apply to the reference; activation formats do not."""
    table = tmp_path / "formats.json"
    common = ("verify", llama.twin.directory, "--precision", table, "-n", 2, "--length", 9)
    weights = ["layers.1", {"weights": "bfloat16"}], ["lm_head", {"weights": "int8"}]
    table.write_text(json.dumps(weights))
    assert verdict(run, *common)[0]
    holds, out = verdict(run, *common, "--against", llama.twin.directory)
    assert not holds
    assert "first to diverge: layers.1.input_layernorm" in out
    table.write_text(json.dumps([["layers.2.mlp.down_proj", {"activations": "bfloat16"}]]))
    holds, out = verdict(run, *common)
    assert not holds
    assert "first to diverge: layers.2.mlp" in out


def test_verify_command_reads_native_checkpoints(run: Any, llama: Pair, tmp_path: Path) -> None:
    native = tmp_path / "native"
    assert run("convert", llama.twin.directory, native)[0] == 0
    assert run("verify", native, "-n", 2, "--length", 9)[0] == 0


def test_verify_command_names_bad_arguments(run: Any, llama: Pair) -> None:
    """Unknown formats and missing references raise errors that name them."""
    status, _, err = run("verify", llama.twin.directory, "-n", 1, "--quantize", "int5")
    assert status == 1
    assert "int5" in err
    status, _, err = run("verify", llama.twin.directory, "--against", "nowhere")
    assert status == 1
    assert "nowhere" in err


# Broken code. Last in the file, because it recompiles all programs.


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("shifted", "stage"),
    [
        ("both", "layers.1.q"),
        ("k", "layers.1.k"),
        pytest.param("q", "layers.1.q", marks=pytest.mark.full),
    ],
)
def test_shifted_rotation_is_located_in_its_layer(
    shifted: str, stage: str, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 1 rotates by the angles of the next position: the report names that layer, even if
    attention cancels the shift.
    """
    rotate, calls = ops.rotate, iter(range(1000))
    broken = {"both": (2, 3), "q": (2,), "k": (3,)}[shifted]  # call numbers: q and k of each layer

    def wrong(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        if next(calls) % 6 in broken:
            one = 1.0 / 10000.0 ** (jnp.arange(cos.shape[-1], dtype=jnp.float32) / cos.shape[-1])
            one = one[None, None]
            cos, sin = (
                cos * jnp.cos(one) - sin * jnp.sin(one),
                sin * jnp.cos(one) + cos * jnp.sin(one),
            )
        return rotate(x, cos, sin)

    monkeypatch.setattr(ops, "rotate", wrong)
    found = verify(llama.ours, llama.theirs, CASE, new_tokens=2)
    print(to_text(found))
    assert found.first is not None
    assert found.first.name == stage
    # Scores depend on position differences: if keys and queries both move, no later stage is
    # wrong, but the layer is still reported.
    later = [d.name for d in found.stages if not d.holds and d.name.startswith("layers.2")]
    assert bool(later) == (shifted != "both")
    assert not found.holds


def test_verify_accepts_path_or_loaded_model(shallow: Any) -> None:
    """jaxllm.verify takes a path or a loaded LM and makes the case and transformers' backend."""
    path = shallow("gpt2")
    assert jaxllm.verify(path, length=8, new_tokens=2).holds
    lm = jaxllm.load(path, dtype="float32")
    changed = map_leaves(
        lambda name, x: x.at[3, 5].add(1.0) if name == "h.1.mlp.c_fc.weight" else x, lm.params
    )
    changed = dataclasses.replace(lm, params=changed)
    found = jaxllm.verify(changed, path, length=8, new_tokens=2)
    assert not found.holds
    assert found.first is not None
    assert found.first.name == "h.1.mlp.c_proj.input"
