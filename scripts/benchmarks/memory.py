"""Memory use of jaxllm: a subcommand per question, a Markdown table on stdout.

    python scripts/benchmarks/memory.py formats CHECKPOINT [--weights stored int8]
    python scripts/benchmarks/memory.py commands CHECKPOINT [--weights int8] [--scratch DIRECTORY]
    python scripts/benchmarks/memory.py training CHECKPOINT [--ways full LoRA QLoRA]
    python scripts/benchmarks/memory.py mesh MODEL --meshes none tensor=2 data=2,tensor=4
    python scripts/benchmarks/memory.py fsdp demo:llama --meshes data=2 data=8
    python scripts/benchmarks/memory.py logits --meshes none tensor=2 tensor=4
    python scripts/benchmarks/memory.py sequence --meshes none sequence=8 --length 4096

formats: peak memory of loading, prefill and decoding, GB. The first process of a row compiles its
programs, the second loads them from the cache, as `jaxllm generate` does. The goal is weights +
cache + 10% + what a process takes that only imports JAX, Flax and jaxllm (the first line).
commands: the same for `jaxllm quantize` and `jaxllm convert`.
training: the same for two steps of one row; "state" is the memory held between steps.
mesh: weights on each device, and the estimate of `jaxllm plan`.
fsdp: bytes of a training step without and with FSDP.
logits: bytes of a training step that holds all logits, and of one that trains as jaxllm does: with
sharded logits, or on one device (`--meshes none`) with those of a chunk of tokens.
sequence: arguments and temporary arrays of a prefill and of a loss gradient.
The last three run no step: the figures are XLA's memory analysis.

Each measurement runs in a separate process, in which one CPU simulates the devices. "peak" is the
peak resident set (VmHWM, including mapped file pages); "anonymous" is the peak of the part that
Linux could not reclaim (RssAnon, sampled).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ["stored", "float32", "bfloat16", "float16", "int8", "int8-g64", "int4-g64-f16"]
FORMATS += ["bf16-packed"]
TRAINING = {  # name: dtype, whether to train an adapter, format of the frozen weights
    "full, float32": ("float32", False, None),
    "full, bfloat16": ("bfloat16", False, None),
    "LoRA, bfloat16": ("bfloat16", True, None),
    "QLoRA, int8": ("bfloat16", True, "int8"),
    "QLoRA, int4-g64-zp": ("bfloat16", True, "int4-g64-zp"),
    "QLoRA, nf4": ("bfloat16", True, "nf4"),
}
OPTIONS: tuple[tuple[str, str, Any, str], ...] = (  # subcommands, name, default, help
    ("formats commands training mesh fsdp", "model", None, "model, as for `jaxllm.load`"),
    ("formats commands", "--weights", FORMATS, "weight formats"),
    ("formats", "--caches", ["bfloat16", "int8"], "formats of keys and values"),
    ("formats", "--prompt", 300, "prompt length, tokens"),
    ("formats", "--new", 16, "decoded tokens"),
    ("commands", "--scratch", None, "directory for the written checkpoints"),
    ("training", "--ways", [*TRAINING], "kinds of training, by the start of their names"),
    ("training", "--no-remat", False, "no activation recomputation"),
    ("mesh fsdp logits sequence", "--meshes", ["none", "data=2"], "meshes"),
    ("mesh", "--quantize", "none", "weight format"),
    ("logits", "--vocabulary", 32000, "vocabulary size"),
    ("fsdp logits", "--rows", 8, "batch size"),
    ("training fsdp logits sequence", "--length", 128, "tokens per row"),
)


class Peak(NamedTuple):
    """Peak bytes of a process: resident and anonymous."""

    resident: int = 0
    anonymous: int = 0


def read_memory(process: str = "self") -> Peak:
    """Return the resident peak of a process so far and its anonymous bytes now; 0 if unknown."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return Peak()
    rows = dict(line.split(":") for line in lines if line.startswith(("VmHWM", "RssAnon")))
    return Peak(*(1024 * int(rows.get(name, "0 kB").split()[0]) for name in ("VmHWM", "RssAnon")))


def run_command(command: Sequence[str], environment: dict[str, str]) -> tuple[str, Peak]:
    """Run a command; return its stdout and its peak memory.

    Raises:
        CalledProcessError: if the command fails.
    """
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would override JAXLLM_COMPILE_CACHE
    peak = Peak()
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen(command, stdout=out, cwd=ROOT, env=environment) as process,
    ):
        while process.poll() is None:
            peak = Peak(*map(max, peak, read_memory(str(process.pid))))
            time.sleep(0.003)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        out.seek(0)
        return out.read(), peak


