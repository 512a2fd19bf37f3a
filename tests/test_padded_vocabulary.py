"""A model whose embedding has more rows than its tokenizer has tokens, as most checkpoints do."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm import steps
from jaxllm.errors import SamplingError, TokenError
from jaxllm.generation.loops import generate as loops
from jaxllm.research.rl.job import Reinforcement, make_answer_sampler
from jaxllm.text.detokenizer import Detokenizer

TOKENS, ROWS = 1536, 1600


@pytest.fixture(scope="module")
def plain(shallow: Callable[[str], Path]) -> jaxllm.LM:
    return jaxllm.load(shallow("llama"), dtype="float32")


@pytest.fixture(scope="module")
def padded(shallow: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> jaxllm.LM:
    """The same model with 64 more rows, which often win: four times those of some tokens."""
    path = tmp_path_factory.mktemp("padded") / "llama"
    shutil.copytree(shallow("llama"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": ROWS}))
    [file] = path.glob("*.safetensors")
    weights, name = load_file(file), "model.embed_tokens.weight"
    weights[name] = np.concatenate([weights[name], 4 * weights[name][300 : 300 + ROWS - TOKENS]])
    save_file(weights, file)
    return jaxllm.load(path, dtype="float32")


def test_ids_without_token_are_never_drawn(plain: jaxllm.LM, padded: jaxllm.LM) -> None:
    """Decoders write what they write without the rows, whatever the bias; scores keep them."""
    prompt, new = "Once upon a time", 6
    ids = padded.encode(prompt)
    logits = jaxllm.forward(padded.model, padded.params, None, [ids]).logits[0]
    assert (np.argmax(logits, axis=-1) >= TOKENS).any()  # they would be drawn
    expected = plain.generate(prompt, max_new_tokens=new)
    options: Any = {"max_new_tokens": new, "logit_bias": {1590: 100}}
    found = padded.generate(prompt, **options)
    assert found.tokens == expected.tokens
    assert found.logprobs[0] < expected.logprobs[0]  # the softmax has all rows, as transformers'
    batch = padded.generate([prompt, "One day"], max_new_tokens=new, temperature=5.0, seed=1)
    assert max(max(completion.tokens) for completion in batch) < TOKENS
    assert [piece.token for piece in padded.stream(prompt, **options)] == expected.tokens
    [(_, served)] = padded.serve([{"prompt": prompt, **options}], rows=2, capacity=64)
    assert served.tokens == expected.tokens
    looked_up = padded.generate(prompt, max_new_tokens=new, prompt_lookup_num_tokens=3)
    assert looked_up.tokens == expected.tokens
    for decoder in ({"num_beams": 2}, {"penalty_alpha": 0.4}):  # these add up probabilities
        assert max(padded.generate(prompt, max_new_tokens=new, **decoder).tokens) < TOKENS
    assert plain._resolve_options([ids], {}).sampler == jaxllm.Sampler(greedy=True)


def test_training_and_searches_draw_tokens_only(padded: jaxllm.LM) -> None:
    sampler, _ = make_answer_sampler(padded, Reinforcement(), 4)
    scores_BV = jaxllm.generation.sampling.sampler.apply_processors(
        np.ones((1, ROWS), np.float32), sampler, None
    )
    assert np.isneginf(scores_BV[0, TOKENS:]).all()
    assert np.isfinite(scores_BV[0, :TOKENS]).all()
    options: Any = {"max_new_tokens": 4, "budget": 16, "tokenizer": padded.tokenizer}
    found = jaxllm.best_first(padded.model, padded.params, padded.encode("Once"), **options)
    assert max(found.best.tokens) < TOKENS


def test_ids_without_token_have_no_text(padded: jaxllm.LM) -> None:
    """Text equals transformers', also in pieces; ids past the model's rows are refused."""
    theirs = transformers.AutoTokenizer.from_pretrained(padded.path)
    ids = padded.encode("Once upon a time")
    holes = [1590, *ids[:2], 1537, *ids[2:], 1599]
    assert padded.decode(holes) == theirs.decode(holes, skip_special_tokens=True)
    assert padded.decode([1590]) == theirs.decode([1590]) == ""
    with pytest.raises(TokenError, match="outside the vocabulary of 1600"):
        padded.decode([1600])
    assert padded.tokenizer is not None
    pieces = Detokenizer(padded.tokenizer, prompt=[1590])
    assert "".join(map(pieces.push, holes)) == padded.decode(holes)


def test_draft_may_have_other_rows(plain: jaxllm.LM, padded: jaxllm.LM) -> None:
    """Models of one tokenizer draft for each other, also served; another tokenizer is refused."""
    for lm, draft in ((plain, padded), (padded, plain)):
        options: Any = {"max_new_tokens": 8}
        expected = lm.generate("Once upon a time", **options)
        found = lm.generate("Once upon a time", assistant_model=draft, **options)
        assert found.tokens == expected.tokens
        assert found.draft_stats is not None and found.draft_stats.accepted > 2
    requests = [{"prompt": "Once upon a time", "max_new_tokens": 8}]
    [(_, served)] = padded.serve(requests, rows=1, capacity=64, draft=plain)
    assert served.tokens == expected.tokens
    nameless = dataclasses.replace(plain, tokenizer=None)
    with pytest.raises(SamplingError, match="Use a draft with the model's tokenizer"):
        padded.generate("Once", assistant_model=nameless)


def test_prompt_lengths_share_programs(plain: jaxllm.LM) -> None:
    """Ten prompts of ten lengths compile three programs for prompts, one to decode."""
    programs = steps.PREFILL._jit._plain, loops.ROUNDS._jit._plain
    before = [program._cache_size() for program in programs]
    for length in (3, 9, 17, 40, 64, 100, 129, 200, 300, 400):
        ids = (np.arange(length) % 500 + 300).tolist()
        found = plain.generate(ids, max_new_tokens=3)
        if length in (9, 100):
            logits = jaxllm.forward(plain.model, plain.params, None, [ids]).logits[0, -1]
            assert found.tokens[0] == int(np.argmax(logits))
            np.testing.assert_allclose(
                found.logprobs[0], jax.nn.log_softmax(logits).max(), atol=1e-4
            )
    grown = [program._cache_size() - n for program, n in zip(programs, before, strict=True)]
    assert grown[0] <= 3
    assert grown[1] <= 1
