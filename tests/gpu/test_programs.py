"""What compiled programs consist of: lowered for CUDA anywhere, and compiled for an H100 where the
wheels of `jaxllm[gpu-check]` and a description of the card are (`make test-gpu-programs`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm.evaluate import bench
from jaxllm.models.compiled_steps import PREFILL
from jaxllm.models.sites import NO_EDITS
from jaxllm.ops import cuda
from jaxllm.ops.target import trace_for
from scripts.tools import gpu_programs as gpu
from tests.tiny_models import random_model

compiles = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))


@pytest.fixture
def card() -> Iterator[None]:
    with trace_for("cuda"):
        yield


def test_lowered_steps_have_no_loop_over_slots() -> None:
    """For a GPU, a step over 4,096 slots is a step over all of them: the loop of steps is the only
    one, and a prompt's pass has none.
    """
    model, params = random_model("llama", max_position_embeddings=8192)
    cache = jax.eval_shape(lambda: jaxllm.init_cache(model, 2, 4096))
    token_SB = jax.ShapeDtypeStruct((8, 2), jnp.int32)
    token_BT, length_B = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((2, 64), (2,)))
    passed: Any = (model, params, token_BT, token_BT, length_B, NO_EDITS, False, ())

    def count() -> list[int]:
        loop = bench.decode_given._plain.trace(model, params, cache, token_SB)
        once = PREFILL._jit._plain.trace(cache, (), *passed)
        texts = (x.lower(lowering_platforms=("cuda",)).as_text() for x in (loop, once))
        return [text.count("stablehlo.while") for text in texts]

    assert count() == [2, 1]  # blocks of 256 slots, on a CPU without kernels
    with trace_for("rocm"):
        assert count() == [1, 0]


@compiles
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("rows", "slots"), [(1, 8320), (64, 2176)])
def test_decode_step_is_one_loop_of_few_kernels(
    card: None, rows: int, slots: int, packed: bool
) -> None:
    """Two layers in at most 64 kernels, nothing conditional, and no copy of a cache."""
    made = gpu.decode(rows, slots, packed)
    assert len(made.loops) == 1 and made.conditionals == 0
    assert len(made.step) <= (52 if packed else 64)
    assert made.count("cudnn") == (2 if packed else 0)
    one_layer = rows * slots * 4 * 64 * 2
    copies = [x for x in made.step if x.kind in ("copy", "transpose") and x.nbytes >= one_layer]
    assert copies == []
    if packed:  # the loop's own cache, of which the caller keeps the first
        assert made.temporary < 4.2 * one_layer + 60e6


@compiles
@pytest.mark.parametrize(
    ("fmt", "rows"),
    [(fmt, rows) for fmt in ("int8", "int4-g64-f16") for rows in (1, 8, 64)]
    + [("int4-g32-zp", 8), ("int8-g32-f16", 8)],
)
def test_integer_weights_are_not_written_out(card: None, fmt: str, rows: int) -> None:
    """No array of a step is as large as a layer's smallest weight in bfloat16, `[2048, 2048]`."""
    if "-g" in fmt and rows > 1 and jax.__version_info__ < (0, 11):
        pytest.skip("XLA fuses groups of integers from jax 0.11 on")
    made = gpu.decode(rows, 256, fmt=fmt)
    written = [x for x in made.step if x.nbytes >= 2048 * 2048 * 2 and "256,4,64" not in x.form]
    activations = rows * 32000 * 4
    assert [x.form for x in written if x.nbytes > activations] == []


@compiles
@pytest.mark.parametrize(("fmt", "rows"), [("bfloat16", 1), ("int8", 8), ("int4-g64-f16", 8)])
def test_step_with_kernels_has_fewer_launches(
    card: None, monkeypatch: pytest.MonkeyPatch, fmt: str, rows: int
) -> None:
    """Two layers and the head are nine launches, and at most 27 other kernels; of 42 to 56
    without. No cache is copied.
    """
    monkeypatch.setenv(cuda.ENV, "1")
    made = gpu.decode(rows, 256, fmt=fmt)
    assert made.count(cuda.TARGET) == 9 and len(made.step) <= 36
    one_layer = rows * 256 * 4 * 64 * 2
    copies = [x for x in made.step if x.kind in ("copy", "transpose") and x.nbytes >= one_layer]
    assert copies == [] and made.temporary < 10e6


@compiles
def test_launches_are_captured(tmp_path: Path) -> None:
    """All launches of a step are in the graph that the loop's body is."""
    code = """if True:
        from jaxllm.ops.target import trace_for
        from scripts.tools import gpu_programs
        with trace_for("cuda"):
            gpu_programs.decode(1, 256)
    """
    flags = {"XLA_FLAGS": f"--xla_dump_to={tmp_path}", cuda.ENV: "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | flags)
    [file] = tmp_path.glob("*decode_given.thunk_sequence_after_thunk_passes.txt")
    text = file.read_text(encoding="utf-8")
    body = text[text.index("body:") :]
    before, _, graph = body.partition("kCommandBuffer")
    assert "kCustomCall" not in before and graph.count("kCustomCall ") == 9


@compiles
def test_prompt_has_no_scores(card: None) -> None:
    """2,048 tokens after 16,384: two calls of cuDNN a layer, and nothing as large as scores."""
    made = gpu.prompt(2048, 16512)
    assert made.count("cudnn") == 4 and made.loops == [] and made.temporary < 200e6


@compiles
@pytest.mark.parametrize("packed", [True, False])
def test_training_has_no_scores(card: None, packed: bool) -> None:
    """4 x 4,096 tokens: the scores of one layer would be 8.6 GB in float32."""
    made = gpu.train(4, 4096, packed)
    assert made.temporary < 4e9
    assert made.count("cudnn") == (4 if packed else 0)
    assert all(x.nbytes < 1e9 for step in made.computations.values() for x in step)


@compiles
def test_checkpointing_keeps_attention(card: None) -> None:
    """With gradient checkpointing attention of two layers runs twice forward and twice backward."""
    made = gpu.train(4, 1024, True, remat=True)
    assert made.count("cudnn") == 4 and made.temporary < 1.2e9


@pytest.mark.skipif(gpu.missing("tpu") is not None, reason=str(gpu.missing("tpu")))
def test_steps_compile_for_a_tpu() -> None:
    """The loop of steps is the only one, and int8 weights are not written out."""
    with trace_for("tpu"):
        made = gpu.decode(8, 256, fmt="int8")
    assert len(made.loops) == 1 and made.conditionals == 0 and made.temporary < 10e6
