"""Activation patching compared with PyTorch hooks, and steering in a batch with a plain one.

    python scripts/benchmarks/patching.py [--tokens 256] [--positions 32] [--torch-layers 1]

One decision: both patch the same cells of the same random model, and the results must agree.
GPT-2 medium's shape; the residual stream after each layer, at each of the last positions of a
text. PyTorch runs transformers' model with a forward hook, once per cell and also in batches, for
some layers, and its time is scaled to all. jaxllm runs all cells: with the prefix shared, and (for
the same layers, scaled) without. `--steering` compares 8 rows of `serve` with 8 strengths of a
vector with 8 plain rows instead, in alternating rounds, at GPT-2's shape.
Example: python scripts/benchmarks/patching.py --small
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import jaxllm
from jaxllm.inside import Add, Patches, patch_sites

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.benchmarks.compare_peers import measure_background_load

SIZES: dict[str, dict[str, int]] = {
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "small": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 128},
}
ROWS, STEPS = 8, 48


def random_models(size: str) -> tuple[Any, jaxllm.LM]:
    """Return a random model in PyTorch, and the same one in jaxllm."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SIZES[size], bos_token_id=0, eos_token_id=0)
    ).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return theirs, jaxllm.load(directory, dtype="float32")


def timed(run: Callable[[], Any]) -> tuple[np.ndarray, Any]:
    """Return the seconds that passed, the CPU seconds of this process, and the result."""
    start = np.array([time.perf_counter(), time.process_time()])
    result = run()
    return np.array([time.perf_counter(), time.process_time()]) - start, result


def metric(logits_V: Any) -> Any:
    return logits_V[3] - logits_V[7]


@torch.no_grad()
def patch_with_hooks(
    model: Any, ids: np.ndarray, source_ids: np.ndarray, layers: range, places: range, rows: int
) -> np.ndarray:
    """Return the metric `[layers, positions]` of whole runs, `rows` positions at a time."""
    values: list[Any] = []
    handles = [
        block.register_forward_hook(lambda _, args, out: values.append(first(out)))
        for block in model.transformer.h
    ]
    model(torch.tensor(source_ids[None]), logits_to_keep=1)
    for handle in handles:
        handle.remove()
    cells = []
    for layer in layers:
        for start in range(0, len(places), rows):
            at = torch.tensor(places[start : start + rows])
            hook = partial(set_rows, at=at, value_1TD=values[layer])
            handle = model.transformer.h[layer].register_forward_hook(hook)
            token_BT = torch.tensor(np.repeat(ids[None], len(at), axis=0))
            logits = model(token_BT, logits_to_keep=1).logits[:, -1]
            handle.remove()
            cells += [float(metric(row)) for row in logits]
    return np.array(cells).reshape(len(layers), len(places))


def set_rows(_: Any, args: Any, out: Any, at: torch.Tensor, value_1TD: torch.Tensor) -> Any:
    """Set one position of each row."""
    x = first(out).clone()
    x[torch.arange(len(at)), at] = value_1TD[0, at]
    return (x, *out[1:]) if isinstance(out, tuple) else x


def first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def compare_sweeps(size: str, tokens: int, positions: int, torch_layers: int) -> None:
    """Print the seconds of each way to fill the map of layers and positions."""
    theirs, lm = random_models(size)
    rng, layers = np.random.default_rng(0), SIZES[size]["n_layer"]
    ids, source_ids = rng.integers(0, 500, (2, tokens))
    source_ids[0] = ids[0]
    places, some = range(tokens - positions, tokens), range(torch_layers)
    scale = layers / torch_layers

    def sweep(which: range, places: Sequence[int] = places, whole: bool = False) -> Patches:
        # Token 0 is equal in both texts: to set it too changes nothing but where the suffix starts.
        cells: Any = [[0, at] for at in places] if whole else places
        args = lm.model, lm.params, ids, source_ids, metric, "resid_post"
        return patch_sites(*args, layers=which, positions=cells)

    print(f"background load: {measure_background_load()} cores; {torch.get_num_threads()} threads")
    seconds = {}
    sweep(range(layers), [*places[:2], *places[-3:]])  # compiles
    seconds["jaxllm, prefix shared"], ours = timed(lambda: sweep(range(layers)))
    sweep(some, places[:4], whole=True)
    once, whole = timed(lambda: sweep(some, whole=True))
    seconds["jaxllm, whole runs"] = once * scale
    for rows in (1, ROWS):
        once, hooked = timed(
            lambda rows=rows: patch_with_hooks(theirs, ids, source_ids, some, places, rows)
        )
        seconds[f"torch hooks, {rows} a run"] = once * scale
        spread = np.ptp(hooked)
        assert np.abs(ours.metric[some] - hooked).max() < 1e-3 * max(spread, 1e-3)
        assert np.abs(whole.metric - hooked).max() < 1e-3 * max(spread, 1e-3)
    print(f"{layers} layers x {positions} positions of {tokens} tokens, {size}")
    print("| | seconds | CPU seconds | times jaxllm's | of CPU |\n|---|---:|---:|---:|---:|")
    for name, value in seconds.items():
        numbers = *value, *(value / seconds["jaxllm, prefix shared"])
        print(f"| {name} |", " | ".join(f"{x:.1f}" for x in numbers), "|", flush=True)
    print(f"background load after: {measure_background_load()} cores")


def compare_steering(size: str, rounds: int) -> None:
    """Print the time of 8 rows with 8 strengths as a share of 8 plain rows' time."""
    _, lm = random_models(size)
    rng, site = np.random.default_rng(0), f"blocks.{SIZES[size]['n_layer'] // 2}.resid_post"
    prompts = rng.integers(0, 500, (ROWS, 16))
    vector_D = rng.standard_normal(SIZES[size]["n_embd"]).astype(np.float32)

    def answer(steered: bool) -> None:
        requests = [
            jaxllm.Request(
                id=row,
                prompt=prompts[row],
                max_new_tokens=STEPS,
                edits={site: Add(vector_D, scale=0.1 * row)} if steered else None,
            )
            for row in range(ROWS)
        ]
        events = jaxllm.serve(lm.model, lm.params, requests, rows=ROWS, capacity=64 + STEPS)
        assert sum(1 for _ in events) >= ROWS * STEPS

    print(f"background load: {measure_background_load()} cores")
    for steered in (False, True):
        answer(steered)  # compiles
    pairs = [[timed(lambda s=s: answer(s))[0][0] for s in (False, True)] for _ in range(rounds)]
    plain, steered = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(
        f"{ROWS} rows x {STEPS} tokens: plain {plain:.2f} s, steered {steered:.2f} s, {ratio:.3f}x"
    )
    print(f"background load after: {measure_background_load()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=256, help="text length [default: 256]")
    parser.add_argument("--positions", type=int, default=32, help="last positions [default: 32]")
    parser.add_argument("--torch-layers", type=int, default=1, help="layers to time [default: 1]")
    parser.add_argument("--steering", action="store_true", help="8 strengths in `serve`")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of --steering [default: 7]")
    parser.add_argument("--small", action="store_true", help="a tiny model and text")
    options = parser.parse_args()
    if options.steering:
        compare_steering("small" if options.small else "gpt2", options.rounds)
    elif options.small:
        compare_sweeps("small", 40, 8, 1)
    else:
        compare_sweeps("medium", options.tokens, options.positions, options.torch_layers)


if __name__ == "__main__":
    main()