def run(
    task: Callable[..., Any], *arguments: Any, devices: int = 1, programs: str = "0"
) -> tuple[Any, Peak]:
    """Run a function of this file in a process; return its result and the process's peak memory.

    Args:
        programs: the directory of compiled programs, "0" for none.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--run", task.__name__]
    environment = {"JAXLLM_COMPILE_CACHE": programs, "JAX_NUM_CPU_DEVICES": str(devices)}
    out, peak = run_command([*command, json.dumps(arguments)], environment)
    return json.loads(out.splitlines()[-1]), peak


def generate(path: str, weights: str, cache: str, prompt: int, new: int) -> list[int]:
    """Load, prefill a random prompt, decode; return bytes of weights, cache and loading peak."""
    import dataclasses

    import jax
    import numpy as np

    import jaxllm
    from jaxllm.convert.registry import open_checkpoint
    from jaxllm.ops.compile_cache import enable_compile_cache
    from jaxllm.weights.types.arrays import DTYPES

    enable_compile_cache()
    precision = open_checkpoint(path).precision
    precision = precision.with_dtype(weights) if weights in DTYPES else precision
    if cache != "stored":
        precision = dataclasses.replace(precision, cache=cache)
    quantize = None if weights in (*DTYPES, "stored") else weights
    lm = jaxllm.load(path, dtype=precision, quantize=quantize, show_progress=False)
    jax.block_until_ready(lm.params)
    loaded = read_memory().resident
    new = min(new, lm.config.context_length - 1)
    length = min(prompt, lm.config.context_length - new)
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, length).tolist()
    completion = lm.generate(ids, max_new_tokens=new, eos_token_id=[])
    return [sum(x.nbytes for x in jax.tree.leaves(lm.params)), completion.cache.nbytes, loaded]


def import_libraries() -> int:
    """Import what `generate` imports, and start JAX; return the peak so far."""
    import flax.linen  # noqa: F401
    import jax

    import jaxllm.lm  # noqa: F401

    jax.devices()
    return read_memory().resident


def train(path: str, name: str, length: int, remat: bool) -> list[float]:
    """Take two steps; return the bytes held between them, and the second step's seconds."""
    import jax

    import jaxllm
    from jaxllm.adapters import LoraConfig
    from jaxllm.train import jobs
    from jaxllm.train.optimizer import Optimizer
    from jaxllm.train.partition import partition
    from jaxllm.train.step import Setup, init_state, train_step

    dtype, adapter, quantize = TRAINING[name]
    options: Any = {"dtype": dtype if adapter else "float32", "quantize": quantize}
    lm = jaxllm.load(path, **options, show_progress=False)
    lora = LoraConfig(r=16, lora_alpha=16)
    job = jobs.lora(lm, lora) if adapter else jobs.full_finetune(lm, dtype)
    rows, seconds = make_random_rows(1, length, lm.config.vocab_size), 0.0
    del lm
    optimizer = Optimizer(steps=100, lr=1e-4, warmup=0.0)
    setup = Setup(job.model.clone(remat=remat), job.objective, optimizer)
    trained, frozen = partition(job.params, job.rules, job.compute_params)
    del job
    state = init_state(trained, setup)
    del trained
    held = sum(int(x.nbytes) for x in jax.tree.leaves((state, frozen)))
    for _ in range(2):
        start = time.perf_counter()
        state, metrics = train_step(state, frozen, None, rows, jax.random.key(0), setup=setup)
        metrics.loss.block_until_ready()
        seconds = time.perf_counter() - start
    return [held, seconds]


def make_random_rows(count: int, length: int, vocabulary: int) -> Any:
    """Return one microbatch of random tokens."""
    import numpy as np

    from jaxllm.train.data.rows import Rows

    ids = np.random.default_rng(0).integers(0, vocabulary, (1, count, length + 1)).astype(np.int32)
    position = np.broadcast_to(np.arange(length, dtype=np.int32), (1, count, length))
    return Rows(ids[..., :-1], ids[..., 1:], position, np.zeros_like(position))


def load_on_mesh(mesh: str, path: str, quantize: str) -> list[int]:
    """Return bytes on the fullest device, planned per device, on all devices, process growth."""
    import jax

    import jaxllm
    from jaxllm.convert.registry import open_checkpoint
    from jaxllm.research.plan.memory import weight_bytes
    from jaxllm.sharding.mesh_spec import MeshSpec, parse_mesh
    from jaxllm.sharding.partition_rules import resolve_mesh
    from jaxllm.sharding.shard_params import bytes_per_device

    jax.devices()
    before = read_memory().resident
    options: Any = {"mesh": mesh, "quantize": quantize}
    options = {name: value for name, value in options.items() if value != "none"}
    lm = jaxllm.load(path, **options, show_progress=False)
    growth = read_memory().resident - before
    axes = MeshSpec() if mesh == "none" else resolve_mesh(parse_mesh(mesh), lm.config)
    planned = weight_bytes(open_checkpoint(path), lm.model.precision, axes, False, 1).total
    held = bytes_per_device(lm.params).values()
    return [max(held), planned, sum(held), growth]


