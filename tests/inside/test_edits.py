"""Edits: their laws on all families, their arithmetic, and what is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import models, steps
from jaxllm.adapters import LoraConfig, attach_adapter
from jaxllm.cache import branch, drop_range, load_cache, merge_rows, save_cache
from jaxllm.errors import CacheMismatchError, ConfigError
from jaxllm.inside import Add, Apply, Clamp, Project, Scale, Set, assign_edits
from jaxllm.models.site_inputs import check_edits, fingerprint
from jaxllm.models.sites import WEIGHT_SITES
from jaxllm.weights.precision import Precision, cast
from tests.adapters.random_adapters import random_adapter
from tests.tiny_models import each_family, random_model, tokens

B, T = 2, 7
# XLA fuses a product before a site of theirs and the sum after it into one, rounded once.
EXACT = ("llama", "gpt2")  # the others have products that XLA may fuse with the sum after a site


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama")


def forward(lm: Any, ids: Any, cache: Any = None, **options: Any) -> jaxllm.Output:
    return jaxllm.forward(*lm, cache, ids, **options)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", each_family(models.FAMILIES))
def test_reading_and_setting_own_values_change_no_bits(name: str) -> None:
    """Reading all sites gives the logits of reading none. So does setting a site to its own value,
    except that edited scores and weights leave the attention kernel, and that XLA may fuse a
    product before a site with the sum after it.
    """
    lm, ids = random_model(name), tokens(B, T)
    plain = forward(lm, ids)
    read = forward(lm, ids, read=["*"])
    if name in EXACT:
        assert bits((plain.logits, plain.delta)) == bits((read.logits, read.delta))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5)
    jax.tree.map(close, (plain.logits, plain.delta), (read.logits, read.delta))
    # One program has an edit at each site, of which one at a time is active.
    own = {site: x for site, x in read.sites.items() if not site.endswith("attn.result")}
    weights = [site for site in own if site.endswith(WEIGHT_SITES)]
    for group in ({*own} - {*weights}, weights):
        for active in sorted(group):
            rows = {site: range(B) if site == active else [-1] * B for site in group}
            edits = {site: Set(own[site], rows=np.array(rows[site])) for site in sorted(group)}
            logits = forward(lm, ids, edits=edits).logits
            if active in weights or name not in EXACT:
                np.testing.assert_allclose(logits, plain.logits, atol=5e-5)
            else:
                assert bits(logits) == bits(plain.logits), active


def test_no_edits_run_the_plain_program(lm: Any, compiled: list[str]) -> None:
    """Empty reads and edits compile nothing more, and the program has no operation more."""
    ids = tokens(B, T)
    forward(lm, ids)
    count = len(compiled)
    forward(lm, ids, read=(), edits={})
    forward(lm, ids, edits=None)
    assert len(compiled) == count
    model, params = lm
    at = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))

    def run(params: Any, ids: Any) -> Any:
        return model.apply({"params": params}, ids, at, np.full(B, T, np.int32)).logits

    def run_forward(params: Any, ids: Any) -> Any:
        return steps.run_model(model, params, (), ids, at)[0].logits

    count = str(jax.make_jaxpr(run)(params, ids)).count(" = ")
    assert str(jax.make_jaxpr(run_forward)(params, ids)).count(" = ") <= count + 8  # input checks


def test_unread_sites_are_not_computed(lm: Any) -> None:
    """The lowered program computes attention weights only if they are read."""
    model, params = lm
    ids = tokens(B, T)

    def lower(**options: Any) -> int:
        run = jax.jit(lambda params: jaxllm.forward(model, params, None, ids, **options))
        return str(run.lower(params).as_text()).count("stablehlo.dot_general")

    plain = lower()
    assert lower(read=["blocks.0.attn.z", "blocks.*.resid_post"]) == plain
    assert lower(read=["blocks.0.attn.pattern"]) > plain


def test_edits_compute_their_formulas(lm: Any) -> None:
    """Each kind of edit against NumPy, at the site itself, for some positions and rows."""
    ids, site = tokens(B, T), "blocks.0.resid_post"
    x = np.asarray(forward(lm, ids, read=[site]).sites[site])
    D = x.shape[-1]
    v, e, d, scale_B = random(D), random(D, seed=1), random(D, seed=2), np.array([0.5, -2.0])
    scale = scale_B[:, None, None]
    along = (x @ v)[..., None] / (v @ v) * v
    active = np.maximum((x @ e)[..., None] + 0.3, 0)
    wanted = {
        Add: (Add(v, scale=scale_B), x + scale * v),
        Set: (Set(v), np.broadcast_to(v, x.shape)),
        Scale: (Scale(scale_B), x * scale),
        Project: (Project(v), x - along),
        Clamp: (Clamp(e, d, scale_B, bias=0.3), x + (scale - active) * d),
        Apply: (jnp.tanh, np.tanh(x)),
        list: ([Add(v), Scale(2.0)], 2 * (x + v)),
    }
    for kind, (edit, want) in wanted.items():
        got = forward(lm, ids, read=[site], edits={site: edit}).sites[site]
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=str(kind))
    for chosen, at in (
        ({"positions": [2, 5]}, (slice(None), [2, 5])),
        ({"rows": [1]}, (1, slice(None))),
        ({"positions": [[1, 4], [-1, -1]]}, (0, [1, 4])),
        ({"positions": [[1, 4], [2, 3]], "rows": [0]}, (0, [1, 4])),
    ):
        want = x.copy()
        want[at] = 3.0
        got = forward(lm, ids, read=[site], edits={site: Set(3.0, **chosen)}).sites[site]
        np.testing.assert_array_equal(got, want)


def test_heads_are_edited_alone(lm: Any) -> None:
    """Setting two heads to zero leaves the others, and removes just their part of the output."""
    ids, read = tokens(B, T), ["blocks.1.attn.z", "blocks.1.attn.result", "blocks.1.attn.output"]
    plain = forward(lm, ids, read=read).sites
    edited = forward(lm, ids, read=read, edits={read[0]: Set(0.0, heads=[1, 6])}).sites
    want = np.array(plain[read[0]])
    want[:, :, [1, 6]] = 0
    np.testing.assert_array_equal(edited[read[0]], want)
    lost = plain[read[1]][:, :, jnp.array([1, 6])].sum(axis=2)
    np.testing.assert_allclose(edited[read[2]], plain[read[2]] - lost, atol=1e-5)


def test_edited_attention_weights_take_effect(lm: Any) -> None:
    """Weights set to one slot make each head that slot's value; -inf scores remove a slot."""
    ids = tokens(B, T)
    read = ["blocks.0.attn.z", "blocks.0.attn.v", "blocks.0.attn.pattern"]
    first_S = np.zeros(T, np.float32)
    first_S[0] = 1
    sites = forward(lm, ids, read=read, edits={"blocks.0.attn.pattern": Set(first_S)}).sites
    G = sites[read[0]].shape[2] // sites[read[1]].shape[2]
    want = np.repeat(np.asarray(sites[read[1]])[:, :1], G, axis=2)
    np.testing.assert_allclose(
        sites[read[0]], np.broadcast_to(want, sites[read[0]].shape), atol=1e-6
    )
    hidden_S = np.where(np.arange(T) == 1, -np.inf, 0).astype(np.float32)
    sites = forward(lm, ids, read=read, edits={"blocks.0.attn.scores": Add(hidden_S)}).sites
    pattern = np.asarray(sites[read[2]])
    assert not pattern[..., 1].any()
    np.testing.assert_allclose(pattern.sum(-1), 1, rtol=1e-6)


