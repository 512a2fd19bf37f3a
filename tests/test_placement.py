"""The `place` function: shard parameters and caches by path, on two simulated CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import jaxllm
from jaxllm.compress.layerwise import LayerInputs, map_layers
from jaxllm.weights.paths import Params
from tests.tiny_models import save_random, tokens

CODE = """
import sys, jax, numpy as np, jaxllm
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
assert len(jax.devices()) == 2

def place(path, x):
    if path.endswith("weight") and x.ndim == 2 and x.shape[0] % 2 == 0:
        return NamedSharding(mesh, P("x", None))
    if path.startswith(("tail.k.", "tail.v.")):
        return NamedSharding(mesh, P(None, None, "x", None))
    return NamedSharding(mesh, P())

lm = jaxllm.load(sys.argv[1], dtype="float32", place=place)
q = lm.params["layers.0"]["self_attn"]["q_proj"]["weight"]
assert q.addressable_shards[0].data.shape[0] * 2 == q.shape[0]
cache = jaxllm.init_cache(lm.model, 1, 16, place=place)
assert cache.tail.k[0].addressable_shards[0].data.shape[2] * 2 == cache.tail.k[0].shape[2]
ids = np.load(sys.argv[2])
logits, cache = jaxllm.prefill(lm.model, lm.params, cache, ids)
logits, cache = jaxllm.decode_step(lm.model, lm.params, cache, np.array([7]))
np.save(sys.argv[3], np.asarray(logits))

from jaxllm.compress.layerwise import map_layers
seen = []

def look(stage):
    seen.append(stage.x_NTD)
    return stage.params

map_layers(lm.model, lm.params, ids, look, name="", show_progress=False)
np.save(sys.argv[4], np.stack(seen))
"""


FILES = ("m", "ids.npy", "out.npy", "seen.npy")


def test_place_on_two_devices_equals_one_device(tmp_path: Path) -> None:
    """With parameters and cache sharded by `place` over two devices, logits and layer inputs equal
    a single device.
    """
    save_random(tmp_path / "m", "llama")
    ids = tokens(1, 9)
    np.save(tmp_path / "ids.npy", ids)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", CODE, *(str(tmp_path / n) for n in FILES)],
        env={**os.environ, "XLA_FLAGS": flags, "JAXLLM_NATIVE": "0"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lm = jaxllm.load(tmp_path / "m", dtype="float32")
    cache = jaxllm.prefill(lm.model, lm.params, lm.init_cache(1, 16), ids).cache
    expected, _ = jaxllm.decode_step(lm.model, lm.params, cache, np.array([7]))
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, float(np.abs(expected).max())))

    seen: list[np.ndarray] = []

    def look(stage: LayerInputs) -> Params:
        seen.append(stage.x_NTD)
        return stage.params

    map_layers(lm.model, lm.params, ids, look, name="", show_progress=False)
    np.testing.assert_allclose(np.load(tmp_path / "seen.npy"), np.stack(seen), atol=1e-4)


def test_place_receives_every_array_path(tmp_path: Path) -> None:
    """`place` is called with the path of every array of a quantized model and of an int8 cache."""
    save_random(tmp_path, "gpt2", n_layer=1)
    placed: dict[str, tuple[int, ...]] = {}

    def place(path: str, x: jax.Array) -> None:
        placed[path] = x.shape

    lm = jaxllm.load(tmp_path, quantize="int4", place=place)
    assert {"h.0.mlp.c_fc.weight.data", "h.0.mlp.c_fc.weight.scale", "ln_f.bias"} <= set(placed)
    assert len(placed) == len(jax.tree.leaves(lm.params))
    placed.clear()
    jaxllm.init_cache(lm.model, 2, 8, dtype="int8", place=place)
    assert {"tail.k.0.value", "tail.k.0.scale", "tail.position_BS", "cursor"} <= set(placed)
