"""A text has the same bits on a mesh however it is run, and those of one device."""

from collections.abc import Callable
from pathlib import Path

import pytest

import jaxllm
from jaxllm.evaluate.invariance import check_invariance
from jaxllm.ops import native

pytestmark = [
    pytest.mark.devices,
    pytest.mark.skipif(not native.is_enabled(), reason="no native kernels"),
]


@pytest.mark.more
@pytest.mark.parametrize(
    ("mesh", "exact"),
    [
        ("data=2,stage=2,tensor=2", True),
        pytest.param("stage=2", False, marks=pytest.mark.full),
    ],
)
def test_mesh_keeps_the_bits_of_one_device(
    mesh: str, exact: bool, shallow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `invariant`, batches, chunks, caches and `serve` on a mesh give one device's bits, also
    where the table of paths would never take the kernels.
    """
    row = {"rows": 0, "fallback": "xla"}
    names = [f"{kind.name.lower()} {x}" for kind in native.Kind for x in ("float32", "bfloat16")]
    table = {str(native.isa()): dict.fromkeys(names, row)}
    monkeypatch.setattr(native, "_kernel_paths", lambda: table)
    lm = jaxllm.load(shallow("llama"), dtype="bfloat16", mesh=mesh, exact=exact, invariant=True)
    report = check_invariance(lm, length=40, new_tokens=8, show=lambda _: None)
    assert {"one device", "one of 4 prompts"} <= {x.way for x in report.comparisons}
    assert report.holds, report.comparisons
