"""Patching sweeps: every cell equals a whole run with that one edit, on all kinds of families."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.errors import CacheMismatchError, ConfigError, TokenError
from jaxllm.inside import Add, Set, attribute_patches, patch_paths, patch_sites
from tests.test_docs import snippets
from tests.tiny_models import random_model, tokens

T = 18  # suffixes of 16 and of 18 tokens
IDS, SOURCE = tokens(1, T)[0], tokens(1, T, seed=1)[0]
FAMILIES = ["llama", "gpt2", "gemma2", "qwen3_moe"]  # windows, experts, learned positions


@pytest.fixture(scope="module")
def lm() -> Any:
    return random_model("llama")


def metric(logits_V: jax.Array) -> jax.Array:
    return logits_V[3] - logits_V[7]


def run(lm: Any, ids: Any, **options: Any) -> Any:
    return jaxllm.forward(*lm, None, ids[None], **options)


def measure(lm: Any, ids: Any = IDS, **options: Any) -> float:
    return float(metric(run(lm, ids, **options).logits[0, -1]))


def assert_equal(patches: Any, lm: Any, want: Any) -> None:
    """Check a sweep to 1e-5 of its scale, and the metric of both texts."""
    scale = np.abs([patches.base, patches.source, *np.ravel(want)]).max()
    np.testing.assert_allclose(patches.metric, want, rtol=0, atol=1e-5 * scale)
    both = [measure(lm), measure(lm, SOURCE)]
    np.testing.assert_allclose([patches.base, patches.source], both, atol=1e-5 * scale)
    ends = (patches.metric - patches.base) / (patches.source - patches.base)
    np.testing.assert_array_equal(patches.effect, ends)
    assert np.ptp(want) > 1e-2 * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_sweep_cells_equal_whole_runs(family: str) -> None:
    """Each cell is the run of the whole text with one position of one layer set; rows of several
    batches, the last of which is not full, and suffixes of two lengths.
    """
    lm, site = random_model(family), "resid_post"
    patches = patch_sites(*lm, IDS, SOURCE, metric, f"hook_{site}", batch_tokens=80)
    names = [f"blocks.{layer}.{site}" for layer in range(2)]
    value = run(lm, SOURCE, read=names).sites
    want = [
        [measure(lm, edits={n: Set(value[n], positions=[at])}) for at in range(T)] for n in names
    ]
    assert patches.layers == (0, 1)
    assert_equal(patches, lm, want)


@pytest.mark.parametrize(("site", "heads"), [("attn.z", [7, 0, 3]), ("attn.v", [1])])
def test_sweep_patches_single_heads_and_token_groups(lm: Any, site: str, heads: list[int]) -> None:
    places: list[Any] = [4, [1, 9], range(T)]
    options: Any = {"layers": [1], "positions": places, "heads": heads}
    patches = patch_sites(*lm, IDS, SOURCE, metric, site, **options)
    name = f"blocks.1.{site}"
    value = run(lm, SOURCE, read=[name]).sites[name]

    def cell(at: Any, head: int) -> float:
        return measure(lm, edits={name: Set(value, positions=np.r_[at], heads=[head])})

    assert patches.layers == (1,)
    assert_equal(patches, lm, [[[cell(at, head) for head in heads] for at in places]])


def test_sweep_runs_one_program_per_suffix_length(lm: Any, compiled: list[str]) -> None:
    """Other texts, values and layers of one sweep run the same two programs."""

    def sweep(ids: Any) -> None:
        patch_sites(*lm, ids, SOURCE, metric, "mlp_out", batch_tokens=80)

    sweep(IDS)
    count = len(compiled)
    sweep(tokens(1, T, seed=2)[0])
    assert len(compiled) == count


@pytest.mark.parametrize("freeze", [("attn.z", "mlp_out"), ("attn.z",)])
def test_path_patches_equal_brute_force(freeze: tuple[str, ...]) -> None:
    """Sender to receivers, everything in `freeze` kept: two edited runs of the whole text."""
    lm = random_model("llama", num_hidden_layers=3)
    receivers = {"blocks.2.attn.q": [1, 5], "blocks.1.attn.k": None, "blocks.2.mlp_norm": None}
    senders, places = [2, 6], [0, 5, 16]
    patches = patch_paths(
        *lm, IDS, SOURCE, metric, "attn.z", receivers,
        freeze=freeze, positions=places, heads=senders,
    )  # fmt: skip
    kept = [f"blocks.{layer}.{site}" for layer in range(3) for site in freeze]
    base = run(lm, IDS, read=kept).sites
    source = run(lm, SOURCE, read=["blocks.*.attn.z"]).sites

    def cell(layer: int, at: int, head: int) -> float:
        sender = f"blocks.{layer}.attn.z"
        edits: dict[str, Any] = {name: [Set(base[name])] for name in kept}
        edits[sender] += [Set(source[sender], positions=[at], heads=[head])]
        found = run(lm, IDS, read=list(receivers), edits=edits).sites
        return measure(lm, edits={n: Set(found[n], heads=heads) for n, heads in receivers.items()})

    want = [[[cell(n, at, head) for head in senders] for at in places] for n in range(3)]
    assert_equal(patches, lm, want)
    last = patches.metric[2]
    if freeze == ("attn.z", "mlp_out"):  # layer 2 sends only to its own MLP
        assert np.ptp(last) > 0 and np.abs(last[0] - patches.base).max() < 1e-5


@pytest.mark.parametrize("site", ["resid_pre", "attn.z", "mlp.post"])
def test_attribution_equals_finite_differences(lm: Any, site: str) -> None:
    """The estimate is the slope of the metric toward the source at each token (and head)."""
    patches = attribute_patches(*lm, IDS, SOURCE, metric, site)
    names = [f"blocks.{layer}.{site}" for layer in range(2)]
    base, source = (run(lm, ids, read=names).sites for ids in (IDS, SOURCE))
    estimate = patches.metric - patches.base
    heads = estimate.shape[2:]
    assert estimate.shape[:2] == (2, T) and heads == ((8,) if site == "attn.z" else ())
    step = 2e-3
    for layer, name in enumerate(names):
        for at in (1, T - 1):
            where: Any = {"positions": [at]} | ({"heads": [2]} if heads else {})
            change = source[name] - base[name]
            up, down = (
                measure(lm, edits={name: Add(change, scale=by, **where)}) for by in (step, -step)
            )
            slope = estimate[(layer, at, 2) if heads else (layer, at)]
            scale = max(1.0, np.abs(estimate).max())
            np.testing.assert_allclose(slope, (up - down) / (2 * step), atol=1e-2 * scale)
    assert np.abs(estimate).max() > 0.1


INVALID: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TokenError, "must have one length, got 18 and 17 tokens", {"source": SOURCE[1:]}),
    (TokenError, "non-empty", {"ids": IDS[:0], "source": IDS[:0]}),
    (TokenError, "131", {"ids": IDS + 131}),
    (ConfigError, "unknown site 'blocks.*.resid_pots'", {"site": "resid_pots"}),
    (ConfigError, "layer 2 is out of range", {"layers": [2]}),
    (ConfigError, "cannot patch attn.pattern", {"site": "attn.pattern"}),
    (ConfigError, "cannot patch mlp_*", {"site": "mlp_*"}),
    (ConfigError, "for reading only", {"site": "attn.result"}),
    (ConfigError, "layers must be a list", {"layers": []}),
    (ConfigError, "layers must be a list", {"layers": 1}),
    (ConfigError, "site blocks.x.resid_post", {"layers": ["x"]}),
    (ConfigError, "a position must be a whole number from 0 to 17, got 18", {"positions": [18]}),
    (ConfigError, "a position must be a whole number", {"positions": [[3, -1]]}),
    (ConfigError, "a position must be a whole number", {"positions": [0.5]}),
    (ConfigError, "positions must be a list", {"positions": [[]]}),
    (ConfigError, "heads must be a list", {"heads": [], "site": "attn.z"}),
    (ConfigError, "heads must be integers", {"heads": ["a"], "site": "attn.z"}),
    (ConfigError, "heads cannot be chosen", {"heads": [0]}),
    (ConfigError, r"heads .* out of range", {"heads": [8], "site": "attn.z"}),
    (ConfigError, "batch_tokens must be a whole number", {"batch_tokens": 0}),
    (ConfigError, "must return one number", {"metric": lambda x: x[:2]}),
]


@pytest.mark.parametrize(("error", "message", "changes"), INVALID)
def test_invalid_sweeps_are_refused(
    lm: Any, error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    args = {"ids": IDS, "source": SOURCE, "metric": metric, "site": "resid_post"} | changes
    positional = [args.pop(name) for name in ("ids", "source", "metric", "site")]
    with pytest.raises(error, match=message) as caught:
        patch_sites(*lm, *positional, **args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("site", "receivers", "message"),
    [
        ("mlp.post", {"final_norm": None}, "a sender must be one of attn.z"),
        ("attn.z", {"logits": None}, "logits cannot be a receiver"),
        ("attn.z", {"blocks.0.attn.pattern": None}, "cannot be a receiver"),
        ("attn.z", {"blocks.0.nothing": None}, "unknown site"),
        ("attn.z", ["final_norm"], "receivers must be a dict"),
        ("attn.z", {}, "receivers must be a dict"),
    ],
)
def test_invalid_paths_are_refused(lm: Any, site: str, receivers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        patch_paths(*lm, IDS, SOURCE, metric, site, receivers)
    assert "\n" not in str(caught.value)


def test_effect_needs_two_metrics(lm: Any) -> None:
    patches = patch_sites(*lm, IDS, IDS, metric, "resid_post", positions=[T - 1])
    np.testing.assert_allclose(patches.metric, patches.base, atol=1e-4)
    with pytest.raises(ConfigError, match="the metric of both texts is"):
        _ = patches.effect


def test_models_with_memory_are_refused() -> None:
    lm = jaxllm.load("demo:long-infini", dtype="float32")
    with pytest.raises(CacheMismatchError, match="patching"):
        patch_sites(lm.model, lm.params, IDS, SOURCE, metric, "resid_post")


@pytest.mark.parametrize("page", ["patching", "sae"])
def test_page_code_runs(
    page: str, demo_names: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = (s.text for s in snippets(f"docs/{page}.md") if s.language == "python")
    exec(compile(code, page, "exec"), {})
