"""FixedShapeRunner: one compiled program serves any length and gives the logits of `forward`."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxllm
from jaxllm import ops
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.export import FixedShapeRunner, StaticCache, StepSignature, input_shapes, make_step
from jaxllm.ops.masked import attend_with_mask
from jaxllm.weights.precision import Precision
from tests.tiny_models import random_model, tokens

N, M = 4, 13  # tokens per step, total tokens: nine past slots
IDS = tokens(3, M)
VARIANTS: dict[str, dict[str, Any]] = {
    "positions": {},
    "boolean": {"mask": "boolean"},
    "additive": {"mask": "additive"},
    "rotary": {"rotary": True},
    "rotary-boolean": {"rotary": True, "mask": "boolean"},
}
CASES = [
    *(("llama", name) for name in ("positions", "rotary", "additive", "rotary-boolean")),
    *(("gpt2", name) for name in ("positions", "boolean", "additive")),
]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Return each model with the logits of `forward` over all of `IDS`."""
    found = {}
    for family in ("llama", "gpt2"):
        model, params = random_model(family)
        found[family] = (model, params, np.asarray(jaxllm.forward(model, params, None, IDS).logits))
    return found


def make(models: Any, family: str, variant: str = "positions", **more: Any) -> FixedShapeRunner:
    model, params, _ = models[family]
    return FixedShapeRunner(model, params, N, M, **{**VARIANTS[variant], **more})


def close(a: Any, b: Any) -> None:
    scale = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize(("family", "variant"), CASES)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_runner_any_length_equals_forward(
    models: Any, family: str, variant: str, padding: str
) -> None:
    """Inputs of every length, with padding on either side, give the logits of forward."""
    run = make(models, family, variant, padding=padding)
    for length in (1, N - 1, N, N + 1, 2 * N, M):
        out = run(tokens=IDS[:, :length])
        assert out.logits.shape == (3, length, 131)
        close(out.logits, models[family][2][:, :length])


@pytest.mark.parametrize(("family", "variant"), CASES)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_runner_ragged_rows_equal_single_rows(
    models: Any, family: str, variant: str, padding: str
) -> None:
    """Each row of a ragged batch has forward's logits on that row, in the first call and next."""
    lengths = [6, 1, 9]
    rows = [IDS[r, :length].tolist() for r, length in enumerate(lengths)]
    run = make(models, family, variant, padding=padding)
    out = run(tokens=rows)
    assert out.mask.sum(axis=1).tolist() == lengths
    assert out.mask[1, -1 if padding == "left" else 0]
    for r, length in enumerate(lengths):
        close(out.logits[r][out.mask[r]], models[family][2][r, :length])
    more = run(tokens=[[int(IDS[r, n])] for r, n in enumerate(lengths)], past=out.past)
    for r, length in enumerate(lengths):
        close(more.logits[r, 0], models[family][2][r, length])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_runner_mask_allows_padding_anywhere(models: Any, family: str) -> None:
    """With padding at arbitrary masked positions, logits equal forward, and the ids under the mask
    are never validated.
    """
    run, mask = make(models, family), np.array([[0, 1, 1, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0, 1, 0]])
    ids = np.full((2, 8), 999)  # ids under the mask are never read
    for r in range(2):
        ids[r, mask[r] == 1] = IDS[r, : mask[r].sum()]
    out = run(tokens=ids, mask=mask)
    for r in range(2):
        close(out.logits[r][out.mask[r]], models[family][2][r, : mask[r].sum()])