def compile_fsdp(mesh: str, path: str, rows: int, length: int) -> list[int]:
    """Return a device's state bytes and temporary bytes, each without and with FSDP."""
    import jaxllm
    from jaxllm.sharding.shard_params import bytes_per_device
    from jaxllm.train.objective import NextToken

    sizes = []
    for fsdp in (False, True):
        lm = jaxllm.load(path, dtype="float32", mesh=mesh, fsdp=fsdp, show_progress=False)
        state, step = compile_step(lm.model, lm.params, NextToken(), rows, length)
        temporary = step.memory_analysis().temp_size_in_bytes
        sizes.append((max(bytes_per_device(state).values()), temporary))
    return [x for pair in zip(*sizes, strict=True) for x in pair]


def compile_logits(mesh: str, vocabulary: int, rows: int, length: int) -> list[int]:
    """Return a device's temporary bytes and sent bytes, each with all logits and in training."""
    import jax
    import numpy as np

    import jaxllm
    from jaxllm import models
    from jaxllm.sharding.collective_stats import count_collectives
    from jaxllm.train.objective import LossOutput, NextToken, cross_entropy, forward

    def gather_and_score(
        model: Any, params: Any, extra_inputs: Any, rows: Any, key: Any
    ) -> LossOutput:
        logits = forward(model, params, rows, gather_logits=True).logits
        return LossOutput(*cross_entropy(logits, rows.label_BT))

    model, sizes = make_small_llama(mesh, length, vocabulary, 64, 192, 8, 8), []
    shapes = jaxllm.param_shapes(models.build(model.config))
    params = model.shard(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes))
    for objective in (gather_and_score, NextToken()):
        _, step = compile_step(model, params, objective, rows, length)
        stats = count_collectives(step.as_text())
        sent = sum(stats[x].bytes for x in ("all-gather", "reduce-scatter") if x in stats)
        sizes.append((step.memory_analysis().temp_size_in_bytes, sent))
    return [x for pair in zip(*sizes, strict=True) for x in pair]


def compile_sequence(mesh: str, T: int) -> list[int]:
    """Return a device's bytes for one text: of the prefill, and of the loss gradient."""
    import jax

    import jaxllm
    from jaxllm import steps
    from jaxllm.train.data.rows import Rows
    from jaxllm.train.objective import NextToken

    model = make_small_llama(mesh, T, 1024, 512, 2048, 2, 64).clone(remat=True)
    params = jaxllm.param_shapes(make_small_llama("none", T, 1024, 512, 2048, 2, 64))
    ids = jax.ShapeDtypeStruct((1, T), jax.numpy.int32)

    def prefill(params: Any, cache: Any, token: Any, at: Any) -> Any:
        last = jax.numpy.full((1,), T - 1, jax.numpy.int32)
        return steps.run_and_commit(model, params, (), cache, token, at, column_B=last)

    def loss(params: Any, rows: Rows) -> jax.Array:
        return NextToken()(model, params, None, rows, jax.random.key(0)).total

    prompt = jax.jit(prefill).lower(params, jaxllm.init_cache(model, 1, T), ids, ids)
    gradient = jax.jit(jax.grad(loss)).lower(params, Rows(ids, ids, ids, ids))
    analyses = [lowered.compile().memory_analysis() for lowered in (prompt, gradient)]
    return [x.argument_size_in_bytes + x.temp_size_in_bytes for x in analyses]


def make_small_llama(
    mesh: str, length: int, vocabulary: int, width: int, inner: int, groups: int, head_dim: int
) -> Any:
    """Return a Llama of two layers with eight heads."""
    import jaxllm
    from jaxllm.config.model import Rope
    from jaxllm.sharding import make_sharded_model
    from jaxllm.sharding.mesh_spec import parse_mesh

    config = jaxllm.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=groups, head_dim=head_dim, hidden_act="silu",
        max_position_embeddings=length, norm_eps=1e-5, tie_word_embeddings=False,
        rope=Rope(rope_type="default", rope_theta=10000.0),
    )  # fmt: skip
    if mesh == "none":
        return jaxllm.build(config)
    return make_sharded_model(config, jaxllm.Precision(), parse_mesh(mesh))


