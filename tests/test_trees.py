"""A node of a tree has the logits, keys and values of its path run alone after the same cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import jaxllm
from jaxllm.adapters import LoraConfig
from jaxllm.cache.kv import count_bytes
from jaxllm.cache.tree import ancestors, init_tree
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.inside import Add
from jaxllm.models import FAMILIES, compiled_steps
from jaxllm.ops import native
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.weights.precision import Precision
from jaxllm.weights.quantize import quantize
from tests.adapters.random_adapters import random_adapter, with_one
from tests.tiny_models import (
    INVARIANT,
    RECURRENT,
    VOCAB,
    assert_close,
    marks_of,
    random_model,
    tokens,
)

PROMPT = 11
PARENTS = [-1, 0, 0, -1, 2, 4, 1, 5, -1, 7, 9]
needs_kernels = pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")
# GPT-NeoX's exact GELU has no promise: XLA's erf has other bits for other numbers of rows. Nor have
# recurrent layers.
# Each family in one format, and each format in several families.
FORMATS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"))
EACH = [
    pytest.param(f, *FORMATS[i % 3], marks=marks_of(f, "gemma2"))
    for i, f in enumerate(f for f in FAMILIES if f not in ("gpt_neox", *RECURRENT))
]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def make_model(family: str = "llama", dtype: str = "float32", **changes: Any) -> Any:
    precision = dataclasses.replace(Precision.uniform(dtype), invariant=True)
    return random_model(family, precision=precision, **changes)


def read_prompt(model: Any, params: Any, rows: int = 1, **options: Any) -> jaxllm.KVCache:
    cache = jaxllm.init_cache(model, rows, PROMPT + 20, **options)
    return jaxllm.prefill(model, params, cache, tokens(rows, PROMPT)).cache


def run_chain(
    model: Any, params: Any, cache: jaxllm.KVCache, tokens_BT: np.ndarray
) -> tuple[np.ndarray, jaxllm.KVCache]:
    """Decode tokens one by one; return the last logits, `[B, V]`, and the cache."""
    for token_B in tokens_BT.T:
        logits, cache = jaxllm.decode_step(model, params, cache, token_B)
    return np.asarray(logits), cache


def check_nodes(
    model: Any,
    params: Any,
    cache: jaxllm.KVCache,
    tokens_BN: np.ndarray,
    parents: Sequence[int],
    logits_BNV: np.ndarray,
    delta: Any,
    exact: bool = True,
) -> None:
    """Compare each node with its chain. parents: the same in all rows."""
    for node in range(len(parents)):
        expected, after = run_chain(model, params, cache, tokens_BN[:, path_to(parents, node)])
        committed = jaxllm.commit(cache, delta, node)
        assert committed.cursor == after.cursor
        np.testing.assert_array_equal(committed.next_position_B, after.next_position_B)
        np.testing.assert_array_equal(committed.position_BS, after.position_BS)
        if exact:
            assert logits_BNV[:, node].tobytes() == expected.tobytes(), node
            assert committed == after
        else:
            assert_close(logits_BNV[:, node], expected)


@needs_kernels
@pytest.mark.parametrize(("family", "dtype", "weights"), EACH)
def test_node_has_bits_of_its_chain(family: str, dtype: str, weights: str | None) -> None:
    """Windows (5 and 7 tokens, within the prompt), soft caps, experts and biases included."""
    model, params = make_model(family, dtype, **INVARIANT.get(family, {}))
    params = params if weights is None else quantize(params, weights)
    params = jaxllm.cast(params, model.precision) if weights is None else params
    cache = read_prompt(model, params)
    words = tokens(1, len(PARENTS), seed=1)
    out = jaxllm.forward(model, params, cache, words, parents=[PARENTS])
    check_nodes(model, params, cache, words, PARENTS, np.asarray(out.logits), out.delta)
    chain = path_to(PARENTS, 10)
    once = jaxllm.forward(model, params, cache, words[:, chain])
    assert np.asarray(once.logits).tobytes() == np.asarray(out.logits[:, chain]).tobytes()
    assert jaxllm.commit(cache, once.delta) == jaxllm.commit(cache, out.delta, 10)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_neox", marks=pytest.mark.more)])
def test_node_equals_its_chain_without_kernels(family: str) -> None:
    model, params = make_model(family)
    words = tokens(2, len(PARENTS), seed=1)
    with native.disable_kernels():
        cache = read_prompt(model, params, 2)
        out = jaxllm.forward(model, params, cache, words, parents=[PARENTS] * 2)
        logits = np.asarray(out.logits)
        check_nodes(model, params, cache, words, PARENTS, logits, out.delta, exact=False)


@needs_kernels
@pytest.mark.parametrize(
    ("seed", "dtype"),
    [
        (0, "float32"),
        (1, "int8"),
        *(pytest.param(s, "float32" if s % 4 > 1 else "int8", marks=pytest.mark.more)
          for s in range(3, 7)),
    ],
)  # fmt: skip
def test_random_tree_grown_in_pieces_has_bits_of_chains(seed: int, dtype: str) -> None:
    """In two rows with other prompts; with a cache in int8, a tree with and without room."""
    rng = np.random.default_rng(seed)
    model, params = make_model("gemma3_text")
    cache = read_prompt(model, params, 2, dtype=dtype)
    tree = init_tree(cache, 16) if seed % 2 else None
    parents, words, logits = list[int](), np.zeros((2, 0), int), np.zeros((2, 0, VOCAB), "f4")
    for _ in range(3):
        new = int(rng.integers(1, 6))
        grown = [int(rng.integers(-1, len(parents) + i)) for i in range(new)]
        fresh = rng.integers(0, VOCAB, (2, new))
        out = jaxllm.forward(model, params, cache, fresh, parents=[grown] * 2, tree=tree)
        parents, words, tree = parents + grown, np.hstack([words, fresh]), out.delta
        logits = np.concatenate([logits, np.asarray(out.logits)], axis=1)
        assert tree.size == len(parents)
    check_nodes(model, params, cache, words, parents, logits, tree)


def test_rows_have_their_own_trees_and_nodes() -> None:
    """Rows of other shapes; `commit` takes a node for each."""
    model, params = make_model()
    cache = read_prompt(model, params, 2)
    parents, words = [[-1, 0, 1, 2], [-1, -1, 1, 1]], tokens(2, 4, seed=2)
    out = jaxllm.forward(model, params, cache, words, parents=parents)
    committed = jaxllm.commit(cache, out.delta, [2, 3])
    assert committed.tokens(0) == [*cache.tokens(0), *words[0, :3].tolist()]
    assert committed.tokens(1) == [*cache.tokens(1), *words[1, [1, 3]].tolist()]
    for row, path in enumerate(([0, 1, 2], [1, 3])):
        alone = jaxllm.cache.branch(cache, row)
        expected, _ = run_chain(model, params, alone, words[row, path][None])
        assert_close(out.logits[row, path[-1]], expected[0])


def test_tree_needs_no_cache_and_continues_a_fork() -> None:
    model, params = make_model()
    words = tokens(1, 4, seed=3)
    out = jaxllm.forward(model, params, None, words, parents=[[-1, 0, 0, 2]])
    whole = jaxllm.forward(model, params, None, words[:, [0, 2, 3]])
    assert_close(out.logits[:, [0, 2, 3]], np.asarray(whole.logits))
    rows = jaxllm.cache.fork(read_prompt(model, params), 2, capacity=8)
    rows = jaxllm.decode_step(model, params, rows, np.array([4, 5])).cache
    out = jaxllm.forward(model, params, rows, tokens(2, 3), parents=[[-1, 0, 0]] * 2)
    expected, _ = run_chain(model, params, rows, tokens(2, 3)[:, [0, 2]])
    assert_close(out.logits[:, 2], expected)


def test_tree_runs_in_jit_with_int4_and_adapters() -> None:
    """With traced parents, tokens, cache, earlier nodes and chosen node."""
    model, params = make_model()
    adapter = random_adapter(model.config, params, LoraConfig(r=2))
    params = with_one(model.config, quantize(params, "int4"), adapter)
    cache, words = read_prompt(model, params), tokens(1, 6, seed=4)

    @jax.jit
    def run(cache: Any, words: Any, parents: Any, node: Any) -> Any:
        first = jaxllm.forward(model, params, cache, words[:, :4], parents=parents[:, :4])
        out = jaxllm.forward(
            model, params, cache, words[:, 4:], parents=parents[:, 4:], tree=first.delta
        )
        return jnp.concatenate([first.logits, out.logits], 1), jaxllm.commit(cache, out.delta, node)

    parents = [-1, 0, 0, 2, 3, 1]
    logits, committed = run(cache, words, np.array([parents]), np.array(4))
    for node in range(6):
        expected, _ = run_chain(model, params, cache, words[:, path_to(parents, node)])
        assert_close(logits[:, node], expected)
    assert committed.tokens() == [*cache.tokens(), *words[0, [0, 2, 3, 4]].tolist()]


def test_sites_hidden_states_and_edits_follow_nodes() -> None:
    model, params = make_model()
    words, site = tokens(1, 5, seed=5), "blocks.1.resid_post"
    edits = {"blocks.0.resid_post": Add(np.linspace(-1, 1, 40, dtype=np.float32))}
    cache = read_prompt(model, params)
    asked: Any = {"read": [site, "blocks.0.attn.q"], "edits": edits, "hidden_states": True}
    out = jaxllm.forward(model, params, cache, words, parents=[[-1, 0, 0, 1, 2]], **asked)
    chain = jaxllm.forward(model, params, cache, words[:, [0, 2, 4]], **asked)
    for name, x in chain.sites.items():
        assert_close(out.sites[name][:, [0, 2, 4]], np.asarray(x))
    assert out.hidden_states is not None and chain.hidden_states is not None
    for x, y in zip(out.hidden_states, chain.hidden_states, strict=True):
        assert_close(x[:, [0, 2, 4]], np.asarray(y))
    committed, others = jaxllm.commit(cache, out.delta, 1), {site: edits.popitem()[1]}
    with pytest.raises(CacheMismatchError, match="other edits"):
        jaxllm.forward(model, params, committed, [[1]], edits=others)


def test_strengths_by_row_hold_for_nodes() -> None:
    """Each row's nodes have the logits of its chain with its own strength."""
    model, params = make_model()
    direction_D = np.linspace(-1, 1, 40, dtype=np.float32)
    edits = {"blocks.0.resid_post": Add(direction_D, scale=np.array([1.0, -2.0], np.float32))}
    words = tokens(2, 5, seed=5)
    asked: Any = {"edits": edits}
    out = jaxllm.forward(model, params, None, words, parents=[[-1, 0, 0, 1, 2]] * 2, **asked)
    chain = jaxllm.forward(model, params, None, words[:, [0, 2, 4]], **asked)
    assert_close(out.logits[:, [0, 2, 4]], np.asarray(chain.logits))


