"""Compile jaxllm's programs for an H100 on a machine without one, and print what they consist of.

    JAX_PLATFORMS=cpu python -m scripts.tools.gpu_programs [--tpu]
        [--only decode,prompt,weights,serve,train]

`pip install jaxllm[gpu-check]` brings the compiler. A description of the card stands for the card:
XLA's text for an H100, in JAXLLM_TEST_DATA/gpu/h100_sxm.txtpb (XLA's sources have it, in
backends/gpu/target_config/specs). Kernels are chosen without timing them, so a card may split or
merge some. Times are XLA's own model of each kernel; it has none for cuDNN's, and none for starting
a kernel. The models have two layers of TinyLlama's shape, in bfloat16. --tpu compiles for one chip
of a TPU v5e, with the wheel `libtpu` alone.
Example: JAX_PLATFORMS=cpu python -m scripts.tools.gpu_programs --only decode
"""

import argparse
import dataclasses
import os
import re
import time
from collections.abc import Callable
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm import models
from jaxllm.cache.kv import init_cache
from jaxllm.config.model import Rope
from jaxllm.evaluate import bench
from jaxllm.generation.batching.active import empty_rows
from jaxllm.generation.loops.rounds import SERVED_ROUNDS, LoopInputs, LoopPlan, Tails
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.generation.sampling.stacked import fit_sampler, stack_sampler
from jaxllm.models.compiled_steps import PREFILL
from jaxllm.models.llama import LlamaConfig
from jaxllm.models.sites import NO_EDITS
from jaxllm.ops.target import target, trace_for
from jaxllm.train import step as training
from jaxllm.train.data.rows import Rows
from jaxllm.train.objective import NextToken
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import Placeholder
from jaxllm.weights.formats import for_accelerator
from jaxllm.weights.paths import flatten, map_leaves
from jaxllm.weights.precision import Precision

WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13")
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
STEPS = 64
FORMATS = ("bfloat16", "int8", "int8-g32-f16", "int4-g64-f16", "int4-g32-zp", "nf4", "bf16-packed")
_NO_KERNELS = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota"}
_OPERATION = re.compile(r"\s+(?:ROOT )?%\S+ = (\([^=]*?\)|\S+) ([\w\-]+)\(")
_TIME = re.compile(r'"reification_cost":\[\{[^}]*"exec_time_us":([\d.e+-]+)')
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


@cache
def missing(kind: str = "cuda") -> str | None:
    """Return what is missing to compile for a GPU, or a TPU; None if nothing is."""
    for wheel in WHEELS if kind == "cuda" else ("libtpu",):
        try:
            version(wheel)
        except PackageNotFoundError:
            extra = "jaxllm[gpu-check]" if kind == "cuda" else wheel
            return f"{wheel} is not installed (pip install '{extra}')"
    if kind == "cuda" and not _description().exists():
        return "no description of a card (JAXLLM_TEST_DATA/gpu/h100_sxm.txtpb)"
    return None


def _description() -> Path:
    return Path(os.environ.get("JAXLLM_TEST_DATA", DATA), "gpu", "h100_sxm.txtpb")


@cache
def _device(kind: str) -> NamedSharding:
    from jax.experimental import topologies

    if kind == "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no machine to ask
        chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        return NamedSharding(Mesh(np.array(chips[:1]), ("x",)), PartitionSpec())
    text = _description().read_text(encoding="utf-8")
    card = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    return NamedSharding(topologies.make_mesh(card, (1,), ("x",)), PartitionSpec())


def on_card(tree: Any) -> Any:
    """Return the shapes of arrays as those of arrays on the card."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_device(target())), tree
    )


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that does something: its kind, and the largest array that it writes.

    microseconds: XLA's estimate, 0 if it has none.
    """

    kind: str
    form: str
    microseconds: float

    @property
    def nbytes(self) -> int:
        return max(_sizes(self.form), default=0)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    text: XLA's, after all passes. temporary: bytes of arrays between its inputs and outputs.
    seconds: of compiling. is_loop: whether its steps are a loop, the first in the text.
    """

    text: str
    temporary: int
    seconds: float
    is_loop: bool = False

    @cached_property
    def computations(self) -> dict[str, list[Operation]]:
        found = {}
        for block in re.split(r"\n(?=%|ENTRY)", self.text):
            head, *lines = block.split("\n")
            name = "ENTRY" if head.startswith("ENTRY") else head.split(" ")[0]
            found[name] = [o for line in lines if (o := _read_operation(line)) is not None]
        return found

    @property
    def loops(self) -> list[str]:
        """The bodies of all loops, wherever they are."""
        return re.findall(r"while\(.*?body=(%[\w.\-]+)", self.text)

    @property
    def conditionals(self) -> int:
        return len(re.findall(r" conditional\(", self.text))

    @property
    def step(self) -> list[Operation]:
        """The operations of the one loop over steps, or of a program that is a step."""
        body = self.loops[0] if self.loops and self.is_loop else "ENTRY"
        return self.computations[body]

    def count(self, kind: str) -> int:
        """Count the step's operations with this text in their kind."""
        return sum(kind in operation.kind for operation in self.step)