def test_other_values_compile_nothing(lm: Any, compiled: list[str]) -> None:
    """Strengths, vectors, positions, heads and rows are traced."""
    ids, D = tokens(B, T), 40

    def run(seed: int) -> Any:
        add = Add(random(D, seed=seed), scale=random(B, seed=seed), positions=[seed, seed + 1])
        zero = Set(0.0, heads=[seed], rows=[seed % 2])
        return forward(lm, ids, edits={"blocks.*.resid_post": add, "blocks.0.attn.z": zero}).logits

    first, count = run(0), len(compiled)
    second = run(1)
    assert len(compiled) == count
    assert bits(first) != bits(second)


def test_rows_are_edited_independently(lm: Any) -> None:
    """A row's edit leaves the bits of other rows alone, and each row gets its own strength."""
    ids, site = tokens(3, T), "blocks.0.resid_post"
    v, scale_B = random(40), np.array([0.0, 1.5, -1.0], np.float32)
    plain = forward(lm, ids).logits
    together = forward(lm, ids, edits={site: Add(v, scale=scale_B)}).logits
    one = forward(lm, ids, edits={site: Add(v, scale=scale_B, rows=[1])}).logits
    assert bits(one[jnp.array([0, 2])]) == bits(plain[jnp.array([0, 2])])
    assert bits(one[1]) == bits(together[1]) != bits(plain[1])
    assert bits(together[0]) == bits(plain[0])


