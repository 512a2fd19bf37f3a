"""Prompt tuning and prefix jobs: their cache files work in `generate`."""

from collections.abc import Callable
from pathlib import Path

import pytest

import jaxllm
from jaxllm.adapters import LoraConfig
from jaxllm.cache.files import load_cache
from jaxllm.errors import ConfigError
from jaxllm.train import jobs
from jaxllm.train.frozen_prefix import PROMPT_KINDS, PrefixLoss, prompt_tuning, with_prefix


@pytest.fixture(scope="module")
def lm(shallow: Callable[[str], Path]) -> jaxllm.LM:
    return jaxllm.load(shallow("llama"), dtype="float32")


def ids(lm: jaxllm.LM, text: str, bos: bool = False) -> list[int]:
    assert lm.tokenizer is not None
    return lm.tokenizer.encode(text, bos=bos)


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_untrained_prompt_cache_equals_its_text(lm: jaxllm.LM, kind: str, tmp_path: Path) -> None:
    """The cache file of an untrained prompt generates like its text, also after a frozen prefix."""
    begin, rest = ids(lm, "One day, Lily", bos=True), ids(lm, " went to the")
    expected = lm.generate([*begin, *rest], max_new_tokens=5)
    job = prompt_tuning(lm, begin, kind=kind)
    job.finish(job.params, tmp_path / "prompt.cache")
    cache = load_cache(tmp_path / "prompt.cache", lm.model, lm.params)
    assert cache.tokens() == begin
    found = lm.generate([*begin, *rest], max_new_tokens=5, cache=cache)
    assert found.tokens == expected.tokens
    after_prefix = prompt_tuning(lm, rest, kind="embeddings", prefix=cache)
    after_prefix.finish(after_prefix.params, tmp_path / "both.cache")
    both = load_cache(tmp_path / "both.cache", lm.model, lm.params)
    assert both.tokens() == [*begin, *rest]


def test_with_prefix_wraps_training_job(lm: jaxllm.LM) -> None:
    """with_prefix adds the prefix to a LoRA job; a job without the next-token loss and unknown
    prompt kinds are refused.
    """
    job = jobs.lora(lm, LoraConfig(r=2, target_modules=("q_proj",)))
    begin = ids(lm, "One day, Lily", bos=True)
    found = with_prefix(job, begin)
    assert found.objective == PrefixLoss()
    assert [s.token_BS.tolist() for s in found.extra_inputs] == [[begin]]
    assert found.params is job.params
    with pytest.raises(ConfigError, match="needs the next-token loss"):
        with_prefix(found, begin)
    with pytest.raises(ConfigError, match="must be embeddings or entries, got 'words'"):
        prompt_tuning(lm, begin, kind="words")