def test_100_continuations_copy_nothing() -> None:
    """The bytes of all distinct arrays are those of one cache and of 100 nodes' own."""
    model, params = make_model()
    cache = read_prompt(model, params)
    tree = init_tree(cache, 100)
    out = jaxllm.forward(model, params, cache, tokens(1, 60), parents=[[-1] * 60], tree=tree)
    parents = [[-1, 0] * 20]
    out = jaxllm.forward(model, params, cache, tokens(1, 40), parents=parents, tree=out.delta)
    config = model.config
    keys = 2 * 2 * config.num_key_value_heads * config.head_dim * 4  # 2 layers, k and v, float32
    a_node = keys + 4 + 4 + 1 + 4  # position, token, patched, parent
    assert out.delta.size == 100
    assert count_bytes(cache, out.delta) == cache.nbytes + 100 * a_node + 4  # size


def test_sizes_of_a_bucket_share_a_program() -> None:
    model, params = make_model(num_hidden_layers=1)
    cache = read_prompt(model, params)
    tree = init_tree(cache, 16)
    before = compiled_steps.run_tree._cache_size()
    for parents in ([-1, 0, 1, 2, 3], [-1, 0, 1, 1, 3, 4, 2], [-1, 0, 1, 2, 3, 4, 5, 6]):
        jaxllm.forward(model, params, cache, tokens(1, len(parents)), parents=[parents], tree=tree)
    assert compiled_steps.run_tree._cache_size() - before == 1


