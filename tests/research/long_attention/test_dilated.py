"""A model with dilated attention: chunked prefill, decoding, cache edits and training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.cache import branch, close_gaps, compact, fork, keep, rewind, select, shift
from jaxllm.errors import ConfigError
from jaxllm.export.step import StepSignature, check_signature
from jaxllm.research.long_attention import dilated
from jaxllm.research.long_attention.dilated_attention import multiplicity
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.research.pruning.structured_pruning import narrow_config
from jaxllm.research.upcycle import model as upcycle
from jaxllm.train.data.rows import Rows
from jaxllm.train.objective import NextToken
from jaxllm.weights.precision import Precision
from tests.cache.caches import close, filled, fresh, peek
from tests.conftest import Run, succeed
from tests.research.long_attention.test_dilated_attention import dense_attend
from tests.tiny_models import cut_demo, random_model, tokens

DILATED = {"kind": "dilated", "segment_lengths": [4, 12], "dilated_ratios": [1, 3]}
KIND = LongAttention(kind="dilated", segment_lengths=(4, 12), dilated_ratios=(1, 3))


def lm_of(cache: str = "float32", layers: int = 1, **fields: Any) -> Any:
    kind = {**DILATED, **fields}
    precision = Precision(cache=cache)
    return random_model("llama", precision=precision, attention=kind, num_hidden_layers=layers)


def attend_dense(q: Any, position: Any, parts: Any, sight: Any, *, document_BT: Any) -> Any:
    assert document_BT is None
    return dense_attend(q, position, parts, sight)


def use_dense_softmax(lm: Any, patch: pytest.MonkeyPatch) -> Any:
    """Replace dilated attention with one softmax with multiplicities in all later traces.

    Returns the model with another context length, so that no earlier trace is reused.
    """
    patch.setattr(dilated.dilated_attention, "attend", attend_dense)
    model, params = lm
    return model.clone(config=dataclasses.replace(model.config, max_position_embeddings=98)), params


@pytest.mark.parametrize("by", ["heads", "layers"])
def test_forward_equals_dense_softmax(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dilated attention equals one softmax with multiplicities, with pairs by heads and by layers,
    and padded rows.
    """
    lm, ids = lm_of(by=by, layers=2), tokens(2, 29)
    at = np.stack([np.arange(29), np.maximum(np.arange(29) - 8, -1)])
    ours = jaxllm.forward(*lm, None, ids, positions_BT=at).logits
    expected = jaxllm.forward(
        *use_dense_softmax(lm, monkeypatch), None, ids, positions_BT=at
    ).logits
    for row in range(2):
        close(ours[row, at[row] >= 0], expected[row, at[row] >= 0])


@pytest.mark.parametrize("cache", ["int8", pytest.param("float32", marks=pytest.mark.full)])
def test_chunked_prefill_and_decode_equal_forward(cache: str) -> None:
    """In left-padded rows, slots and positions within segments differ; chunks and single steps
    equal one forward pass.
    """
    lm, ids = lm_of(cache), tokens(2, 29)
    at = np.stack([np.arange(29), np.maximum(np.arange(29) - 6, -1)])
    whole = jaxllm.forward(*lm, None, ids, positions_BT=at).logits
    empty = jaxllm.init_cache(lm[0], 2, 32)
    logits, filled = jaxllm.prefill(*lm, empty, ids[:, :26], positions_BT=at[:, :26], chunk=10)
    close(logits, whole[:, 25])
    for column in range(26, 29):
        logits, filled = jaxllm.decode_step(*lm, filled, ids[:, column])
        close(logits, whole[:, column])


def test_rewound_and_forked_rows_equal_fresh_runs() -> None:
    """Rewound, forked and selected cache rows have the logits of a run without a cache."""
    lm, ids = lm_of(), tokens(1, 23)
    cache = filled(lm, ids)
    close(peek(lm, rewind(cache, to=15))[0], fresh(lm, ids[0, :15]))
    forks = select(fork(branch(cache, 0), 3, capacity=4), [2, 0])
    close(peek(lm, forks), np.stack([fresh(lm, ids[0])] * 2))
    _, forks = jaxllm.decode_step(*lm, forks, np.array([3, 5]))
    close(peek(lm, forks)[1], fresh(lm, np.append(ids[0], 5)))


