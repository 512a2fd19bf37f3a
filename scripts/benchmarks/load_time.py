"""How long a GGUF file takes until its first token, and how much memory, beside llama.cpp.

    python scripts/benchmarks/load_time.py MODEL.gguf --llama-bench BIN [--rounds 5]

One decision: whole processes, in turns, with the file in the page cache: ours is `jaxllm generate
-n 1` (Python and JAX start, weights load, programs compile or are found compiled from the round
before, which does not count), llama.cpp's is `llama-bench` of one token without its warm-up. Told
are medians of seconds, the largest resident set, and what of it is no page of a file; and how long
`jaxllm.load` takes by itself.
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
    """Seconds, and the largest resident set of a process and of its own pages, in GB."""
    own = [0]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip

    def watch() -> None:
        while process.returncode is None:
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
                line = next(x for x in text.splitlines() if x.startswith("RssAnon"))
            except (OSError, StopIteration):  # it has ended
                return
            own[0] = max(own[0], int(line.split()[1]) * 1024)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert process.stdout and process.stderr
    with process.stdout as said, process.stderr as wrong:
        said.read()
        errors = wrong.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} ended with {process.returncode}: {errors[-300:]!r}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e9, own[0] / 1e9


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Example: python scripts/benchmarks/load_time.py Q4_0.gguf --llama-bench BIN",
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="2", help="llama.cpp's")
    options = parser.parse_args()
    for path in (options.model, options.llama_bench):
        if not path.exists():
            parser.error(f"{path} is not there")
    model = str(options.model)
    ours = [sys.executable, "-m", "jaxllm", "generate", "-m", model, "-p", "a", "-n", "1"]
    theirs = [str(options.llama_bench), "-m", model, "-t", options.threads, "-p", "0", "-n", "1",
              "-r", "1", "--no-warmup"]  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {"jaxllm": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "JAXLLM_COMPILE_CACHE": scratch}
        for number in range(options.rounds + 1):
            for name, command in (("jaxllm", ours), ("llama.cpp", theirs)):
                row = run(command, environment)
                if number:
                    found[name].append(row)
                elif name == "jaxllm":
                    print(f"the first time, which compiles: {row[0]:.2f} s")
    print("| whole process | s | resident, GB | of it no file's, GB |\n|---|---|---|---|")
    for name, rows in found.items():
        middle = [statistics.median(some) for some in zip(*rows, strict=True)]
        print(f"| {name} | {middle[0]:.2f} | {middle[1]:.2f} | {middle[2]:.2f} |")
    alone = [
        float(subprocess.check_output([sys.executable, "-c", LOAD, model]))
        for _ in range(options.rounds)
    ]
    print(f"jaxllm.load by itself: {statistics.median(alone):.2f} s")


if __name__ == "__main__":
    main()