@given(st.lists(st.integers(0, 99), max_size=40))
def test_ancestors_equal_walks(draws: list[int]) -> None:
    parents = [draw % (i + 1) - 1 for i, draw in enumerate(draws)] or [-1]
    found_SP = ancestors(np.array([parents], np.int32))[0]
    walks = [path_to(parents, node)[::-1] for node in range(len(parents))]
    width = 1 << (max(map(len, walks)) - 1).bit_length()
    assert found_SP.tolist() == [walk + [-1] * (width - len(walk)) for walk in walks]
    traced_SP = np.asarray(jax.jit(ancestors)(np.array([parents], np.int32)))[0]
    np.testing.assert_array_equal(traced_SP[:, :width], found_SP)
    assert (traced_SP[:, width:] == -1).all()


def test_bad_trees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = make_model(num_hidden_layers=1)
    cache = read_prompt(model, params)

    def run(parents: Any, words: Any = ((1, 2, 3),), **more: Any) -> Any:
        return jaxllm.forward(model, params, cache, words, parents=parents, **more)

    for parents, message in (
        ([[-1, 1, 0]], "row 0: the parent of node 1 is 1, expected an earlier node or -1"),
        ([[-1, 0, -2]], "parent of node 2 is -2"),
        ([[-1, 0, 1 << 40]], "parent of node 2 is"),
        ([[-1, 0]], r"shape of the tokens, \(1, 3\), got \(1, 2\)"),
        ([-1, 0, 1], "shape of the tokens"),
        ([[-1.0, 0.0, 1.0]], "parents must be an array of integers"),
        (jnp.array([[-1.0, 0.0, 1.0]]), "parents must be integers"),
        ([[-1, "a", 0]], "parents must be an array of integers"),
    ):
        with pytest.raises(TokenError, match=message):
            run(parents)
    with pytest.raises(TokenError, match="999 is outside"):
        run([[-1, 0, 1]], [[1, 2, 999]])
    for more in ({"positions_BT": [[1, 2, 3]]}, {"attention_mass": True}, {"attention_weights": 1}):
        with pytest.raises(ConfigError, match="positions follow from its parents"):
            run([[-1, 0, 1]], **more)
    with pytest.raises(ConfigError, match=r"cannot read blocks.0.attn.pattern"):
        run([[-1, 0, 1]], read=["blocks.0.attn.pattern"])
    out = run([[-1, 0, 1]])
    with pytest.raises(TokenError, match="parent of node 3 is 3"):
        run([[3]], [[1]], tree=out.delta)
    with pytest.raises(TokenError, match="tree= needs parents="):
        run(None, [[1]], tree=out.delta)
    with pytest.raises(CacheMismatchError, match=r"tree must be the delta of forward"):
        run([[0]], [[1]], tree=jaxllm.forward(model, params, cache, [[1]]).delta)
    grown = jaxllm.commit(cache, out.delta, 0)
    with pytest.raises(CacheMismatchError, match=r"at positions \[11\], this cache is at \[12"):
        jaxllm.forward(model, params, grown, [[1]], parents=[[0]], tree=out.delta)
    with pytest.raises(CacheMismatchError, match="at positions"):
        jaxllm.commit(grown, out.delta, 0)
    with pytest.raises(CacheMismatchError, match=r"the tree has 1 rows, the cache has 2"):
        jaxllm.commit(read_prompt(model, params, 2), out.delta, 0)
    with pytest.raises(CacheMismatchError, match=r"Use commit\(cache, delta, node\)"):
        jaxllm.commit(cache, out.delta)
    with pytest.raises(TokenError, match="node selects a path"):
        jaxllm.commit(cache, jaxllm.forward(model, params, cache, [[1]]).delta, 0)
    for node, message in ((3, "from 0 to 2, got 3"), (-1, "got -1"), ([[0]], "one per row"),
                          ("a", "node must be an array of integers")):  # fmt: skip
        with pytest.raises(TokenError, match=message):
            jaxllm.commit(cache, out.delta, node)
    other = init_tree(read_prompt(model, params, dtype="bfloat16"), 4)
    with pytest.raises(CacheMismatchError, match="another model or dtype"):
        run([[-1]], [[1]], tree=other)
    with pytest.raises(CapacityError, match="tree's slots"):
        init_tree(cache, 0)
    monkeypatch.setattr("jaxllm.files.memory_limit.machine_memory", lambda: 10**6)
    with pytest.raises(CapacityError, match="a tree of 9,999 nodes in 1 rows needs"):
        init_tree(cache, 9_999)
    monkeypatch.undo()
    small = jaxllm.init_cache(model, 1, PROMPT + 1)
    small = jaxllm.prefill(model, params, small, tokens(1, PROMPT)).cache
    with pytest.raises(CapacityError, match="2 more tokens do not fit"):
        jaxllm.commit(small, out.delta, 1)


def test_tree_is_refused_beyond_positions_and_with_memory() -> None:
    model, params = make_model("gpt2", n_layer=1, n_positions=12)
    cache = read_prompt(model, params)
    jaxllm.forward(model, params, cache, [[1, 2]], parents=[[-1, -1]])
    with pytest.raises(TokenError, match="position 12 is out of range"):
        jaxllm.forward(model, params, cache, [[1, 2]], parents=[[-1, 0]])
    model, params = random_model("llama", num_hidden_layers=1)
    infini = LongAttention(kind="infini", segment_length=8, update="linear")
    model = jaxllm.build(dataclasses.replace(model.config, attention=infini))
    with pytest.raises(ConfigError, match="long-context attention"):
        jaxllm.forward(model, params, None, [[1]], parents=[[-1]])
