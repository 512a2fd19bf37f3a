"""A row's bits depend on its own text alone (`Precision.invariant`), with the native kernels.

Whatever else runs with it, and however it is cut into steps: every way of running a text gives the
same logits as one `forward` of all of it, to the last bit.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.evaluate import invariance
from jaxllm.evaluate.invariance import check_invariance
from jaxllm.generation.loops.joined_pass import can_join, pack_joined, run_joined
from jaxllm.generation.loops.microbatch import TokenRun, pack_microbatch, run_microbatch
from jaxllm.models import FAMILIES
from jaxllm.models.invariance import has_invariant_rows, make_invariant
from jaxllm.ops import native
from jaxllm.weights.precision import Precision, cast
from jaxllm.weights.quantize import quantize
from tests.tiny_models import INVARIANT, RECURRENT, cut_demo, marks_of, random_model, tokens

pytestmark = pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")
LENGTH = 61


# Each family in one format, and each format in several families.
# GPT-NeoX's exact GELU has no promise: XLA's erf has other bits for other numbers of rows. Nor have
# recurrent layers.
FORMATS = (("bfloat16", None), ("float32", None), ("bfloat16", "int8"))
EACH = [
    pytest.param(f, *FORMATS[i % 3], marks=marks_of(f, "mixtral"))
    for i, f in enumerate(f for f in FAMILIES if f not in ("gpt_neox", *RECURRENT))
]


@pytest.mark.parametrize(("family", "dtype", "weights"), EACH)
def test_every_way_of_running_a_text_has_the_same_bits(
    family: str, dtype: str, weights: str | None
) -> None:
    precision = Precision.uniform(dtype)
    model, params = random_model(family, precision=precision, **INVARIANT.get(family, {}))
    params = cast(params, precision)
    params = params if weights is None else quantize(params, weights)
    model = make_invariant(model)
    ids = tokens(1, LENGTH)
    whole = np.asarray(jaxllm.forward(model, params, None, ids).logits)[0]
    if dtype == "bfloat16" and weights is None:
        assert has_invariant_rows(model, params)
    for name, found in ways(model, params, ids):
        at = [i for i, row in found.items() if row.tobytes() != whole[i].tobytes()]
        assert not at, (name, at, max(np.abs(found[i] - whole[i]).max() for i in at))


@pytest.mark.more
@pytest.mark.parametrize("isa", list(native.INSTRUCTION_SETS))
def test_one_kernel_for_any_rows_needs_no_invariant_mode(isa: str) -> None:
    """Where a set's own paths are one kernel, `has_invariant_rows` says so, and the bits agree."""
    if isa not in native.available_isas():
        pytest.skip(f"no {isa}")
    precision = Precision.uniform("bfloat16")
    model, params = random_model("llama", precision=precision, num_hidden_layers=1)
    params = cast(params, precision)
    before = native.isa()
    try:
        native.isa(isa)
        kinds = [native.kernel_path(native.Kind.BFLOAT16, "bfloat16")]
        assert has_invariant_rows(model, params) == all(p.takes_any_rows for p in kinds)
        if has_invariant_rows(model, params):
            whole = np.asarray(jaxllm.forward(model, params, None, tokens(1, 61)).logits)
            for name, found in ways(model, params, tokens(1, 61)):
                for at, row in found.items():
                    assert row.tobytes() == whole[0, at].tobytes(), (name, at)
    finally:
        native.isa(before)
        jax.clear_caches()