def test_vmap_over_edits_equals_single_runs(lm: Any) -> None:
    """64 edits in one `vmap` give the logits of 64 runs."""
    model, params = lm
    ids, vectors = tokens(1, T), random(64, 40)
    at = np.arange(64, dtype=np.int32) % T

    @jax.jit
    def run(vector_D: Any, position: Any) -> Any:
        edits = {"blocks.0.resid_post": Add(vector_D, positions=position)}
        return jaxllm.forward(model, params, None, ids, edits=edits).logits

    many = jax.vmap(run)(vectors, at)
    for i in range(64):
        np.testing.assert_allclose(many[i], run(vectors[i], at[i]), atol=2e-5)


@pytest.mark.parametrize("site", ["resid_post", "attn.pattern", "mlp.post", "attn.rot_k"])
def test_gradients_through_edits_equal_finite_differences(lm: Any, site: str) -> None:
    model, params = lm
    ids, name = tokens(1, T), f"blocks.0.{site}"
    x = forward(lm, ids, read=[name]).sites[name]
    direction = random(*x.shape[1:]) * (np.asarray(x[0]) != 0)

    @jax.jit
    def metric(scale: Any) -> Any:
        edits = {name: Add(direction, scale=scale)}
        logits = jaxllm.forward(model, params, None, ids, edits=edits).logits
        return (logits[0, -1] * random(131, seed=3)).sum()

    slope = jax.grad(metric)(0.0)
    step = 1e-2
    numeric = (metric(step) - metric(-step)) / (2 * step)
    assert abs(slope) > 1e-2
    np.testing.assert_allclose(slope, numeric, rtol=2e-2)


