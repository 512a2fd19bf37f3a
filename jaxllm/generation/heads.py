"""Labels, rewards and relevance of texts, by a score head or by a yes or no."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.config.model import ScoreHead
from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer

# The published form of Qwen3-Reranker (Zhang et al. 2025, arXiv 2506.05176).
RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_MARKER = re.compile(r"<\|[^|<>\s]+\|>")


class Classification(NamedTuple):
    """What a score head returns for N texts.

    Attributes:
        labels: the names of the head's L outputs.
        logits: the outputs, float32 `[N, L]`; a reward model's rewards.
        scores: the outputs as transformers' text-classification pipeline shows them, float32
            `[N, L]`; see `to_scores`.
    """

    labels: tuple[str, ...]
    logits: np.ndarray
    scores: np.ndarray


def describe(found: Classification) -> list[dict[str, Any]]:
    """Return each text's best label, and the scores and logits in the order of the labels."""
    return [
        {
            "label": found.labels[int(score_L.argmax())],
            "scores": shortest_floats(score_L),
            "logits": shortest_floats(logit_L),
        }
        for score_L, logit_L in zip(found.scores, found.logits, strict=True)
    ]


def shortest_floats(x_T: np.ndarray) -> list[float]:
    """Return float32 numbers as floats with the fewest digits that identify them."""
    return [float(str(x)) for x in x_T.astype(np.float32)]


def to_scores(head: ScoreHead, logits_NL: np.ndarray) -> np.ndarray:
    """Return outputs as scores, by the problem's type, as transformers' pipeline does.

    Regression: the outputs themselves. Several labels at once, or one label: the sigmoid of each.
    Else the softmax.
    """
    if head.problem_type == "regression":
        return logits_NL
    if head.problem_type == "multi_label_classification" or len(head.labels) == 1:
        with np.errstate(over="ignore"):  # 1 / (1 + inf) is 0
            return 1 / (1 + np.exp(-logits_NL))
    return softmax(logits_NL)


def softmax(x_NL: np.ndarray) -> np.ndarray:
    """Return the softmax of each row."""
    y_NL = np.exp(x_NL - x_NL.max(axis=1, keepdims=True, initial=-np.inf))
    found_NL: np.ndarray = y_NL / y_NL.sum(axis=1, keepdims=True)
    return found_NL


def strip_padding(ids: Sequence[int], pad: int | None) -> Sequence[int]:
    """Return a text up to its last token that is not padding; of padding alone, the first token.

    The logits of the last token left are then those that transformers' classifiers return.
    """
    end = next((i + 1 for i in reversed(range(len(ids))) if ids[i] != pad), 1)
    return ids[:end]


def encode_template(tokenizer: Tokenizer, template: str, values: Mapping[str, str]) -> list[int]:
    """Return the token ids of a template, whose `{name}` fields are replaced by plain text.

    Special tokens are parsed in the template alone: those spelled out in a value stay text. Raises
    ConfigError for a template with a field that has no value, or with a marker such as
    `<|im_start|>` that is no special token of this tokenizer.
    """
    if not isinstance(template, str):
        raise ConfigError(f"template must be a text, got {template!r:.60}")
    fields = set(re.findall(r"\{(\w*)\}", template))
    if not fields <= set(values) or "document" not in fields:
        raise ConfigError(
            f"template must have the field {{document}} and none but"
            f" {', '.join(f'{{{name}}}' for name in values)}: got {template!r:.60}"
        )
    special = {tokenizer.token(index): index for index in tokenizer.special_ids}
    if unknown := set(_MARKER.findall(template)) - set(special):
        raise ConfigError(
            f"the tokenizer has no special token {min(unknown)}, which the template contains. Give"
            " the template of this model"
        )
    longest = sorted(filter(None, special), key=len, reverse=True)
    cut = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
    ids, begin = list[int](), 0
    for end, after, token in [
        *((m.start(), m.end(), [special[m[0]]]) for m in cut.finditer(template)),
        (len(template), len(template), []),
    ]:
        text = re.sub(r"\{(\w+)\}", lambda field: values[field[1]], template[begin:end])
        ids += [*(tokenizer.encode(text) if text else []), *token]
        begin = after
    return ids


def answer_ids(tokenizer: Tokenizer, answers: Sequence[str]) -> list[int]:
    """Return the ids of two answers, each one token. Raises ConfigError unless they are."""
    pair = isinstance(answers, list | tuple) and len(answers) == 2
    if not pair or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError(f'answers must be two tokens, such as ("no", "yes"): got {answers!r:.60}')
    ids = [tokenizer.id(answer) for answer in answers]
    for answer, index in zip(answers, ids, strict=True):
        if index is None:
            raise ConfigError(
                f"the tokenizer has no token {answer!r:.40}. Give the two answers of this model"
            )
    return [index for index in ids if index is not None]
