"""The script's bytes are those of the arrays."""

from pathlib import Path

import fsdp_memory
import jax
import pytest

import jaxllm


@pytest.mark.full
def test_a_device_keeps_its_part_alone(shallow_demos: Path) -> None:
    kept, took, part_kept, part_took = fsdp_memory.measured(
        str(shallow_demos / "gpt2"), "data=4", 4, 8
    )
    params = jaxllm.load(shallow_demos / "gpt2", dtype="float32").params
    matrices = sum(x.nbytes for x in jax.tree.leaves(params) if x.ndim > 1)
    vectors = sum(x.nbytes for x in jax.tree.leaves(params) if x.ndim == 1)
    assert kept == 3 * (matrices + vectors) + 3 * 4  # and three counters
    assert part_kept == 3 * (matrices // 4 + vectors) + 3 * 4
    assert part_took < took
