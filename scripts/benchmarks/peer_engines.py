"""The engines of compare_peers: worker processes, and llama.cpp's programs.

One decision: a worker is this file with `--worker ENGINE DIRECTORY FORMAT`. It loads once, reads a
test per line of JSON on stdin, and writes its seconds, or an error, as a line of JSON on stdout.
"""

import contextlib
import copy
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.native import read_model_json
from jaxllm.compress.pipeline import compress
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.evaluate import bench
from jaxllm.evaluate.bench import Test
from jaxllm.weights.formats import parse_format
from jaxllm.weights.types.arrays import DTYPES
from jaxllm.weights.types.int_weight import IntFormat
from jaxllm.weights.types.packed_bf16 import NAME as PACKED

Measure = Callable[[Test], float]


def precision_of(fmt: str) -> str:
    """Return the precision that a format is compared in: float32, bfloat16, float16, int8, int4.

    Raises:
        ConfigError: if the format is unknown, or +int8_inputs follows a format without integers.
    """
    name, plus, extra = fmt.partition("+")
    parsed = parse_format(name)
    integers = isinstance(parsed, IntFormat) or name.startswith("int8-")
    if plus and (extra != "int8_inputs" or not integers):
        raise ConfigError(f"+int8_inputs requires an integer format, got {fmt!r}")
    if isinstance(parsed, IntFormat) and parsed.is_plain:
        return f"int{parsed.bits}"
    return "bfloat16" if parsed.name == PACKED else parsed.name.partition("-")[0]


class Contender:
    """An engine with a weight format that can be timed."""

    def __init__(self, peer: str, fmt: str) -> None:
        self.name, self.peer, self.precision = f"{peer} {fmt}", peer, precision_of(fmt)
        self.weights: float | None = None
        """Bytes of weights that a decoded token reads; None if not known yet."""

    def measure(self, test: Test) -> float:
        """Return the seconds of one run.

        Raises:
            ConfigError: if the engine cannot run the test; the message has the reason.
        """
        raise NotImplementedError


class Worker(Contender):
    """A contender in a separate process, which starts to load at once; `wait_until_ready` waits."""

    def __init__(self, peer: str, fmt: str, directory: Path, threads: int) -> None:
        super().__init__(peer, fmt)
        # XLA takes its threads from NPROC, PyTorch's libraries from OMP_NUM_THREADS.
        environment = {"NPROC": str(threads), "OMP_NUM_THREADS": str(threads)}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", peer, str(directory), fmt],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,  # only the parent handles an interrupt
        )

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: if it cannot load; the message has the reason.
        """
        self.weights = self._request(b"") or None

    def measure(self, test: Test) -> float:
        return self._request(json.dumps(dataclasses.asdict(test)).encode() + b"\n")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _request(self, request: bytes) -> float:
        stdin, stdout = self._process.stdin, self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # the process ended; the read below reports it
            if stdin and request:
                stdin.write(request)
                stdin.flush()
        if not (line := stdout.readline() if stdout else b""):
            raise ConfigError(f"process ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return float(answer["value"])


class LlamaBench(Contender):
    """llama.cpp on a GGUF file.

    `untied` is the size of an untied embedding, of which a token reads one row. The bytes per token
    assume that the embedding has the file's average number of bits.
    """

    build = "not run"

    def __init__(
        self, fmt: str, gguf: Path, binary: Path, batched: Path | None, threads: int, untied: int
    ) -> None:
        super().__init__("llama.cpp", fmt)
        self._binary, self._batched, self._untied = binary, batched, untied
        self._common = ["-m", str(gguf), "-t", str(threads)]

    def measure(self, test: Test) -> float:
        try:
            if test.batch > 1:
                return self._measure_batch(test)
            counts = ("-p", test.prompt, "-n", test.decode, "-d", test.depth, "-r", 1)
            row = json.loads(self._run(self._binary, *counts, "-o", "json"))[0]
            self.build = f"{row['build_number']} ({row['build_commit']})"
            self.weights = row["model_size"] * (1 - self._untied / row["model_n_params"])
            return float(row["samples_ns"][0]) / 1e9
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, JaxllmError):
                raise
            raise ConfigError(f"unexpected output: {error!r}") from None

    def _measure_batch(self, test: Test) -> float:
        """Time several rows at once; each reads one token first, or the program prints nan."""
        if self._batched is None:
            raise ConfigError("several rows require --llama-batched-bench")
        slots = -(-(test.decode + 1) // 256) * 256 * test.batch  # rows take blocks of 256
        counts = ("-npp", 1, "-ntg", test.decode, "-npl", test.batch, "-c", slots)
        text = self._run(self._batched, *counts, "--output-format", "jsonl")
        line = next((x for x in text.splitlines() if x.startswith("{")), text)
        return float(json.loads(line)["t_tg"])

    def _run(self, binary: Path, *options: object) -> str:
        command = [str(binary.resolve()), *self._common, *map(str, options)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except OSError as error:
            raise ConfigError(f"{binary}: {error.strerror}") from None
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(f"{binary} ended with code {done.returncode}: {last}")
        return done.stdout


def draw_tokens(test: Test, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids_BT to prefill, token_SB to decode), as `bench.prepare_run` draws them."""
    generator = np.random.default_rng(0)
    ids_BT = generator.integers(0, vocabulary, (test.batch, test.prompt or max(1, test.depth)))
    return ids_BT, generator.integers(0, vocabulary, (test.decode, test.batch))