def _read_operation(line: str) -> Operation | None:
    match = _OPERATION.match(re.sub(r"/\*index=\d+\*/", "", line))
    if match is None or match[2] in _NO_KERNELS or match[2].endswith("-done"):
        return None
    kind = match[2]
    if kind == "fusion":
        named = re.search(r'"kind":"(\w+)"', line) or re.search(r"kind=(k\w+)", line)
        kind = named[1] if named else kind
    elif kind == "custom-call":
        named = re.search(r'custom_call_target="([^"]+)"', line)
        kind = named[1] if named else kind
    estimate = _TIME.search(line)
    return Operation(kind, match[1], float(estimate[1]) if estimate else 0.0)


def _sizes(form: str) -> list[int]:
    """Return the bytes of each array of a type, as "(bf16[64,128]{1,0}, f32[])"."""
    return [
        _BYTES.get(name, 4) * int(np.prod([int(n) for n in shape.split(",") if n] or [1]))
        for name, shape in re.findall(r"(\w+)\[([\d,]*)\]", form)
    ]


def compile_for_gpu(function: Any, *args: Any, **static: Any) -> Compiled:
    """Compile a jitted function for the card; arrays may be shapes. Inside `trace_for`."""
    lowered, start = function.lower(*args, **static), time.perf_counter()
    options = {"xla_gpu_collect_cost_model_stats": "True"} if target() == "cuda" else {}
    program = lowered.compile(compiler_options=options)
    took = time.perf_counter() - start
    return Compiled(program.as_text(), program.memory_analysis().temp_size_in_bytes, took)


def make_model(fmt: str = "bfloat16", layers: int = 2) -> tuple[Any, Any]:
    """Return a model of TinyLlama's shape, and its parameters as shapes on the card."""
    config = LlamaConfig(
        vocab_size=32000, hidden_act="silu", norm_eps=1e-5, tie_word_embeddings=False,
        max_position_embeddings=65536, hidden_size=2048, intermediate_size=5632,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=64,
        rope=Rope(rope_type="default", rope_theta=10000.0),
    )  # fmt: skip
    precision = Precision().with_dtype("bfloat16")
    if fmt != "bfloat16":
        precision = dataclasses.replace(precision, quantize=fmt)
    model = models.build(config, precision)

    def quantize() -> Any:
        forms = models.param_shapes(model)
        return map_leaves(
            lambda path, x: precision.cast(path, jnp.ones(x.shape, "bfloat16")), forms
        )

    try:
        params = jax.eval_shape(quantize)
    except jax.errors.TracerArrayConversionError:  # quantized on the host
        params = quantize()
    return model, on_card(jax.eval_shape(for_accelerator, params))


def cache_of(model: Any, rows: int, slots: int) -> Any:
    return on_card(jax.eval_shape(lambda: init_cache(model, rows, slots)))


def ints(*shape: int) -> Any:
    return on_card(jax.ShapeDtypeStruct(shape, jnp.int32))


def decode(rows: int, slots: int, packed: bool = True, fmt: str = "bfloat16") -> Compiled:
    """Compile a loop of steps with so many slots per row, as `jaxllm bench` runs it."""
    model, params = make_model(fmt)
    tokens = ints(STEPS, rows)
    cache = cache_of(model, rows, slots)
    made = compile_for_gpu(bench.decode_given, model.clone(packed=packed), params, cache, tokens)
    return dataclasses.replace(made, is_loop=True)


def prompt(width: int, slots: int, packed: bool = True) -> Compiled:
    """Compile a pass of a prompt into a cache."""
    model, params = make_model()
    cache = cache_of(model, 1, slots)
    args = (model.clone(packed=packed), params, ints(1, width), ints(1, width), ints(1))
    return compile_for_gpu(PREFILL, cache, (), *args, NO_EDITS, False, ())