@pytest.mark.parametrize(("family", "variant"), CASES)
@given(cuts=st.lists(st.integers(1, M - 1), max_size=4), left=st.booleans())
@settings(max_examples=8)
def test_runner_any_slicing_equals_one_forward(
    models: Any, family: str, variant: str, cuts: list[int], left: bool
) -> None:
    """A sequence fed in arbitrary pieces gives the logits of one forward pass."""
    run = make(models, family, variant, padding="left" if left else "right")
    # Everything before the last cut must fit into the nine past slots.
    edges = sorted({0, *(c for c in cuts if c <= M - N), M})
    past, pieces = None, []
    for start, stop in itertools.pairwise(edges):
        out = run(tokens=IDS[:, start:stop], past=past)
        past = out.past
        pieces.append(out.logits)
    close(np.concatenate(pieces, axis=1), models[family][2])


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_runner_embeddings_equal_tokens(models: Any, family: str, tied: bool) -> None:
    """Embedding rows give the logits of their token ids, both input kinds can be mixed, and NaN
    under the mask has no effect.
    """
    model, params, whole = models[family]
    if tied is not model.config.tie_word_embeddings:
        model, params = random_model(family, tie_word_embeddings=tied)
        whole = np.asarray(jaxllm.forward(model, params, None, IDS).logits)
    table_VD = np.asarray(params["wte" if family == "gpt2" else "embed_tokens"]["weight"])
    run = FixedShapeRunner(model, params, N, M)
    out = run(embeddings=table_VD[IDS[:, :7]])
    close(out.logits, whole[:, :7])
    after = run(tokens=IDS[:, 7:11], past=out.past)  # the two input kinds can be mixed
    close(after.logits, whole[:, 7:11])
    vectors = table_VD[IDS[:, :7]].copy()
    vectors[0, :2] = np.nan
    mask = np.ones((3, 7), int)
    mask[0, :2] = 0
    assert np.isfinite(run(embeddings=vectors, mask=mask).logits).all()


def test_runner_continues_from_cache_keys_and_values(models: Any) -> None:
    """A past with the keys and values of a smaller KVCache continues like forward."""
    model, params, whole = models["llama"]
    cache = jaxllm.init_cache(model.config, 3, 7)  # fewer slots than the step has
    _, cache = jaxllm.prefill(model, params, cache, IDS[:, :5])
    past = StaticCache(cache.tail.k, cache.tail.v, np.asarray(cache.position_BS))
    for padding in ("left", "right"):
        out = make(models, "llama", padding=padding)(tokens=IDS[:, 5:M], past=past)
        close(out.logits, whole[:, 5:])
        assert out.past.k[0].shape == (3, M - N, *cache.tail.k[0].shape[2:])
        assert out.past.num_missing == 3 * (M - (M - N))


def test_runner_past_reports_slot_positions(models: Any) -> None:
    """The past holds the position of each filled slot, and keys and values of fixed shapes."""
    out = make(models, "llama")(tokens=[[1, 2, 3], [4, 5]])
    assert [sorted(row[row >= 0].tolist()) for row in out.past.position_BS] == [[0, 1, 2], [0, 1]]
    assert all(x.shape == (2, M - N, 2, 6) for x in (*out.past.k, *out.past.v))


def test_runner_sliding_window_and_dynamic_rope_equal_forward(models: Any) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    changes: list[tuple[str, dict[str, Any], list[str]]] = [
        ("mistral", {"sliding_window": 3}, ["boolean"]),
        ("llama", {"rope_parameters": rope, "max_position_embeddings": 8}, ["positions", "rotary"]),
    ]
    for family, change, variants in changes:
        model, params = random_model(family, **change)
        whole = jaxllm.forward(model, params, None, IDS).logits
        for variant in variants:
            run = FixedShapeRunner(model, params, N, M, **VARIANTS[variant])
            close(run(tokens=IDS).logits, whole)


def test_runner_quantized_weights_equal_forward(models: Any) -> None:
    model, params, _ = models["llama"]
    rules = [("layers.0.mlp.down_proj.*", "int4-g32"), ("layers.1.*o_proj.*", "int8")]
    params = jaxllm.quantize(params, [*rules, (".*", None)])
    whole = np.asarray(jaxllm.forward(model, params, None, IDS).logits)
    close(FixedShapeRunner(model, params, N, M, mask="boolean")(tokens=IDS).logits, whole)


