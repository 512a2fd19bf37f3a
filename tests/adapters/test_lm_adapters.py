"""Adapters of a loaded model, chosen by name per call, row, request and command."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.adapters import LoraConfig, merge_adapter, read_adapter, with_adapters, write_adapter
from jaxllm.adapters.attach import attach_adapter
from jaxllm.cache import load_cache, save_cache
from jaxllm.errors import CacheMismatchError, CheckpointError, ConfigError, SamplingError
from tests.adapters.random_adapters import random_adapter
from tests.tiny_models import assert_close, cut_demo, save_random, tokens

NAMES = ("x", "y", "z")
LORA_CONFIGS = {
    "x": LoraConfig(r=2, target_modules=("q_proj", "down_proj")),
    "y": LoraConfig(r=4, use_dora=True),
    "z": LoraConfig(r=3, target_modules=("embed_tokens", "lm_head")),
}
PROMPT = tokens(1, 7)[0].tolist()
NEW = {"max_new_tokens": 6, "eos_token_id": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and one adapter of each kind."""
    path: Path = tmp_path_factory.mktemp("adapters")
    save_random(path / "model", "llama", eos_token_id=None, num_hidden_layers=1)
    base = jaxllm.load(path / "model")
    for seed, (name, lora) in enumerate(LORA_CONFIGS.items()):
        made = random_adapter(base.config, base.params, lora, seed)
        write_adapter(path / name, made, base.config)
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> jaxllm.LM:
    return jaxllm.load(folder / "model", adapters=[folder / name for name in NAMES])


@pytest.fixture(scope="module")
def merged_lm(folder: Path) -> Callable[[str], jaxllm.LM]:
    """Return the base model, or the model with one adapter merged into its weights."""
    base = jaxllm.load(folder / "model")
    made = {"base": base}
    for name in NAMES:
        adapter = read_adapter(folder / name, base.config, base.params)
        _, params = merge_adapter(base.config, attach_adapter(base.config, base.params, adapter))
        made[name] = dataclasses.replace(base, params=params)
    return lambda name: made[name]


@pytest.fixture(scope="module")
def expected(merged_lm: Callable[[str], jaxllm.LM]) -> dict[str, list[int]]:
    found = {name: merged_lm(name).generate(PROMPT, **NEW).tokens for name in (*NAMES, "base")}
    assert len({tuple(text) for text in found.values()}) == 4
    return found


def test_generate_uses_named_adapter_without_recompiling(
    lm: jaxllm.LM, expected: dict[str, list[int]], compiled: list[str]
) -> None:
    """Generation uses the named adapter, the first by default, and switching adapters compiles
    nothing.
    """
    assert (lm.adapters, lm.adapter) == (NAMES, "x") and "adapters x, y, z" in repr(lm)
    assert lm.generate(PROMPT, **NEW).tokens == expected["x"]  # the first
    before = len(compiled)
    for name, text in expected.items():
        assert lm.generate(PROMPT, **NEW, adapter=name).tokens == text
        assert lm.with_adapter(name).generate(PROMPT, **NEW).tokens == text
    assert compiled[before:] == []  # the choice is data
    streamed = [piece.token for piece in lm.stream(PROMPT, **NEW, adapter="y")]
    assert streamed == expected["y"]


def test_batch_rows_generate_with_own_adapters(
    lm: jaxllm.LM, expected: dict[str, list[int]]
) -> None:
    """Each row of a batch generates the tokens of its own adapter, also with batch_invariant."""
    names = ["y", "base", None, "z"]
    found = lm.generate([PROMPT] * 4, **NEW, adapter=names)
    assert [c.tokens for c in found] == [expected[name or "x"] for name in names]
    invariant = lm.generate([PROMPT] * 4, **NEW, adapter=names, batch_invariant=True)
    assert [c.tokens for c in invariant] == [c.tokens for c in found]


@pytest.mark.full
def test_beam_search_uses_each_prompts_adapter(
    lm: jaxllm.LM, merged_lm: Callable[[str], jaxllm.LM]
) -> None:
    search = {"max_new_tokens": 3, "eos_token_id": [], "num_beams": 2}
    found = lm.generate([PROMPT] * 2, **search, adapter=["y", "z"])
    for name, completion in zip("yz", found, strict=True):
        assert completion.tokens == merged_lm(name).generate([PROMPT] * 2, **search)[0].tokens


def test_serve_handles_requests_with_different_adapters(
    lm: jaxllm.LM, expected: dict[str, list[int]], compiled: list[str]
) -> None:
    """Concurrent requests each get the tokens of their adapter; an unknown adapter fails only its
    own request.
    """

    def requests(order: Any) -> list[dict[str, Any]]:
        return [
            {"id": number, "prompt": PROMPT, "adapter": name, **NEW}
            for number, name in enumerate(order)
        ]

    order = ["x", "y", "z", "base", "y", "nobody", None]
    found = dict(lm.serve(requests(order), rows=3, capacity=16))
    assert isinstance(found[5], ConfigError)
    assert "no adapter 'nobody'; loaded are x, y, z, base" in str(found[5])
    for number, name in enumerate(order):
        if number != 5:
            answer = found[number]
            assert isinstance(answer, jaxllm.Completion)
            assert answer.tokens == expected[name or "x"], name
    before = len(compiled)
    dict(lm.serve(requests(["z", "z", "x", "y", "base", "x"]), rows=3, capacity=16))
    assert compiled[before:] == []


