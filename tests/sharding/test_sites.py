"""Sites of sharded models: read and edited as on one device, or refused."""

from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.inside import Add, Set
from tests.sharding.tiny_models import largest_difference, make_model, shard_model
from tests.tiny_models import tokens

pytestmark = pytest.mark.devices
CLOSE = 2e-5


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("gpt2", "data=2,tensor=4"),
        ("qwen3_moe", "expert=7"),
        ("llama", "stage=2,tensor=2:tokens"),
        ("gemma2", "sequence=4"),
        pytest.param("llama", "sequence=2:heads", marks=pytest.mark.more),
    ],
)
def test_sites_equal_single_device(family: str, mesh: str) -> None:
    """Every site that a mesh can read, whichever axes split it."""
    model, params = make_model(family, num_hidden_layers=2)
    over, shares = shard_model(model, params, mesh)
    ids = tokens(2, 8)
    weights = () if "sequence" in mesh else ("blocks.*.attn.scores", "blocks.1.attn.pattern")
    read = [
        "embed", "pos_embed" if family == "gpt2" else "embed", "final_norm", "logits",
        "blocks.*.resid_*", "blocks.*.attn.[qkvz]", "blocks.*.attn.rot_*", "blocks.*.mlp*",
        "blocks.*_out", "blocks.*.attn.output", "blocks.*.attn_norm", *weights,
        *(["blocks.1.router"] if family == "qwen3_moe" else []),
    ]  # fmt: skip
    whole = jaxllm.forward(model, params, None, ids, read=read).sites
    found = jaxllm.forward(over, shares, None, ids, read=read).sites
    assert list(whole) == list(found)
    for name, x in whole.items():
        seen = np.isfinite(np.asarray(x))
        assert (np.isfinite(np.asarray(found[name])) == seen).all(), name
        close = largest_difference(np.where(seen, found[name], 0), np.where(seen, x, 0))
        assert close < CLOSE, (name, close)


@pytest.mark.parametrize(
    ("mesh", "site", "shape"),
    [
        ("data=2,tensor=4", "blocks.*.resid_post", (40,)),
        ("data=2", "blocks.0.attn.z", (8, 6)),
        ("data=2", "blocks.0.attn.pattern", ()),
    ],
)
def test_edits_equal_single_device(mesh: str, site: str, shape: Any) -> None:
    """Each row has its own strength, in forward and in generate, on a mesh that splits rows."""
    model, params = make_model("llama")
    over, shares = shard_model(model, params, mesh)
    vector = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    edits = {site: [Add(vector, scale=[0.5, -1.0]), Set(0.0, positions=[[1, 2], [4, -1]])]}
    ids = tokens(2, 6)
    whole = jaxllm.forward(model, params, None, ids, edits=edits).logits
    found = jaxllm.forward(over, shares, None, ids, edits=edits).logits
    assert largest_difference(found, whole) < CLOSE
    if site == "blocks.*.resid_post":
        texts = [
            jaxllm.generate(*lm, ids, max_new_tokens=4, edits=edits).token_BT
            for lm in ((model, params), (over, shares))
        ]
        np.testing.assert_array_equal(*texts)


@pytest.mark.parametrize(
    ("mesh", "site"),
    [
        ("tensor=4", "blocks.0.attn.z"),
        ("tensor=4", "blocks.0.mlp.post"),
        ("stage=2", "blocks.0.resid_post"),
        ("sequence=2", "blocks.0.resid_post"),
        ("tensor=2:tokens", "blocks.0.resid_post"),
    ],
)
def test_edits_of_split_sites_are_refused(mesh: str, site: str) -> None:
    over, shares = shard_model(*make_model("llama"), mesh)
    with pytest.raises(ConfigError, match=f"site {site} cannot be edited on mesh"):
        jaxllm.forward(over, shares, None, tokens(2, 4), edits={site: Set(0.0)})


def test_head_outputs_of_split_heads_are_refused() -> None:
    over, shares = shard_model(*make_model("llama"), "tensor=4")
    with pytest.raises(ConfigError, match="cannot be read with tensor=4"):
        jaxllm.forward(over, shares, None, tokens(2, 4), read=["blocks.0.attn.result"])