def test_runner_text_equals_token_ids(data: Any) -> None:
    """Text gives the logits of its token ids, and text without a tokenizer is refused."""
    lm = jaxllm.load("demo:llama", dtype="float32")
    run = FixedShapeRunner(lm.model, lm.params, 8, 40, tokenizer=lm.tokenizer)
    texts = ["Once upon a time there was a little dog", "One day"]
    out = run(text=texts)
    ids = np.zeros(out.mask.shape, int)
    ids[out.mask] = [token for text in texts for token in lm.encode(text)]
    positions = np.where(out.mask, out.mask.cumsum(axis=1) - 1, -1)
    whole = jaxllm.forward(lm.model, lm.params, None, ids, positions_BT=positions).logits
    for r, text in enumerate(texts):
        assert out.mask[r].sum() == len(lm.encode(text))
        close(out.logits[r][out.mask[r]], whole[r][out.mask[r]])
    with pytest.raises(TokenError, match="text requires a tokenizer"):
        dataclasses.replace(run, tokenizer=None)(text="x")


def test_runner_compiles_once_per_batch_size(compiled: list[str]) -> None:
    """Lengths, padding sides and mask values share one compiled program; another batch size
    compiles a second one.
    """
    # A model that no other test compiles.
    models = {"llama": (*random_model("llama", max_position_embeddings=89), None)}
    run = make(models, "llama", mask_value=-49.0, mask="additive")
    past, count = None, len(compiled)
    for length in (1, 2, 3, 4, 9):
        run(tokens=IDS[:, :length])
    for _ in range(3):
        past = run(tokens=IDS[:, :2], past=past).past
    other = make(models, "llama", padding="right", mask="additive")
    other(tokens=IDS[:, :7], past=past)
    assert len(compiled) - count == 1
    run(tokens=IDS[:1])
    assert len(compiled) - count == 2


def test_step_is_pure_function_of_named_arrays(models: Any) -> None:
    """With RoPE tables and mask written out by hand, the step gives the logits of forward and its
    declared output shapes; unseen slots may hold NaN.
    """
    model, params, whole = models["llama"]
    form = StepSignature(mask="boolean", rotary=True)
    shapes = input_shapes(model, form, batch=3, num_tokens=N, capacity=M - N)
    assert list(shapes)[:5] == ["input_ids", "cos", "sin", "attention_mask", "slots"]
    assert shapes["cos"].shape == (3, 1, N, 3)
    assert shapes["attention_mask"].shape == (3, 1, N, M)
    inputs = {name: np.zeros(s.shape, s.dtype) for name, s in shapes.items()}
    # Angles and mask written out: theta^(-2i/H) with H = 6, causal among the new tokens.
    angle = np.arange(N)[:, None] * 10000.0 ** (-np.arange(0, 6, 2) / 6)
    inputs["cos"][:], inputs["sin"][:] = np.cos(angle), np.sin(angle)
    inputs["attention_mask"][:, 0, :, M - N :] = np.tril(np.ones((N, N), bool))
    inputs["input_ids"][:] = IDS[:, :N]
    inputs["slots"][:] = np.arange(N)
    for i in range(2):  # masked slots may hold anything
        inputs[f"past_key_values.{i}.value"][:] = np.nan
    outputs = jax.jit(make_step(model, form))(params, inputs)
    close(outputs["logits"], whole[:, :N])
    declared = jax.eval_shape(make_step(model, form), params, shapes)
    assert {n: (x.shape, x.dtype) for n, x in outputs.items()} == {
        n: (x.shape, x.dtype) for n, x in declared.items()
    }


