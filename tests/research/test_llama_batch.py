"""llama.cpp-style batches of many sequences, against `forward` over each sequence's text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxllm
from jaxllm.cache import KVCache, drop_range
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.research.llama_batch.batch import StatusCode, TokenBatch, decode
from jaxllm.research.llama_batch.sequences import (
    add_positions,
    copy_sequence,
    defragment,
    divide_positions,
    init_sequences,
    keep_sequence,
    read_positions,
    remove_range,
)
from jaxllm.weights.precision import Precision
from tests.tiny_models import BOTH, assert_close, in_both, random_model, tokens

SEQUENCES, CAPACITY = 4, 24
A, B = tokens(2, 9, seed=1)[0], tokens(2, 9, seed=2)[0]


@pytest.fixture(scope="module", params=BOTH)
def lm(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model("llama")


def empty_state(lm: Any, **options: Any) -> KVCache:
    return init_sequences(lm[0].config, SEQUENCES, CAPACITY, **options)


def forward_logits(lm: Any, *text: Any, positions: Any = None) -> np.ndarray:
    """Return the logits of a text, `[T, V]`, padded to one shape for all tests."""
    ids = np.concatenate([np.atleast_1d(part) for part in text])
    padded, at = np.zeros((1, 32), np.int32), np.full((1, 32), -1, np.int32)
    padded[0, : ids.size] = ids
    at[0, : ids.size] = np.arange(ids.size) if positions is None else positions
    return np.asarray(jaxllm.forward(*lm, None, padded, positions_BT=at).logits)[0, : ids.size]


def decode_parts(
    lm: Any, state: KVCache, *parts: tuple[Any, Any], **options: Any
) -> tuple[Any, KVCache]:
    """Decode `(sequences, ids)` parts in order; return all outputs and the new state."""
    ids = np.concatenate([np.atleast_1d(text) for _, text in parts])
    sequences = [s for s, text in parts for _ in np.atleast_1d(text)]
    batch = TokenBatch(tokens=ids, sequences=sequences, outputs="all")
    status, outputs, state = decode(*lm, state, batch, **options)
    assert status, status.message
    assert outputs is not None
    return outputs.values, state


def check_next(lm: Any, state: KVCache, sequence: int, *text: Any) -> None:
    """Assert that the next token of a sequence has the logits that follow this text."""
    logits, _ = decode_parts(lm, state, (sequence, 77))
    assert_close(logits[0], forward_logits(lm, *text, 77)[-1])


def fingerprint(state: KVCache) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def mixed_batch() -> TokenBatch:
    """Return a batch of three interleaved sequences of 9, 5 and 1 tokens."""
    order = [0, 1, 0, 3, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0]
    left = {0: list(A), 1: list(B[:5]), 3: [7]}
    return TokenBatch(tokens=[left[s].pop(0) for s in order], sequences=order, outputs="all")


@in_both("lm", n_ubatch=[512, 1])
def test_mixed_batch_equals_separate_sequences(lm: Any, n_ubatch: int) -> None:
    """Interleaved sequences have the logits and tokens of separate passes, for any n_ubatch."""
    batch = mixed_batch()
    status, outputs, state = decode(*lm, empty_state(lm), batch, n_ubatch=n_ubatch)
    assert status.code is StatusCode.OK and outputs is not None
    assert outputs.indices.tolist() == list(range(15))
    of = np.asarray(batch.sequences)
    for sequence, text in ((0, A), (1, B[:5]), (3, [7])):
        assert_close(outputs.values[of == sequence], forward_logits(lm, text))
        assert state.tokens(sequence) == list(text)
    assert state.length_B.tolist() == state.next_position_B.tolist() == [9, 5, 0, 1]
    more, _ = decode_parts(lm, state, (3, [8, 9]), (0, 10), (2, 11))
    assert_close(more[1], forward_logits(lm, [7, 8, 9])[-1])
    assert_close(more[2], forward_logits(lm, A, 10)[-1])
    assert_close(more[3], forward_logits(lm, 11)[-1])


def test_decode_returns_only_requested_outputs(lm: Any) -> None:
    """outputs selects the last token, a subset or none, with the values of outputs='all'."""
    whole = decode(*lm, empty_state(lm), mixed_batch())[1]
    assert whole is not None
    for wanted, places in (
        ("last", [14]),
        ([i in (3, 7, 11) for i in range(15)], [3, 7, 11]),
        ([False] * 15, []),
    ):
        batch = TokenBatch(
            tokens=mixed_batch().tokens, sequences=mixed_batch().sequences, outputs=wanted
        )
        some = decode(*lm, empty_state(lm), batch)[1]
        assert some is not None and some.indices.tolist() == places
        assert some.values.shape == (len(places), 131)
        np.testing.assert_allclose(some.values, whole.values[places], atol=1e-5, rtol=1e-4)


def test_int8_sequence_cache_equals_prefill() -> None:
    """With an int8 cache, a copied and continued sequence has the logits of prefill within 2%."""
    lm = random_model("llama", precision=Precision(cache="int8"))
    cache = jaxllm.init_cache(lm[0].config, 1, CAPACITY, dtype="int8")
    expected, _ = jaxllm.prefill(*lm, cache, A[None])
    state = copy_sequence(decode_parts(lm, empty_state(lm, dtype="int8"), (0, A[:4]))[1], 0, 1)
    assert state.dtype == "int8"
    logits, _ = decode_parts(lm, state, (1, A[4:]), (2, B))
    np.testing.assert_allclose(logits[4], expected[0], atol=2e-2 * np.abs(expected).max())


def bad_batches() -> dict[str, tuple[TokenBatch, StatusCode]]:
    ok = [1, 2]
    return {
        "neither": (TokenBatch(), StatusCode.INVALID),
        "both": (TokenBatch(tokens=ok, embeddings=np.zeros((2, 40))), StatusCode.INVALID),
        "empty": (TokenBatch(tokens=[]), StatusCode.INVALID),
        "no vectors": (TokenBatch(embeddings=np.zeros((0, 40))), StatusCode.INVALID),
        "width": (TokenBatch(embeddings=np.zeros((2, 41))), StatusCode.INVALID),
        "nan": (TokenBatch(embeddings=np.full((2, 40), np.nan)), StatusCode.INVALID),
        "id": (TokenBatch(tokens=[1, 131]), StatusCode.INVALID),
        "negative": (TokenBatch(tokens=[-1]), StatusCode.INVALID),
        "ragged": (TokenBatch(tokens=[[1], [1, 2]]), StatusCode.INVALID),
        "whole": (TokenBatch(embeddings=np.zeros((2, 40), int)), StatusCode.INVALID),
        "float": (TokenBatch(tokens=[1.5]), StatusCode.INVALID),
        "gap": (TokenBatch(tokens=ok, positions=[5, 7]), StatusCode.INVALID),
        "behind": (TokenBatch(tokens=ok, positions=[4, 5]), StatusCode.INVALID),
        "twice": (TokenBatch(tokens=ok, positions=[5, 5]), StatusCode.INVALID),
        "before": (TokenBatch(tokens=[1], positions=[-1], sequences=[2]), StatusCode.INVALID),
        "outside": (
            TokenBatch(tokens=[1], positions=[2**31 - 1], sequences=[2]),
            StatusCode.INVALID,
        ),
        "positions": (TokenBatch(tokens=ok, positions=[5]), StatusCode.INVALID),
        "sequence": (TokenBatch(tokens=ok, sequences=[0, 4]), StatusCode.INVALID),
        "no sequence": (TokenBatch(tokens=ok, sequences=[[0], []]), StatusCode.INVALID),
        "sequences": (TokenBatch(tokens=ok, sequences=[0]), StatusCode.INVALID),
        "flags": (TokenBatch(tokens=ok, outputs=[True]), StatusCode.INVALID),
        "wanted": (TokenBatch(tokens=ok, outputs="some"), StatusCode.INVALID),  # type: ignore[arg-type]
        "texts": (TokenBatch(tokens=ok, sequences=[[2, 3], [0, 2]]), StatusCode.INVALID),
        "parted": (TokenBatch(tokens=[1, 2, 3], sequences=[[2, 3], 2, [2, 3]]), StatusCode.INVALID),
        "room": (TokenBatch(tokens=[1] * 20), StatusCode.NO_ROOM),
        "shared": (TokenBatch(tokens=[1] * 25, sequences=[[2, 3]] * 25), StatusCode.NO_ROOM),
    }


@pytest.fixture(scope="module")
def prefilled(lm: Any) -> KVCache:
    return decode_parts(lm, empty_state(lm), (0, A[:5]))[1]


@pytest.mark.parametrize("name", bad_batches())
def test_failed_batch_leaves_state_unchanged(lm: Any, prefilled: KVCache, name: str) -> None:
    """A bad or too large batch returns its status and the same state, also with donate=True."""
    batch, code = bad_batches()[name]
    before = fingerprint(prefilled)
    status, outputs, after = decode(*lm, prefilled, batch, donate=True)
    assert (status.code, outputs) == (code, None)
    assert not status and status.message
    assert after is prefilled
    assert fingerprint(after) == before


def test_no_room_batch_succeeds_after_freeing(lm: Any) -> None:
    """After NO_ROOM, a batch succeeds once a range is removed; the earlier state stays valid."""
    _, state = decode_parts(lm, empty_state(lm), (0, tokens(1, 20)[0]))
    batch = TokenBatch(tokens=A, sequences=[0] * 9)
    assert decode(*lm, state, batch)[0].code is StatusCode.NO_ROOM
    freed = remove_range(state, 0, 10)
    logits, again = decode_parts(lm, freed, (0, A))
    assert_close(logits, forward_logits(lm, tokens(1, 20)[0, :10], A)[10:])
    check_next(lm, again, 0, tokens(1, 20)[0, :10], A)
    check_next(lm, state, 0, tokens(1, 20)[0])  # the state before the removal is still valid


def test_decode_refuses_bad_options_and_caches(lm: Any, prefilled: KVCache) -> None:
    """Unknown options, and caches of another model or from fork, raise errors."""
    batch = TokenBatch(tokens=[1])
    for options in ({"n_ubatch": 0}, {"output": "x"}, {"pooling": "mean"}, {"normalize": True}):
        with pytest.raises(ConfigError):
            decode(*lm, prefilled, batch, **options)  # type: ignore[arg-type]
    other = jaxllm.init_cache(random_model("llama", num_hidden_layers=1)[0].config, 1, 4)
    with pytest.raises(CacheMismatchError, match="another model"):
        decode(*lm, other, batch)
    forked = jaxllm.cache.fork(jaxllm.init_cache(lm[0].config, 1, 4), 2)
    with pytest.raises(CacheMismatchError, match="init_sequences"):
        decode(*lm, forked, batch)


def test_donated_state_is_invalid_afterwards(lm: Any) -> None:
    """donate=True returns a valid state; using the donated one raises CacheMismatchError."""
    state = empty_state(lm)
    _, _, grown = decode(*lm, state, TokenBatch(tokens=A), donate=True)
    check_next(lm, grown, 0, A)
    with pytest.raises(CacheMismatchError, match="donated"):
        decode(*lm, state, TokenBatch(tokens=A))


@pytest.mark.parametrize("n_ubatch", [2, 512])
def test_shared_prompt_is_stored_once(lm: Any, n_ubatch: int) -> None:
    """A prompt given to four sequences takes its slots once, with a reference count of 4, and every
    continuation is correct.
    """
    state, everyone = empty_state(lm), [0, 1, 2, 3]
    parts = [(everyone, A), *((s, [20 + s, 30 + s]) for s in everyone)]
    logits, state = decode_parts(lm, state, *parts, n_ubatch=n_ubatch)
    assert_close(logits[:9], forward_logits(lm, A))
    for s in everyone:
        assert_close(logits[9 + 2 * s : 11 + 2 * s], forward_logits(lm, A, [20 + s, 30 + s])[9:])
        check_next(lm, state, s, A, [20 + s, 30 + s])
    assert (read_positions(state).own_BS >= 0).sum() == 8
    assert (read_positions(state).ref_count_N == 4).sum() == 9


def test_copied_sequences_share_memory(lm: Any) -> None:
    """Copies reference the same arrays, diverge correctly, and outlive the removal of one."""
    _, state = decode_parts(lm, empty_state(lm), (0, A))
    once = copy_sequence(state, 0, 1)
    k = [id(x) for x in jax.tree.leaves((once.frozen[0].k, once.tail.k))]
    four = copy_sequence(copy_sequence(once, 0, 2), 0, 3)
    assert [id(x) for x in jax.tree.leaves((four.frozen[0].k, four.tail.k))] == k  # by reference
    assert four.nbytes == state.nbytes
    now = read_positions(four)
    assert (now.own_BS >= 0).sum() == 0 and (now.ref_count_N == 4).sum() == 9
    logits, branched = decode_parts(lm, four, *((s, [40 + s, 50 + s]) for s in range(4)))
    for s in range(4):
        assert_close(logits[2 * s : 2 * s + 2], forward_logits(lm, A, [40 + s, 50 + s])[9:])
        check_next(lm, branched, s, A, [40 + s, 50 + s])
    check_next(lm, state, 0, A)  # the earlier state is unchanged
    gone = remove_range(branched, 0)
    check_next(lm, gone, 2, A, [42, 52])  # the other sequences still have the shared slots
    assert (read_positions(remove_range(gone)).ref_count_N > 0).sum() == 0


def test_copy_sequence_supports_ranges_and_copies(lm: Any) -> None:
    """Ranges and copies can be copied; taken positions, bad indices and little room raise."""
    _, state = decode_parts(lm, empty_state(lm), (0, A))
    state = copy_sequence(state, 0, 1, 0, 4)
    _, state = decode_parts(lm, state, (1, B[:3]))
    state = copy_sequence(state, 1, 2, donate=True)
    check_next(lm, state, 0, A)
    for sequence in (1, 2):
        check_next(lm, state, sequence, A[:4], B[:3])
    assert copy_sequence(state, 1, 1) is state
    with pytest.raises(TokenError, match="already has a token at position 0"):
        copy_sequence(state, 0, 1)
    with pytest.raises(TokenError, match=r"sequence must be .* got 4"):
        copy_sequence(state, 0, 4)
    with pytest.raises(CapacityError, match="shared slots"):
        copy_sequence(decode_parts(lm, empty_state(lm, shared=8), (0, A))[1], 0, 1)


def test_remove_range_equals_drop_range(lm: Any) -> None:
    """Removing a range gives the logits of drop_range, also in a copied sequence, and leaves other
    sequences unchanged.
    """
    cache = jaxllm.prefill(*lm, jaxllm.init_cache(lm[0].config, 1, CAPACITY), A[None]).cache
    expected = jaxllm.decode_step(*lm, drop_range(cache, 2, 5), [77]).logits[0]
    _, state = decode_parts(lm, empty_state(lm), (1, A), (2, B))
    for now in (state, copy_sequence(state, 1, 0)):
        logits, _ = decode_parts(lm, remove_range(now, 1, 2, 5), (1, 77))
        assert_close(logits[0], expected)
        check_next(lm, remove_range(now, 1, 2, 5), 2, B)
        check_next(lm, remove_range(now, None, 4), 1, A[:4])


def test_keep_sequence_empties_all_but_one(lm: Any) -> None:
    """The chosen sequence is unchanged, and the emptied ones can be used again."""
    _, state = decode_parts(lm, empty_state(lm), (0, A), (1, B))
    kept = keep_sequence(copy_sequence(state, 1, 2), 1)
    assert kept.length_B.tolist() == [0, 9, 0, 0]
    check_next(lm, kept, 1, B)
    check_next(lm, kept, 0)  # an empty sequence starts again


@pytest.mark.parametrize("shared", [False, True])
def test_add_positions_equals_run_at_shifted_positions(llama: Any, shared: bool) -> None:
    """A shifted sequence equals a run at those positions; a copy sharing its slots stays."""
    _, state = decode_parts(llama, empty_state(llama), (1, A))
    state = copy_sequence(state, 1, 2) if shared else state
    moved = add_positions(state, 1, 6)
    assert moved.next_position_B[1] == 15
    logits, _ = decode_parts(llama, moved, (1, 77))
    assert_close(logits[0], forward_logits(llama, A, 77, positions=np.arange(6, 16))[-1])
    if shared:
        check_next(llama, moved, 2, A)  # the copy does not move
        unshared = add_positions(remove_range(state, 2), 1, 6)  # in place: no longer shared
        assert_close(decode_parts(llama, unshared, (1, 77))[0], logits)
        assert (read_positions(unshared).own_BS >= 0).sum() == 0


def test_divide_positions_equals_run_at_divided_positions() -> None:
    """With one layer, divided positions equal a run there, and a copy does not move."""
    lm = random_model("llama", num_hidden_layers=1)  # deeper layers depend on the old positions
    _, state = decode_parts(lm, empty_state(lm), (1, A))
    divided = divide_positions(copy_sequence(state, 1, 2), 1, 3, 2, 8)
    positions_S = [0, 1, 0, 1, 1, 1, 2, 2, 8]
    assert sorted(np.asarray(divided.position_BS)[1].tolist())[-9:] == sorted(positions_S)
    logits, _ = decode_parts(lm, divided, (1, 77))
    order = np.argsort(positions_S, kind="stable")
    expected = forward_logits(lm, A[order], 77, positions=[*np.sort(positions_S), 9])[-1]
    assert_close(logits[0], expected)
    check_next(lm, divided, 2, A)


def test_position_changes_refuse_invalid_moves(lm: Any) -> None:
    """Learned positions, out-of-range or fractional moves and missing slots raise errors and leave
    the state unchanged.
    """
    _, state = decode_parts(lm, empty_state(lm), (0, A))
    before = fingerprint(state)
    if lm[0].config.model_type == "gpt2":
        for move in (add_positions, divide_positions):
            with pytest.raises(ConfigError, match="learned position embeddings"):
                move(state, 0, 2)
        return
    for by, match in ((-1, "move to -1"), (2**31, "move to 2147483648")):
        with pytest.raises(TokenError, match=match):
            add_positions(state, 0, by)
    with pytest.raises(TokenError, match="divisor must be"):
        divide_positions(state, 0, 0)
    for none in (lambda: add_positions(state, 0, 1.5), lambda: copy_sequence(state, 0.0, 1)):
        with pytest.raises(TokenError, match="whole number"):
            none()
    full = decode_parts(lm, copy_sequence(state, 0, 1), (1, tokens(1, 20)[0]))[1]
    with pytest.raises(CapacityError, match="own slots for"):
        add_positions(full, 1, 1)
    assert fingerprint(state) == before


def test_defragment_preserves_sequences_in_fewer_slots(lm: Any) -> None:
    """Sequences keep tokens and next logits; slots that are no longer shared become own slots."""
    _, state = decode_parts(lm, empty_state(lm), (0, A), (1, B), (2, [3]))
    state = copy_sequence(state, 0, 3)
    _, state = decode_parts(lm, state, (0, B), (3, [4, 5]))
    state = remove_range(remove_range(state, 0, 9, 15), 3)
    packed = defragment(state)
    now = read_positions(packed)
    assert now.own_BS[0, :12].tolist() == [*range(9), 15, 16, 17]  # back from shared slots
    assert int(packed.cursor) == 12
    assert not now.ref_count_N.any()
    for sequence in range(3):
        one, two = (decode_parts(lm, s, (sequence, 77))[0] for s in (state, packed))
        assert_close(one, two)
        assert packed.tokens(sequence) == state.tokens(sequence)


@pytest.mark.parametrize("pooling", ["none", "mean", "last", "cls"])
@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_are_pooled_last_hidden_states(lm: Any, pooling: Any, normalize: bool) -> None:
    """Embeddings are the last states of separate runs, pooled per sequence, normalized if asked."""
    batch = mixed_batch()
    status, outputs, _ = decode(
        *lm, empty_state(lm), batch, output="embeddings", pooling=pooling, normalize=normalize
    )
    assert status and outputs is not None
    of = np.asarray(batch.sequences)
    hidden = np.zeros((15, 40), np.float32)
    for sequence, text in ((0, A), (1, B[:5]), (3, [7])):
        out = jaxllm.forward(*lm, None, np.array(text)[None], hidden_states=True)
        assert out.hidden_states is not None
        hidden[of == sequence] = out.hidden_states[-1][0]
    expected = hidden
    if pooling != "none":
        assert outputs.indices.tolist() == [0, 1, 3]
        pools = {"mean": lambda x: x.mean(0), "last": lambda x: x[-1], "cls": lambda x: x[0]}
        expected = np.stack([pools[pooling](hidden[of == s]) for s in (0, 1, 3)])
    if normalize:
        expected = expected / np.sqrt((expected**2).sum(1, keepdims=True))
    assert_close(outputs.values, expected)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_inputs_equal_token_inputs(family: str, tied: bool) -> None:
    """Token embeddings as inputs give the tokens' logits, and their cached ids are -1."""
    lm = random_model(family, tie_word_embeddings=tied)
    table = lm[1]["wte" if family == "gpt2" else "embed_tokens"]["weight"]
    order = [0, 1, 0, 1, 1, 0, 0]
    vectors = np.asarray(table)[A[:7]]
    by_id = TokenBatch(tokens=A[:7], sequences=order, outputs="all")
    by_vector = TokenBatch(embeddings=vectors, sequences=order, outputs="all")
    _, expected, _ = decode(*lm, empty_state(lm), by_id)
    status, outputs, state = decode(*lm, empty_state(lm), by_vector)
    assert status and outputs is not None and expected is not None
    assert outputs.values.shape == (7, 131)
    assert_close(outputs.values, expected.values)
    assert state.tokens(0) == [-1] * 4
    logits, _ = decode_parts(lm, state, (0, 77))
    assert_close(logits[0], forward_logits(lm, A[:7][np.array(order) == 0], 77)[-1])
    far = decode(*lm, empty_state(lm), TokenBatch(embeddings=jnp.asarray(vectors) + 1.0))[1]
    assert far is not None and not np.allclose(far.values[0], expected.values[-1], atol=1e-2)