def time_call(run: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def load_ours(directory: str, fmt: str) -> tuple[Measure, float]:
    """Return a timer of jaxllm in a format, and the weight bytes that a decoded token reads."""
    from jaxllm.cli.options import load_model

    name, _, extra = fmt.partition("+")
    sparse = parse_format(name).dense_format is not None
    dtype, quantize = (name, None) if name in DTYPES else ("bfloat16", None if sparse else name)
    options = {"quantize": quantize, "int8_inputs": bool(extra), "reuse_compiled": False}
    lm = load_model(directory, dtype, **options)
    if sparse:
        half = "2:4" if name.endswith("2:4") else "50%"
        lm = compress(lm, [f"prune: magnitude {half}", f"quantize: rtn {name}"])
    runs = cache(lambda test: bench.prepare_run(lm, test, 512))
    return lambda test: time_call(runs(test)), bench.weight_bytes(lm)


def load_transformers(directory: str, dtype: str) -> tuple[Measure, float]:
    """Return the same for transformers, in eager PyTorch with its default cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    options = {"dtype": getattr(torch, dtype), "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    config = model.config

    @cache
    def fill_cache(test: Test) -> DynamicCache:
        kv = DynamicCache(config=config)
        if test.depth:
            ids_BT = torch.from_numpy(draw_tokens(test, config.vocab_size)[0])
            model(ids_BT, past_key_values=kv, logits_to_keep=1)
        return kv

    def measure(test: Test) -> float:
        ids_BT, token_SB = map(torch.from_numpy, draw_tokens(test, config.vocab_size))
        kv = copy.deepcopy(fill_cache(test))
        blocks_BT = [ids_BT] if test.prompt else [token_B[:, None] for token_B in token_SB]
        return time_call(
            lambda: [model(x, past_key_values=kv, logits_to_keep=1) for x in blocks_BT]
        )

    tables = ("wpe",) if config.tie_word_embeddings else ("wpe", "wte", "embed_tokens")
    named = [(name.split(".")[-2], p.nbytes) for name, p in model.named_parameters()]
    return measure, sum(n for name, n in named if name not in tables)


def load_openvino(directory: str, precision: str) -> tuple[Measure, float]:
    """Return the same for OpenVINO; the weight bytes that it reads are not known."""
    from scripts.benchmarks.openvino_engine import compile_model

    step, reset = compile_model(directory, precision)
    vocabulary = read_model_json(Path(directory))["vocab_size"]

    def measure(test: Test) -> float:
        ids_BT, token_SB = draw_tokens(test, vocabulary)
        reset()
        if test.prompt:
            return time_call(lambda: step(ids_BT, 0))
        if test.depth:
            step(ids_BT, 0)
        return time_call(lambda: [step(t[:, None], test.depth + i) for i, t in enumerate(token_SB)])

    return measure, 0


def load_bus(directory: str, fmt: str) -> tuple[Measure, float]:
    """Return a probe of the current memory bandwidth in GB/s, for any test."""
    import jax.numpy as jnp

    probe = jnp.arange(bench.PROBE_BYTES // 4, dtype=jnp.uint32).block_until_ready()
    return lambda test: bench.measure_bandwidth(probe), 0


LOADERS = {
    "jaxllm": load_ours,
    "transformers": load_transformers,
    "openvino": load_openvino,
    "memory bus": load_bus,
}


def serve(peer: str, directory: str, fmt: str) -> None:
    """Run the worker's side: load, reply, then run one test per line of stdin until it ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, which must carry replies only

    def reply(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = function(*arguments)
            message = {"value": result[1] if isinstance(result, tuple) else result}
        except Exception as error:  # any error is a reason to skip this peer
            result, text = None, " ".join(str(error).split())[:300]
            message = {"error": f"{type(error).__name__}: {text}"}
        print(json.dumps(message), file=replies, flush=True)
        return result

    if loaded := reply(LOADERS[peer], directory, fmt):
        for line in sys.stdin:
            reply(loaded[0], Test(**json.loads(line)))


if __name__ == "__main__" and sys.argv[1:2] == ["--worker"]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
    serve(*sys.argv[2:])
