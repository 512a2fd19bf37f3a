"""Time and memory until the first token of a GGUF file, compared with llama.cpp.

    python scripts/benchmarks/load_time.py MODEL.gguf --llama-bench BIN [--rounds 5]

One decision: it times complete processes, alternating, with the file in the page cache. Ours is
`jaxllm generate -n 1`: Python and JAX start, weights load, and compiled programs come from the
first round, which does not count. llama.cpp's is `llama-bench` for one token without warm-up. The
table reports medians of the seconds, the peak resident set, and its anonymous part. The last line
is the time of `jaxllm.load` alone.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

LOAD = """
import time, sys, jaxllm, jax
jax.devices()
start = time.perf_counter()
lm = jaxllm.load(sys.argv[1], show_progress=False)
jax.block_until_ready(lm.params)
print(time.perf_counter() - start)
"""


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Run a process; return its seconds, its peak resident set and peak anonymous memory in GB."""
    anonymous = [0]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip

    def sample_memory() -> None:
        while process.returncode is None:
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
                line = next(x for x in text.splitlines() if x.startswith("RssAnon"))
            except (OSError, StopIteration):  # the process has ended
                return
            anonymous[0] = max(anonymous[0], int(line.split()[1]) * 1024)
            time.sleep(0.01)

    threading.Thread(target=sample_memory, daemon=True).start()
    assert process.stdout and process.stderr
    with process.stdout, process.stderr:
        process.stdout.read()
        errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} ended with {process.returncode}: {errors[-300:]!r}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e9, anonymous[0] / 1e9


def main() -> None:
    """Print the table, and the time of `jaxllm.load` alone."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Example: python scripts/benchmarks/load_time.py Q4_0.gguf --llama-bench BIN",
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True, help="path of llama-bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="2", help="threads of llama.cpp")
    options = parser.parse_args()
    for path in (options.model, options.llama_bench):
        if not path.exists():
            parser.error(f"{path} does not exist")
    model = str(options.model)
    ours = [sys.executable, "-m", "jaxllm", "generate", model, "-p", "a", "-n", "1"]
    llama_cpp = [str(options.llama_bench), "-m", model, "-t", options.threads, "-p", "0", "-n", "1",
              "-r", "1", "--no-warmup"]  # fmt: skip
    results: dict[str, list[tuple[float, float, float]]] = {"jaxllm": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "JAXLLM_COMPILE_CACHE": scratch}
        for number in range(options.rounds + 1):
            for name, command in (("jaxllm", ours), ("llama.cpp", llama_cpp)):
                row = run(command, environment)
                if number:
                    results[name].append(row)
                elif name == "jaxllm":
                    print(f"first run, which compiles: {row[0]:.2f} s")
    print("| process | s | peak resident, GB | peak anonymous, GB |\n|---|---|---|---|")
    for name, rows in results.items():
        seconds, resident, anonymous = (statistics.median(x) for x in zip(*rows, strict=True))
        print(f"| {name} | {seconds:.2f} | {resident:.2f} | {anonymous:.2f} |")
    load_seconds = [
        float(subprocess.check_output([sys.executable, "-c", LOAD, model]))
        for _ in range(options.rounds)
    ]
    print(f"jaxllm.load alone: {statistics.median(load_seconds):.2f} s")


if __name__ == "__main__":
    main()