def test_functions_have_traced_arguments(lm: Any, compiled: list[str]) -> None:
    """A `Partial` with other arguments runs the same program, under scan too."""
    ids, site = tokens(1, T), "blocks.0.mlp.post"

    def power(strength: Any, x: Any) -> Any:
        return x * strength

    def run(strength: float) -> Any:
        return forward(lm, ids, edits={site: jax.tree_util.Partial(power, jnp.float32(strength))})

    first, count = run(2.0), len(compiled)
    assert bits(first.logits) == bits(forward(lm, ids, edits={site: Scale(2.0)}).logits)
    count = len(compiled)
    run(3.0)
    assert len(compiled) == count
    model, params = lm

    def step(carry: Any, scale: Any) -> Any:
        return carry, jaxllm.forward(model, params, None, ids, edits={site: Scale(scale)}).logits

    _, logits = jax.lax.scan(step, (), jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(logits[1], first.logits, atol=1e-5)


AT = "blocks.0.resid_post"
INVALID = [
    ({"blocks.0.resid_pots": Add(1.0)}, "did you mean blocks.0.resid_post"),
    ({"blocks.2.resid_post": Add(1.0)}, "layer 2 is out of range, expected 0 to 1"),
    (
        {AT: Add(random(39))},
        r"Add at blocks.0.resid_post: vector has shape \(39,\), which does not fit the site's"
        r" \[B 2, T 7, D 40\]",
    ),
    ({AT: Project(2.0)}, "direction must be a vector of width 40"),
    ({AT: Add(1.0, scale=[1.0] * 3)}, "scale must be one number or one for each of 2 rows"),
    ({AT: Add(1.0, heads=[1])}, "heads cannot be chosen at a site without heads"),
    ({"blocks.0.attn.k": Set(0.0, heads=[2])}, r"heads \[2\] out of range: expected 0 to 1"),
    ({AT: Set(0.0, positions=[0.5])}, "positions must be integers"),
    ({AT: Set(0.0, rows=[2])}, r"rows \[2\] out of range"),
    ({AT: Set("x")}, "value must be an array of numbers"),
    ({AT: 3.0}, "an edit must be one of jaxllm.inside"),
    ({"blocks.0.attn.result": Set(0.0)}, "for reading only"),
    ([Add(1.0)], "edits must be a dict"),
]


@pytest.mark.parametrize(("edits", "message"), INVALID)
def test_invalid_edits_are_refused(lm: Any, edits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        forward(lm, tokens(B, T), edits=edits)
    assert "\n" not in str(caught.value)


def test_functions_that_change_the_shape_are_refused(lm: Any) -> None:
    with pytest.raises(ConfigError, match="must keep the shape"):
        forward(lm, tokens(B, T), edits={"blocks.0.resid_post": lambda x: x[:, :1]})


def test_long_attention_refuses_scores() -> None:
    kind = {"kind": "infini", "segment_length": 8}
    lm = random_model("llama")
    config = models.config_from_dict({**lm[0].config.to_dict(), "attention": kind})
    shapes = models.param_shapes(models.build(config))
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.1, x.dtype), shapes)
    with pytest.raises(ConfigError, match="does not support attention mass or weights"):
        forward((models.build(config), params), tokens(1, 3), read=["blocks.0.attn.scores"])


STEER = {"blocks.0.resid_post": Add(random(40), scale=np.array([1.0, -0.5]))}


def test_chunks_and_steps_equal_forward_under_edits(lm: Any) -> None:
    """Prefill in chunks and decode steps, read and edited, give what one forward pass gives."""
    ids, read = tokens(B, T), ["blocks.1.attn.z", "final_norm", "blocks.0.resid_post"]
    edits = {**STEER, "blocks.1.resid_pre": Add(random(40), positions=[[1, 4], [3, 6]])}
    whole = forward(lm, ids, read=read, edits=edits)
    cache = jaxllm.init_cache(lm[0], B, 16)
    out = jaxllm.prefill(*lm, cache, ids[:, :5], chunk=3, read=read, edits=edits)
    np.testing.assert_allclose(out.logits, whole.logits[:, 4], atol=2e-5)
    for site in read:
        np.testing.assert_allclose(out.sites[site], whole.sites[site][:, :5], atol=2e-5)
    for t in (5, 6):
        out = jaxllm.decode_step(*lm, out.cache, ids[:, t], read=read, edits=edits)
        np.testing.assert_allclose(out.logits, whole.logits[:, t], atol=2e-5)
        for site in read:
            np.testing.assert_allclose(out.sites[site][:, 0], whole.sites[site][:, t], atol=2e-5)
    with pytest.raises(ConfigError, match=r"prefill cannot read blocks\.0\.attn\.pattern"):
        jaxllm.prefill(*lm, cache, ids, read=["blocks.*.attn.pattern"])
    with pytest.raises(ConfigError, match="does not fit"):
        jaxllm.prefill(*lm, cache, ids, edits={"blocks.0.resid_post": Set(whole.sites[read[2]])})


