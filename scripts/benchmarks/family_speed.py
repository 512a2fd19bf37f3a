"""Decoding speed of each family compared with llama.cpp, at about a billion weights.

    python scripts/benchmarks/family_speed.py --llama-bench BIN [NAME ...]
        [--kind Q8_0] [--rounds 5]

One decision: both run the same GGUF file, written with `jaxllm convert`'s writer from random
weights (a repeated block of noise; speed does not depend on it). All families have about
TinyLlama's sizes (hidden size 2048, MLP 5632, 22 layers, 32 heads, 4 key/value heads, vocabulary
32,000), so that only the family differs. Mixtures have 11 layers with 8 experts of half the MLP
size, 2 per token; gpt_oss has four layers of gpt-oss-20b, with experts in MXFP4; qwen3_5_text and
lfm2 have the sizes of Qwen3.5-0.8B and LFM2-1.2B. Rounds of the two
alternate. The table reports median tokens per second for one row, 32 tokens from an empty cache,
and the ratio. llama.cpp rounds the inputs of quantized products
to 8 bits, and so does jaxllm unless --exact-inputs keeps them in bfloat16.
"""

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoints.native import Checkpoint
from jaxllm.cli.options import load_model
from jaxllm.convert.gguf.tensors import LEAVES
from jaxllm.convert.gguf.writer import FILE_TYPES, write_gguf
from jaxllm.convert.hf import read_config
from jaxllm.errors import JaxllmError
from jaxllm.evaluate import bench
from jaxllm.evaluate.bench import Test
from jaxllm.models import FAMILIES, build, param_shapes
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Precision
from jaxllm.weights.types import mxfp4
from jaxllm.weights.types.int_weight import IntFormat

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.benchmarks.compare_peers import BUSY, measure_background_load
from scripts.benchmarks.peer_engines import LlamaBench

SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
SQUARE = {name: size for name, size in SIZES.items() if name != "head_dim"}
EXPERTS = {"num_hidden_layers": 11, "num_experts_per_tok": 2}
# Fields of each family's config.json. Gemma, which has large vocabularies, ties its embeddings.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SQUARE,
    "gpt2": {
        "vocab_size": 32000, "n_embd": 2048, "n_layer": 22, "n_head": 32, "n_positions": 2048,
    },
    "qwen2": SQUARE,
    "qwen3": SIZES,
    "gemma2": {**SIZES, "tie_word_embeddings": True, "query_pre_attn_scalar": 64},
    "gemma3_text": {**SIZES, "tie_word_embeddings": True, "query_pre_attn_scalar": 64},
    "phi3": {**SQUARE, "original_max_position_embeddings": 2048},
    "olmo2": SQUARE,
    "smollm3": SQUARE,
    "granite": SQUARE,
    "mixtral": {**SQUARE, **EXPERTS, "num_local_experts": 8, "intermediate_size": 2816},
    "qwen3_moe": {
        **SIZES, **EXPERTS, "num_experts": 8, "moe_intermediate_size": 2816,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        **SIZES, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "qwen3_5_text": {
        **SIZES, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "lfm2": {
        **SQUARE, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "block_auto_adjust_ff_dim": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        **{n: size for n, size in SQUARE.items() if n != "num_key_value_heads"},
        "intermediate_size": 8192,
    },
}  # fmt: skip
TEST = Test(decode=32)


def write_noise(name: str, kind: str, path: Path) -> None:
    """Write a GGUF file of the family's shape; weights that the type quantizes are random codes."""
    config, _ = read_config({"model_type": name, **CONFIGS[name]})
    rng, wanted = np.random.default_rng(0), LEAVES[kind].format if kind in LEAVES else None
    noise = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
    bits = np.maximum(rng.integers(-128, 128, 1 << 20, np.int8), -127)

    def repeat_block(block: np.ndarray, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor(
            block.dtype, shape, lambda: np.resize(block, math.prod(shape)).reshape(shape)
        )

    tensors, formats = {}, {}
    for at, form in flatten(param_shapes(build(config))):
        shape, leaf = form.shape, wanted
        if name == "gpt_oss" and at.endswith("weight") and len(shape) == 3:
            leaf = mxfp4.FORMAT
        plain = isinstance(leaf, IntFormat) and (leaf.is_plain or leaf is mxfp4.FORMAT)
        if plain and len(shape) > 1 and shape[-1] % 32 == 0:
            formats[at] = leaf.name
            for piece, (size, dtype) in leaf.array_specs(shape).items():
                scale = 2e-4 if np.dtype(dtype).itemsize > 1 else 119  # an exponent
                is_code = piece == ".data"
                block = bits.view(dtype) if is_code else np.full(1, scale).astype(dtype)
                tensors[at + piece] = repeat_block(block, size)
        else:  # norm scales are about 1
            tensors[at] = repeat_block(noise + np.float32("norm" in at or ".ln_" in at), shape)
    precision = Precision.uniform("float32")
    checkpoint = Checkpoint(path.with_suffix(""), config, tensors, {}, precision, formats)
    write_gguf(path, checkpoint, kind)


def time_both(
    path: Path, binary: Path, threads: int, rounds: int, int8_inputs: bool
) -> list[float]:
    """Return the median tokens per second of jaxllm and of llama.cpp (NaN if it fails)."""
    lm = load_model(str(path), "bfloat16", int8_inputs=int8_inputs, reuse_compiled=False)
    run = bench.prepare_run(lm, TEST, 512)
    llama_cpp = LlamaBench("int8", path, binary, None, threads, 0)
    run()  # compiles
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds[0].append(time.perf_counter() - start)
        try:
            seconds[1].append(llama_cpp.measure(TEST))
        except JaxllmError as error:
            print(f"  llama.cpp: {error}", flush=True)
            seconds[1].append(math.nan)
    return [TEST.decode / statistics.median(times) for times in seconds]


def main() -> None:
    """Print the table for the families named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Example: python scripts/benchmarks/family_speed.py --llama-bench BIN qwen3",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"families: {', '.join(CONFIGS)}")
    parser.add_argument("--llama-bench", type=Path, required=True, help="path of llama-bench")
    parser.add_argument("--kind", choices=FILE_TYPES, default="Q8_0", help="GGUF file type")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="threads of llama.cpp")
    parser.add_argument("--exact-inputs", action="store_true", help="inputs in bfloat16, not int8")
    parser.add_argument("--scratch", type=Path, help="directory for the files, 4 GB each")
    options = parser.parse_args()
    assert set(CONFIGS) <= set(FAMILIES)
    if unknown := [name for name in options.names if name not in CONFIGS]:
        parser.error(f"unknown family {unknown[0]!r}: expected one of {', '.join(CONFIGS)}")
    if not options.llama_bench.exists():
        parser.error(f"{options.llama_bench} does not exist")
    print("| family | file, GB | jaxllm | llama.cpp | ratio |\n|---|---|---|---|---|", flush=True)
    for name in options.names or CONFIGS:
        if (load := measure_background_load()) is not None and load > BUSY:
            print(f"  other programs use {load:.1f} cores", flush=True)
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            path = Path(scratch) / f"{name}.gguf"
            write_noise(name, options.kind, path)
            ours, theirs = time_both(
                path, options.llama_bench, options.threads, options.rounds, not options.exact_inputs
            )
            print(
                f"| {name} | {path.stat().st_size / 1e9:.2f} | {ours:.1f} | {theirs:.1f} |"
                f" {ours / theirs:.2f}x |",
                flush=True,
            )
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    main()
