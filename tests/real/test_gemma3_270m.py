"""Gemma 3 270M as it is published: its tokens and log-probabilities are llama.cpp's.

llama.cpp computed them in float32 from the file's own weights (`scripts/tools/real_golden.py`).
Its GELU is a table of float16, so they differ by up to 0.009.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.errors import TemplateError
from jaxllm.lm import LM
from tests.conftest import Run, succeed
from tests.real.texts import CHAT, CONTINUED, READ, varied_texts

pytestmark = pytest.mark.full

TOLERANCE = 0.02  # of a log-probability
WIDTH = 64  # tokens, with padding: one program for all texts
MB = 1 << 20
# The mean KL divergence of quantized weights from those of the file, in nats: twice what was found.
KL = {"int8": 0.014, "int8-g64": 0.0024, "int4": 0.21, "int4-g64-f16": 0.9, "nf4": 0.42}

LIBRARIES = """
import jax, jaxllm, resource
jax.numpy.zeros(1).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.fixture(scope="module")
def lm(gemma: Path) -> LM:
    return jaxllm.load(gemma, dtype="float32")


def read_logprobs(lm: LM, tokens: list[int]) -> np.ndarray:
    """Return log-probabilities of all tokens at each position, in float64."""
    cache = jaxllm.init_cache(lm.config, 1, WIDTH, dtype="float32")
    padded = [*tokens, *[0] * (WIDTH - len(tokens))]
    logits = jaxllm.forward(lm.model, lm.params, cache, [padded]).logits[0, : len(tokens)]
    logit_TV = np.asarray(logits, np.float64)
    shifted_TV = logit_TV - logit_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))


def test_tokens_equal_llama_cpp(lm: LM, golden: dict[str, Any]) -> None:
    """Of varied strings, of texts after a begin-of-text token, and of special tokens."""
    tokenizer = lm.tokenizer
    assert tokenizer is not None and len(golden["strings"]) == 300
    for text, tokens in zip(varied_texts(), golden["strings"], strict=True):
        assert tokenizer.encode(text) == tokens, text
        assert tokenizer.decode(tokens) == text.replace("\u2581", " ")  # which stands for a space
    for text, one in zip(READ, golden["read"], strict=True):
        assert lm.encode(text) == one["tokens"]
    assert tokenizer.encode(CHAT, parse_special=True) == golden["chat"]
    assert "whole" not in vars(tokenizer._plain)  # its 262,144 tokens were not built


@pytest.mark.parametrize("kind", ["read", "continued"])
def test_logprobs_equal_llama_cpp(lm: LM, golden: dict[str, Any], kind: str) -> None:
    """At each position, those of its most likely tokens, and which token is the most likely."""
    for one in golden[kind]:
        logprob_TV = read_logprobs(lm, one["tokens"])
        found_TK = np.take_along_axis(logprob_TV, np.array(one["top"]), -1)
        error_TK = np.abs(found_TK - np.array(one["logprobs"]))
        assert error_TK.max() < TOLERANCE and error_TK.mean() < TOLERANCE / 5
        best_T = np.array(one["top"])[:, 0]
        assert (logprob_TV.max(-1) - found_TK[:, 0] < TOLERANCE).all()
        assert (logprob_TV.argmax(-1) == best_T).mean() > 0.95


def test_greedy_texts_equal_llama_cpp(lm: LM, golden: dict[str, Any]) -> None:
    """Up to a token whose two most likely ones are as close as the tolerance."""
    for prompt, one in zip(CONTINUED, golden["continued"], strict=True):
        begin = len(lm.encode(prompt))
        expected = one["tokens"][begin:]
        margin_T = [first - second for first, second, *_ in one["logprobs"]][begin - 1 : -1]
        sure = next((i for i, gap in enumerate(margin_T) if gap < TOLERANCE), len(expected))
        found = lm.generate(prompt, max_new_tokens=len(expected), temperature=0).tokens
        assert sure > 4 and found[:sure] == expected[:sure]


def test_perplexity_equals_llama_cpp(lm: LM, golden: dict[str, Any]) -> None:
    for text, one in zip(READ, golden["read"], strict=True):
        logprob_T = lm.log_probs(text)
        assert np.abs(logprob_T - np.array(one["next"])).max() < TOLERANCE
        assert np.mean(logprob_T) == pytest.approx(np.mean(one["next"]), abs=0.002)


def test_base_model_has_no_chat_template(lm: LM) -> None:
    with pytest.raises(TemplateError, match=r"has no tokenizer\.chat_template"):
        lm.chat_prompt([{"role": "user", "content": "Hi"}])


def test_other_formats_keep_tokens_and_logprobs(
    gemma: Path, lm: LM, golden: dict[str, Any], tmp_path: Path, run: Run
) -> None:
    """To Hugging Face's format, which transformers reads alike, and from there to GGUF."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    folder, file = tmp_path / "hf", tmp_path / "again.gguf"
    succeed(run, "convert", gemma, folder, "--to-hf", "--dtype", "float32")
    succeed(run, "convert", folder, file, "--to-gguf", "F32")
    tokens = golden["read"][0]["tokens"]
    expected_TV = read_logprobs(lm, tokens)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprob_TV = torch.log_softmax(theirs(torch.tensor([tokens])).logits[0].double(), -1)
    np.testing.assert_allclose(logprob_TV.numpy(), expected_TV, rtol=0, atol=1e-3)
    del theirs
    for path in (folder, file):
        again = jaxllm.load(path)
        np.testing.assert_allclose(read_logprobs(again, tokens), expected_TV, rtol=0, atol=1e-3)
        assert again.tokenizer is not None
        for text, ids in zip(varied_texts(), golden["strings"], strict=True):
            assert again.tokenizer.encode(text) == ids, text
        del again
    shutil.rmtree(folder)  # 2 GB that pytest would keep
    file.unlink()


@pytest.mark.parametrize("name", KL)
def test_quantized_weights_stay_close(
    gemma: Path, lm: LM, golden: dict[str, Any], name: str
) -> None:
    """The mean KL divergence from the file's own weights is at most twice what it was."""
    quantized = jaxllm.load(gemma, dtype="float32", quantize=name)
    found = []
    for one in golden["read"]:
        p_TV, q_TV = (read_logprobs(x, one["tokens"]) for x in (lm, quantized))
        found.append((np.exp(p_TV) * (p_TV - q_TV)).sum(-1))
    assert 0 < np.concatenate(found).mean() < KL[name]


def test_command_is_small_and_compiles_once(
    gemma: Path, golden: dict[str, Any], tmp_path: Path
) -> None:
    """Its peak is that of the libraries, the file and 300 MB; a second process compiles nothing."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    environment["JAXLLM_COMPILE_CACHE"] = str(tmp_path)
    libraries = int(subprocess.check_output([sys.executable, "-c", LIBRARIES], text=True))
    command = [sys.executable, "-m", "jaxllm", "generate", gemma, CONTINUED[1], "-n", "6", "--json"]
    programs: list[set[str]] = []
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            report = json.loads(process.stdout.read())
            _, status, usage = os.wait4(process.pid, 0)
        assert status == 0
        begin = len(golden["continued"][1]["tokens"]) - 24
        assert report["tokens"] == golden["continued"][1]["tokens"][begin : begin + 6]
        assert usage.ru_maxrss * 1024 < libraries + gemma.stat().st_size + 300 * MB
        programs.append({path.name for path in tmp_path.rglob("*.program")})
    assert programs[0] and programs[0] == programs[1]
