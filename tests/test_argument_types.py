"""Arguments of the wrong type, for each public function: an immediate JaxllmError.

A table row is a call with one argument left open, and the kind of that argument. Each kind has a
list of invalid values. No call gets far enough to compile a step.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm import adapters, cache as caches
from jaxllm.adapters import LoraConfig
from jaxllm.errors import JaxllmError, TokenError
from jaxllm.evaluate.likelihood.data import loader
from jaxllm.generation.options import OPTIONS
from jaxllm.models import FAMILIES
from jaxllm.train import jobs
from tests.tiny_models import random_model

BIG = np.int64(2**40)
INVALID: dict[str, list[Any]] = {
    "whole": [None, 1.5, True, "1", BIG, object(), jnp.float32(1)],
    "whole?": [1.5, True, "1", BIG, object(), -1],
    "row": [None, 1.5, True, "1", BIG, [0], -1, 9],
    "number": [True, "1", "x", object(), math.nan],
    "rows": [None, [1.7], ["1"], [True, False], [BIG], [2**70], [None], 0, [],
             np.array([0.0, 1.0])],
    "lengths": [[1.7, 1.0], ["1", "1"], [True, True], [1, BIG], 1, [], [1, 2], [0, 1], object()],
    "positions": [None, 1.5, True, "1", BIG, [None], np.array([1, 1, 1]), np.array([[1]])],
    "grid": [None, 1.5, True, "1", BIG, [None], np.array([1, 1, 1]), [[1.5]], [[1], [2], [3]]],
    "ids": [None, 5, "text", [[1.5]], [["a"]], [[BIG]], [[2**70]], [[None]], [5, 6], [[5], [6, 7]],
            [[True]], np.zeros((1, 2)), {"input_ids": [[5]]}, object()],
    "token": [None, 1.5, "a", [1.5], [BIG], [[5]], [2**70], object()],
    "mask": [None, "x", [[1.0] * 16], [[1] * 16], [[True], [True, False]], object()],
    "mass": [None, "x", [[1] * 16], [[1.0], [1.0, 2.0]], [1.0], object()],
    "model": [None, 5, "llama", {}, object()],
    "hashable model": [None, 5, "llama", object()],
    "params": [None, 5, "params", {"params": {}}, object()],
    "cache": [None, 5, "cache", {}, object()],
    "delta": [None, 5, "delta", {}, object()],
    "prompt": [None, 5, 1.5, object(), [1.5], [{"role": "user", "content": "Hi"}], {"a": 1},
               [[BIG]], [True], [None], np.zeros((1, 2)), b"text"],
    "tokens": [None, 5, "text", 1.5, [1.5], [BIG], [[5, 6]], [None], object()],
    "tokens?": [5, "text", 1.5, [1.5], [BIG], [[5, 6]], [None], object()],
    "texts": [None, 5, "text", [None], [[BIG]], [[1.5]], object()],
    "path": [None, 5, b"x", True, object(), ["demo:llama"]],
    "dtype": [5, True, "int9", float, np.int32, object(), [], b"bf16"],
    "seed": [None, 1.5, True, "a", -1, 2**70, object()],
    "mesh": [4, {"tensor": 2}, True, ["tensor=2"], object()],
    "adapters": [5, [5], {"a": 5}, {5: "x"}, True, object(), None],
    "function": [5, "x", True, object()],
    "name": [5, True, "nosuch", object(), ["x"]],
    "rules": [5, True, "nosuch", [5], [("(", None)], [(".*", 5)], object()],
    "loader": [None, 5, "text", [[1, 2]], object()],
    "documents": [None, 5, [5], ["a"], [[1.5]], [[BIG]], [[[1, 2]]], [None], object()],
    "requests": [5, None],
}  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> Any:
    """Return the demo model, which has a vocabulary and a tokenizer for the prompts."""
    return jaxllm.load("demo:llama", dtype="float32")


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    """Return a tiny model, its parameters, and a cache of two rows with 16 slots."""
    model, params = random_model("llama")
    return model, params, jaxllm.init_cache(model, 2, 16)


def _delta(m: Any, rows: int = 2) -> Any:
    tail = m[2].tail
    one = {name: getattr(tail, name)[:, :1] for name in ("position_BS", "token_BS", "patched_BS")}
    k, v = (tuple(x[:, :1] for x in y) for y in (tail.k, tail.v))
    return caches.Delta(k=k, v=v, **one)


def _next(x: Any) -> Any:
    return next(iter(x))


# Steps and functions on top of them: ((model, params, cache), value).
STEPS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "forward model": ("model", lambda m, x: jaxllm.forward(x, m[1], None, [[5]])),
    "forward params": ("params", lambda m, x: jaxllm.forward(m[0], x, None, [[5]])),
    "forward cache": ("cache", lambda m, x: jaxllm.forward(m[0], m[1], x or 0, [[5]])),
    "forward tokens": ("ids", lambda m, x: jaxllm.forward(m[0], m[1], None, x)),
    "forward positions": (
        "ids",
        lambda m, x: jaxllm.forward(
            m[0], m[1], None, [[5]], positions_BT=[[-9]] if x is None else x
        ),
    ),
    "forward attention_mass": (
        "name",
        lambda m, x: jaxllm.forward(m[0], m[1], None, [[5]], attention_mass=[x]),
    ),
    "decode_step model": ("model", lambda m, x: jaxllm.decode_step(x, m[1], m[2], [5, 6])),
    "decode_step cache": ("cache", lambda m, x: jaxllm.decode_step(m[0], m[1], x, [5, 6])),
    "decode_step token": ("token", lambda m, x: jaxllm.decode_step(m[0], m[1], m[2], x)),
    "prefill params": ("params", lambda m, x: jaxllm.prefill(m[0], x, m[2], [[5], [6]])),
    "prefill cache": ("cache", lambda m, x: jaxllm.prefill(m[0], m[1], x, [[5], [6]])),
    "prefill tokens": ("ids", lambda m, x: jaxllm.prefill(m[0], m[1], m[2], x)),
    "prefill lengths": (
        "lengths",
        lambda m, x: jaxllm.prefill(m[0], m[1], m[2], [[5], [6]], lengths_B=x),
    ),
    "prefill chunk": (
        "whole",
        lambda m, x: jaxllm.prefill(m[0], m[1], m[2], [[5], [6]], chunk=0 if x is BIG else x),
    ),
    "init_cache model": ("model", lambda m, x: jaxllm.init_cache(x, 1, 8)),
    "init_cache batch": ("whole", lambda m, x: jaxllm.init_cache(m[0], x, 8)),
    "init_cache capacity": ("whole", lambda m, x: jaxllm.init_cache(m[0], 1, x)),
    "init_cache dtype": ("dtype", lambda m, x: jaxllm.init_cache(m[0], 1, 8, dtype=x)),
    "init_cache place": ("function", lambda m, x: jaxllm.init_cache(m[0], 1, 8, place=x)),
    "generate model": ("model", lambda m, x: jaxllm.generate(x, m[1], [[5]], max_new_tokens=1)),
    "generate params": ("params", lambda m, x: jaxllm.generate(m[0], x, [[5]], max_new_tokens=1)),
    "generate tokens": ("ids", lambda m, x: jaxllm.generate(m[0], m[1], x, max_new_tokens=1)),
    "generate max_new_tokens": (
        "whole",
        lambda m, x: jaxllm.generate(m[0], m[1], [[5]], max_new_tokens=x),
    ),
    "generate sampler": (
        "function",
        lambda m, x: jaxllm.generate(m[0], m[1], [[5]], max_new_tokens=1, sampler=x),
    ),
    "generate seed": (
        "seed",
        lambda m, x: jaxllm.generate(m[0], m[1], [[5]], max_new_tokens=1, seed=x),
    ),
    "generate cache": (
        "cache",
        lambda m, x: jaxllm.generate(m[0], m[1], [[5]], max_new_tokens=1, cache=x or 0),
    ),
    "generate until": (
        "function",
        lambda m, x: jaxllm.generate(m[0], m[1], [[5]], max_new_tokens=1, until=x),
    ),
    "generate overflow": (
        "function",
        lambda m, x: jaxllm.generate(m[0], m[1], [[5]], max_new_tokens=1, overflow=x),
    ),
    "generate eos_token_ids": (
        "token",
        lambda m, x: jaxllm.generate(m[0], m[1], [[5]], max_new_tokens=1, eos_token_ids=x),
    ),
    "stream tokens": ("ids", lambda m, x: _next(jaxllm.stream(m[0], m[1], x, max_new_tokens=1))),
    "beam_search model": (
        "model",
        lambda m, x: jaxllm.beam_search(x, m[1], [[5]], num_beams=2, max_new_tokens=1),
    ),
    "beam_search tokens": (
        "ids",
        lambda m, x: jaxllm.beam_search(m[0], m[1], x, num_beams=2, max_new_tokens=1),
    ),
    "beam_search num_beams": (
        "whole",
        lambda m, x: jaxllm.beam_search(m[0], m[1], [[5]], num_beams=x, max_new_tokens=1),
    ),
    "beam_search max_new_tokens": (
        "whole",
        lambda m, x: jaxllm.beam_search(m[0], m[1], [[5]], num_beams=2, max_new_tokens=x),
    ),
    "beam_search cache": (
        "cache",
        lambda m, x: jaxllm.beam_search(
            m[0], m[1], [[5]], num_beams=2, max_new_tokens=1, cache=x or 0
        ),
    ),
    "beam_search sampler": (
        "function",
        lambda m, x: jaxllm.beam_search(
            m[0], m[1], [[5]], num_beams=2, max_new_tokens=1, sampler=x
        ),
    ),
    "speculative_generate draft": (
        "model",
        lambda m, x: jaxllm.speculative_generate(m[0], m[1], [[5]], draft=x, max_new_tokens=1),
    ),
    "speculative_generate draft's params": (
        "params",
        lambda m, x: jaxllm.speculative_generate(
            m[0], m[1], [[5]], draft=(m[0], x), max_new_tokens=1
        ),
    ),
    "PromptLookup": ("whole", lambda m, x: jaxllm.PromptLookup(ngram=0 if x is BIG else x)),
    "serve model": ("model", lambda m, x: _next(jaxllm.serve(x, m[1], []))),
    "serve requests": ("requests", lambda m, x: _next(jaxllm.serve(m[0], m[1], x))),
    "serve rows": ("whole", lambda m, x: _next(jaxllm.serve(m[0], m[1], [], rows=x))),
    "serve request": ("model", lambda m, x: _next(jaxllm.serve(m[0], m[1], [x or 5]))),
    "sample key": ("seed", lambda m, x: jaxllm.sample(x, jnp.zeros((1, 9)), jaxllm.GREEDY)),
    "sample logits": (
        "number",
        lambda m, x: jaxllm.sample(jax.random.key(0), x, jaxllm.GREEDY),
    ),
    "sample sampler": (
        "function",
        lambda m, x: jaxllm.sample(jax.random.key(0), jnp.zeros((1, 9)), x),
    ),
    "recompute start": ("whole", lambda m, x: jaxllm.recompute(m[0], m[1], m[2], x, 2)),
    "recompute cache": ("cache", lambda m, x: jaxllm.recompute(m[0], m[1], x, 0, 2)),
    "recompute model": ("model", lambda m, x: jaxllm.recompute(x, m[1], m[2], 0, 2)),
    "insert position": ("whole", lambda m, x: jaxllm.insert(m[0], m[1], m[2], x, [[5], [6]])),
    "insert tokens": ("ids", lambda m, x: jaxllm.insert(m[0], m[1], m[2], 0, x)),
    "embeddings texts": ("texts", lambda m, x: jaxllm.embeddings(m[0], m[1], x)),
    "embeddings model": ("model", lambda m, x: jaxllm.embeddings(x, m[1], [[5]])),
    "embeddings layer": ("whole", lambda m, x: jaxllm.embeddings(m[0], m[1], [[5]], layer=x)),
    "embeddings pooling": ("name", lambda m, x: jaxllm.embeddings(m[0], m[1], [[5]], pooling=x)),
    "stages tokens": ("ids", lambda m, x: jaxllm.activations(m[0], m[1], None, x)),
    "stages model": ("model", lambda m, x: jaxllm.activations(x, m[1], None, [[5]])),
    "stages cache": ("cache", lambda m, x: jaxllm.activations(m[0], m[1], x or 0, [[5]])),
    "perplexity loader": ("loader", lambda m, x: jaxllm.perplexity(m[0], m[1], x)),
    "perplexity model": ("model", lambda m, x: jaxllm.perplexity(x, m[1], None)),  # type: ignore[arg-type]
    "divergence loader": ("loader", lambda m, x: jaxllm.divergence(m[0], m[1], m[0], m[1], x)),
    "divergence other": ("model", lambda m, x: jaxllm.divergence(m[0], m[1], x, m[1], None)),  # type: ignore[arg-type]
    "sensitivity loader": (
        "loader",
        lambda m, x: jaxllm.measure_sensitivity(m[0], m[1], x, "int8"),
    ),
    "sensitivity format": ("name", lambda m, x: jaxllm.measure_sensitivity(m[0], m[1], None, x)),  # type: ignore[arg-type]
    "loader documents": ("documents", lambda m, x: loader(x, window=4)),
    "FixedShapeRunner model": ("model", lambda m, x: jaxllm.FixedShapeRunner(x, m[1], 4, 16)),
    "FixedShapeRunner params": ("params", lambda m, x: jaxllm.FixedShapeRunner(m[0], x, 4, 16)),
    "FixedShapeRunner num_tokens": (
        "whole",
        lambda m, x: jaxllm.FixedShapeRunner(m[0], m[1], x, 16),
    ),
    "FixedShapeRunner mask": (
        "name",
        lambda m, x: jaxllm.FixedShapeRunner(m[0], m[1], 4, 16, mask=x),
    ),
    "FixedShapeRunner mask_value": (
        "number",
        lambda m, x: jaxllm.FixedShapeRunner(m[0], m[1], 4, 16, mask_value=x),
    ),
    "build config": ("model", lambda m, x: jaxllm.build(x)),
    "build precision": ("dtype", lambda m, x: jaxllm.build(m[0].config, x)),
    "param_shapes": ("hashable model", lambda m, x: jaxllm.param_shapes(x)),
    "cast params": ("params", lambda m, x: jaxllm.cast(x, jaxllm.Precision())),
    "cast precision": ("dtype", lambda m, x: jaxllm.cast(m[1], x)),
    "quantize params": ("params", lambda m, x: jaxllm.quantize(x, "int8")),
    "quantize rules": ("rules", lambda m, x: jaxllm.quantize(m[1], x)),
    "dequantize": ("params", lambda m, x: jaxllm.dequantize(x)),
    "row_keys seed": ("seed", lambda m, x: jaxllm.row_keys(x, 2)),
    "row_keys rows": ("whole", lambda m, x: jaxllm.row_keys(0, x)),
    "make_sampler temperature": ("number", lambda m, x: jaxllm.make_sampler(temperature=x)),
    "make_sampler logits_processor": (
        "function",
        lambda m, x: jaxllm.make_sampler(logits_processor=x),
    ),
}

CACHES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "tokens row": ("row", lambda m, x: m[2].tokens(x)),
    "show tokenizer": ("model", lambda m, x: m[2].show(x)),
    "branch row": ("row", lambda m, x: caches.branch(m[2], x)),
    "branch cache": ("cache", lambda m, x: caches.branch(x, 0)),
    "select rows": ("rows", lambda m, x: caches.select(m[2], x)),
    "select cache": ("cache", lambda m, x: caches.select(x, [0])),
    "fork n": ("whole", lambda m, x: caches.fork(caches.branch(m[2], 0), x)),
    "fork capacity": ("whole?", lambda m, x: caches.fork(caches.branch(m[2], 0), 2, capacity=x)),
    "fork cache": ("cache", lambda m, x: caches.fork(x, 2)),
    "merge_rows": ("cache", lambda m, x: caches.merge_rows(x)),
    "merge_rows one": ("cache", lambda m, x: caches.merge_rows([x])),
    "merge_rows capacity": ("whole?", lambda m, x: caches.merge_rows([m[2]], capacity=x)),
    "rewind n": ("positions", lambda m, x: caches.rewind(m[2], x)),
    "rewind to": ("positions", lambda m, x: caches.rewind(m[2], to=x)),
    "rewind cache": ("cache", lambda m, x: caches.rewind(x, 1)),
    "drop_range start": ("positions", lambda m, x: caches.drop_range(m[2], x, 3)),
    "drop_range stop": (
        "positions",
        lambda m, x: caches.drop_range(m[2], 0, 1.5 if x is None else x),
    ),
    "shift by": ("positions", lambda m, x: caches.shift(m[2], x)),
    "shift start": ("positions", lambda m, x: caches.shift(m[2], 1, x)),
    "keep": ("mask", lambda m, x: caches.keep(m[2], x)),
    "keep cache": ("cache", lambda m, x: caches.keep(x, [[True]])),
    "compact capacity": ("whole?", lambda m, x: caches.compact(m[2], capacity=x)),
    "compact cache": ("cache", lambda m, x: caches.compact(x)),
    "close_gaps": ("cache", lambda m, x: caches.close_gaps(x)),
    "slot_order": ("cache", lambda m, x: caches.slot_order(x)),
    "slots_at positions": ("grid", lambda m, x: caches.find_slots(m[2], x)),
    "slots_at cache": ("cache", lambda m, x: caches.find_slots(x, [[0]])),
    "patch slots": ("positions", lambda m, x: caches.patch(m[2], x, _delta(m))),
    "patch delta": ("delta", lambda m, x: caches.patch(m[2], [[0], [0]], x)),
    "commit delta": ("delta", lambda m, x: caches.commit(m[2], x)),
    "commit cache": ("cache", lambda m, x: caches.commit(x, _delta(m))),
    "sinks_and_window sinks": (
        "whole",
        lambda m, x: caches.sinks_and_window(m[2], sinks=x, window=2),
    ),
    "sinks_and_window window": (
        "whole",
        lambda m, x: caches.sinks_and_window(m[2], sinks=1, window=x),
    ),
    "sinks_and_window cache": ("cache", lambda m, x: caches.sinks_and_window(x, sinks=1, window=2)),
    "heavy_hitters mass": ("mass", lambda m, x: caches.heavy_hitters(m[2], x, heavy=1, recent=1)),
    "heavy_hitters heavy": (
        "whole",
        lambda m, x: caches.heavy_hitters(m[2], np.zeros((2, 16)), heavy=x, recent=1),
    ),
    "heavy_hitters recent": (
        "whole",
        lambda m, x: caches.heavy_hitters(m[2], np.zeros((2, 16)), heavy=1, recent=x),
    ),
    "segment_in_hand": ("cache", lambda m, x: caches.current_segment(x)),
    "pool ratio": ("whole", lambda m, x: caches.pool(m[2], ratio=x, sinks=0, recent=0)),
    "pool mass": (
        "mass",
        lambda m, x: caches.pool(m[2], ratio=2, sinks=0, recent=0, mass_BS=[5] if x is None else x),
    ),
    "save_cache path": ("path", lambda m, x: caches.save_cache(x, m[2], m[0], m[1])),
    "load_cache capacity": (
        "whole?",
        lambda m, x: caches.load_cache("nosuch", m[0], m[1], capacity=x),
    ),
    "load_cache prefix": (
        "tokens?",
        lambda m, x: caches.load_cache("nosuch", m[0], m[1], prefix=x),
    ),
    "load_cache path": ("path", lambda m, x: caches.load_cache(x, m[0], m[1])),
    "save_cache cache": ("cache", lambda m, x: caches.save_cache(Path("x"), x, m[0], m[1])),
    "fingerprint": ("params", lambda m, x: caches.fingerprint(x)),
}

LMS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "load path": ("path", lambda m, x: jaxllm.load(x)),
    "load dtype": ("dtype", lambda m, x: jaxllm.load("demo:llama", dtype=x)),
    "load mesh": ("mesh", lambda m, x: jaxllm.load("demo:llama", mesh=x)),
    "load adapters": ("adapters", lambda m, x: jaxllm.load("demo:llama", adapters=x)),
    "load place": ("function", lambda m, x: jaxllm.load("demo:llama", place=x)),
    "load quantize": ("rules", lambda m, x: jaxllm.load("demo:llama", quantize=x)),
    "verify model": ("path", lambda m, x: jaxllm.verify(x)),
    "LM.generate": ("prompt", lambda m, x: m.generate(x, max_new_tokens=1)),
    "LM.generate max_new_tokens": ("whole?", lambda m, x: m.generate([5], max_new_tokens=x)),
    "LM.generate logits_processor": (
        "function",
        lambda m, x: m.generate([5], max_new_tokens=1, logits_processor=x),
    ),
    "LM.generate stopping_criteria": (
        "function",
        lambda m, x: m.generate([5], max_new_tokens=1, stopping_criteria=x),
    ),
    "LM.generate cache": ("cache", lambda m, x: m.generate([5], max_new_tokens=1, cache=x or 0)),
    "LM.stream": ("prompt", lambda m, x: m.stream(x, max_new_tokens=1)),
    "LM.encode": ("prompt", lambda m, x: m.encode(x)),
    "LM.decode": ("tokens", lambda m, x: m.decode(x)),
    "LM.log_probs": ("prompt", lambda m, x: m.log_probs(x)),
    "LM.embed": ("texts", lambda m, x: m.embed(x)),
    "LM.embed adapter": ("name", lambda m, x: m.embed([[5]], adapter=x)),
    "LM.embed pooling": ("name", lambda m, x: m.embed([[5]], pooling=x)),
    "LM.embed pool": ("name", lambda m, x: m.embed([[5]], pool=x)),
    "LM.using": ("name", lambda m, x: m.with_adapter(x)),
    "LM.init_cache batch": ("whole", lambda m, x: m.init_cache(x, 8)),
    "LM.init_cache capacity": ("whole?", lambda m, x: m.init_cache(1, x)),
    "LM.serve rows": ("whole", lambda m, x: _next(m.serve([], rows=x))),
    "LM.serve requests": ("requests", lambda m, x: _next(m.serve(x))),
    "LM.chat_prompt": ("texts", lambda m, x: m.chat_prompt(x)),
    "LM.save": ("path", lambda m, x: m.save(x)),
    "LM.self_extended group": (
        "whole",
        lambda m, x: m.with_self_extend(group_size=x, neighbor_window=8),
    ),
    "LM.self_extended window": (
        "whole",
        lambda m, x: m.with_self_extend(group_size=2, neighbor_window=x),
    ),
    "jobs.lora seed": ("seed", lambda m, x: jobs.lora(m, LoraConfig(r=1), seed=x)),
    "jobs.lora start": ("cache", lambda m, x: jobs.lora(m, LoraConfig(r=1), start=x or 0)),
    "jobs.full dtype": ("dtype", lambda m, x: jobs.full_finetune(m, x)),
    "adapters.fresh dtype": (
        "dtype",
        lambda m, x: adapters.init_adapter(m.config, m.params, LoraConfig(r=1), None, dtype=x),  # type: ignore[arg-type]
    ),
}


def unexpected_outcomes(call: Callable[[Any, Any], Any], subject: Any, kind: str) -> list[str]:
    """Return the invalid values that were accepted or raised an error of another library."""
    wrong = []
    for value in INVALID[kind]:
        try:
            call(subject, value)
        except JaxllmError as error:
            if len(str(error)) < 10:
                wrong.append(f"{value!r}: no message: {error}")
        except Exception as error:
            wrong.append(f"{value!r}: {type(error).__name__}: {error!s:.120}")
        else:
            wrong.append(f"{value!r}: accepted")
    return wrong


@pytest.mark.parametrize("name", STEPS)
def test_steps_refuse_wrong_argument_types(tiny_model: Any, name: str) -> None:
    """Functions of steps, decoding and evaluation raise a JaxllmError with a message for any wrong
    argument.
    """
    kind, call = STEPS[name]
    assert unexpected_outcomes(call, tiny_model, kind) == []


@pytest.mark.parametrize("name", CACHES)
def test_cache_functions_refuse_wrong_argument_types(tiny_model: Any, name: str) -> None:
    """Cache functions raise a JaxllmError with a message for any wrong argument."""
    kind, call = CACHES[name]
    assert unexpected_outcomes(call, tiny_model, kind) == []


@pytest.mark.parametrize("name", LMS)
def test_lm_methods_refuse_wrong_argument_types(lm: Any, name: str) -> None:
    """load, verify, LM methods and train jobs raise a JaxllmError with a message for any wrong
    argument.
    """
    kind, call = LMS[name]
    assert unexpected_outcomes(call, lm, kind) == []


def _chat(lm: Any) -> Any:
    return lm.generate([{"role": "user", "content": "Hi"}])


def _job_with(lm: Any, **changes: Any) -> Any:
    """Return a LoRA job from an adapter of rank 2, scale 1 on q_proj, with a changed config."""
    usual: dict[str, Any] = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    start = adapters.init_adapter(lm.config, lm.params, LoraConfig(**usual), jax.random.key(0))
    return jobs.lora(lm, LoraConfig(**{**usual, **changes}), start=start)


REMEDIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an LM for its model": (
        lambda lm: jaxllm.forward(lm, lm.params, None, [[5]]),
        "Pass lm.model and lm.params",
    ),
    "the parameters first": (
        lambda lm: jaxllm.forward(lm.params, lm.model, None, [[5]]),
        "Pass the model first",
    ),
    "an LM for its parameters": (
        lambda lm: jaxllm.forward(lm.model, lm, None, [[5]]),
        "For an LM pass lm.params",
    ),
    "Flax's variables": (
        lambda lm: jaxllm.forward(lm.model, {"params": lm.params}, None, [[5]]),
        'Pass the value of "params"',
    ),
    "an LM for a cache's model": (lambda lm: jaxllm.init_cache(lm, 1, 8), "lm.model"),
    "an LM for a draft": (
        lambda lm: jaxllm.speculative_generate(
            lm.model, lm.params, [[5]], draft=lm, max_new_tokens=1
        ),
        r"pass \(lm.model, lm.params\)",
    ),
    "rows of unequal length": (
        lambda lm: jaxllm.prefill(lm.model, lm.params, lm.init_cache(2, 8), [[5, 6], [7]]),
        "lengths_B",
    ),
    "a row without a batch": (
        lambda lm: jaxllm.prefill(lm.model, lm.params, lm.init_cache(1, 8), [5, 6, 7]),
        r"Wrap a single row: \[ids\]",
    ),
    "messages of a chat": (_chat, r"lm.chat_prompt\(messages\)"),
    "pool for pooling": (lambda lm: lm.embed(["a"], pool="mean"), "did you mean pooling"),
    "a mesh as a dict": (
        lambda lm: jaxllm.load("demo:llama", mesh={"tensor": 2}),
        "such as data=2,tensor=4",
    ),
    "a mask for rows": (
        lambda lm: caches.select(lm.init_cache(2, 8), [True, False]),
        r"np.flatnonzero\(mask\)",
    ),
    "an output for its delta": (
        lambda lm: caches.commit(
            lm.init_cache(1, 8),
            jaxllm.Output(logits=None, delta=None),  # type: ignore[arg-type]
        ),
        "Give its delta",
    ),
    "transformers' order of a processor's arguments": (
        lambda lm: lm.generate(
            [5], max_new_tokens=1, logits_processor=[lambda ids, scores: scores * 2]
        ),
        r"\(input_ids, scores\): swap the arguments",
    ),
    "a processor of one argument": (
        lambda lm: lm.generate([5], max_new_tokens=1, logits_processor=[lambda scores: scores]),
        r"functions of \(scores \[B, V\], Context\)",
    ),
    "a criterion of one argument": (
        lambda lm: lm.generate([5], max_new_tokens=1, stopping_criteria=lambda text: True),
        r"function of \(text, token ids\)",
    ),
    "a criterion of transformers": (
        lambda lm: lm.generate(
            [5], max_new_tokens=1, stopping_criteria=lambda ids, scores: ids.shape[1] > 3
        ),
        r"functions \(text, token ids\) -> bool",
    ),
    "a start of another scale": (
        lambda lm: _job_with(lm, lora_alpha=16),
        r"the adapter has LoRA of rank 2, scale 1, the configuration LoRA of rank 2, scale 8",
    ),
    "a start of another rank": (lambda lm: _job_with(lm, r=4), "rank 4, scale 0.5"),
    "a start of other modules": (
        lambda lm: _job_with(lm, target_modules=["q_proj", "v_proj"]),
        "v_proj: the adapter has nothing",
    ),
    "a start of rsLoRA": (lambda lm: _job_with(lm, use_rslora=True), "scale 1.41421"),
    "a start of DoRA": (lambda lm: _job_with(lm, use_dora=True), "configuration DoRA"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_errors_name_remedy(lm: Any, name: str) -> None:
    call, remedy = REMEDIES[name]
    with pytest.raises(JaxllmError, match=remedy):
        call(lm)


def test_lora_start_trains_with_written_config(lm: Any, tmp_path: Path) -> None:
    """A start adapter of equal meaning is accepted, with another dropout, and the written config is
    the trained one.
    """
    job = _job_with(lm, target_modules=r".*\.q_proj", lora_dropout=0.25)
    leaf = job.params["layers.0"]["self_attn"]["q_proj"]["weight"]
    assert (leaf.scale.tolist(), leaf.dropout) == ([1.0, 1.0], 0.25)
    job.finish(job.params, tmp_path / "a")
    written = adapters.read_adapter(tmp_path / "a", lm.config).config
    assert (written.r, written.lora_alpha, written.lora_dropout) == (2, 2.0, 0.25)


def test_encode_accepts_arrays_and_torch_tensors(lm: Any) -> None:
    for given in (torch.tensor([5, 6]), [torch.tensor(5), 6], np.array([5, 6]), jnp.array([5, 6])):
        assert lm.encode(given) == [5, 6]


def test_decode_inverts_encode(lm: Any) -> None:
    ids = lm.encode("Once upon a time")
    assert lm.decode(ids) == lm.decode(torch.tensor(ids)) == "Once upon a time"
    assert lm.decode([]) == ""
    with pytest.raises(TokenError, match="no tokenizer"):
        dataclasses.replace(lm, tokenizer=None).decode(ids)


def test_select_accepts_any_integer_type(tiny_model: Any) -> None:
    """Lists, arrays and ranges of any integer type select the same rows."""
    cache = dataclasses.replace(tiny_model[2], next_position_B=jnp.array([3, 4], jnp.int32))
    for rows in ([1, 0], np.array([1, 0], np.uint8), jnp.array([1, 0]), range(1, -1, -1)):
        assert caches.select(cache, rows).next_position_B.tolist() == [4, 3]
    assert caches.branch(cache, np.int64(1)).next_position_B.tolist() == [4]


def test_help_names_families_and_options() -> None:
    """The docstring of load names all families, signatures list all options, and dir() has only
    public names.
    """
    for family in FAMILIES:
        assert family in (jaxllm.load.__doc__ or "")
    for method in (jaxllm.LM.generate, jaxllm.LM.stream):
        assert OPTIONS.keys() < inspect.signature(method).parameters.keys()
    names = dir(jaxllm)
    assert len(names) == len(set(names)) and set(jaxllm.__all__) <= set(names)
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(names)


def test_stream_chunk_prints_its_text() -> None:
    piece = jaxllm.StreamChunk(" there", 5, -0.5, None, 0.0, None)  # type: ignore[arg-type]
    assert str(piece) == " there"


@pytest.mark.parametrize(
    "processor",
    [lambda scores, context: scores, jaxllm.Processor()],
    ids=["function", "base"],
)
def test_sampler_processors_are_validated(processor: Any, lm: jaxllm.LM) -> None:
    """A function, or a processor without __call__, is refused with the remedy."""
    with pytest.raises(jaxllm.errors.SamplingError, match=r"logits_processor=\[f\]"):
        lm.generate([5, 6], max_new_tokens=2, sampler=jaxllm.Sampler((processor,)))