def burst(rows: int, slots: int, packed: bool) -> Compiled:
    """Compile the loop of steps of `serve` in which all rows decode greedily."""
    model, params = make_model()
    tail = cache_of(model, rows, slots).tail
    _, sampler = fit_sampler(Sampler(), model.config.vocab_size, slots + 1)
    state, stacked = on_card(
        jax.eval_shape(lambda: (empty_rows(rows, slots), stack_sampler(sampler, rows)))
    )
    kinds = on_card(jax.ShapeDtypeStruct((1, rows), bool))
    made = compile_for_gpu(
        SERVED_ROUNDS, LoopPlan(model.clone(packed=packed), 16), LoopInputs(params, uses_KR=kinds),
        Tails(tail), state.replace(samplers=(stacked,)), ints(), ints(),
    )  # fmt: skip
    return dataclasses.replace(made, is_loop=True)


def train(rows: int, width: int, packed: bool, remat: bool = False) -> Compiled:
    """Compile a training step of all weights. packed: one document a row."""
    model, _ = make_model()
    model, forms = (
        model.clone(packed=packed, remat=remat),
        dict(flatten(models.param_shapes(model))),
    )
    setup = training.Setup(model, NextToken(), Optimizer(lr=1e-4, steps=9))
    trained = {path: jnp.zeros((), jnp.float32) for path in forms}
    state = jax.eval_shape(
        lambda: training.init_state(
            {path: jnp.broadcast_to(x, forms[path].shape) for path, x in trained.items()}, setup
        )
    )
    holes = map_leaves(lambda _, x: Placeholder("bfloat16", x.shape), models.param_shapes(model))
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = Rows(*[ints(1, rows, width)] * 4)
    return compile_for_gpu(
        training.train_step, on_card(state), holes, None, batch, on_card(key), setup=setup
    )


PROGRAMS: dict[str, list[tuple[str, Callable[[], Compiled]]]] = {
    "decode": [
        (f"{rows} row{'s' * (rows > 1)}, {slots:,} slots, {'cuDNN' if packed else 'positions'}",
         lambda rows=rows, slots=slots, packed=packed: decode(rows, slots, packed))
        for rows, slots in ((1, 256), (1, 8320), (1, 32896), (64, 256), (64, 2176))
        for packed in (True, False)
    ],
    "prompt": [
        (f"{width} tokens, {slots:,} slots, {'cuDNN' if packed else 'positions'}",
         lambda width=width, slots=slots, packed=packed: prompt(width, slots, packed))
        for width, slots in ((512, 640), (2048, 4224), (2048, 16512))
        for packed in (True, False)
    ],
    "weights": [
        (f"{fmt}, {rows} row{'s' * (rows > 1)}",
         lambda fmt=fmt, rows=rows: decode(rows, 256, True, fmt))
        for fmt in FORMATS
        for rows in (1, 8, 64)
    ],
    "serve": [
        (f"64 rows, 1,024 slots, {'cuDNN' if packed else 'positions'}",
         lambda packed=packed: burst(64, 1024, packed))
        for packed in (True, False)
    ],
    "train": [
        (f"4 x {width}, {'one document a row' if packed else 'documents'}"
         + ", --gradient-checkpointing" * remat,
         lambda width=width, packed=packed, remat=remat: train(4, width, packed, remat))
        for width in (1024, 4096)
        for packed in (True, False)
        for remat in (False, True)
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.splitlines()[-1]
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), help="parts of the table")
    parser.add_argument("--tpu", action="store_true", help="compile for a TPU")
    options = parser.parse_args()
    kind = "tpu" if options.tpu else "cuda"
    if (problem := missing(kind)) is not None:
        parser.exit(1, f"{problem}\n")
    print("| program | kernels a step | of cuDNN | loops, conditionals in all | estimate, us |"
          " largest array, MB | temporaries, MB | compiled in s |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for part in options.only.split(","):
        for name, make in PROGRAMS[part]:
            with trace_for(kind):
                made = make()
            largest = max((x.nbytes for x in made.step), default=0)
            cells = (
                f"{part}: {name}", len(made.step), made.count("cudnn"),
                f"{len(made.loops)}, {made.conditionals}",
                f"{sum(x.microseconds for x in made.step):.0f}", f"{largest / 1e6:.1f}",
                f"{made.temporary / 1e6:.0f}", f"{made.seconds:.1f}",
            )  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
