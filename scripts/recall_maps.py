"""Heat maps of `jaxllm recall`: models and policies side by side, those that fail among them.

    python scripts/recall_maps.py --out docs/recall.png

Down: the depth of the fact, across: the length of the text. A map is what `jaxllm recall MODEL
--policies POLICY` has; an empty cell is a text that the model refuses by name.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jaxllm
from jaxllm.errors import CapacityError
from jaxllm.evaluate.recall.grid import EXTENDED, Cell, default_extension, recall
from jaxllm.evaluate.recall.report import plot
from jaxllm.progress import steps_bar

# (model, style of the texts, policy): a map each.
MAPS = (
    ("demo:llama", "story", "full"),
    ("demo:llama", "story", "self-extend"),
    ("demo:llama", "story", "sinks"),
    ("demo:llama", "story", "heavy"),
    ("demo:llama", "story", "pooled"),
    ("demo:llama", "story", "slide"),
    ("demo:gpt2", "story", "full"),
    ("demo:gpt2", "story", "slide"),
    ("demo:long-dense", "meetings", "full"),
    ("demo:long-dense", "meetings", "window"),
    ("demo:long-dense", "meetings", "self-extend"),
    ("demo:long-infini", "meetings", "segments"),
)


def cells_of(
    lm: jaxllm.LM, style: str, policy: str, lengths: Sequence[int], options: argparse.Namespace
) -> list[Cell]:
    """The cells of a map, without those of lengths that the model refuses."""
    found: list[Cell] = []
    extended = None
    if policy == EXTENDED:
        extended = lm.self_extended(**default_extension(lm.config, max(lengths))).model
    for length in lengths:
        try:
            found += recall(
                lm.model,
                lm.params,
                lm.encode,
                style=style,
                lengths=[length],
                depths=options.depths,
                policies=[policy],
                slots=options.slots,
                tries=options.tries,
                extended=extended,
                show_progress=False,
            )
        except CapacityError as error:
            print(f"{lm.path.name}, {policy}: {error}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Draw what models and policies recall, by depth and length.",
        epilog="example: python scripts/recall_maps.py --out docs/recall.png",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/recall.png"))
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 384, 768])
    parser.add_argument("--depths", nargs="+", type=float, default=[0.0, 0.5, 1.0])
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--tries", type=int, default=8)
    options = parser.parse_args(arguments)
    maps: dict[str, list[Cell]] = {}
    with steps_bar("maps", len(MAPS), None) as done:
        for model, style, policy in MAPS:
            lm = jaxllm.load(model, dtype="float32")
            cells = cells_of(lm, style, policy, options.lengths, options)
            maps[f"{model}, {policy}"] = cells
            done()
    plot(maps, options.out, f"recall; {options.slots} slots but for full", across=4, dpi=80)


if __name__ == "__main__":
    main()
