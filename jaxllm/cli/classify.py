"""`jaxllm classify`: the labels or rewards of texts, by a checkpoint's score head."""

from jaxllm.cli.console import write, write_json
from jaxllm.cli.embed import TextFile, Texts, read_texts
from jaxllm.cli.option_groups import AdapterOptions
from jaxllm.cli.options import AsJson, BatchSize, Model

EXAMPLE = "Example: jaxllm classify reward-model --text 'One day' --text 'Once upon a time' --json"


def classify(
    model: Model,
    text: Texts = None,
    file: TextFile = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
    *,
    loading: AdapterOptions,
) -> None:
    """Classify texts: the label with the highest score, and its score.

    The checkpoint must have a score head (a ForSequenceClassification class).

    Args:
        batch: Texts per batch.
        as_json: Print one JSON object per line: label, scores and logits of all labels.
    """
    from jaxllm.generation.heads import describe

    texts = read_texts(text, file)
    for result in describe(loading.load(model).classify(texts, batch=batch)):
        if as_json:
            write_json(result)
        else:
            write(f"{result['label']} {max(result['scores']):.6g}\n")
