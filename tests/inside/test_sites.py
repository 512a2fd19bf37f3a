"""Sites of all families: their names, and equality with transformers' forward hooks."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import jaxllm
from jaxllm import models
from jaxllm.errors import ConfigError
from jaxllm.evaluate.parity.transformers_backend import _replace_attention
from jaxllm.models.site_inputs import find_sites, site_names
from jaxllm.models.sites import LAYER_SITES, SITES
from jaxllm.weights.paths import flatten
from tests.conftest import ROOT
from tests.tiny_models import assert_close, make_twin, random_model, tokens

FAMILIES = list(models.FAMILIES)
T = 9


@contextmanager
def hooked(model: Any, family: Any) -> Iterator[dict[str, Any]]:
    """Record the arrays of a transformers model by our names while the context is open."""
    found: dict[str, Any] = {}
    body = model.get_submodule(model.base_model_prefix)
    hooks = []

    def keep(name: str, x: Any) -> None:
        found[name] = (x[0] if isinstance(x, tuple) else x).detach().clone()

    def before(module: Any, name: str) -> None:
        hooks.append(module.register_forward_pre_hook(lambda _, x: keep(name, x)))

    def after(module: Any, name: str) -> None:
        hooks.append(module.register_forward_hook(lambda _, __, x: keep(name, x)))

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        at = f"blocks.{module.layer_idx}"
        for name, x in (("rot_q", q), ("rot_k", k), ("v", v)):
            keep(f"{at}.attn.{name}", x.transpose(1, 2))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        heads, weights = eager(module, q, k, v, mask, **options)
        keep(f"{at}.attn.z", heads)
        keep(f"{at}.attn.pattern", weights)
        return heads, weights

    for layer, block in enumerate(body.get_submodule(family.layers)):
        at = f"blocks.{layer}"
        before(block, f"{at}.resid_pre")
        after(block, f"{at}.resid_post")
        modules = dict(block.named_modules())
        attention = next(modules[n] for n in ("self_attn", "attn", "attention") if n in modules)
        after(attention, f"{at}.attn.output")
        for norm, site in ((family.attention_norm, "attn_norm"), (family.mlp_norm, "mlp_norm")):
            if norm is not None:
                after(modules[norm], f"{at}.{site}")
        after(modules["mlp"], f"{at}.mlp.output")
        if family.mlp_down in modules:
            before(modules[family.mlp_down], f"{at}.mlp.post")
        if family.router is not None and family.router in modules:
            after(modules[family.router], f"{at}.router")
        for name in ("mlp.gate_proj", "mlp.c_fc", "mlp.dense_h_to_4h"):
            if name in modules:
                after(modules[name], f"{at}.mlp.pre")
    after(body.get_submodule(family.norm), "final_norm")
    with _replace_attention(model, attend):
        yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_equal_transformers_hooks(name: str, tmp_path: Any) -> None:
    """The residual stream before and after each layer, queries, keys and values, attention weights,
    heads, the outputs of attention and MLP, hidden channels and router scores.
    """
    twin, ids = make_twin(tmp_path, name, layers=2), tokens(2, T)
    family = models.get_family(twin.config.model_type)
    with hooked(twin.torch_model, family) as theirs:
        logits = twin.logits(ids)
    ours = jaxllm.forward(twin.model, twin.params, None, ids, read=("*",)).sites
    assert set(theirs) < set(ours)
    assert {site for site in theirs if site.startswith("blocks.1")} >= {
        f"blocks.1.{site}"
        for site in ("resid_pre", "resid_post", "attn.rot_q", "attn.rot_k", "attn.v", "attn.z",
                     "attn.pattern", "attn.output", "mlp.output")
    }  # fmt: skip
    for site, x in theirs.items():
        assert_close(ours[site].reshape(x.shape), x.float().numpy())
    assert_close(ours["logits"], logits)
    for layer in range(2):
        at = f"blocks.{layer}"
        x = {
            site: np.asarray(ours[f"{at}.{site}"]) for site in LAYER_SITES if f"{at}.{site}" in ours
        }
        assert_close(x["resid_mid"], x["resid_pre"] + x["attn_out"])
        assert_close(x["resid_post"], x["resid_mid"] + x["mlp_out"])
        parts = x["attn.result"].sum(axis=2)
        bias_D = (x["attn.output"] - parts)[0, 0]
        assert_close(parts + bias_D, x["attn.output"])
        seen = np.isfinite(x["attn.scores"])
        weight = np.exp(
            np.where(seen, x["attn.scores"], -np.inf) - x["attn.scores"].max(-1)[..., None]
        )
        assert_close(weight / weight.sum(-1, keepdims=True), x["attn.pattern"])


def test_site_shapes_follow_their_axes() -> None:
    """The shape of every site of a grouped-query model with a cache is that of its axes."""
    model, params = random_model("qwen3_moe")
    cache = jaxllm.init_cache(model, 2, 13)
    sites = jaxllm.forward(model, params, cache, tokens(2, T), read=["*"]).sites
    c = model.config
    sizes = {
        "B": 2, "T": T, "S": 13 + T, "D": c.hidden_size, "N": 8, "K": 2, "H": c.head_dim,
        "F": c.intermediate_size, "E": 7, "V": c.vocab_size,
    }  # fmt: skip
    assert tuple(sites) == site_names(c)
    for name, x in sites.items():
        axes = SITES[name.split(".", 2)[2] if name.startswith("blocks") else name].axes
        assert x.shape == tuple(sizes[axis] for axis in axes), name


def test_transformer_lens_names_are_aliases() -> None:
    model, params = random_model("gpt2")
    pairs = {
        "hook_embed": "embed",
        "hook_pos_embed": "pos_embed",
        "blocks.1.hook_resid_post": "blocks.1.resid_post",
        "blocks.0.attn.hook_attn_scores": "blocks.0.attn.scores",
        "blocks.0.mlp.hook_post": "blocks.0.mlp.post",
    }
    out = jaxllm.forward(model, params, None, tokens(1, 3), read=[*pairs])
    assert sorted(out.sites) == sorted(pairs.values())
    assert find_sites(model.config, "blocks.*.attn.hook_q") == (
        "blocks.0.attn.q",
        "blocks.1.attn.q",
    )
    assert find_sites(model.config, "blocks.[1-9].mlp*") == tuple(
        f"blocks.1.{site}" for site in ("mlp_norm", "mlp.pre", "mlp.post", "mlp.output", "mlp_out")
    )


def test_sites_equal_transformer_lens_cache() -> None:
    """GPT-2's whole cache of activations, under TransformerLens' names."""
    lens = pytest.importorskip("transformer_lens", reason="transformer_lens is not installed")
    model, params = random_model("gpt2")
    c = model.config
    config = lens.HookedTransformerConfig(
        n_layers=2, d_model=c.hidden_size, n_ctx=c.max_position_embeddings, d_head=c.head_dim,
        n_heads=c.num_attention_heads, d_mlp=c.intermediate_size, d_vocab=c.vocab_size,
        act_fn="gelu_new", normalization_type="LN", eps=c.norm_eps, use_attn_result=True,
    )  # fmt: skip
    theirs = lens.HookedTransformer(config)
    theirs.load_state_dict(_lens_weights(params, c), strict=False)
    ids = tokens(2, T)
    _, cache = theirs.run_with_cache(torch.tensor(ids))
    ours = jaxllm.forward(model, params, None, ids, read=["*"]).sites
    aliases = {site.alias: name for name, site in SITES.items() if site.alias is not None}
    for name, x in cache.items():
        block, alias = name.rsplit("blocks.", 1)[-1].partition(".")[::2]
        key = (
            f"blocks.{block}.{aliases.get(alias)}"
            if name.startswith("blocks")
            else aliases.get(name)
        )
        if key in ours:
            assert_close(ours[key], x.numpy())


def _lens_weights(params: Any, c: Any) -> dict[str, Any]:
    """Return GPT-2's parameters in TransformerLens' layout."""
    N, H, D = c.num_attention_heads, c.head_dim, c.hidden_size
    arrays = {path: torch.tensor(np.asarray(x)) for path, x in flatten(params)}
    found = {
        "embed.W_E": arrays["wte.weight"],
        "pos_embed.W_pos": arrays["wpe.weight"],
        "ln_final.w": arrays["ln_f.weight"],
        "ln_final.b": arrays["ln_f.bias"],
        "unembed.W_U": arrays["wte.weight"].T,
        "unembed.b_U": torch.zeros(c.vocab_size),
    }
    for i in range(c.num_hidden_layers):
        ours = {path: arrays[f"h.{i}.{path}"] for path in LENS_PATHS}
        theirs = {name: ours[path] for path, name in LENS_PATHS.items() if name}
        for j, name in enumerate("QKV"):
            rows = slice(j * D, (j + 1) * D)
            weight = ours["attn.c_attn.weight"][rows].reshape(N, H, D)
            theirs[f"attn.W_{name}"] = weight.transpose(1, 2)
            theirs[f"attn.b_{name}"] = ours["attn.c_attn.bias"][rows].reshape(N, H)
        theirs["attn.W_O"] = ours["attn.c_proj.weight"].T.reshape(N, H, D)
        theirs["mlp.W_in"] = ours["mlp.c_fc.weight"].T
        theirs["mlp.W_out"] = ours["mlp.c_proj.weight"].T
        found |= {f"blocks.{i}.{name}": x for name, x in theirs.items()}
    return found


LENS_PATHS = {
    "ln_1.weight": "ln1.w",
    "ln_1.bias": "ln1.b",
    "ln_2.weight": "ln2.w",
    "ln_2.bias": "ln2.b",
    "attn.c_proj.bias": "attn.b_O",
    "mlp.c_fc.bias": "mlp.b_in",
    "mlp.c_proj.bias": "mlp.b_out",
    "attn.c_attn.weight": "",
    "attn.c_attn.bias": "",
    "attn.c_proj.weight": "",
    "mlp.c_fc.weight": "",
    "mlp.c_proj.weight": "",
}


@pytest.mark.parametrize(
    ("pattern", "message"),
    {
        "blocks.0.resid_pots": "unknown site 'blocks.0.resid_pots': did you mean blocks.0.resid_",
        "blocks.9.resid_post": "layer 9 is out of range, expected 0 to 1",
        "blocks.0.router": "this llama model computes no router there",
        "pos_embed": "a llama model computes no pos_embed",
        "blocks.*.nothing": "unknown site",
    }.items(),
)
def test_unknown_sites_are_refused(pattern: str, message: str) -> None:
    model, params = random_model("llama")
    with pytest.raises(ConfigError, match=message) as caught:
        jaxllm.forward(model, params, None, tokens(1, 3), read=[pattern])
    assert "\n" not in str(caught.value)


def test_read_takes_a_list_of_names() -> None:
    model, params = random_model("llama")
    with pytest.raises(ConfigError, match="read must be a list"):
        jaxllm.forward(model, params, None, tokens(1, 3), read="blocks.0.resid_post")
    with pytest.raises(ConfigError, match="a site is a name"):
        jaxllm.forward(model, params, None, tokens(1, 3), read=[3])


def test_page_lists_all_sites_and_runs(
    demo_names: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of docs/inside.md has the sites with their axes, in order, and its code runs."""
    text = (ROOT / "docs/inside.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", text, re.MULTILINE)
    before, after = ["embed", "pos_embed"], ["final_norm", "logits"]
    assert rows == [(name, SITES[name].axes) for name in [*before, *LAYER_SITES, *after]]
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(code, "docs/inside.md", "exec"), names)
    assert "blocks.1.attn.pattern" in capsys.readouterr().out
