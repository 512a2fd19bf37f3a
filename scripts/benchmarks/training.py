"""The same training step on jaxllm and on torch with PEFT, alternating in one run.

One decision: each measurement runs in a separate process. It loads, takes one step that compiles
and does not count, then times further steps and reads its peak resident set. Rounds alternate which
engine runs first; a ratio is a ratio of medians. Both update float32 masters with AdamW: LoRA's
matrices, or all weights. torch uses its fused attention (sdpa); jaxllm's mask separates documents.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Annotated, Any

import numpy as np
import typer

from jaxllm.cli import run_command
from jaxllm.cli.console import log, write
from jaxllm.errors import ConfigError

EXAMPLE = (
    "Example: python scripts/benchmarks/training.py tiny-hf --kinds lora,full --dtypes float32"
)
KINDS, ENGINES = ("lora", "full"), ("jaxllm", "torch")
RANK, RATE = 16, 1e-4


def draw_ids(vocab: int, batch: int, length: int) -> np.ndarray:
    """Return random ids `[B, T + 1]`; speed does not depend on the text."""
    return np.random.default_rng(0).integers(0, vocab, (batch, length + 1), np.int64)


def time_jaxllm(
    directory: str, kind: str, dtype: str, batch: int, length: int, steps: int, remat: bool
) -> list[float]:
    """Return the seconds of each step; the first compiles."""
    import jax

    import jaxllm
    from jaxllm.adapters import LoraConfig
    from jaxllm.train import jobs
    from jaxllm.train.data.rows import Rows
    from jaxllm.train.optimizer import Optimizer
    from jaxllm.train.partition import partition
    from jaxllm.train.step import Setup, init_state, train_step

    lm = jaxllm.load(directory, dtype=dtype if kind == "lora" else "float32")
    job = (
        jobs.lora(lm, LoraConfig(r=RANK, lora_alpha=RANK))
        if kind == "lora"
        else jobs.full_finetune(lm, dtype)
    )
    del lm
    optimizer = Optimizer(steps=100, lr=RATE, schedule="constant", warmup=0.0)
    setup = Setup(job.model.clone(remat=remat), job.objective, optimizer)
    trained, frozen = partition(job.params, job.rules, job.compute_params)
    state = init_state(trained, setup)
    del trained
    ids = draw_ids(job.lm.config.vocab_size, batch, length).astype(np.int32)
    position = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
    batch_rows = Rows(ids[:, :-1], ids[:, 1:], position, np.zeros((batch, length), np.int32))
    microbatches = jax.tree.map(lambda x: x[None], batch_rows)
    seconds, key = [], jax.random.key(0)
    del job
    for _ in range(steps + 1):
        begin = time.perf_counter()
        state, metrics = train_step(state, frozen, None, microbatches, key, setup=setup)
        float(metrics.loss)
        seconds.append(time.perf_counter() - begin)
    return seconds


def time_torch(
    directory: str, kind: str, dtype: str, batch: int, length: int, steps: int, remat: bool
) -> list[float]:
    """Return the seconds of each step with transformers and PEFT.

    In bfloat16, full training runs float32 masters under autocast; LoRA trains float32 adapters on
    a bfloat16 model.
    """
    import contextlib

    import peft
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model_dtype = torch.bfloat16 if (dtype, kind) == ("bfloat16", "lora") else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=model_dtype)
    if kind == "lora":
        names = "all-linear"
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names)
        model = peft.get_peft_model(model, config)
    if remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01)
    ids = torch.tensor(draw_ids(model.config.vocab_size, batch, length))
    autocast = (
        torch.autocast("cpu", torch.bfloat16)
        if dtype == "bfloat16" and kind == "full"
        else contextlib.nullcontext()
    )
    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        with autocast:
            logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()
        adamw.zero_grad()
        float(loss.detach())
        seconds.append(time.perf_counter() - begin)
    return seconds


TIMERS = {"jaxllm": time_jaxllm, "torch": time_torch}


def measure(engine: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Measure in a separate process: median step seconds, first step seconds, peak GB."""
    program = [sys.executable, __file__, "--worker", engine, json.dumps(arguments)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{engine} {arguments}: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_worker(engine: str, arguments: str) -> None:
    """Print one measurement as JSON."""
    first, *others = TIMERS[engine](**json.loads(arguments))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"step": statistics.median(others), "first": first, "peak": peak}))


def compare(
    model: Annotated[str, typer.Argument(help="Hugging Face directory.")],
    kinds: Annotated[str, typer.Option(help="Kinds of training: lora, full.")] = "lora,full",
    dtypes: Annotated[str, typer.Option(help="Dtypes: float32, bfloat16.")] = "float32,bfloat16",
    batch: Annotated[int, typer.Option(min=1, help="Batch size, rows.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens per row.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per process.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", "-r", min=1, help="Processes per engine.")] = 3,
    remat: Annotated[bool, typer.Option("--remat", help="Activation recomputation.")] = False,
) -> None:
    """Time a training step on both engines, alternating."""
    write("| step | engine | s | tokens/s | against torch | first step, s | peak, GB |\n")
    write("|---|---|---|---|---|---|---|\n")
    for kind in kinds.split(","):
        for dtype in dtypes.split(","):
            if kind not in KINDS:
                raise ConfigError(f"--kinds must be among {', '.join(KINDS)}, got {kind!r}")
            arguments = {
                "directory": model, "kind": kind, "dtype": dtype, "batch": batch,
                "length": length, "steps": steps, "remat": remat,
            }  # fmt: skip
            results: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
            for number in range(rounds):
                for engine in ENGINES[:: 1 if number % 2 == 0 else -1]:
                    results[engine].append(measure(engine, arguments))
                    log(f"{kind} {dtype} {engine}: {results[engine][-1]}")
            medians = {
                engine: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                for engine, runs in results.items()
            }
            for engine, m in medians.items():
                ratio = medians["torch"]["step"] / m["step"]
                write(
                    f"| {kind} {dtype} {batch} x {length} | {engine} | {m['step']:.2f}"
                    f" | {batch * length / m['step']:.0f} | {ratio:.2f} | {m['first']:.1f}"
                    f" | {m['peak']:.1f} |\n"
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(*sys.argv[2:])
    else:
        run_command(compare, "python scripts/benchmarks/training.py", EXAMPLE)