@pytest.mark.parametrize("padding", ["left", "right"])
def test_custom_step_receives_documented_inputs(models: Any, padding: str) -> None:
    """An external step receives padding on the documented side, 0 and -1 as padding id and
    position, and an additive mask.
    """
    model, params, _ = models["llama"]
    compiled = jax.jit(make_step(model, StepSignature(mask="additive")))
    seen: list[dict[str, Any]] = []

    def step(inputs: Any) -> Any:
        seen.append({name: np.asarray(x) for name, x in inputs.items()})
        return compiled(params, inputs)

    run = make(models, "llama", "additive", padding=padding, mask_value=-7.0, step=step)
    past = run(tokens=[[5, 6]]).past
    few = StaticCache(
        tuple(x[:, :2] for x in past.k), tuple(x[:, :2] for x in past.v), past.position_BS[:, :2]
    )
    run(tokens=[[999, 7, 8]], mask=[[0, 1, 1]], past=few)
    first, second = seen
    left = padding == "left"
    assert first["input_ids"].tolist() == [[0, 0, 5, 6] if left else [5, 6, 0, 0]]
    assert first["position_ids"].tolist() == [[-1, -1, 0, 1] if left else [0, 1, -1, -1]]
    assert second["input_ids"].tolist() == [[0, 0, 7, 8] if left else [0, 7, 8, 0]]
    assert second["position_ids"].tolist() == [[-1, -1, 2, 3] if left else [-1, 2, 3, -1]]
    filled_slots = second["past_key_values.0.key"].any(axis=(0, 2, 3)).tolist()
    assert filled_slots == ([False] * 7 + [True] * 2 if left else [True] * 2 + [False] * 7)
    row = second["attention_mask"][0, 0, -1 if left else 2]  # of the last real token
    assert set(np.flatnonzero(row == 0)) == ({7, 8, 11, 12} if left else {0, 1, 10, 11})
    assert set(row[row != 0].tolist()) == {-7.0}