def test_cache_is_refused_under_other_edits(lm: Any, tmp_path: Any) -> None:
    """The cache carries a fingerprint of its edits through steps, commits, rows and files."""
    model, params = lm
    ids = tokens(B, T)
    empty = jaxllm.init_cache(model, B, 24)
    cache = jaxllm.prefill(*lm, empty, ids, edits=STEER).cache
    again = forward(lm, ids[:, :2], cache, edits=STEER)
    cache = jaxllm.commit(cache, again.delta, donate=True)
    other = {"blocks.0.resid_post": Add(random(40), scale=np.array([1.0, -0.25]))}
    for edits, row in ((None, 0), (other, 1)):
        with pytest.raises(CacheMismatchError, match=f"row {row} of the cache holds keys"):
            forward(lm, ids, cache, edits=edits)
        with pytest.raises(CacheMismatchError, match="other edits"):
            jaxllm.decode_step(*lm, cache, ids[:, 0], edits=edits)
        with pytest.raises(CacheMismatchError, match="other edits"):
            jaxllm.generate(*lm, ids, max_new_tokens=2, cache=cache, edits=edits)
    save_cache(tmp_path / "c.safetensors", cache, *lm)
    loaded = load_cache(tmp_path / "c.safetensors", *lm)
    assert loaded == cache
    rows = merge_rows([branch(loaded, 1), branch(jaxllm.prefill(*lm, empty, ids).cache, 0)])
    first = {"blocks.0.resid_post": Add(random(40), scale=np.array([-0.5, 1.0]), rows=[0])}
    with pytest.raises(CacheMismatchError, match="row 0"):
        forward(lm, ids, rows)
    one = {"blocks.0.resid_post": Add(random(40), scale=-0.5)}
    forward(lm, ids[:1], branch(loaded, 1), edits=one)  # the row's own strength
    forward(lm, ids[1:], branch(rows, 1))
    forward(lm, ids, assign_edits(model, rows, first), edits=first)
    forward(lm, ids, assign_edits(model, cache))
    jitted = jax.jit(lambda cache, ids: jaxllm.decode_step(model, params, cache, ids, edits=STEER))
    np.testing.assert_array_equal(jitted(cache, ids[:, 0]).cache.edits_B, cache.edits_B)


def test_culled_edit_leaves_no_trace(lm: Any) -> None:
    """Tokens committed under an edit and culled change no bit of what follows."""
    model, ids = lm[0], tokens(1, 12)
    edits = {"blocks.*.resid_post": Set(7.0, positions=[4, 5])}

    def run(edits: Any) -> Any:
        cache = jaxllm.prefill(*lm, jaxllm.init_cache(model, 1, 20), ids[:, :4]).cache
        cache = jaxllm.prefill(*lm, cache, ids[:, 4:6], edits=edits).cache
        cache = assign_edits(model, drop_range(cache, 4, 6))
        return jaxllm.prefill(*lm, cache, ids[:, 6:])

    plain, culled = run(None), run(edits)
    assert bits(plain.logits) == bits(culled.logits)


def test_generate_edits_prompt_and_new_tokens(lm: Any) -> None:
    """Greedy tokens under an edit are those of edited forward passes, and sites are theirs."""
    ids, read = tokens(B, T), ["blocks.1.resid_post", "blocks.0.attn.pattern"]
    out = jaxllm.generate(*lm, ids, max_new_tokens=5, edits=STEER)
    text = np.concatenate([ids, out.token_BT], axis=1)
    whole = forward(lm, text[:, :-1], edits=STEER, read=read)
    np.testing.assert_array_equal(whole.logits[:, T - 1 :].argmax(-1), out.token_BT)
    plain = jaxllm.generate(*lm, ids, max_new_tokens=5)
    assert bits(plain.token_BT) != bits(out.token_BT)
    seen = jaxllm.generate(*lm, ids, max_new_tokens=5, edits=STEER, read=read, read_steps=[1, 3])
    np.testing.assert_array_equal(seen.token_BT, out.token_BT)
    x = seen.sites[read[0]]
    assert isinstance(x, np.ndarray)
    at = [T + 1, T + 3]
    np.testing.assert_allclose(x, np.asarray(whole.sites[read[0]])[:, at], rtol=1e-4, atol=2e-5)
    assert seen.sites[read[1]].shape == (B, 8, 2, seen.cache.slots + 1)
    steps = [
        step.sites for step in jaxllm.stream(*lm, ids, max_new_tokens=5, edits=STEER, read=read[:1])
    ]
    assert steps[0] == {} and len(steps) == 5
    np.testing.assert_allclose(steps[2][read[0]], x[:, :1], atol=2e-5)