def ways(model: Any, params: Any, ids: np.ndarray) -> Any:
    """Yield ways of running the text: a name, and the logits by place."""
    T = ids.shape[1]
    for chunk, capacity in ((1, 512), (7, 61), (16, 512), (40, 61)):
        cache = jaxllm.init_cache(model, 1, capacity)
        logits, cache = jaxllm.prefill(model, params, cache, ids[:, : T - 3], chunk=chunk)
        found = {T - 4: np.asarray(logits[0])}
        for at in range(T - 3, T):
            logits, cache = jaxllm.decode_step(model, params, cache, ids[:, at])
            found[at] = np.asarray(logits[0])
        yield f"chunks of {chunk}, capacity {capacity}", found
    for rows, left in ((3, True), (9, False), (20, True)):
        others = tokens(rows, 75, seed=rows)
        lengths = np.arange(rows) * 7 % 60 + 10
        lengths[rows // 2] = T
        positions = np.full((rows, 75), -1)
        for r, n in enumerate(lengths):
            at = slice(75 - n, 75) if left else slice(0, n)
            positions[r, at] = np.arange(n)
            if r == rows // 2:
                others[r, at] = ids[0]
        cache = jaxllm.init_cache(model, rows, 80)
        logits, cache = jaxllm.prefill(
            model, params, cache, others, positions_BT=positions, chunk=32
        )
        yield (
            f"row of {rows}, padding on the {'left' if left else 'right'}",
            {T - 1: np.asarray(logits[rows // 2])},
        )
    if has_invariant_rows(model, params):
        part, single = run_beside(model, params, ids[0])
        yield "a part of a prompt beside rows that decode", {T - 1: part}
        yield "a row that decodes beside a part of a prompt", {T - 1: single}


def run_beside(model: Any, params: Any, text_T: np.ndarray) -> list[np.ndarray]:
    """Return the logits of a text's last token in one pass for two rows that have the text: its
    last 21 tokens in row 4, and its last token alone in row 1, beside another row in row 3.
    """
    T, other_T = text_T.size, tokens(1, 30, seed=5)[0]
    texts = {1: (text_T, T - 1), 3: (other_T, 29), 4: (text_T, T - 21)}
    cache = jaxllm.init_cache(model, 6, 80)
    for row, (text, ran) in texts.items():
        places, _ = pack_microbatch([run_of(row, text, 0, ran)], 6, invariant_rows=True)
        cache = run_microbatch(model, params, cache, places)[1]
    groups = [[run_of(4, *texts[4])], [run_of(row, *texts[row]) for row in (1, 3)]]
    assert can_join(groups)
    packed = pack_joined(groups, 6)
    logits, cache = run_joined(model, params, cache, [places for places, _ in packed])
    position_BS = np.asarray(cache.tail.position_BS)
    for row, (text, _) in texts.items():
        assert position_BS[row].tolist() == [*range(text.size), *[-1] * (80 - text.size)]
    return [np.asarray(x[at[0], 0]) for x, (_, at) in zip(logits, packed, strict=True)]


def run_of(row: int, text_T: np.ndarray, start: int, end: int | None = None) -> TokenRun:
    """Return the run of some tokens of a text in a cache row."""
    at_T = np.arange(text_T.size)[start:end]
    last_T = at_T == text_T.size - 1
    return TokenRun((row,), at_T, text_T[at_T], at_T, at_T, last_T, text_T.size)


@pytest.mark.more
@pytest.mark.parametrize(
    ("demo", "quantize"),
    [("llama", None), pytest.param("gpt2", "int4", marks=pytest.mark.full)],
)
def test_report_finds_no_difference_on_demos(
    tmp_path: Path, demo: str, quantize: str | None
) -> None:
    """Batches, chunks, caches, speculation, `serve`, grammars and another process give a text the
    same bits with a demo's first layer.
    """
    path = cut_demo(demo, tmp_path, layers=1)
    load = partial(jaxllm.load, path, dtype="bfloat16", quantize=quantize, invariant=True)
    others = load if quantize is None else None
    report = check_invariance(load(), show=lambda _: None, load=others)
    assert ("scored by another process" in {x.way for x in report.comparisons}) == bool(others)
    assert report.promised
    assert report.holds, report.comparisons


@pytest.mark.more
def test_report_names_first_stage_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels, the report does not promise equal bits, and names where they differ."""
    for texts in ("_compare_texts", "_compare_grammars"):
        monkeypatch.setattr(invariance, texts, lambda *_: ())
    lm = jaxllm.load(cut_demo("llama", tmp_path, layers=1))
    with native.disable_kernels():
        report = check_invariance(lm, length=40, new_tokens=4, show=lambda _: None)
    assert not report.promised
    assert not report.holds
    stages = {x.way: x.stage for x in report.comparisons}
    assert stages["chunks of 1"].startswith("blocks.")
    assert not stages["compiled anew"]


DIGEST = """
import hashlib, sys
import numpy as np
import jaxllm
lm = jaxllm.load(sys.argv[1], dtype="bfloat16", quantize="int4", invariant=True)
ids = np.random.default_rng(0).integers(3, lm.config.vocab_size, (3, 80))
out = jaxllm.forward(lm.model, lm.params, None, ids, read=["blocks.*.resid_post"])
drawn = lm.generate(ids[0].tolist(), max_new_tokens=16, temperature=1.0, top_p=0.95, seed=7)
arrays = b"".join(np.asarray(x).tobytes() for x in (*out.sites.values(), out.logits))
print(hashlib.sha256(arrays + repr((drawn.tokens, drawn.logprobs)).encode()).hexdigest())
"""


@pytest.mark.more
def test_number_of_threads_changes_no_bits(shallow: Any) -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST, shallow("llama")],
            env={**os.environ, "JAXLLM_THREADS": threads},
            check=True, capture_output=True, text=True,
        ).stdout
        for threads in ("1", "3")
    }  # fmt: skip
    assert len(digests) == 1
