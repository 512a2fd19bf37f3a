"""Every family on every mesh, in each kind of number: the same tokens, logits but for rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.weights.precision import Precision
from tests.mesh.made import FAMILIES, WIDE, largest_difference, one, spread
from tests.twins import tokens

pytestmark = [pytest.mark.full, pytest.mark.devices]

MESHES = ("tensor=2", "tensor=4", "tensor=8", "data=2,tensor=2", "data=2,tensor=4")
PRECISIONS = {
    "float32": (Precision(), 1e-5),
    "bfloat16": (Precision.uniform("bfloat16"), 0.03),  # 8 bits of a number, layer after layer
    "int8": (Precision(quantize="int8"), 1e-5),
    "int4": (Precision(quantize="int4-g32"), 1e-5),
}
LARGE: dict[str, Any] = {"head_dim": 32, "intermediate_size": 256, "hidden_size": 64}
SQUARE = {"intermediate_size": 256, "hidden_size": 256}
SIZES: dict[str, dict[str, Any]] = {  # of which every share is of whole groups of 32
    **dict.fromkeys(FAMILIES, SQUARE),
    **dict.fromkeys(("llama", "qwen3", "gemma2", "gemma3_text"), LARGE),
    "gpt2": WIDE["gpt2"],
    "qwen3_moe": {**SQUARE, "moe_intermediate_size": 256},
    "phi3": {"intermediate_size": 256},  # whose heads are of six numbers
}
CUT = {("phi3", "int4")}  # 6 numbers a head: groups of 32 are cut


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_forward(family: str, precision: str) -> None:
    if (family, precision) in CUT:
        pytest.skip("its heads cut groups")
    chosen, close = PRECISIONS[precision]
    model, params = one(family, chosen, **SIZES[family])
    ids = tokens(2, 9)
    whole = jaxllm.forward(model, params, None, ids, hidden_states=True, attention_mass=True)
    for mesh in MESHES:
        over, shares = spread(model, params, mesh)
        found = jaxllm.forward(over, shares, None, ids, hidden_states=True, attention_mass=True)
        assert largest_difference(found.logits, whole.logits) < close, mesh
        assert largest_difference(found.attention_mass, whole.attention_mass) < close, mesh
        assert largest_difference(found.hidden_states[1], whole.hidden_states[1]) < close, mesh


def greedy(model: Any, params: Any) -> Any:
    return jaxllm.generate(model, params, tokens(2, 5), max_new_tokens=8).token_BT


def sampled(model: Any, params: Any) -> Any:
    sampler = jaxllm.make_sampler(temperature=0.9, top_p=0.9)
    options: Any = {"max_new_tokens": 8, "sampler": sampler, "seed": 3}
    return jaxllm.generate(model, params, tokens(2, 5), **options).token_BT


def beams(model: Any, params: Any) -> Any:
    return jaxllm.beam_search(model, params, tokens(2, 5), num_beams=3, max_new_tokens=6).token_BNT


def speculated(model: Any, params: Any) -> Any:
    draft = one("llama", vocab_size=model.config.vocab_size)  # on one device, as drafts may be
    return jaxllm.speculative_generate(
        model, params, tokens(2, 5), draft=draft, max_new_tokens=8
    ).token_BT


def served(model: Any, params: Any) -> Any:
    asked = [
        jaxllm.Request(id=i, prompt=tokens(1, 3 + i)[0], max_new_tokens=6, seed=i) for i in range(3)
    ]
    events = [*jaxllm.serve(model, params, asked, rows=2, capacity=16)]
    return [[e.token for e in events if e.id == i] for i in range(3)]


WAYS = (greedy, sampled, beams, speculated, served)


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_decoding(family: str, way: Callable[..., Any], precision: str) -> None:
    if (family, precision) in CUT:
        pytest.skip("its heads cut groups")
    if way is speculated and family in ("phi3",):
        pytest.skip("its angles change with the text's length")
    chosen, _ = PRECISIONS[precision]
    model, params = one(family, chosen, **SIZES[family])
    whole = np.asarray(way(model, params))
    for mesh in MESHES:
        np.testing.assert_array_equal(np.asarray(way(*spread(model, params, mesh))), whole, mesh)
