"""Every family on every mesh and precision: equal tokens, and logits equal up to rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxllm
from tests.sharding import mesh_matrix
from tests.sharding.tiny_models import FAMILIES, make_model, shard_model
from tests.tiny_models import tokens

pytestmark = [pytest.mark.full, pytest.mark.devices]

MESHES = ("tensor=2", "data=2,tensor=4")


def _cells() -> list[tuple[str, str, str]]:
    """Return each family on each mesh in one precision in turn, so that each of these pairs is
    there, and one family in all.
    """
    cells, precisions = [], list(mesh_matrix.PRECISIONS)
    for i, family in enumerate(FAMILIES):
        for j, mesh in enumerate(mesh_matrix.MESHES):
            some = precisions if family == "llama" else [precisions[(i + j) % len(precisions)]]
            cells += [(family, precision, mesh) for precision in some]
    return cells


@pytest.mark.parametrize(("family", "precision", "mesh"), _cells())
def test_mesh_matrix_cell_equals_single_device(family: str, precision: str, mesh: str) -> None:
    """Logits and a train step are within rounding, and tokens are equal (cells of
    docs/mesh_matrix.md).
    """
    if family == "phi3" and precision == "int4":
        pytest.skip("head dim 6 splits groups of 32")
    mesh_matrix.check_cell(family, mesh, precision)


def beams(model: Any, params: Any) -> Any:
    return jaxllm.beam_search(model, params, tokens(2, 5), num_beams=3, max_new_tokens=6).token_BNT


def speculated(model: Any, params: Any) -> Any:
    draft = make_model("llama", vocab_size=model.config.vocab_size)  # drafts may stay on one device
    return jaxllm.speculative_generate(
        model, params, tokens(2, 5), draft=draft, max_new_tokens=8
    ).token_BT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", (beams, speculated), ids=lambda way: way.__name__)
def test_beam_and_speculative_decoding_equal_single_device(
    family: str, way: Callable[..., Any]
) -> None:
    if way is speculated and family == "phi3":
        pytest.skip("LongRoPE angles change with the text length")
    model, params = make_model(family, **mesh_matrix.SIZES[family])
    whole = np.asarray(way(model, params))
    for mesh in MESHES:
        np.testing.assert_array_equal(
            np.asarray(way(*shard_model(model, params, mesh))), whole, mesh
        )
