"""Contrastive search against its definition, run in transformers without a cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.errors import CapacityError, NonFiniteError, SamplingError
from jaxllm.generation.loops.contrastive import contrastive_search
from tests.tiny_models import BOTH, Twin, load_twin, random_model, save_random, tokens

PROMPT = tokens(1, 6, seed=3)[0].tolist()


@pytest.fixture(scope="module", params=BOTH)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_random(directory, request.param, spread=0.2)
    return load_twin(directory)


def by_definition(model: Any, text: list[int], alpha: float, top_k: int, new: int) -> list[int]:
    """Search by running the whole text again with each candidate appended."""

    def run(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out = model(torch.tensor(texts), output_hidden_states=True)
        return out.logits[:, -1], out.hidden_states[-1]

    start = len(text)
    for _ in range(new):
        law = torch.softmax(run([text])[0][0], dim=0)
        tokens = torch.topk(law, top_k).indices.tolist()
        hidden = run([[*text, token] for token in tokens])[1]
        likeness = torch.cosine_similarity(hidden[:, -1:], hidden[:, :-1], dim=2).amax(dim=1)
        text = [*text, tokens[int(((1 - alpha) * law[tokens] - alpha * likeness).argmax())]]
    return text[start:]


@pytest.mark.parametrize(("alpha", "top_k"), [(0.6, 4), (0.9, 3), (0.0, 4)])
def test_contrastive_search_equals_definition(twin: Twin, alpha: float, top_k: int) -> None:
    """Tokens equal the definition without a cache in transformers; only alpha 0 is greedy."""
    ours = contrastive_search(
        twin.model, twin.params, PROMPT, penalty_alpha=alpha, top_k=top_k, max_new_tokens=8
    )
    assert ours == by_definition(twin.torch_model, PROMPT, alpha, top_k, 8)
    greedy = jaxllm.generate(twin.model, twin.params, [PROMPT], max_new_tokens=8)
    assert (ours == greedy.token_BT[0].tolist()) == (alpha == 0.0)


def test_contrastive_search_stops_and_refuses_bad_options() -> None:
    """The search ends at EOS; bad options, an oversized prompt and NaN logits raise errors."""
    model, params = random_model("gpt2")

    def search(prompt: list[int] = PROMPT, **changes: Any) -> list[int]:
        options = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 8, **changes}
        return contrastive_search(model, params, prompt, **options)

    free = search()
    cut = free.index(free[3]) + 1
    assert search(eos_token_ids=[free[3]]) == free[:cut]
    with pytest.raises(SamplingError, match="penalty_alpha"):
        search(penalty_alpha=1.5)
    with pytest.raises(SamplingError, match="top_k must be a whole number from 1 to 131"):
        search(top_k=132)
    with pytest.raises(SamplingError, match="max_new_tokens"):
        search(max_new_tokens=0)
    with pytest.raises(CapacityError, match="98 tokens of prompt and continuation do not fit"):
        search(PROMPT * 15)
    params = {**params, "ln_f": {**params["ln_f"], "bias": params["ln_f"]["bias"] * np.nan}}
    with pytest.raises(NonFiniteError, match="token 0"):
        search()
