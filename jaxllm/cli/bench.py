"""`jaxllm bench`: the speed of a model on this machine."""

from typing import Annotated

import typer

from jaxllm.cli.console import log, spinner, write
from jaxllm.cli.option_groups import LoadingOptions
from jaxllm.cli.options import AsJson, Model, check_exclusive, split_numbers

EXAMPLE = "Example: jaxllm bench ~/models/TinyLlama-1.1B --quantize int4 --batches 1,8"


def bench(
    model: Model = "demo:llama",
    prompts: str = "128,512",
    decode: int = 32,
    depths: str = "0,1024",
    batches: str = "1,4,8,16",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1)] = 5,
    step: list[str] | None = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv")] = False,
    *,
    loading: LoadingOptions,
) -> None:
    """Time prefill and decoding.

    Compile time and memory bandwidth have their own columns.

    Args:
        prompts: Prompt lengths in tokens, comma-separated.
        decode: Number of tokens to decode.
        depths: Tokens in the cache before decoding, comma-separated.
        batches: Batch sizes for decoding, comma-separated.
        repetitions: Repetitions of each test.
        step: Recipe step to apply first, of those that need no calibration data, for example
            "prune: magnitude 2:4"; repeatable.
        as_csv: Print CSV instead of a table.
    """
    check_exclusive({"--json": as_json, "--csv": as_csv})
    lists = {"--prompts": prompts, "--depths": depths, "--batches": batches}
    lengths, levels, rows_at_once = (split_numbers(*row, least=0) for row in lists.items())

    import os
    import time

    with spinner("starting"):
        import jax

        from jaxllm.evaluate import bench as timing
        from jaxllm.ops import native
        from jaxllm.runtime.progress import steps_bar

    start = time.perf_counter()
    # Compiling is timed too: no stored programs.
    lm = loading.load(model, reuse_compiled=False)
    loaded = time.perf_counter() - start
    if step:
        from jaxllm.compress.pipeline import compress
        from jaxllm.lm import shard_like, to_one_device

        lm = shard_like(compress(to_one_device(lm), step, allow_repeat=True, log=log), lm)
    context = lm.config.context_length
    tests = timing.make_tests(lengths, decode, levels, rows_at_once)
    fits = [t for t in tests if (t.prompt or t.depth + t.decode) <= context]
    for test in tests:
        if test not in fits:
            log(f"{test.name}: skipped, longer than the model's context of {context} tokens")
    rows = []
    with steps_bar(f"timing {lm.path.name}", len(fits)) as done:
        for row in timing.bench(lm, fits, repetitions=repetitions):
            rows.append(row)
            done()
    about = {
        "model": repr(lm),
        "backend": jax.default_backend(),
        "threads": os.cpu_count(),
        "kernels": native.isa() if native.is_enabled() else None,
        "int8_inputs": lm.model.precision.int8_inputs,
        "weights_mb": round(sum(x.nbytes for x in jax.tree.leaves(lm.params)) / 1e6, 1),
        "peak_mb": round(timing.peak_bytes() / 1e6, 1),
        "load_s": round(loaded, 2),
        "jax": jax.__version__,
    }
    if as_json:
        return write(timing.as_json(rows, about))
    log(", ".join(f"{name} {value}" for name, value in about.items()))
    write(timing.as_csv(rows) if as_csv else timing.as_markdown(rows))
