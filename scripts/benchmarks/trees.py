"""Trees of tokens compared with chains: seconds, and bytes beyond the prompt's cache.

    python scripts/benchmarks/trees.py [-m MODEL] [--branches 4 16 64] [--tokens 8] [--prompt 512]
    python scripts/benchmarks/trees.py --drafts TEXT [--model MODEL]

One decision: all ways run the same branches after the same prompt, in alternating rounds, after a
round that compiles. "Forked" trees double at each token until there are enough branches; "apart"
trees share nothing but the prompt. "Rows" are a fork of the cache with a row per branch.
`--drafts` asks instead whether the K latest matches of a text's last tokens are a better draft as a
tree than one of them as a chain. With the same random key the text does not depend on the draft, so
the tokens per pass of any draft follow from a text. The last column multiplies them by the time of
a pass over one token by the time of one over all of the draft's tokens.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm.cache import fork
from jaxllm.cache.kv import count_bytes
from jaxllm.cache.tree import init_tree

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.benchmarks.compare_peers import measure_background_load


def make_tree(branches: int, tokens: int, doubles: bool) -> list[list[int]]:
    """Return the parents of each level of a tree, by number: `tokens` levels."""
    levels: list[list[int]] = []
    first, before = 0, [-1]
    for level in range(tokens):
        count = min(branches, 2 ** (level + 1)) if doubles else branches
        levels.append([before[i % len(before)] for i in range(count)])
        before = list(range(first, first + count))
        first += count
    return levels


def compare(lm: Any, prompt: int, branches: int, tokens: int, rounds: int) -> None:
    """Print a row for each way to run the branches."""
    model, params = lm.model, lm.params
    rng = np.random.default_rng(0)
    ids = rng.integers(3, lm.config.vocab_size, (1, prompt))
    cache = lm.init_cache(batch=1, capacity=prompt + tokens)
    cache = jaxllm.prefill(model, params, cache, ids).cache
    forked, apart = (make_tree(branches, tokens, doubles) for doubles in (True, False))
    words = rng.integers(3, lm.config.vocab_size, branches * tokens)

    def one_pass(levels: list[list[int]]) -> Any:
        parents = [[*itertools.chain(*levels)]]
        return jaxllm.forward(model, params, cache, words[None, : len(parents[0])], parents=parents)

    def by_level(levels: list[list[int]]) -> Any:
        tree, out = init_tree(cache, sum(map(len, levels))), None
        for parents in levels:
            tokens_BN = words[None, : len(parents)]
            out = jaxllm.forward(model, params, cache, tokens_BN, parents=[parents], tree=tree)
            tree = out.delta
        return out

    def rows_in_one_pass() -> Any:
        rows = fork(cache, branches, capacity=tokens)
        out = jaxllm.forward(model, params, rows, words.reshape(branches, tokens))
        return out.logits, jaxllm.commit(rows, out.delta, donate=True)

    def rows_by_token() -> Any:
        rows, out = fork(cache, branches, capacity=tokens), None
        for _ in range(tokens):
            out = jaxllm.decode_step(model, params, rows, words[:branches], donate=True)
            rows = out.cache
        return out

    def one_by_one() -> Any:
        chains = words.reshape(branches, 1, tokens)
        outs = [jaxllm.forward(model, params, cache, chain) for chain in chains]
        return [jaxllm.commit(cache, out.delta) for out in outs]

    ways: dict[str, Callable[[], Any]] = {
        "tree, forked, one pass": lambda: one_pass(forked),
        "tree, apart, one pass": lambda: one_pass(apart),
        "rows, one pass": rows_in_one_pass,
        "chains, one by one": one_by_one,
        "tree, forked, level by level": lambda: by_level(forked),
        "tree, apart, level by level": lambda: by_level(apart),
        "rows, token by token": rows_by_token,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            result = jax.block_until_ready(run())
            if number:
                seconds[name].append(time.perf_counter() - start)
            else:
                size = count_bytes(cache, _arrays(result)) - count_bytes(cache)
                seconds[name + " bytes"] = [size]
    for name in ways:
        nodes = sum(map(len, forked if "forked" in name else apart))
        print(
            f"| {branches} | {name} | {nodes} | {statistics.median(seconds[name]):.4f}"
            f" | {seconds[name + ' bytes'][0] / 1e6:.2f} |",
            flush=True,
        )


def _arrays(result: Any) -> Any:
    """Return what a result holds besides logits."""
    if isinstance(result, jaxllm.Output):
        return result.delta
    if isinstance(result, jaxllm.StepOutput):
        return result.cache
    return result[1] if isinstance(result, tuple) else result


def draft_tree(text: Sequence[int], places: dict[Any, list[int]], count: int, width: int) -> Any:
    """Return `count` continuations of the text's end, `width` tokens each, as a tree of dicts.

    The longest matches of up to three tokens come first, and of these the latest.

    Args:
        places: By n-gram, where it ends, in order; without the text's end.
    """
    tree: dict[int, Any] = {}
    taken: set[int] = set()
    chains: set[tuple[int, ...]] = set()
    for n in (3, 2, 1):
        for at in reversed(places.get(tuple(text[-n:]), [])):
            if len(chains) == count:
                return tree
            if at in taken:
                continue
            taken.add(at)
            period = len(text) - 1 - at
            chain = tuple(text[at + 1 + ahead % period] for ahead in range(width))
            chains.add(chain)
            branch = tree
            for token in chain:
                branch = branch.setdefault(token, {})
    return tree


def tree_size(tree: Any) -> int:
    return sum(1 + tree_size(below) for below in tree.values())


def simulate(text: Sequence[int], start: int, count: int, width: int) -> tuple[float, float]:
    """Return the text's tokens per pass from `start` on, and the draft's tokens per pass."""
    places: dict[Any, list[int]] = {}
    at, passes, drafted, indexed = start, 0, 0, 0
    while at < len(text):
        for end in range(indexed, at - 1):  # n-grams before the last token
            for n in (1, 2, 3):
                if end + 1 >= n:
                    places.setdefault(tuple(text[end + 1 - n : end + 1]), []).append(end)
        indexed = max(indexed, at - 1)
        tree = draft_tree(text[:at], places, count, width)
        passes, drafted = passes + 1, drafted + tree_size(tree)
        while at < len(text) and text[at] in tree:
            tree, at = tree[text[at]], at + 1
        at += 1
    return (len(text) - start) / passes, drafted / passes


def pass_seconds(lm: Any, prompt: int, counts: Sequence[int], rounds: int) -> list[float]:
    """Return the median seconds of passes over this many nodes after a prompt."""
    ids = np.random.default_rng(0).integers(3, lm.config.vocab_size, (1, prompt))
    cache = lm.init_cache(batch=1, capacity=prompt + 1)
    cache = jaxllm.prefill(lm.model, lm.params, cache, ids).cache
    seconds: list[list[float]] = [[] for _ in counts]
    for number in range(rounds + 1):
        for count, times in zip(counts, seconds, strict=True):
            parents = [[-1] * count]
            start = time.perf_counter()
            out = jaxllm.forward(lm.model, lm.params, cache, ids[:, :count], parents=parents)
            jax.block_until_ready(out.logits)
            if number:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def compare_drafts(lm: Any, path: Path, prompt: int, rounds: int) -> None:
    """Print a table of drafts of a file's text, and of what the model writes."""
    written = lm.generate(
        "Once upon a time", max_new_tokens=480, temperature=0.8, seed=1, eos_token_id=[]
    )
    texts = {path.name: lm.encode(path.read_text(encoding="utf-8")[:40_000])}
    texts[f"written by {lm.config.model_type}"] = list(written.tokens)
    counts = [1 << n for n in range(7)]
    measured = pass_seconds(lm, prompt, counts, rounds)
    print("ms per pass over " + ", ".join(
        f"{count}: {1e3 * x:.1f}" for count, x in zip(counts, measured, strict=True)
    ))  # fmt: skip
    print("| text | chains x tokens | drafted per pass | tokens per pass | speed over none |")
    print("|---|---|---|---|---|")
    for name, text in texts.items():
        for count, width in ((1, 4), (1, 8), (2, 4), (4, 4), (8, 4), (4, 2), (8, 2), (16, 1)):
            per_pass, drafted = simulate(text, min(256, len(text) // 4), count, width)
            cost = np.interp(1 + drafted, counts, measured) / measured[0]
            print(
                f"| {name} | {count} x {width} | {drafted:.1f} | {per_pass:.2f}"
                f" | {per_pass / cost:.2f} |",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", default="demo:llama")
    parser.add_argument("--branches", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--tokens", type=int, default=8, help="tokens per branch")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens, if there is room")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and cache")
    parser.add_argument("--quantize", default=None, help="weight format, such as int8")
    parser.add_argument("--drafts", type=Path, metavar="TEXT", help="compare drafts of this text")
    options = parser.parse_args(arguments)
    lm = jaxllm.load(options.model, dtype=options.dtype, quantize=options.quantize, invariant=True)
    prompt = min(options.prompt, lm.config.position_limit - options.tokens)
    print(f"background load: {measure_background_load()} cores; a prompt of {prompt} tokens")
    if options.drafts is not None:
        return compare_drafts(lm, options.drafts, prompt, options.rounds)
    print("| branches | way | tokens run | s | MB beyond the cache |")
    print("|---|---|---|---|---|")
    for branches in options.branches:
        compare(lm, prompt, branches, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