@settings(max_examples=8)
@given(data=st.data())
def test_random_operations_equal_plain_token_lists(data: st.DataObject) -> None:
    """After random feeds, copies, cuts and defragmentation, each sequence has the tokens and next
    logits of a plain list.
    """
    lm = random_model("llama")
    state, texts = empty_state(lm), [list[int]() for _ in range(SEQUENCES)]
    number = st.integers(0, SEQUENCES - 1)
    for _ in range(6):
        kind = data.draw(st.sampled_from(["feed", "feed", "copy", "cut", "clear", "pack"]))
        one, two, length = data.draw(number), data.draw(number), data.draw(st.integers(1, 4))
        if kind == "feed" and max(len(texts[one]), len(texts[two])) < 18:
            new = {one: list(range(length)), two: [100 + length]}
            _, state = decode_parts(lm, state, *new.items())
            for sequence, ids in new.items():
                texts[sequence] += ids
        elif kind == "copy" and one != two:
            state = copy_sequence(remove_range(state, two), one, two)
            texts[two] = list(texts[one])
        elif kind == "cut":
            state = remove_range(state, one, length)
            texts[one] = texts[one][:length]
        elif kind == "clear":
            state, texts[one] = remove_range(state, one), []
        elif kind == "pack":
            state = defragment(state)
        assert [state.tokens(s) for s in range(SEQUENCES)] == texts
    logits, _ = decode_parts(lm, state, *((s, 77) for s in range(SEQUENCES)))
    for sequence, text in enumerate(texts):
        assert_close(logits[sequence], forward_logits(lm, np.array(text, int), 77)[-1])
