"""What each way of keeping a long text still knows of it: a Markdown table, on stdout.

    python scripts/benchmarks/policy_table.py [--models demo:llama demo:gpt2]
        [--lengths 96 192 384 768] [--depths 0 0.5 1]
        [--policies full slide ...] [--slots 96] [--tries 16]

The tests of `jaxllm recall`: a name told at some depth of a story, asked for at its end. A cell is
the share of texts whose right answer was the likeliest, in percent, over the share that greedy
decoding answers. `slots` is what a row's cache holds under every policy but full and self-extend,
which have one for every token. What a model cannot do is told in its own words below the table.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jaxllm
from jaxllm.errors import JaxllmError
from jaxllm.evaluate.needle.grid import POLICIES, SELF_EXTEND, Cell, default_extension, recall


def measured(lm: Any, policy: str, length: int, options: argparse.Namespace) -> str:
    """A cell of the table: the shares by depth. Raises JaxllmError for what the model cannot do."""
    extended = None
    if policy == SELF_EXTEND:
        numbers = default_extension(lm.config, max(options.lengths))
        extended = lm.with_self_extend(**numbers).model
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
    return ", ".join(f"{_percent(c.right, c)}/{_percent(c.greedy, c)}" for c in cells)


def _percent(count: int, cell: Cell) -> str:
    return f"{100 * count / cell.tries:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo:llama", "demo:gpt2"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[96, 192, 384, 768])
    parser.add_argument("--depths", nargs="+", type=float, default=[0.0, 0.5, 1.0])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--tries", type=int, default=16)
    parser.add_argument("--texts", default="story")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    depths = ", ".join(f"{d:.0%}" for d in options.depths)
    print(f"Right / greedy in percent at depths {depths}; {options.slots} slots.\n")
    print("| model | policy | " + " | ".join(f"{n} tokens" for n in options.lengths) + " |")
    print("|---" * (2 + len(options.lengths)) + "|")
    refused: dict[str, None] = {}
    for name in options.models:
        lm = jaxllm.load(name)
        for policy in options.policies:
            shown = []
            for length in options.lengths:
                try:
                    shown.append(measured(lm, policy, length, options))
                except JaxllmError as error:
                    shown.append("")
                    refused[f"* {name}, {policy}: {error}"] = None
            print(f"| {name} | {policy} | " + " | ".join(shown) + " |", flush=True)
    if refused:
        print("\n" + "\n".join(refused))


if __name__ == "__main__":
    main()
