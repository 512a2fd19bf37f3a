"""Arguments of the wrong type, for each public function: an immediate JaxllmError.

A table row is a valid call and the kinds of its arguments, which invalid values of that kind
replace one at a time. No call gets far enough to compile a step.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator
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
from jaxllm.research.long_attention.segments import current_segment
from jaxllm.research.self_extend import SelfExtend
from jaxllm.research.token_merging.pool import pool
from jaxllm.train import jobs
from tests.tiny_models import random_model

BIG = np.int64(2**40)
INVALID: dict[str, list[Any]] = {
    "whole": [None, 1.5, True, "1", BIG, object(), jnp.float32(1)],
    "whole?": [1.5, True, "1", BIG, object(), -1],
    "count": [None, 1.5, True, "1", 0, object(), jnp.float32(1)],
    "count?": [1.5, True, "1", 0, object(), jnp.float32(1)],
    "row": [None, 1.5, True, "1", BIG, [0], -1, 9],
    "number": [True, "1", "x", object(), math.nan],
    "rows": [None, [1.7], ["1"], [True, False], [BIG], [2**70], [None], 0, [],
             np.array([0.0, 1.0])],
    "lengths": [[1.7, 1.0], ["1", "1"], [True, True], [1, BIG], 1, [], [1, 2], [0, 1], object()],
    "positions": [None, 1.5, True, "1", BIG, [None], np.array([1, 1, 1]), np.array([[1]]),
                  [1.0, 2.0], jnp.ones(2)],
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
# Where None is valid: other values in its place.
INVALID |= {f"{kind}?": INVALID[kind][1:] for kind in ("positions", "tokens", "mass")}
INVALID["counts"] = [*INVALID["positions"], [[1], [2, 3]]]
INVALID["cache?"] = [0, 5, "cache", object()]
INVALID["ids?"] = [[[-9]], *INVALID["ids"][1:]]
INVALID["names"] = ["heads", *([x] for x in INVALID["name"])]
INVALID["caches"] = [*INVALID["cache"], *([x] for x in INVALID["cache"])]
INVALID["list of requests"] = [*INVALID["requests"], [5], ["llama"], [object()]]


@pytest.fixture(scope="module")
def lm() -> Any:
    """Return the demo model, which has a vocabulary and a tokenizer for the prompts."""
    return jaxllm.load("demo:llama", dtype="float32")


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    """Return a tiny model, its parameters, and a cache of two rows with 16 slots."""
    model, params = random_model("llama")
    return model, params, jaxllm.init_cache(model, 2, 16)


def _delta(m: Any) -> Any:
    tail = m[2].tail
    one = {name: getattr(tail, name)[:, :1] for name in ("position_BS", "token_BS", "patched_BS")}
    k, v = (tuple(x[:, :1] for x in y) for y in (tail.k, tail.v))
    return caches.Delta(k=k, v=v, **one)


@dataclasses.dataclass(frozen=True)
class Call:
    """A valid call of `function`, and the kinds of the arguments that are replaced one by one.

    kinds: of the positional arguments, "-" for one that is not replaced.
    given: returns the positional arguments.
    named: the kinds of keyword arguments.
    options: keyword arguments of every call.
    """

    function: Callable[..., Any]
    kinds: str
    given: Callable[[Any], tuple[Any, ...]]
    named: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


ONE = {"max_new_tokens": 1}
BEAMS = {"num_beams": 2, **ONE}


def _model(m: Any) -> tuple[Any, ...]:
    return m[0], m[1]


def _text(m: Any) -> tuple[Any, ...]:
    return m[0], m[1], [[5]]


def _uncached(m: Any) -> tuple[Any, ...]:
    return m[0], m[1], None, [[5]]


# Steps and functions on top of them, of (model, params, cache).
STEPS: dict[str, Call] = {
    "forward": Call(
        jaxllm.forward, "model params cache? ids", _uncached,
        {"positions_BT": "ids?", "attention_mass": "names"},
    ),
    "decode_step": Call(jaxllm.decode_step, "model - cache token", lambda m: (*m, [5, 6])),
    "prefill": Call(
        jaxllm.prefill, "- params cache ids", lambda m: (*m, [[5], [6]]),
        {"lengths_B": "lengths", "chunk": "count?"},
    ),
    "init_cache": Call(
        jaxllm.init_cache, "model whole whole", lambda m: (m[0], 1, 8),
        {"dtype": "dtype", "place": "function"},
    ),
    "generate": Call(
        jaxllm.generate, "model params ids", _text,
        {
            "max_new_tokens": "whole", "sampler": "function", "seed": "seed", "cache": "cache?",
            "until": "function", "overflow": "function", "eos_token_ids": "token",
            "lengths_B": "lengths",
        },
        ONE,
    ),
    "stream": Call(jaxllm.stream, "- - ids", _text, {}, ONE),
    "beam_search": Call(
        jaxllm.beam_search, "model - ids", _text,
        {"num_beams": "whole", "max_new_tokens": "whole", "cache": "cache?", "sampler": "function"},
        BEAMS,
    ),
    "speculative_generate": Call(
        jaxllm.speculative_generate, "", _text, {"draft": "model"}, ONE
    ),
    "speculative_generate's draft": Call(
        lambda m, x: jaxllm.speculative_generate(*_text(m), draft=(m[0], x), **ONE),
        "- params", lambda m: (m, None),
    ),
    "PromptLookup": Call(jaxllm.PromptLookup, "", lambda m: (), {"ngram": "count"}),
    "serve": Call(
        jaxllm.serve, "model - list of requests", lambda m: (*_model(m), []), {"rows": "whole"}
    ),
    "sample": Call(
        jaxllm.sample, "seed number function",
        lambda m: (jax.random.key(0), jnp.zeros((1, 9)), jaxllm.GREEDY),
    ),
    "recompute": Call(jaxllm.recompute, "model - cache whole", lambda m: (*m, 0, 2)),
    "insert": Call(jaxllm.insert, "- - - whole ids", lambda m: (*m, 0, [[5], [6]])),
    "embeddings": Call(
        jaxllm.embeddings, "model - texts", _text, {"layer": "whole", "pooling": "name"}
    ),
    "activations": Call(jaxllm.activations, "model - cache? ids", _uncached),
    "perplexity": Call(jaxllm.perplexity, "model - loader", lambda m: (*_model(m), None)),
    "divergence": Call(
        jaxllm.divergence, "- - model - loader", lambda m: (*_model(m), *_model(m), None)
    ),
    "measure_sensitivity": Call(
        jaxllm.measure_sensitivity, "- - loader name", lambda m: (*_model(m), None, "int8")
    ),
    "loader": Call(loader, "documents", lambda m: (None,), {}, {"window": 4}),
    "FixedShapeRunner": Call(
        jaxllm.FixedShapeRunner, "model params whole", lambda m: (*_model(m), 4, 16),
        {"mask": "name", "mask_value": "number"},
    ),
    "build": Call(jaxllm.build, "model dtype", lambda m: (m[0].config, jaxllm.Precision())),
    "param_shapes": Call(jaxllm.param_shapes, "hashable model", lambda m: (m[0],)),
    "cast": Call(jaxllm.cast, "params dtype", lambda m: (m[1], jaxllm.Precision())),
    "quantize": Call(jaxllm.quantize, "params rules", lambda m: (m[1], "int8")),
    "dequantize": Call(jaxllm.dequantize, "params", lambda m: (m[1],)),
    "row_keys": Call(jaxllm.row_keys, "seed whole", lambda m: (0, 2)),
    "make_sampler": Call(
        jaxllm.make_sampler, "", lambda m: (),
        {"temperature": "number", "logits_processor": "function"},
    ),
}  # fmt: skip

CACHES: dict[str, Call] = {
    "tokens": Call(jaxllm.KVCache.tokens, "- row", lambda m: (m[2], 0)),
    "show": Call(jaxllm.KVCache.show, "- model", lambda m: (m[2], None)),
    "branch": Call(caches.branch, "cache row", lambda m: (m[2], 0)),
    "select": Call(caches.select, "cache rows", lambda m: (m[2], [0])),
    "fork": Call(
        caches.fork, "cache whole", lambda m: (caches.branch(m[2], 0), 2), {"capacity": "whole?"}
    ),
    "merge_rows": Call(caches.merge_rows, "caches", lambda m: ([m[2]],), {"capacity": "whole?"}),
    "rewind": Call(caches.rewind, "cache counts", lambda m: (m[2], 1)),
    "rewind to": Call(caches.rewind, "-", lambda m: (m[2],), {"to": "positions"}),
    "drop_range": Call(caches.drop_range, "- positions positions?", lambda m: (m[2], 0, 3)),
    "shift": Call(caches.shift, "- positions positions", lambda m: (m[2], 1, 0)),
    "keep": Call(caches.keep, "cache mask", lambda m: (m[2], [[True]])),
    "compact": Call(caches.compact, "cache", lambda m: (m[2],), {"capacity": "whole?"}),
    "close_gaps": Call(caches.close_gaps, "cache", lambda m: (m[2],)),
    "slot_order": Call(caches.slot_order, "cache", lambda m: (m[2],)),
    "find_slots": Call(caches.find_slots, "cache grid", lambda m: (m[2], [[0]])),
    "patch": Call(caches.patch, "- positions delta", lambda m: (m[2], [[0], [0]], _delta(m))),
    "commit": Call(caches.commit, "cache delta", lambda m: (m[2], _delta(m))),
    "sinks_and_window": Call(
        caches.sinks_and_window, "cache", lambda m: (m[2],), {"sinks": "whole", "window": "whole"},
        {"sinks": 1, "window": 2},
    ),
    "heavy_hitters": Call(
        caches.heavy_hitters, "- mass", lambda m: (m[2], np.zeros((2, 16))),
        {"heavy": "whole", "recent": "whole"}, {"heavy": 1, "recent": 1},
    ),
    "current_segment": Call(current_segment, "cache", lambda m: (m[2],)),
    "pool": Call(
        pool, "", lambda m: (m[2],), {"ratio": "whole", "mass_BS": "mass?"},
        {"ratio": 2, "sinks": 0, "recent": 0},
    ),
    "save_cache": Call(caches.save_cache, "path cache", lambda m: (Path("x"), m[2], m[0], m[1])),
    "load_cache": Call(
        caches.load_cache, "path", lambda m: ("nosuch", m[0], m[1]),
        {"capacity": "whole?", "prefix": "tokens?"},
    ),
    "fingerprint": Call(caches.fingerprint, "params", lambda m: (m[1],)),
}  # fmt: skip

LM = jaxllm.LM
LMS: dict[str, Call] = {
    "load": Call(
        jaxllm.load, "path", lambda m: ("demo:llama",),
        {
            "dtype": "dtype", "mesh": "mesh", "adapters": "adapters", "place": "function",
            "quantize": "rules",
        },
    ),
    "verify": Call(jaxllm.verify, "path", lambda m: ("demo:llama",)),
    "LM.generate": Call(LM.generate, "- prompt", lambda m: (m, [5])),
    "LM.stream": Call(LM.stream, "- prompt", lambda m: (m, [5])),
    "LM.encode": Call(LM.encode, "- prompt", lambda m: (m, [5])),
    "LM.decode": Call(LM.decode, "- tokens", lambda m: (m, [5])),
    "LM.log_probs": Call(LM.log_probs, "- prompt", lambda m: (m, [5])),
    "LM.embed": Call(
        LM.embed, "- texts", lambda m: (m, [[5]]),
        {"adapter": "name", "pooling": "name", "pool": "name"},
    ),
    "LM.classify": Call(LM.classify, "- texts", lambda m: (m, [[5]]), {"adapter": "name"}),
    "LM.rerank": Call(
        LM.rerank, "- texts texts", lambda m: (m, "a", ["b"]),
        {"adapter": "name", "method": "name", "template": "name", "answers": "name"},
    ),
    "LM.with_adapter": Call(LM.with_adapter, "- name", lambda m: (m, None)),
    "LM.init_cache": Call(LM.init_cache, "- whole whole?", lambda m: (m, 1, 8)),
    "LM.serve": Call(LM.serve, "- requests", lambda m: (m, []), {"rows": "whole"}),
    "LM.chat_prompt": Call(LM.chat_prompt, "- texts", lambda m: (m, None)),
    "LM.save": Call(LM.save, "- path", lambda m: (m, None)),
    "SelfExtend": Call(
        SelfExtend, "", lambda _: (),
        {"group_size": "whole", "neighbor_window": "whole"},
        {"group_size": 2, "neighbor_window": 8},
    ),
    "jobs.lora": Call(
        jobs.lora, "", lambda m: (m, LoraConfig(r=1)), {"seed": "seed", "start": "cache?"}
    ),
    "jobs.full_finetune": Call(jobs.full_finetune, "- dtype", lambda m: (m, None)),
    "adapters.init_adapter": Call(
        adapters.init_adapter, "", lambda m: (m.config, m.params, LoraConfig(r=1), None),
        {"dtype": "dtype"},
    ),
}  # fmt: skip


def unexpected_outcomes(call: Call, subject: Any) -> list[str]:
    """Return the invalid values that were accepted or raised an error of another library."""
    wrong = []
    kinds = re.findall(r"-|hashable model|list of requests|\S+", call.kinds)
    places: list[tuple[int | str, str]] = [*enumerate(kinds), *call.named.items()]
    for place, kind in places:
        for value in INVALID[kind] if kind != "-" else ():
            given, named = [*call.given(subject)], dict(call.options)
            if isinstance(place, int):
                given[place] = value
            else:
                named[place] = value
            try:
                found = call.function(*given, **named)
                if isinstance(found, Iterator):
                    next(found)
            except JaxllmError as error:
                if len(str(error)) < 10:
                    wrong.append(f"{place} {value!r}: no message: {error}")
            except Exception as error:
                wrong.append(f"{place} {value!r}: {type(error).__name__}: {error!s:.120}")
            else:
                wrong.append(f"{place} {value!r}: accepted")
    return wrong


@pytest.mark.parametrize("name", STEPS)
def test_steps_refuse_wrong_argument_types(tiny_model: Any, name: str) -> None:
    """Steps, decoding and evaluation raise a JaxllmError with a message for a wrong argument."""
    assert unexpected_outcomes(STEPS[name], tiny_model) == []


@pytest.mark.parametrize("name", CACHES)
def test_cache_functions_refuse_wrong_argument_types(tiny_model: Any, name: str) -> None:
    """Cache functions raise a JaxllmError with a message for any wrong argument."""
    assert unexpected_outcomes(CACHES[name], tiny_model) == []


@pytest.mark.parametrize("name", LMS)
def test_lm_methods_refuse_wrong_argument_types(lm: Any, name: str) -> None:
    """load, verify, LM methods and jobs raise JaxllmError with a message for a wrong argument."""
    assert unexpected_outcomes(LMS[name], lm) == []


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
    "messages of a chat": (
        lambda lm: lm.generate([{"role": "user", "content": "Hi"}]),
        r"lm.chat_prompt\(messages\)",
    ),
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
    """load's docstring names all families, signatures all options, dir() only public names."""
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
