"""TinyLlama-1.1B and GPT-2-124M at full size, each in a separate process: `make test-full`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.full

MEASURE = """
import json, sys
def peak(): return next(
    int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
import jax, jaxllm
jax.numpy.zeros(1).block_until_ready()
base = peak()
lm = jaxllm.load(sys.argv[1], dtype=sys.argv[2])
loaded = peak()
pieces = [*lm.stream([1, 5, 9, 100, 2000], max_new_tokens=16)]
print(json.dumps({
    "base_bytes": base, "load_peak_bytes": loaded, "peak_bytes": peak(),
    "tokens": [p.token for p in pieces]}))
"""


CACHE = """
import json, statistics, sys, time
import jax, jaxllm, numpy as np
from jaxllm.cache import fingerprint, fork, load_cache, save_cache
def resident(): return next(
    int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmRSS"))
def median_ms(step, n=15):
    times = []
    for i in range(n + 2):
        start = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[2:])
lm = jaxllm.load(sys.argv[1])
model, params = lm.model, lm.params
ids = np.random.default_rng(0).integers(0, 32000, (1, 1024))
def filled(tokens, capacity, dtype="bfloat16"):
    empty = jaxllm.init_cache(lm.config, 1, capacity, dtype=dtype)
    return jaxllm.prefill(model, params, empty, ids[:, :tokens]).cache
report = {}
for dtype in ("bfloat16", "int8"):
    cache = filled(1024, 1088, dtype)
    report[f"{dtype}_bytes"] = cache.nbytes
    report[f"{dtype}_peek_ms"] = median_ms(
        lambda: jaxllm.forward(model, params, cache, [[5]]).logits)
    report[f"{dtype}_peek_with_mass_ms"] = median_ms(
        lambda: jaxllm.forward(model, params, cache, [[5]], attention_mass=True).attention_mass)
    report[f"{dtype}_decode_step_ms"] = median_ms(
        lambda: jaxllm.decode_step(model, params, cache, [5]))
    def donated():
        global cache
        logits, cache = jaxllm.decode_step(model, params, cache, [5], donate=True)
        return logits
    report[f"{dtype}_decode_step_donated_ms"] = median_ms(donated)
cache = None
prefix = filled(1000, 1000)
jax.block_until_ready(fork(prefix, 64, capacity=1).tail)
before = resident()
forks = jax.block_until_ready(fork(prefix, 64, capacity=16))
report["fork_resident_bytes"] = resident() - before
report["fork_bytes"], report["prefix_bytes"] = forks.nbytes, prefix.nbytes
forks = jax.block_until_ready(
    jaxllm.decode_step(model, params, forks, np.arange(64), donate=True)).cache
report["step_of_64_resident_bytes"] = resident() - before
report["step_of_64_ms"] = median_ms(
    lambda: jaxllm.decode_step(model, params, forks, np.arange(64)).logits, 5)
start = time.perf_counter()
fingerprint(params)
report["fingerprint_s"] = time.perf_counter() - start
start = time.perf_counter()
save_cache(sys.argv[2], prefix, model, params)
report["save_s"] = time.perf_counter() - start
start = time.perf_counter()
again = load_cache(sys.argv[2], model, params)
report["load_s"] = time.perf_counter() - start
assert all((np.asarray(a) == np.asarray(b)).all()
           for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(prefix)))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def tinyllama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("full") / "tinyllama"
    make(directory, "tinyllama", "bfloat16")
    return directory


def make(directory: Path, shape: str, dtype: str) -> None:
    script = ROOT / "scripts" / "tools" / "make_checkpoint.py"
    command = [sys.executable, str(script), shape, str(directory), "--dtype", dtype]
    subprocess.run(command, check=True)


def measure(directory: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURE, str(directory), dtype]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    report: dict[str, float] = json.loads(out)
    figures = {k: round(v, 3) for k, v in report.items() if k != "tokens"}
    print(directory.name, dtype, json.dumps(figures))
    return report


@pytest.mark.parametrize("form", ["hf", "native"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tinyllama_loads_within_memory_and_generates(
    tinyllama: Path, dtype: str, form: str, tmp_path: Path
) -> None:
    """Loading TinyLlama takes at most 1.3 times the bytes of its weights (bfloat16: 2.2 GB), and 16
    tokens are generated.
    """
    directory = tinyllama
    if form == "native":
        directory = tmp_path / "native"
        subprocess.run(
            [sys.executable, "-m", "convert", str(tinyllama), str(directory)], check=True, cwd=ROOT
        )
    report = measure(directory, dtype)
    assert len(report["tokens"]) == 16  # type: ignore[arg-type]
    size = 2_200_096_768 * (2 if dtype == "float32" else 1)
    assert report["load_peak_bytes"] - report["base_bytes"] <= 1.3 * size


def test_gpt2_loads_and_generates(tmp_path: Path) -> None:
    make(tmp_path / "gpt2", "gpt2", "float32")
    assert len(measure(tmp_path / "gpt2", "float32")["tokens"]) == 16  # type: ignore[arg-type]


def test_forks_cost_under_five_percent_of_copies(tinyllama: Path, tmp_path: Path) -> None:
    """64 forks of a 1000-token prefix take less than 5 percent of the memory of 64 copies, by size
    and by resident memory.
    """
    command = [sys.executable, "-c", CACHE, str(tinyllama), str(tmp_path / "cache")]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    report = json.loads(out)
    print(json.dumps({k: round(v, 3) for k, v in report.items()}))
    copies = 64 * report["prefix_bytes"]
    assert report["fork_bytes"] < 0.05 * copies
    assert report["fork_resident_bytes"] < 0.05 * copies


def test_tinyllama_logits_equal_transformers(tinyllama: Path) -> None:
    """All 22 layers in float32. The models run one after the other, so that two copies of 4.4 GB
    are never alive at once.
    """
    import jax
    import torch
    import transformers

    import jaxllm

    ids = np.random.default_rng(0).integers(0, 32000, (1, 48))
    model = transformers.AutoModelForCausalLM.from_pretrained(tinyllama, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    del model
    lm = jaxllm.load(tinyllama, dtype="float32")
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(jaxllm.forward(lm.model, lm.params, None, ids).logits)
    error = np.abs(ours - theirs).max()
    print(f"max abs error {error:.2e} of logits up to {np.abs(theirs).max():.2f}")
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * scale, rtol=1e-4)