def test_cache_gaps_equal_dense_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """After slots are removed, compacted or not, logits equal one softmax over the
    remaining slots.
    """
    lm, ids = lm_of(), tokens(1, 23)
    kept = np.random.default_rng(3).random((1, 24)) < 0.6
    cache = keep(filled(lm, ids), kept)
    found = [peek(lm, cache), peek(lm, compact(cache))]
    dense = use_dense_softmax(lm, monkeypatch)
    expected = peek(dense, cache.replace(config=dense[0].config))
    for logits in found:
        close(logits, expected)
    assert np.abs(expected[0] - fresh(lm, ids[0])).max() > 1e-2


def test_shift_requires_whole_segments() -> None:
    """Cached tokens move by multiples of the longest segment only; close_gaps is refused."""
    lm, ids = lm_of(), tokens(1, 23)
    cache = filled(lm, ids)
    close(peek(lm, shift(cache, 12))[0], fresh(lm, ids[0], np.arange(12, 36)))
    with pytest.raises(ConfigError, match=r"'dilated' .* only move by multiples of 12 positions"):
        shift(cache, 4)
    with pytest.raises(ConfigError, match="Run the tokens again"):
        close_gaps(keep(cache, np.arange(24)[None] % 5 != 2))


def test_attention_mass_equals_summed_weights() -> None:
    """Weights sum to 1 and are 0 outside the query's segment, and their sum over heads is the
    attention mass.
    """
    lm, ids = lm_of(), tokens(1, 23)
    cache = filled(lm, ids)
    weights = jaxllm.forward(*lm, cache, ids[:, :1], attention_weights=True).attention_weights
    mass = jaxllm.forward(*lm, cache, ids[:, :1], attention_mass=True).attention_mass
    close(weights.sum(axis=-1), np.ones((1, 1, 8, 1)))
    close(np.asarray(weights).sum(axis=(0, 2, 3)), mass)
    assert (np.asarray(weights)[0, 0, :, 0, :12] == 0).all()  # token 23 is in the second segment


def packed_rows(length: int) -> Rows:
    """Return training rows: two documents in the first row, one in the second."""
    ids, first = tokens(2, length + 1), length * 2 // 3
    at, document = np.arange(length), np.zeros(length, int)
    at[first:] -= first
    document[first:] = 1
    both = np.stack([at, np.arange(length)]), np.stack([document, np.zeros(length, int)])
    return Rows(*(jnp.asarray(x, jnp.int32) for x in (ids[:, :-1], ids[:, 1:], *both)))


