"""Classifier-free guidance against transformers and its formula."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.errors import CapacityError, NonFiniteError, SamplingError
from jaxllm.generation.loops.guidance import apply_guidance, generate_with_guidance
from jaxllm.generation.sampling.options import make_sampler
from tests.tiny_models import Twin, load_twin, random_model, save_random, tokens

PROMPT = tokens(1, 6, seed=3)[0].tolist()
NEGATIVE = tokens(1, 4, seed=4)[0].tolist()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_random(directory, request.param, spread=0.2)
    return load_twin(directory)


@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("negative", [NEGATIVE, NEGATIVE * 3, None])
def test_guided_greedy_tokens_equal_transformers(
    twin: Twin, scale: float, negative: list[int] | None
) -> None:
    theirs = twin.torch_model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones((1, len(PROMPT)), dtype=torch.long),
        guidance_scale=scale,
        negative_prompt_ids=None if negative is None else torch.tensor([negative]),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    ours = generate_with_guidance(
        twin.model,
        twin.params,
        PROMPT,
        negative_prompt=negative,
        guidance_scale=scale,
        max_new_tokens=12,
    )
    assert ours == theirs[0, len(PROMPT) :].tolist()


def test_apply_guidance_interpolates_and_extrapolates_logprobs() -> None:
    """Scale 0 gives the negative prompt's log-probabilities, 1 the prompt's, 2 extrapolates."""
    rng = np.random.default_rng(0)
    wanted, unwanted = jnp.asarray(rng.normal(size=(2, 131)), jnp.float32) * 3.0
    scales = jnp.array([0.0, 1.0, 2.0])
    scale_0, scale_1, scale_2 = jax.vmap(apply_guidance, (None, None, 0))(wanted, unwanted, scales)
    np.testing.assert_allclose(scale_0, jax.nn.log_softmax(unwanted), atol=1e-5)
    np.testing.assert_allclose(scale_1, jax.nn.log_softmax(wanted), atol=1e-5)
    np.testing.assert_allclose(scale_2 - scale_1, scale_1 - scale_0, atol=1e-5)


def test_guidance_scale_one_equals_generate() -> None:
    """Scale 1 equals plain generation and stops at EOS; sampled tokens depend on the seed."""
    model, params = random_model("llama")
    plain = jaxllm.generate(model, params, [PROMPT], max_new_tokens=10).token_BT[0].tolist()

    def call(**changes: Any) -> list[int]:
        options = {"guidance_scale": 1.0, "max_new_tokens": 10, **changes}
        return generate_with_guidance(model, params, PROMPT, negative_prompt=NEGATIVE, **options)

    assert call() == plain
    assert call(eos_token_ids=[plain[4]]) == plain[: plain.index(plain[4]) + 1]
    warm = {"sampler": make_sampler(temperature=1.5), "guidance_scale": 1.5}
    assert call(seed=1, **warm) == call(seed=1, **warm) != call(seed=2, **warm)


def test_guidance_refuses_invalid_arguments() -> None:
    """Bad budgets, scales and prompts and NaN logits raise errors."""
    model, params = random_model("gpt2")

    def call(prompt: list[int] = PROMPT, **changes: Any) -> list[int]:
        options = {"guidance_scale": 1.5, "max_new_tokens": 8, **changes}
        return generate_with_guidance(model, params, prompt, **options)

    with pytest.raises(SamplingError, match="max_new_tokens must be a whole number from 1 up"):
        call(max_new_tokens=0)
    with pytest.raises(SamplingError, match="finite guidance_scale"):
        call(guidance_scale=float("nan"))
    with pytest.raises(SamplingError, match="at least one token"):
        call([])
    with pytest.raises(CapacityError, match="98 tokens of prompt and continuation do not fit"):
        call(PROMPT * 15, max_new_tokens=9)
    params = {**params, "ln_f": {**params["ln_f"], "bias": params["ln_f"]["bias"] * np.nan}}
    with pytest.raises(NonFiniteError, match="token 0"):
        call()
