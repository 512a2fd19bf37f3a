"""`jaxllm embed`: one vector per text."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import log, read_stdin, write
from jaxllm.cli.eval_data import read_text_option
from jaxllm.cli.option_groups import AdapterOptions
from jaxllm.cli.options import BatchSize, Model, NewFile
from jaxllm.errors import ConfigError
from jaxllm.runtime import multihost

Texts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT|@FILE|-", help="Text, @FILE to read a whole file, or - for stdin; repeatable."
    ),
]
TextFile = Annotated[str | None, typer.Option(help="File with one text per line; - for stdin.")]
EXAMPLE = "Example: jaxllm embed demo:llama --text 'One day' --text 'Once upon a time' --json"


def embed(
    model: Model = "demo:llama",
    text: Texts = None,
    file: TextFile = None,
    layer: int = -1,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    batch: BatchSize = 16,
    out: NewFile = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    *,
    loading: AdapterOptions,
) -> None:
    """Embed texts: pooled hidden states of a layer.

    Prints one row per text, in their order.

    Args:
        layer: Layer: 0 is the embedding table, n the output of block n, -1 the last, normed.
        pooling: Pooling over the tokens: mean, last or cls [default: the checkpoint's, else mean].
        normalize: Scale each vector to Euclidean norm 1 [default: the checkpoint's, else not].
        prompt_name: Prompt of the checkpoint to put before each text, such as query.
        instruction: Task of the texts, which are queries, in the form of Qwen3-Embedding.
        batch: Texts per batch.
        out: Output file, .npy or .safetensors [default: stdout].
        as_json: Print one JSON array per line.
    """
    if out is not None and out.suffix not in (".npy", ".safetensors"):
        raise ConfigError(f"--out must end in .npy or .safetensors, got {out}")
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists; name another file")
    texts = read_texts(text, file)
    lm = loading.load(model)
    options: dict[str, Any] = {"prompt_name": prompt_name, "instruction": instruction}
    given = {"pooling": pooling, "normalize": normalize}
    options |= {name: value for name, value in given.items() if value is not None}
    vectors = lm.embed(texts, layer=layer, batch=batch, **options)
    if out is not None:
        _save_rows(out, vectors)
        log(f"{out}: {vectors.shape[0]} rows of {vectors.shape[1]}")
        return
    for row in vectors.tolist():
        write((json.dumps(row) if as_json else " ".join(f"{x:.6g}" for x in row)) + "\n")


def read_texts(text: list[str] | None, file: str | None) -> list[str]:
    """Return the given texts, or the lines of the file, the same in all processes of a group."""
    from jaxllm.files import read_text, split_lines

    if bool(text) == (file is not None):
        raise ConfigError("give either --text (repeatable) or --file")
    texts = [read_text_option(value) for value in text or []]
    if file is not None:
        texts = split_lines(read_stdin() if file == "-" else read_text(Path(file)))
    if not texts:
        raise ConfigError(f"{file} has no lines")
    multihost.check_processes_agree({"texts": multihost.digest(texts)})
    return texts


def _save_rows(out: Path, array: Any) -> None:
    """Write the rows atomically."""
    import numpy as np

    from jaxllm.files import atomic_file
    from jaxllm.weights.lazy import LazyTensor
    from jaxllm.weights.safetensors import write_tensors

    if out.suffix == ".safetensors":
        write_tensors(out, {"embeddings": LazyTensor.from_array(array)}, aligned=False)
        return
    with atomic_file(out) as stream:
        np.save(stream, array)