@pytest.mark.full
def test_embeddings_use_named_adapter(lm: jaxllm.LM, merged_lm: Callable[[str], jaxllm.LM]) -> None:
    for name in ("y", "z"):
        assert_close(lm.embed([PROMPT], adapter=name), merged_lm(name).embed([PROMPT]))


def test_cache_is_refused_for_another_adapter(lm: jaxllm.LM, folder: Path, tmp_path: Path) -> None:
    """A saved cache loads only with the adapter that filled it, under whatever name that adapter is
    loaded.
    """
    file, cache = tmp_path / "cache", lm.generate(PROMPT, **NEW, adapter="y").cache
    assert cache is not None
    save_cache(file, cache, lm.model, lm.with_adapter("y").params)
    for name in ("x", "z", "base"):
        with pytest.raises(CacheMismatchError, match="was made with other weights"):
            load_cache(file, lm.model, lm.with_adapter(name).params)
    other = jaxllm.load(folder / "model", adapters={"mine": folder / "y"})
    np.testing.assert_array_equal(
        load_cache(file, other.model, other.params).tokens(), cache.tokens()
    )


def test_invalid_adapter_arguments_are_refused(lm: jaxllm.LM, folder: Path, tmp_path: Path) -> None:
    """Unknown, duplicate or reserved adapter names, wrong counts, and saving a model with adapters
    raise errors.
    """
    for call in (lambda: lm.generate(PROMPT, adapter="xx"), lambda: lm.with_adapter("xx")):
        with pytest.raises(ConfigError, match=r"no adapter 'xx'"):
            call()
    with pytest.raises(ConfigError, match="no adapter 'x'; loaded are base"):
        jaxllm.load(folder / "model").generate(PROMPT, adapter="x")
    with pytest.raises(SamplingError, match="one for each of 2 prompts"):
        lm.generate([PROMPT] * 2, adapter=["x"])
    with pytest.raises(SamplingError, match="requires the same adapter for all"):
        lm.generate([PROMPT] * 2, adapter=["x", "y"], penalty_alpha=0.5, top_k=2)
    with pytest.raises(CheckpointError, match=r"cannot store adapters\. Merge one"):
        lm.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ConfigError, match="two adapters have the name 'x'"):
        jaxllm.load(folder / "model", adapters=[folder / "x", folder / "." / "x"])
    base = jaxllm.load(folder / "model")
    one = read_adapter(folder / "x", base.config)
    with pytest.raises(ConfigError, match="adapter name 'base' is reserved"):
        with_adapters(base.config, base.params, {"base": one})


@pytest.fixture(scope="module")
def demo(folder: Path) -> Path:
    """One layer of a demo model, which has a tokenizer, and two adapters for it."""
    path = cut_demo("llama", folder / "demo", layers=1)
    base = jaxllm.load(path)
    for name in ("x", "y"):
        made = random_adapter(base.config, base.params, LORA_CONFIGS[name], spread=0.05)
        write_adapter(folder / f"demo-{name}", made, base.config, base=str(path))
    return path


def test_cli_generate_takes_named_adapters(folder: Path, demo: Path, run: Any) -> None:
    adapter_options = ("--adapter", folder / "demo-x", "--adapter", f"second={folder / 'demo-y'}")
    lm = jaxllm.load(demo, adapters={"demo-x": folder / "demo-x", "second": folder / "demo-y"})
    command = ("generate", demo, "-p", "Once", "-n", 4, "--json")
    for option, name in (((), "demo-x"), (("-o", "adapter=second"), "second")):
        code, out, _ = run(*command, *adapter_options, *option)
        assert code == 0
        streamed = lm.stream("Once", max_new_tokens=4, adapter=name)
        assert json.loads(out)["tokens"] == [piece.token for piece in streamed]
    code, _, err = run(*command, *adapter_options, "-o", "adapter=third")
    assert code == 1 and "no adapter 'third'; loaded are demo-x, second, base" in err


def test_cli_merge_writes_merged_model(
    folder: Path, expected: dict[str, list[int]], tmp_path: Path, run: Any
) -> None:
    """The merge command writes a model with the adapter's tokens and reports a KL divergence near
    0.
    """
    code, _, err = run("merge", folder / "model", tmp_path / "out", "--adapter", folder / "y")
    assert code == 0 and "y merged, in float32. KL divergence" in err, err
    assert jaxllm.load(tmp_path / "out").generate(PROMPT, **NEW).tokens == expected["y"]
    divergence = float(err.partition("with the adapter: ")[2].split()[0])
    assert abs(divergence) < 1e-5
    code, _, err = run("merge", folder / "model", tmp_path / "none", "--adapter", folder)
    assert code == 1 and "has no adapter_config.json" in err
