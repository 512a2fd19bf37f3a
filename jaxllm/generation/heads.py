"""Labels, rewards and relevance of texts, by a score head or by a yes or no."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxllm.config.model import ModelConfig, ScoreHead
from jaxllm.errors import ConfigError, JaxllmError, TokenError
from jaxllm.generation.completion import LanguageModel
from jaxllm.generation.embeddings import last_logits
from jaxllm.models.inputs import check_predicts_tokens
from jaxllm.text.embedding_settings import EmbeddingSettings
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
    """The output of a score head for N texts.

    Attributes:
        labels: the names of the head's L outputs.
        logits: the outputs, float32 `[N, L]`; a reward model's rewards.
        scores: the outputs as transformers' text-classification pipeline shows them, float32
            `[N, L]`; see `to_scores`.
    """

    labels: tuple[str, ...]
    logits: np.ndarray
    scores: np.ndarray


class RankingModel(LanguageModel, Protocol):
    """The part of `jaxllm.LM` that `classify` and `rerank` use."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def path(self) -> Path: ...
    @property
    def embedding(self) -> EmbeddingSettings | JaxllmError: ...
    def with_adapter(self, adapter: str | None) -> "RankingModel": ...
    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        instruction: str | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> np.ndarray: ...


def classify(
    lm: RankingModel,
    texts: Sequence[Sequence[int]],
    *,
    adapter: str | None,
    batch: int,
    show_progress: bool | None = None,
) -> Classification:
    """Return the score head's outputs for texts of token ids; see `LM.classify`."""
    if (head := lm.config.score) is None or not head.labels:
        raise ConfigError(
            f"{lm.path} has no score head, which classify requires: load a checkpoint of a"
            " ForSequenceClassification class"
        )
    ids = [strip_padding(text, head.pad_token_id) for text in texts]
    params = lm.with_adapter(adapter).params
    logits_NL = last_logits(lm.model, params, ids, batch=batch, show_progress=show_progress)
    return Classification(head.labels, logits_NL, to_scores(head, logits_NL))


def rerank(
    lm: RankingModel,
    query: str,
    documents: Sequence[str],
    *,
    method: str | None,
    instruction: str | None,
    template: str,
    answers: Sequence[str],
    adapter: str | None,
    batch: int,
) -> np.ndarray:
    """Return the relevance of each document to a query, float32 `[N]`; see `LM.rerank`."""
    listed = not isinstance(documents, str) and isinstance(documents, Iterable)
    texts = [query, *documents] if listed else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise TokenError("rerank takes a query and a list of documents: texts, none empty")
    if not isinstance(instruction, str | None):
        raise ConfigError(f"instruction must be a text, got {instruction!r:.60}")
    labels = 0 if lm.config.score is None else len(lm.config.score.labels)
    method = method or ("score" if labels else "yes-no")
    if method == "cosine":
        return _cosines(lm, query, texts[1:], instruction, adapter=adapter, batch=batch)
    if method not in ("yes-no", "score"):
        raise ConfigError(f"method must be yes-no, score or cosine, got {method!r:.40}")
    if method == "score" and labels != 1:
        raise ConfigError(f"method score needs a score head of one label, there are {labels}")
    if method == "yes-no":
        check_predicts_tokens(lm.config)
    if (tokenizer := lm.tokenizer) is None:
        raise TokenError(f"{lm.path} has no tokenizer, which rerank requires")
    begin = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    values = {"instruction": instruction or INSTRUCTION, "query": query}
    ids = [
        begin + encode_template(tokenizer, template, {**values, "document": document})
        for document in texts[1:]
    ]
    if method == "score":
        return classify(lm, ids, adapter=adapter, batch=batch).scores[:, 0]
    params, tokens = lm.with_adapter(adapter).params, answer_ids(tokenizer, answers)
    return softmax(last_logits(lm.model, params, ids, tokens=tokens, batch=batch))[:, 1]


def _cosines(
    lm: RankingModel,
    query: str,
    documents: Sequence[str],
    instruction: str | None,
    **options: Any,
) -> np.ndarray:
    prompts = getattr(lm.embedding, "prompts", {})
    names = [name if name in prompts else None for name in ("query", "document")]
    asked = None if instruction is not None else names[0]
    options["normalize"] = True
    query_1D = lm.embed([query], prompt_name=asked, instruction=instruction, **options)
    cosine_N: np.ndarray = lm.embed(documents, prompt_name=names[1], **options) @ query_1D[0]
    return cosine_N


def describe(scored: Classification) -> list[dict[str, Any]]:
    """Return each text's best label, and the scores and logits in the order of the labels."""
    return [
        {
            "label": scored.labels[int(score_L.argmax())],
            "scores": shortest_floats(score_L),
            "logits": shortest_floats(logit_L),
        }
        for score_L, logit_L in zip(scored.scores, scored.logits, strict=True)
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
    prob_NL: np.ndarray = y_NL / y_NL.sum(axis=1, keepdims=True)
    return prob_NL


def strip_padding(ids: Sequence[int], pad: int | None) -> Sequence[int]:
    """Return a text up to its last token that is not padding; of padding alone, the first token.

    Transformers' classifiers return the logits of the last token that is left.
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