def compile_step(model: Any, params: Any, objective: Any, rows: int, length: int) -> Any:
    """Return the initial state and the compiled training step of a sharded model."""
    import jax

    from jaxllm.train.optimizer import Optimizer
    from jaxllm.train.partition import ALL_PARAMS, partition
    from jaxllm.train.step import Setup, init_state, train_step

    trained, frozen = partition(params, ALL_PARAMS, None, model.unsharded_paths)
    setup = Setup(model, objective, Optimizer(steps=3))
    state, batch = (
        init_state(trained, setup),
        make_random_rows(rows, length, model.config.vocab_size),
    )
    arguments = state, frozen, None, batch, jax.random.key(0)
    return state, train_step.lower(*arguments, setup=setup).compile()


# Subcommand: function, its options after the mesh, columns in MB.
ON_MESHES: dict[str, tuple[Callable[..., list[int]], str, str]] = {
    "mesh": (load_on_mesh, "model quantize", "per device|planned|all devices|process growth"),
    "fsdp": (compile_fsdp, "model rows length", "state|with --fsdp|temporary|with --fsdp"),
    "logits": (
        compile_logits,
        "vocabulary rows length",
        "temporary: all logits|training|sent: all logits|training",
    ),
    "sequence": (compile_sequence, "length", "prompt|gradient"),
}


def make_mesh_table(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    from jaxllm.sharding.mesh_spec import parse_mesh

    task, names, columns = ON_MESHES[options.kind]
    yield "mesh", *(f"{name}, MB" for name in columns.split("|"))
    for mesh in options.meshes:
        devices = 1 if mesh == "none" else parse_mesh(mesh).num_devices
        arguments = (getattr(options, name) for name in names.split())
        yield mesh, *(f"{x / 1e6:.2f}" for x in run(task, mesh, *arguments, devices=devices)[0])


def make_format_table(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    columns = "relative to goal", "anonymous"
    names = "weights", "cache", "bytes of both", "goal", "peak, loading"
    imported = run(import_libraries)[0]
    print(f"libraries, imported only: {format_gb(imported)} GB\n")
    yield *names, "peak, compiling", *columns, "peak, cached programs", *columns
    for weights, cache in product(options.weights, options.caches):
        arguments = options.model, weights, cache, options.prompt, options.new
        with tempfile.TemporaryDirectory() as folder:
            runs = [run(generate, *arguments, programs=folder) for _ in range(2)]
        sizes, loaded = runs[0][0][:2], max(result[2] for result, _ in runs)
        goal, cells = 1.1 * sum(sizes) + imported, []
        for _, peak in runs:
            cells += [
                format_gb(peak.resident),
                f"{peak.resident / goal:.2f}x",
                format_gb(peak.anonymous),
            ]
        yield (
            weights,
            cache,
            " + ".join(map(format_gb, sizes)),
            format_gb(goal),
            format_gb(loaded),
            *cells,
        )


def make_command_table(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    yield "command", "written", "peak", "anonymous"
    commands = [["convert"], ["convert", "--to-hf"], ["convert", "--dtype", "float32"]]
    names = [name for name in options.weights if name.startswith(("int", "bf16-"))]
    for command in [*commands, *(["quantize", "--format", name] for name in names)]:
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            target = Path(folder) / "checkpoint"
            line = [sys.executable, "-m", "jaxllm", command[0], options.model, str(target)]
            _, peak = run_command([*line, *command[1:]], {"JAXLLM_COMPILE_CACHE": "0"})
            written = (target / "model.safetensors").stat().st_size
        yield f"`{' '.join(command)}`", *map(format_gb, (written, *peak))


def make_training_table(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    yield "training", "state", "peak", "anonymous", "s/step"
    for name in TRAINING:
        if name.startswith(tuple(options.ways)):
            (held, seconds), peak = run(
                train, options.model, name, options.length, not options.no_remat
            )
            yield name, *map(format_gb, (held, *peak)), f"{seconds:.1f}"


def format_gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(globals()[sys.argv[2]](*json.loads(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    tables: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, ...]]]] = {
        "formats": make_format_table, "commands": make_command_table,
        "training": make_training_table, **dict.fromkeys(ON_MESHES, make_mesh_table),
    }  # fmt: skip
    for kind in tables:
        subparser = kinds.add_parser(kind)
        for name, default, text in (row[1:] for row in OPTIONS if kind in row[0].split()):
            settings: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
            settings |= {"type": int} if type(default) is int else {}
            settings |= {"action": "store_true"} if default is False else {"default": default}
            subparser.add_argument(
                name, **settings, help=f"{text} ({default})" if default else text
            )
    options = parser.parse_args()
    try:
        for number, cells in enumerate(tables[options.kind](options)):
            print(f"| {' | '.join(cells)} |", flush=True)
            if number == 0:
                print(f"|{'---|' * len(cells)}")
    except subprocess.CalledProcessError as error:  # the process has written the reason
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
