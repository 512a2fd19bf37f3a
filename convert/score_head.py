"""The fields of config.json that describe the score head of a `ForSequenceClassification` class."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxllm.config.model import MAX_LABELS, ProblemType, ScoreHead
from jaxllm.errors import ConfigError
from jaxllm.runtime.schema import as_schema


class _Fields(msgspec.Struct):
    """The fields, with transformers' names and defaults."""

    id2label: dict[str, str | int] | None = None
    num_labels: Annotated[int, Meta(ge=1, le=MAX_LABELS)] | None = None
    problem_type: ProblemType | None = None
    pad_token_id: int | None = None


def read_score_head(data: Mapping[str, Any]) -> ScoreHead:
    """Return the head that a config.json describes; by default it has two labels.

    Raises ConfigError for malformed fields, and for fields that contradict each other.
    """
    fields: _Fields = as_schema(data, _Fields, "config.json", ConfigError)
    count = 2 if fields.num_labels is None else fields.num_labels
    label_names = fields.id2label or {str(i): f"LABEL_{i}" for i in range(count)}
    labels = tuple(str(label_names.get(str(i))) for i in range(len(label_names)))
    numbered = set(label_names) == set(map(str, range(len(label_names))))
    if (
        not numbered
        or len(set(labels)) < len(labels)
        or fields.num_labels not in (None, len(labels))
    ):
        raise ConfigError(
            "config.json: id2label must have distinct labels 0, 1, ..., as many as num_labels"
            f" ({fields.num_labels}): got {label_names!r:.80}"
        )
    return ScoreHead(
        labels=labels, problem_type=fields.problem_type, pad_token_id=fields.pad_token_id
    )


def write_score_head(head: ScoreHead) -> dict[str, Any]:
    """Return config.json's fields, with which transformers builds the same head."""
    return {
        "id2label": {str(i): label for i, label in enumerate(head.labels)},
        "label2id": {label: i for i, label in enumerate(head.labels)},
        "problem_type": head.problem_type,
        "pad_token_id": head.pad_token_id,
    }
