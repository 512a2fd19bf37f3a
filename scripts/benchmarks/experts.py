"""Decoding speed of a mixture of experts compared with a dense model of equal active size.

    python scripts/benchmarks/experts.py [--format int8] [--layers 3] [--experts 8] [--per-token 2]

One decision: layers have Mixtral's size (4096 x 14336) and the vocabulary is small, so the layers
dominate the time. Weights are random, so no file is needed. The dense model's MLP is as wide as a
token's experts together. Rounds of the two alternate, so that background load affects both. The
report has medians and the bytes that a token reads. The goal is 0.9 of the dense model's speed.
Example: python scripts/benchmarks/experts.py --small
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm import models
from jaxllm.config.model import ModelConfig, Rope
from jaxllm.models.llama import LlamaConfig
from jaxllm.models.mixtral import MixtralConfig
from jaxllm.models.moe import max_read_fraction
from jaxllm.ops import native
from jaxllm.weights.formats import as_weight, parse_format
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.precision import Precision
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.int_weight import IntFormat

SIZES = {
    "mixtral": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    "small": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2},
}
WIDTH = {"mixtral": 14336, "small": 768}


def make_configs(size: str, layers: int, experts: int, per_token: int) -> dict[str, ModelConfig]:
    """Return the mixture, and a dense model whose MLP is as wide as `per_token` experts."""
    shared: dict[str, Any] = {
        **SIZES[size], "num_hidden_layers": layers, "vocab_size": 512, "hidden_act": "silu",
        "norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "rope": Rope(rope_type="default", rope_theta=1e6),
    }  # fmt: skip
    shared["head_dim"] = shared["hidden_size"] // shared["num_attention_heads"]
    return {
        "mixture": MixtralConfig(
            **shared,
            intermediate_size=WIDTH[size],
            num_experts=experts,
            num_experts_per_tok=per_token,
        ),
        "dense": LlamaConfig(**shared, intermediate_size=per_token * WIDTH[size]),
    }


def draw_params(model: Any) -> Params:
    """Return random weights in the model's formats, each a repeated block of noise."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    noise = rng.normal(0, 0.02, 1 << 18).astype(np.float32)

    def draw(path: str, form: Any) -> Any:
        name = model.precision.param_format(path, form.shape)
        kind = parse_format(name)
        if "norm" in path:
            return jax.numpy.ones(form.shape, DTYPES[name])
        if not (isinstance(kind, IntFormat) and kind.is_plain):
            return jax.device_put(np.resize(noise.astype(DTYPES[name]), form.shape))
        pieces = {}
        for piece, (shape, dtype) in kind.array_specs(form.shape).items():
            data = np.maximum(bits.view(np.int8), -127) if dtype == np.int8 else bits
            scale = np.full(1, 0.02 / (64 if kind.bits == 8 else 4), np.float32)
            source = scale if piece == ".scale" else data if piece == ".data" else bits % 16
            pieces[piece] = np.resize(source.astype(dtype), shape)
        return kind.from_file(path, form.shape, pieces)

    return map_leaves(draw, models.param_shapes(model))


def read_gigabytes(config: ModelConfig, params: Params) -> float:
    """Return the gigabytes of weights that a token reads; of experts only those that it runs."""
    total = 0.0
    for path, leaf in flatten(params):
        if "embed_tokens" in path:
            continue
        stored = as_weight(leaf)
        total += stored.nbytes * max_read_fraction(config, stored.ndim)
    return total / 1e9


def make_round(
    model: Any, params: Params, prompt: int, steps: int
) -> Callable[[], tuple[float, float]]:
    """Return a function that times a prompt, and a decoding step after it, in seconds."""
    ids = np.random.default_rng(1).integers(0, 512, (1, prompt)).astype(np.int32)
    capacity, cache_dtype = prompt + steps + 1, model.precision.cache

    def run_round() -> tuple[float, float]:
        cache = jaxllm.init_cache(model.config, 1, capacity, dtype=cache_dtype)
        start = time.perf_counter()
        logits, cache = jaxllm.prefill(model, params, cache, ids)
        token = np.asarray(logits).argmax(axis=1).astype(np.int32)
        prefilled = time.perf_counter()
        for _ in range(steps):
            logits, cache = jaxllm.decode_step(model, params, cache, token, donate=True)
            token = np.asarray(logits).argmax(axis=1).astype(np.int32)
        return prefilled - start, (time.perf_counter() - prefilled) / steps

    return run_round


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--format", default="int4-g64", help="weights: int4-g64, int8, bfloat16")
    parser.add_argument("--activations", default="bfloat16")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="small layers, as a smoke test")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    precision = Precision.uniform(options.activations)
    if options.format not in DTYPES:
        precision = Precision(
            weights=options.activations, activations=options.activations, cache=options.activations,
            quantize=options.format,
        )  # fmt: skip
    size = "small" if options.small else "mixtral"
    rounds, facts = {}, {}
    for name, config in make_configs(
        size, options.layers, options.experts, options.per_token
    ).items():
        model = models.build(config, precision)
        params = draw_params(model)
        rounds[name] = make_round(model, params, options.prompt, options.steps)
        total = sum(as_weight(leaf).nbytes for _, leaf in flatten(params)) / 1e9
        facts[name] = {"GB": total, "GB a token": read_gigabytes(config, params)}
        rounds[name]()  # compiles
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in rounds}
    for _ in range(options.rounds):
        for name, run in rounds.items():
            seconds[name].append(run())
    for name, times in seconds.items():
        prompt, step = (statistics.median(x) for x in zip(*times, strict=True))
        facts[name] |= {"tokens/s": 1 / step, "prompt tokens/s": options.prompt / prompt}
        facts[name] |= {"GB/s": facts[name]["GB a token"] / step}
    for metric in ("tokens/s", "prompt tokens/s"):
        facts.setdefault("mixture / dense", {})[metric] = (
            facts["mixture"][metric] / facts["dense"][metric]
        )
    if options.json:
        print(json.dumps({"kernels": native.isa(), **vars(options), **facts}))
        return 0
    print(f"{size}, {options.layers} layers, {options.format}, kernels {native.isa()}")
    for name, row in facts.items():
        print(f"{name:16}" + "  ".join(f"{value:.3g} {metric}" for metric, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