def run_served(
    lm: Any, requests: list[jaxllm.Request], rows: int = 3, **options: Any
) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for event in jaxllm.serve(*lm, requests, rows=rows, capacity=32, chunk=8, **options):
        assert event.error is None, event.error
        found.setdefault(event.id, []).append(event.token)
    return found


@pytest.mark.parametrize("cached", [False, True])
def test_served_requests_have_their_own_edits(lm: Any, cached: bool) -> None:
    """Each request of a batch gets the tokens of `generate` under its edits, also if they share a
    prompt, join later, or find the prompt's chunks in a prefix cache.
    """
    site, prompt = "blocks.*.resid_post", tokens(1, 10)[0]
    edits = [
        None,
        {site: Add(random(40), scale=0.8)},
        {site: Add(random(40, seed=1), scale=-1.0)},
        {site: Add(random(40), scale=0.8)},
        {"blocks.0.attn.z": Set(0.0, heads=[2, 5]), site: Scale(1.1)},
        None,
    ]
    requests = [
        jaxllm.Request(id=i, prompt=prompt, max_new_tokens=6, edits=one)
        for i, one in enumerate(edits)
    ]
    options = {"prefix_cache": jaxllm.PrefixCache(1 << 20, chunk=8)} if cached else {}
    found = run_served(lm, requests, **options)
    for i, one in enumerate(edits):
        alone = jaxllm.generate(*lm, prompt[None], max_new_tokens=6, edits=one)
        assert found[i] == alone.token_BT[0].tolist(), i
    assert len({tuple(x) for x in found.values()}) == 4
    if not cached:  # one after the other in one row
        assert run_served(lm, requests[-2:], rows=1) == {i: found[i] for i in (4, 5)}


def test_served_strengths_share_programs(lm: Any, compiled: list[str]) -> None:
    def requests(seed: int) -> list[jaxllm.Request]:
        return [
            jaxllm.Request(
                id=i, prompt=tokens(1, 5)[0], max_new_tokens=4,
                edits={"blocks.1.resid_post": Add(random(40, seed=seed), scale=i + seed)},
            )
            for i in range(4)
        ]  # fmt: skip

    run_served(lm, requests(0))
    count = len(compiled)
    run_served(lm, requests(1))
    assert len(compiled) == count


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"blocks.0.resid_post": jnp.tanh}, "cannot be functions"),
        ({"blocks.*.attn.scores": Scale(2.0)}, "cannot edit blocks.0.attn.scores"),
        ({"embed": Scale(2.0), "blocks.1.attn.pattern": Scale(2.0)}, "cannot edit blocks.1.attn.p"),
    ],
)
def test_served_edits_without_promise_are_refused(lm: Any, edits: Any, message: str) -> None:
    """Edited attention weights would take all rows out of the kernel, and change their bits."""
    request = jaxllm.Request(id=0, prompt=[1, 2], max_new_tokens=2, edits=edits)
    (event,) = jaxllm.serve(*lm, [request], rows=2, capacity=8)
    assert message in str(event.error)


READS: list[dict[str, Any]] = [
    {"read": ["blocks.*.resid_post", "blocks.1.attn.z", "logits"]},
    {},
    {"read": ["blocks.0.hook_resid_mid"], "read_steps": [-1, 2]},
    {
        "read": ["blocks.0.mlp.post"],
        "read_steps": [0],
        "edits": {"blocks.*.resid_pre": Add(random(40), scale=0.8)},
    },
    {"read": ["embed"], "read_steps": [40], "top_logprobs": 3},
]


