"""Llama and GPT-2 equal transformers for every variant, position, layer and dtype."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jaxllm
from tests.tiny_models import ROPES, assert_close, load_twin, save_random, tokens

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped queries": ("llama", {}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many kv heads": ("llama", {"num_key_value_heads": 8}),
    "llama, wide heads": ("llama", {"head_dim": 14}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, gelu_new": ("llama", {"hidden_act": "gelu_new"}),
    "mistral, window 5": ("mistral", {"sliding_window": 5}),
    "gpt2": ("gpt2", {}),
    "gpt2, gelu": ("gpt2", {"activation_function": "gelu"}),
    "gpt2, default inner": ("gpt2", {"n_inner": None}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2, unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, reordered": ("gpt2", {"reorder_and_upcast_attn": True}),
    **{f"llama, rope {name}": ("llama", {"rope_parameters": r}) for name, r in ROPES.items()},
    "llama, rope yarn, every setting": ("llama", {"rope_parameters": {
        **ROPES["yarn"], "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3,
        "truncate": False,
    }}),
    "llama, rope yarn, attention factor": (
        "llama", {"rope_parameters": {**ROPES["yarn"], "attention_factor": 1.3}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_hidden_states_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    save_random(tmp_path, family, **changes)
    twin = load_twin(tmp_path)
    ids = tokens(2, 61)
    with torch.no_grad():
        theirs = twin.torch_model(torch.tensor(ids), output_hidden_states=True)
    ours = jaxllm.forward(twin.model, twin.params, None, ids, hidden_states=True)
    assert_close(ours.logits, theirs.logits.numpy())
    assert ours.hidden_states is not None
    assert len(ours.hidden_states) == len(theirs.hidden_states) == twin.config.num_hidden_layers + 1
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert_close(mine, other.numpy())


def test_dynamic_rope_equals_transformers_beyond_trained_length(tmp_path: Path) -> None:
    """Beyond the original context, whole, chunked and cached runs give transformers' logits."""
    changes = {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 16}
    save_random(tmp_path, "llama", **changes)
    twin = load_twin(tmp_path)
    ids = tokens(1, 40)
    whole = twin.logits(ids)
    assert_close(jaxllm.forward(twin.model, twin.params, None, ids).logits, whole)
    # A chunked prompt is one text: its angles are those of the full prompt.
    cache = jaxllm.init_cache(twin.config, 1, 64)
    logits, cache = jaxllm.prefill(twin.model, twin.params, cache, ids, chunk=7)
    assert_close(logits, whole[:, -1])
    # From here on the base grows with every token, as in cached generation of transformers.
    with torch.no_grad():
        theirs = twin.torch_model(torch.tensor(ids), use_cache=True)
        for token in (5, 77, 130):
            theirs = twin.torch_model(
                torch.tensor([[token]]), past_key_values=theirs.past_key_values, use_cache=True
            )
            with pytest.warns(
                UserWarning, match=r"change with every token beyond 16 \(dynamic NTK\)"
            ):
                logits, cache = jaxllm.decode_step(twin.model, twin.params, cache, [token])
            assert_close(logits, theirs.logits[:, -1].numpy())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_64_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """64 greedy tokens, from generate and from stream, equal transformers."""
    save_random(tmp_path, family)
    twin = load_twin(tmp_path)
    prompt = tokens(3, 9)
    theirs = twin.torch_model.generate(
        torch.tensor(prompt),
        attention_mask=torch.ones(prompt.shape, dtype=torch.int64),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
    )[:, 9:]
    ours = jaxllm.generate(twin.model, twin.params, prompt, max_new_tokens=64)
    np.testing.assert_array_equal(np.asarray(ours.token_BT), theirs.numpy())
    streamed = [
        step.token_BT for step in jaxllm.stream(twin.model, twin.params, prompt, max_new_tokens=64)
    ]
    np.testing.assert_array_equal(np.concatenate(streamed, axis=1), theirs.numpy())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stories260k_and_slm_continue_as_published(
    family: str, data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """stories260K gives its published 200 greedy tokens, and gpt2_slm4096 continues its corpus."""
    import json

    if family == "llama":
        directory = data("stories260K")
        lm = jaxllm.load(directory)
        # 200 greedy steps from BOS, confirmed by transformers.
        completion = lm.generate("", max_new_tokens=200)
        assert completion.text == (directory / "greedy_200.txt").read_text(encoding="utf-8")
        return
    directory = data("gpt2_slm4096")
    vocab = json.loads((directory / "char_vocab.json").read_text(encoding="utf-8"))
    corpus = (directory / "corpus.txt").read_text(encoding="utf-8")
    characters = {i: c for c, i in vocab.items()}
    lm = jaxllm.load(directory)
    ids = [vocab[c] for c in corpus[:28]]
    completion = lm.generate(ids, max_new_tokens=100)
    text = "".join(characters[t] for t in completion.tokens)
    assert text == corpus[28:128]
