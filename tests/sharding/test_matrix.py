"""Every family on every mesh and precision: equal tokens, and logits equal up to rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.weights.precision import Precision
from tests.sharding import matrix
from tests.sharding.made import FAMILIES, largest_difference, make_model, shard_model
from tests.twins import tokens

pytestmark = [pytest.mark.full, pytest.mark.devices]

MESHES = ("tensor=2", "data=2,tensor=4")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", matrix.PRECISIONS)
@pytest.mark.parametrize("mesh", matrix.MESHES)
def test_a_model_on_a_mesh_is_that_of_one_device(family: str, precision: str, mesh: str) -> None:
    """`docs/mesh_matrix.md` has a table of these cells, written once."""
    if why := matrix.left_out(family, mesh, precision):
        pytest.skip(why)
    found = matrix.cell(family, mesh, precision)
    assert found.logits < matrix.CLOSE
    assert found.trained < matrix.TRAINED
    assert (found.generated, found.sampled, found.served) == (True, True, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward(family: str) -> None:
    """In bfloat16, too, of which a number has 8 bits; and what is inside of a step."""
    for precision, close in ((Precision(), 1e-5), (Precision.uniform("bfloat16"), 0.03)):
        model, params = make_model(family, precision, **matrix.SIZES[family])
        ids, options = tokens(2, 9), {"hidden_states": True, "attention_mass": True}
        whole = jaxllm.forward(model, params, None, ids, **options)
        for mesh in MESHES:
            found = jaxllm.forward(*shard_model(model, params, mesh), None, ids, **options)
            for name in ("logits", "attention_mass"):
                mine, theirs = getattr(found, name), getattr(whole, name)
                assert largest_difference(mine, theirs) < close, (mesh, name)
            assert found.hidden_states is not None and whole.hidden_states is not None
            assert largest_difference(found.hidden_states[1], whole.hidden_states[1]) < close, mesh


def beams(model: Any, params: Any) -> Any:
    return jaxllm.beam_search(model, params, tokens(2, 5), num_beams=3, max_new_tokens=6).token_BNT


def speculated(model: Any, params: Any) -> Any:
    draft = make_model("llama", vocab_size=model.config.vocab_size)  # drafts may stay on one device
    return jaxllm.speculative_generate(
        model, params, tokens(2, 5), draft=draft, max_new_tokens=8
    ).token_BT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", (beams, speculated), ids=lambda way: way.__name__)
def test_other_ways_to_decode(family: str, way: Callable[..., Any]) -> None:
    if way is speculated and family == "phi3":
        pytest.skip("LongRoPE angles change with the text length")
    model, params = make_model(family, **matrix.SIZES[family])
    whole = np.asarray(way(model, params))
    for mesh in MESHES:
        np.testing.assert_array_equal(
            np.asarray(way(*shard_model(model, params, mesh))), whole, mesh
        )