@pytest.mark.parametrize("cached", [False, True])
def test_served_requests_read_their_own_sites(lm: Any, cached: bool) -> None:
    """Each request gets what `generate` reads, whatever the others read, and reading changes no
    request's tokens or log-probabilities.
    """
    prompts = [tokens(1, 4 + 5 * i, seed=i)[0] for i in range(len(READS))]
    options: dict[str, Any] = {"rows": 3, "capacity": 40, "chunk": 8}

    def run(reads: list[dict[str, Any]]) -> dict[Any, list[Any]]:
        requests = [
            jaxllm.Request(id=i, prompt=prompt, max_new_tokens=6, **one)
            for i, (prompt, one) in enumerate(zip(prompts, reads, strict=True))
        ]
        cache = jaxllm.PrefixCache(1 << 20, chunk=8) if cached else None
        found: dict[Any, list[Any]] = {}
        for event in jaxllm.serve(*lm, requests, **options, prefix_cache=cache):
            assert event.error is None, event.error
            found.setdefault(event.id, []).append(event)
        return found

    unread = [{k: v for k, v in one.items() if "read" not in k} for one in READS]
    plain, found = run(unread), run(READS)
    for i, one in enumerate(READS):
        both = [[(e.token, e.logprob) for e in events[i]] for events in (plain, found)]
        assert both[0] == both[1], i
        names, edits = one.get("read", []), one.get("edits")
        whole = jaxllm.forward(*lm, None, prompts[i][None], read=names, edits=edits).sites
        steps = one.get("read_steps", range(5))
        ids = [np.array([[event.token]]) for event in found[i]]
        cache = jaxllm.prefill(
            *lm, jaxllm.init_cache(lm[0], 1, 40), prompts[i][None], edits=edits
        ).cache
        for step, event in enumerate(found[i], -1):
            sites = {name: x[:, -1:] for name, x in whole.items()}
            if step >= 0:
                out = jaxllm.decode_step(*lm, cache, ids[step][0], read=names, edits=edits)
                cache, sites = out.cache, out.sites
            assert event.sites.keys() == (sites.keys() if step in steps else set()), (i, step)
            for name, x in event.sites.items():
                assert isinstance(x, np.ndarray) and x.shape == sites[name].shape
                np.testing.assert_allclose(x, sites[name], atol=2e-5, err_msg=f"{i} {name}")


def test_completions_and_chunks_have_sites() -> None:
    lm = jaxllm.load("demo:llama", dtype="float32")
    chunks: list[Any] = []
    request = {"prompt": "Once upon a time", "max_new_tokens": 6, "do_sample": False}
    reading = {"read": ["blocks.1.resid_post", "blocks.0.attn.q"], "on_chunk": chunks.append}
    answers: Any = dict(lm.serve([request | reading, request], rows=2, capacity=32))
    ids = np.array([lm.encode(request["prompt"])])
    result = lm.model, lm.params, ids
    whole = jaxllm.generate(*result, max_new_tokens=6, read=reading["read"])
    assert answers[0].tokens == answers[1].tokens == whole.token_BT[0].tolist()
    assert answers[1].sites == {} and answers[0].sites.keys() == whole.sites.keys()
    for name, x in answers[0].sites.items():
        assert x.shape == whole.sites[name].shape
        np.testing.assert_allclose(x, whole.sites[name], atol=2e-5)
        np.testing.assert_array_equal(x[:, 2:3], chunks[3].sites[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read": ["blocks.0.attn.pattern"]}, "cannot read blocks.0.attn.pattern. Use forward"),
        ({"read": ["blocks.0.resid_pots"]}, "blocks.0.resid_post"),
        ({"read": "embed"}, "read must be a list of site names"),
        ({"read": ["embed"], "read_steps": "1"}, "read_steps must be an array of integers"),
    ],
)
def test_bad_reads_reject_a_request_alone(lm: Any, options: Any, message: str) -> None:
    requests = [
        jaxllm.Request(id=0, prompt=[1, 2], max_new_tokens=2, **options),
        jaxllm.Request(id=1, prompt=[1, 2], max_new_tokens=2),
    ]
    refused, *others = jaxllm.serve(*lm, requests, rows=2, capacity=8)
    assert message in str(refused.error) and len(others) == 2


