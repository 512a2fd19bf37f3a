"""`jaxllm classify`: the labels or rewards of texts, by a checkpoint's score head."""

import json
from typing import Annotated

import typer

from jaxllm.cli.console import write
from jaxllm.cli.embed import read_texts
from jaxllm.cli.option_groups import AdapterOptions
from jaxllm.cli.options import Model
from jaxllm.runtime import multihost

EXAMPLE = "Example: jaxllm classify reward-model --text 'One day' --text 'Once upon a time' --json"


def classify(
    model: Model,
    text: Annotated[list[str] | None, typer.Option(metavar="TEXT|@FILE|-")] = None,
    file: str | None = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch")] = 16,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    *,
    loading: AdapterOptions,
) -> None:
    """Classify texts: the label with the highest score, and its score.

    The checkpoint must have a score head (a ForSequenceClassification class).

    Args:
      text: Text, @FILE to read a whole file, or - for stdin; repeatable.
      file: File with one text per line; - for stdin.
      batch: Texts per batch.
      as_json: Print one JSON object per line: label, scores and logits of all labels.
    """
    from jaxllm.generation.heads import describe

    texts = read_texts(text, file)
    multihost.check_processes_agree({"texts": multihost.digest(texts)})
    for found in describe(loading.load(model).classify(texts, batch=batch)):
        if as_json:
            write(json.dumps(found, ensure_ascii=False) + "\n")
        else:
            write(f"{found['label']} {max(found['scores']):.6g}\n")
