"""Sites of all families: their names, and equality with transformers' forward hooks."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import jaxllm
from jaxllm import models
from jaxllm.compress.layerwise import get_module
from jaxllm.convert.hf import read_config
from jaxllm.convert.rotary_pairs import head_order
from jaxllm.errors import ConfigError
from jaxllm.evaluate.parity.transformers_backend import _replace_attention
from jaxllm.models.site_inputs import find_sites, site_names
from jaxllm.models.sites import LAYER_SITES, SITES, split_name
from tests.conftest import ROOT
from tests.tiny_models import VOCAB, assert_close, each_family, make_twin, random_model, tokens

NORMS = {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}  # LFM2's
T = 9


@contextmanager
def hooked(model: Any, family: Any) -> Iterator[dict[str, Any]]:
    """Record the arrays of a transformers model by our names while the context is open."""
    found: dict[str, Any] = {}
    config, table = read_config(model.config.to_dict())
    order = head_order(config, table.layouts)  # of queries and keys
    body = model.get_submodule(model.base_model_prefix)
    hooks = []

    def keep(name: str, x: Any, total: Any = 0) -> None:
        found[name] = (x[0] if isinstance(x, tuple) else x).detach() + total

    def before(module: Any, name: str) -> None:
        hooks.append(module.register_forward_pre_hook(lambda _, x: keep(name, x)))

    def after(module: Any, name: str) -> None:
        hooks.append(module.register_forward_hook(lambda _, __, x: keep(name, x)))

    def add(module: Any, name: str) -> None:
        hook = module.register_forward_hook(lambda _, __, x: keep(name, x, found.get(name, 0)))
        hooks.append(hook)

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        at = f"blocks.{module.layer_idx}"
        for name, x in (("rot_q", q[..., order]), ("rot_k", k[..., order]), ("v", v)):
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
        mixers = ("self_attn", "attn", "attention", "linear_attn", "conv", "mamba")
        attention = next(modules[n] for n in mixers if n in modules)
        after(attention, f"{at}.attn.output")
        if hasattr(attention, "o_proj"):  # heads may be gated before it
            before(attention.o_proj, f"{at}.attn.z")
        for norm, site in ((family.attention_norm, "attn_norm"), (family.mlp_norm, "mlp_norm")):
            if norm is not None:
                after(modules[norm if norm in modules else NORMS[norm]], f"{at}.{site}")
        for mlp in ("mlp", "shared_mlp", "block_sparse_moe", "feed_forward"):
            if mlp in modules:  # Granite 4's output is the sum of two
                add(modules[mlp], f"{at}.mlp.output")
        if family.mlp_down in modules:
            before(modules[family.mlp_down], f"{at}.mlp.post")
        for router in (family.router, "block_sparse_moe.router"):
            if family.router is not None and router in modules:
                after(modules[router], f"{at}.router")
        for name in ("mlp.gate_proj", "mlp.c_fc", "mlp.dense_h_to_4h"):
            if name in modules:
                after(modules[name], f"{at}.mlp.pre")
    after(getattr(body, "embedding_norm", None) or body.get_submodule(family.norm), "final_norm")
    with _replace_attention(model, attend):
        yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", each_family(models.FAMILIES))
def test_sites_equal_transformers_hooks(name: str, tmp_path: Any) -> None:
    """The residual stream before and after each layer, queries, keys and values, attention weights,
    heads, the outputs of attention and MLP, hidden channels and router scores.
    """
    twin, ids = make_twin(tmp_path, name, layers=2), tokens(2, T)
    family = models.get_family(twin.config.model_type)
    with hooked(twin.torch_model, family) as theirs:
        logits = twin.logits(ids)
    ours = jaxllm.forward(twin.model, twin.params, None, ids, read=("*",)).sites
    heads = ("attn.rot_q", "attn.rot_k", "attn.v")
    layer = int(twin.config.kv_heads(1) > 0)  # one with attention
    if not twin.config.value_heads(layer):  # latent attention's queries attend to latents
        theirs = {site: x for site, x in theirs.items() if not site.endswith(heads)}
        heads = ()
    assert set(theirs) < set(ours)
    assert {site for site in theirs if site.startswith(f"blocks.{layer}")} >= {
        f"blocks.{layer}.{site}"
        for site in ("resid_pre", "resid_post", *heads, "attn.z", "attn.pattern", "attn.output",
                     "mlp.output")
    }  # fmt: skip
    for site, x in theirs.items():
        assert_close(ours[site].reshape(x.shape), x.float().numpy())
    assert_close(ours["logits"], logits)
    for layer in range(2):
        at = f"blocks.{layer}"
        if f"{at}.attn.z" not in ours:
            assert twin.config.kv_heads(layer) == 0
            continue
        x = {
            site: np.asarray(ours[f"{at}.{site}"]) for site in LAYER_SITES if f"{at}.{site}" in ours
        }
        assert_close(x["resid_mid"], x["resid_pre"] + x["attn_out"])
        if family.output_scale is None:
            assert_close(x["resid_post"], x["resid_mid"] + x["mlp_out"])
        group = next(g for g in family.linear_groups if g.input == "attn.z")
        out = get_module(twin.params[f"{family.layers}.{layer}"], group.linears[0])
        bias_D = np.asarray(out.get("bias", np.zeros(1, np.float32)))
        assert_close(x["attn.result"].sum(axis=2) + bias_D, x["attn.output"])
        seen = np.isfinite(x["attn.scores"])
        top = x["attn.scores"].max(-1, keepdims=True)
        weight = np.exp(np.where(seen, x["attn.scores"], -np.inf) - top)
        total = weight.sum(-1, keepdims=True)
        if getattr(twin.config, "attention_sinks", False):
            sink_N = np.asarray(twin.params[f"layers.{layer}"]["self_attn"]["sinks"]["weight"])
            total = total + np.exp(sink_N[:, None, None] - top)
        assert_close(weight / total, x["attn.pattern"])


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sites_equal_transformer_lens_cache(name: str, tmp_path: Any) -> None:
    """Every site that TransformerLens has too, under its name (checked with version 4.3)."""
    lens = pytest.importorskip(
        "transformer_lens.model_bridge", reason="transformer_lens is not installed"
    )
    twin, ids = make_twin(tmp_path, name, layers=2), tokens(2, T)
    words = WordLevel({f"{i}": i for i in range(VOCAB)}, unk_token="0")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), bos_token="1", eos_token="2", pad_token="2"
    ).save_pretrained(tmp_path)
    boot = lens.TransformerBridge.boot_transformers
    theirs = boot(str(tmp_path), hf_model=twin.torch_model)
    with torch.no_grad():
        _, cache = theirs.run_with_cache(torch.tensor(ids))
    ours = jaxllm.forward(twin.model, twin.params, None, ids, read=["*"]).sites
    compared = set()
    for site, x in ours.items():
        layer, kind = split_name(site)
        alias = f"{'' if layer is None else f'blocks.{layer}.'}{SITES[kind].alias}"
        if alias in cache:
            compared.add(kind)
            seen = np.isfinite(np.asarray(x))
            other = np.where(seen, cache[alias].numpy(), 0)
            assert_close(np.where(seen, x, 0), other)
    assert compared >= {kind for kind, site in SITES.items() if site.alias} - NOT_IN_LENS[name]


# What TransformerLens has no hook for, unless an option asks for it.
NOT_IN_LENS = {
    "gpt2": {"attn.rot_q", "attn.rot_k", "attn.result"},
    "llama": {"pos_embed", "attn.result"},
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