@pytest.mark.parametrize("format", ["int8", "int4-g32", "lora", "bfloat16"])
def test_edits_work_on_any_weights(format: str) -> None:
    """Quantized, adapted and half-precision weights."""
    precision = Precision.uniform("bfloat16") if format == "bfloat16" else None
    model, params = random_model("llama", precision=precision)
    if format == "lora":
        lora = LoraConfig(r=2, target_modules=("o_proj", "down_proj", "q_proj"))
        adapter = random_adapter(model.config, params, lora, 0)
        params = attach_adapter(model.config, params, adapter)
    elif format == "bfloat16":
        params = cast(params, model.precision)
    else:
        params = jaxllm.quantize(params, format)
    assert_edits_have_effect(model, params, close=0.05 if format == "bfloat16" else 1e-4)


def assert_edits_have_effect(model: Any, params: Any, close: float = 1e-4) -> None:
    """Check that reading changes no bits, heads' parts add up, and an edit has the effect of the
    formula.
    """
    lm, ids = (model, params), tokens(B, T)
    plain = forward(lm, ids)
    sites = forward(lm, ids, read=["*"]).sites
    assert bits(sites["logits"]) == bits(plain.logits)
    result = np.asarray(sites["blocks.0.attn.result"], np.float32).sum(axis=2)
    np.testing.assert_allclose(result, sites["blocks.0.attn.output"], rtol=close, atol=close * 4)
    edits = {"blocks.0.attn_out": Set(0.0), "blocks.0.resid_post": Add(random(40), rows=[1])}
    read = ["blocks.0.resid_mid", "blocks.0.resid_post", "blocks.0.mlp_out"]
    edited = forward(lm, ids, edits=edits, read=read).sites
    assert bits(edited[read[0]]) == bits(sites["blocks.0.resid_pre"])
    mid, out = (np.asarray(edited[name], np.float32) for name in (read[0], read[2]))
    want = mid + out + random(40) * np.array([[[0]], [[1]]])
    np.testing.assert_allclose(
        np.asarray(edited[read[1]], np.float32), want, atol=close, rtol=close
    )


def test_fingerprints_tell_edits_apart() -> None:
    """Another number, order, place, site, kind or row changes it; on device as on the host."""
    model, _ = random_model("llama")
    v = random(40)
    site, later = "blocks.0.resid_post", "blocks.1.resid_post"
    swapped = v[np.r_[1, 0, 2:40]]
    power = jax.tree_util.Partial
    some: list[Any] = [
        {site: Add(v)}, {site: Add(-v)}, {site: Add(swapped)}, {later: Add(v)}, {site: Set(v)},
        {site: Add(v, scale=0.5)}, {site: Add(v, positions=[1])}, {site: Add(v, positions=[2])},
        {site: [Add(v), Set(v)]}, {site: [Set(v), Add(v)]}, {site: jnp.tanh}, {site: jnp.sin},
        {site: power(jnp.multiply, 0.5)}, {site: power(jnp.multiply, 0.7)},
    ]  # fmt: skip
    checked = [check_edits(model, edits, 2, 1, None) for edits in some]
    prints = [fingerprint(edits, 2) for edits in checked]
    assert len({int(x[0]) for x in prints}) == len(some)
    assert all(x.all() for x in prints)
    rows = check_edits(model, {site: Add(v, scale=np.array([1.0, 0.5]))}, 2, 1, None)
    np.testing.assert_array_equal(fingerprint(rows, 2), [prints[0][0], prints[5][1]])
    traced = jax.jit(lambda edits: fingerprint(edits, 2))(rows)
    np.testing.assert_array_equal(traced, fingerprint(rows, 2))


def test_padding_is_no_position(lm: Any) -> None:
    """Position -1 edits nothing, padded tokens included."""
    at = np.array([[-1, -1, 0, 1, 2]])
    site = "blocks.0.resid_post"
    options: Any = {"positions_BT": at, "read": [site]}
    plain = forward(lm, tokens(1, 5), **options).sites
    edits = {site: Set(0.0, positions=[-1, 7])}
    assert bits(plain) == bits(forward(lm, tokens(1, 5), edits=edits, **options).sites)