def test_packed_row_gradients_equal_separate_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient of packed rows equal one softmax per document, summed."""
    lm, rows = lm_of(), packed_rows(24)
    model, params = lm

    def gradient(model: Any, rows: Rows) -> Any:
        def loss(params: Any) -> jax.Array:
            return NextToken()(model, params, None, rows, jax.random.key(0)).total

        return jax.jit(jax.value_and_grad(loss))(params)

    found = gradient(model, rows)

    def attend_by_document(q: Any, position: Any, parts: Any, shown: Any, **settings: Any) -> Any:
        document = settings.pop("document_BT")
        outs = []
        for number in range(2):
            own = jnp.where(document == number, position, -1)
            part = [jaxllm.ops.Part(*parts[0][:2], own)]
            outs.append(attend_dense(q, own, part, shown, document_BT=None, **settings))
        return sum(outs)

    model = use_dense_softmax(lm, monkeypatch)[0]
    monkeypatch.setattr(dilated.dilated_attention, "attend", attend_by_document)
    expected = gradient(model, rows)
    jax.tree.map(close, found, expected)


def test_train_full_preserves_dilated_attention(run: Run, tmp_path: Path) -> None:
    """`train full` changes the weights and writes the same attention settings."""
    source = cut_demo("llama", tmp_path / "hf", layers=1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "attention": DILATED}))
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a little girl who had a red ball.\n" * 20)
    short = ("--length", 24, "--batch-size", 2, "--steps", 2)
    out = tmp_path / "out"
    succeed(run, "train", "full", source, out, "--data", text, *short)
    before, after = jaxllm.load(source, dtype="float32"), jaxllm.load(out, dtype="float32")
    assert after.config == before.config
    assert after.config.attention == KIND
    name = "layers.0"
    old, new = (lm.params[name]["self_attn"]["v_proj"]["weight"] for lm in (before, after))
    assert np.abs(np.asarray(old) - np.asarray(new)).max() > 0


def receptive_field(model: Any, params: Any, token_T: np.ndarray) -> np.ndarray:
    """Return how much each token's embedding changes each layer's outputs, `[layers, T, T]`.

    An entry is the norm of the output's derivative in one random direction of the embedding:
    exactly zero without influence, and with influence zero with probability zero.
    """
    T = token_T.size
    position_BT, length_B = jnp.arange(T, dtype=jnp.int32)[None], jnp.full((1,), T, jnp.int32)
    at, direction = jax.random.normal(jax.random.key(0), (2, 1, T, model.config.hidden_size))

    def outputs(embeddings_BTD: jax.Array) -> jax.Array:
        trace = model.apply(
            {"params": params}, token_T[None], position_BT, length_B, embeddings_BTD=embeddings_BTD
        )
        return jnp.stack([layer.x[0] for layer in trace.layers])

    def respond_to(place: jax.Array) -> jax.Array:
        here = jnp.where(jnp.arange(T)[None, :, None] == place, direction, 0.0)
        return jnp.linalg.norm(jax.jvp(outputs, (at,), (here,))[1], axis=-1)

    return np.moveaxis(np.asarray(jax.jit(jax.vmap(respond_to))(jnp.arange(T))), 0, 2)


def test_receptive_field_stays_within_longest_segment() -> None:
    """By derivatives: no token depends on another segment, and within a segment exactly the tokens
    of the pairs are read.
    """
    model, params = lm_of(layers=2)
    field = receptive_field(model, params, tokens(1, 24)[0])
    at = jnp.arange(24, dtype=jnp.int32)[None]
    one = np.asarray(multiplicity(dilated.dilations(KIND, 8), at, at)[0]).any(axis=0)
    assert ((field[0] > 0) == one).all()
    assert ((field[1] > 0) == (one.astype(int) @ one > 0)).all()
    assert not field[1, 12:, :12].any()
    assert (field[1, 11, :12] > 0).any()
    plain = receptive_field(*random_model("llama"), tokens(1, 24)[0])
    assert ((plain[1] > 0) == np.tril(np.ones((24, 24), bool))).all()


def test_dilated_attention_refuses_head_cuts_and_masks() -> None:
    """Dropping heads, upcycling to Mixtral and attention masks are refused; narrowing channels is
    not.
    """
    lm = lm_of()
    config = lm[0].config
    with pytest.raises(ConfigError, match="'dilated' cannot be dropped"):
        narrow_config(config, "heads", 1)
    assert narrow_config(config, "channels", 3).attention == KIND
    with pytest.raises(ConfigError, match="Mixtral does not support 'dilated' attention"):
        upcycle._mixtral(config, num_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match=r"takes no mask. Omit mask"):
        check_signature(lm[0], StepSignature(mask="boolean"))
    with pytest.raises(ConfigError, match="takes no mask: omit mask_BTS"):
        ids, at = jnp.zeros((1, 3), jnp.int32), jnp.arange(3, dtype=jnp.int32)[None]
        mask = jnp.ones((1, 3, 3), bool)
        lm[0].apply({"params": lm[1]}, ids, at, jnp.array([3]), mask_BTS=mask)