def test_boolean_mask_holds_for_large_scores() -> None:
    """With a visible score of -90 and a masked score of 0, an additive mask of -50 selects the
    masked entry; a boolean mask does not.
    """

    def entries(first: float, second: float) -> jax.Array:
        return jnp.array([first, first, second, second]).reshape(1, 2, 1, 2)

    q = jnp.ones((1, 1, 1, 2))
    part = ops.Part(entries(-45.0, 0.0), entries(1.0, 2.0), jnp.zeros((1, 2), jnp.int32))
    seen = jnp.array([[[True, False]]])
    out = attend_with_mask(q, [part], seen, scale=1.0)
    np.testing.assert_array_equal(np.asarray(out).ravel(), [1.0, 1.0])
    additive = attend_with_mask(q, [part], jnp.where(seen, 0.0, -50.0), scale=1.0)
    np.testing.assert_allclose(np.asarray(additive).ravel(), [2.0, 2.0], atol=1e-6)
    fully_masked = attend_with_mask(q, [part], jnp.zeros_like(seen), scale=1.0)
    np.testing.assert_array_equal(np.asarray(fully_masked).ravel(), [0.0, 0.0])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 5), "num_tokens must be a whole number from 1 up, got 0"),
        ((2.5, 5), "num_tokens must be a whole number"),
        ((4, 4), r"max_tokens \(4\) must exceed num_tokens \(4\)"),
        ((4, 98), r"max_tokens \(98\) exceeds the model's context of 97"),
        ((4, -1), "max_tokens must be a whole number"),
    ],
)
def test_runner_refuses_invalid_lengths(models: Any, lengths: Any, message: str) -> None:
    model, params, _ = models["llama"]
    with pytest.raises(ConfigError, match=message):
        FixedShapeRunner(model, params, *lengths)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", {"rotary": True}, "gpt2 has no RoPE"),
        ("llama", {"mask": "causal"}, "mask must be one of positions, boolean, additive"),
        ("llama", {"padding": "both"}, "padding must be 'left' or 'right'"),
        ("llama", {"mask_value": 0.0}, "mask_value must be finite and negative"),
        ("llama", {"mask_value": -np.inf}, "mask_value must be finite and negative"),
    ],
)
def test_runner_refuses_invalid_options(
    models: Any, family: str, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(models, family, **options)


def test_runner_refuses_int8_cache() -> None:
    model, params = random_model("llama", precision=Precision(cache="int8"))
    with pytest.raises(ConfigError, match="do not support an int8 cache"):
        FixedShapeRunner(model, params, N, M)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TokenError, "exactly one of text, tokens and embeddings; got none"),
        ({"tokens": [[1]], "text": "x"}, TokenError, "got text and tokens"),
        ({"tokens": [[]]}, TokenError, "tokens must be"),
        ({"tokens": [[1], []]}, TokenError, "row 1 has no tokens"),
        ({"tokens": [1, 2]}, TokenError, "tokens must be"),
        ({"tokens": [[1.5]]}, TokenError, "must be integers"),
        ({"tokens": [[1, 131]]}, TokenError, r"token id 131 .* 131 \(row 0, column 1\)"),
        ({"tokens": [[-1]]}, TokenError, "token id -1"),
        (
            {"tokens": [[1, 2]], "mask": [[1]]},
            TokenError,
            r"mask must have the input's shape \(1, 2\)",
        ),
        ({"tokens": [[1, 2]], "mask": [[1, 2]]}, TokenError, "mask must be 1 for real"),
        ({"tokens": [[1, 2], [3]], "mask": [[1, 1], [1, 0]]}, TokenError, "mask requires an array"),
        ({"embeddings": np.zeros((1, 2, 39))}, TokenError, r"\[B, T, 40\]"),
        ({"embeddings": np.zeros((1, 2, 40), int)}, TokenError, "must be floats"),
        ({"embeddings": np.full((1, 2, 40), np.nan)}, TokenError, "row 0, column 0 is not"),
        ({"tokens": IDS[:1].repeat(2, 1)}, CapacityError, "0 past and 26 new tokens"),
    ],
)
def test_runner_refuses_invalid_input(
    models: Any, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(models, "llama")(**given)


def test_runner_refuses_mismatched_past(models: Any) -> None:
    """A past that is full, too wide, or has wrong rows, layers, shapes, dtypes or positions is
    refused with the reason.
    """
    run = make(models, "llama")
    past = run(tokens=IDS[:, :2]).past
    full = run(tokens=IDS, past=None).past
    with pytest.raises(CapacityError, match="12 tokens of this past did not fit"):
        run(tokens=IDS[:, :1], past=full)
    with pytest.raises(CapacityError, match="2 past and 12 new tokens do not fit"):
        run(tokens=IDS[:, :12], past=past)
    wider = StaticCache(
        *(tuple(np.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in y) for y in (past.k, past.v)),
        np.pad(past.position_BS, ((0, 0), (0, 1)), constant_values=-1),
    )
    with pytest.raises(CapacityError, match="the past has 10 slots"):
        run(tokens=IDS[:, :1], past=wider)
    for broken, message in {
        "rows": (dataclasses.replace(past, position_BS=past.position_BS[:2]), r"\[3, slots\]"),
        "layers": (dataclasses.replace(past, k=past.k[:1]), "1 layers, expected 2"),
        "shape": (dataclasses.replace(past, v=tuple(x[:, :1] for x in past.v)), "v of layer 0"),
        "dtype": (
            dataclasses.replace(past, k=tuple(np.asarray(x, np.float16) for x in past.k)),
            "k of layer 0 must be float32",
        ),
        "floats": (
            dataclasses.replace(past, position_BS=past.position_BS.astype(np.float32)),
            "must be integers",
        ),
    }.values():
        with pytest.raises(CacheMismatchError, match=message):
            run(tokens=IDS[:, :1], past=broken)
    model, params = random_model("gpt2")
    with pytest.raises(TokenError, match="position 97 is too large, expected less than 97"):
        past_2 = FixedShapeRunner(model, params, N, M)(tokens=IDS[:, :2]).past
        late = dataclasses.replace(
            past_2, position_BS=past_2.position_BS + 95 * (past_2.position_BS >= 0)
        )
        FixedShapeRunner(model, params, N, M)(tokens=IDS[:, :1], past=late)
