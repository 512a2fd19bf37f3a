"""`jaxllm steer`: a steering vector from pairs of texts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import log, read_stdin
from jaxllm.cli.option_groups import AdapterOptions
from jaxllm.cli.options import BatchSize, Model, check_folder, split_numbers
from jaxllm.errors import ConfigError

EXAMPLE = """
Examples:

  jaxllm steer demo:llama pairs.tsv happy.gguf

  jaxllm steer demo:llama pairs.tsv happy.gguf --tokens mean --layers 1,2
"""


def steer(
    model: Model,
    pairs: Annotated[str, typer.Argument(metavar="PAIRS")],
    out: Annotated[Path, typer.Argument(metavar="OUT", callback=check_folder)],
    method: str = "mean",
    tokens: str = "last",
    layers: Annotated[str | None, typer.Option(metavar="L,L,...")] = None,
    batch: BatchSize = 16,
    *,
    loading: AdapterOptions,
) -> None:
    """Write a steering vector: the direction from the second texts of pairs to the first.

    OUT is a control vector of llama.cpp (GGUF), or safetensors if its name ends so. generate and
    chat take it as --steer OUT:STRENGTH, serve as --steer NAME=OUT.

    Args:
        pairs: File with one pair per line and a tab between its texts, or a JSON list of pairs; -
            reads stdin.
        out: File to write.
        method: Direction of each layer: mean (the mean difference) or pca (its part in the first
            principal direction).
        tokens: State of a text: that of its last token (last), or the mean of all tokens (mean).
        layers: Layers to write, from 0 [default: all].
        batch: Texts per batch.
    """
    from jaxllm.convert.gguf.writer import check_absent

    check_absent(out)
    texts = read_pairs(pairs)
    chosen = None if layers is None else {*split_numbers("--layers", layers)}
    lm = loading.load(model)
    from jaxllm.inside import find_directions, write_directions

    ids: Any = [tuple(lm.encode(text) for text in pair) for pair in texts]
    options: Any = {"method": method, "tokens": tokens, "batch": batch}
    directions = find_directions(lm.model, lm.params, ids, **options)
    if chosen is not None:
        if beyond := chosen - directions.keys():
            raise ConfigError(f"--layers: layer {max(beyond)} is not in 0 to {max(directions)}")
        directions = {layer: x for layer, x in directions.items() if layer in chosen}
    write_directions(out, directions, model_hint=lm.config.model_type)
    log(f"{out}: {len(texts)} pairs; layers {', '.join(map(str, directions))}")


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Return the pairs of a file, or of stdin. Raises ConfigError for what is no pair."""
    from jaxllm.files import parse_json, read_text, split_lines

    text = read_stdin() if path == "-" else read_text(Path(path))
    rows: list[Any] = (
        parse_json(text, path, ConfigError)
        if text.lstrip().startswith("[")
        else [line.split("\t") for line in split_lines(text) if line.strip()]
    )
    for number, row in enumerate(rows, 1):
        is_pair = isinstance(row, list) and len(row) == 2
        if not is_pair or not all(isinstance(x, str) and x for x in row):
            raise ConfigError(f"{path}: pair {number} must be two texts, got {row!r:.60}")
    if not rows:
        raise ConfigError(f"{path} has no pairs")
    return [(first, second) for first, second in rows]
