"""Recall from a long text under each cache policy: a Markdown table on stdout.

    python scripts/benchmarks/policy_table.py [--models demo:llama demo:gpt2]
        [--lengths 96 192 384 768] [--depths 0 0.5 1]
        [--policies full slide ...] [--slots 96] [--tries 16]

It runs the test of `jaxllm recall`: a story introduces a name at some depth and asks for it at the
end. A cell has two percentages: the texts whose correct answer was the likeliest, and the texts
that greedy decoding answers. `--slots` is the cache size of a row under every policy except full
and self-extend, which have a slot for every token. Errors for what a model does not support follow
the table.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jaxllm
from jaxllm.errors import JaxllmError
from jaxllm.research.needle.grid import POLICIES, SELF_EXTEND, Cell, default_extension, recall


def measure(lm: Any, policy: str, length: int, options: argparse.Namespace) -> str:
    """Return a table cell: the shares by depth.

    Raises:
        JaxllmError: if the model does not support the policy or the length.
    """
    extended = None
    if policy == SELF_EXTEND:
        numbers = default_extension(lm.config, max(options.lengths))
        extended = lm.with_attention(numbers).model
    cells = recall(
        lm.model,
        lm.params,
        lm.encode,
        style=options.texts,
        lengths=[length],
        depths=options.depths,
        policies=[policy],
        slots=options.slots,
        tries=options.tries,
        seed=options.seed,
        extended_model=extended,
    )
    return ", ".join(f"{format_percent(c.right, c)}/{format_percent(c.greedy, c)}" for c in cells)


def format_percent(count: int, cell: Cell) -> str:
    return f"{100 * count / cell.tries:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo:llama", "demo:gpt2"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[96, 192, 384, 768])
    parser.add_argument("--depths", nargs="+", type=float, default=[0.0, 0.5, 1.0])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--slots", type=int, default=96, help="cache slots per row")
    parser.add_argument("--tries", type=int, default=16, help="texts per cell")
    parser.add_argument("--texts", default="story")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    depths = ", ".join(f"{d:.0%}" for d in options.depths)
    print(f"Right / greedy in percent at depths {depths}; {options.slots} cache slots.\n")
    print("| model | policy | " + " | ".join(f"{n} tokens" for n in options.lengths) + " |")
    print("|---" * (2 + len(options.lengths)) + "|")
    refused: dict[str, None] = {}
    for name in options.models:
        lm = jaxllm.load(name)
        for policy in options.policies:
            results = []
            for length in options.lengths:
                try:
                    results.append(measure(lm, policy, length, options))
                except JaxllmError as error:
                    results.append("")
                    refused[f"* {name}, {policy}: {error}"] = None
            print(f"| {name} | {policy} | " + " | ".join(results) + " |", flush=True)
    if refused:
        print("\n" + "\n".join(refused))


if __name__ == "__main__":
    main()
