"""`jaxllm embed`: one vector per text."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxllm.cli.console import log, read_stdin, write
from jaxllm.cli.eval_data import read_text_option
from jaxllm.cli.option_groups import AdapterOptions
from jaxllm.cli.options import Model, check_writable
from jaxllm.errors import ConfigError
from jaxllm.runtime import multihost

EXAMPLE = "Example: jaxllm embed demo:llama --text 'One day' --text 'Once upon a time' --json"


def embed(
    model: Model = "demo:llama",
    text: Annotated[list[str] | None, typer.Option(metavar="TEXT|@FILE|-")] = None,
    file: str | None = None,
    layer: int = -1,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch")] = 16,
    out: Path | None = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    *,
    loading: AdapterOptions,
) -> None:
    """Embed texts: pooled hidden states of a layer.

    Prints one row per text, in their order.

    Args:
      text: Text, @FILE to read a whole file, or - for stdin; repeatable.
      file: File with one text per line; - for stdin.
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
    check_writable("--out", out)
    texts = read_texts(text, file)
    multihost.check_processes_agree({"texts": multihost.digest(texts)})
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
    """Return the given texts, or the lines of the file."""
    if bool(text) == (file is not None):
        raise ConfigError("give either --text (repeatable) or --file")
    if file is None:
        return [read_text_option(value) for value in text or []]
    from jaxllm.files import read_text, split_lines

    lines = split_lines(read_stdin() if file == "-" else read_text(Path(file)))
    if not lines:
        raise ConfigError(f"{file} has no lines")
    return lines


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
