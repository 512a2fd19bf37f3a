"""Classifiers, reward models, rerankers and instructed embeddings equal transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import jaxllm
from jaxllm.config.model import ScoreHead
from jaxllm.convert.hf import TABLES, open_hf, read_config, write_hf
from jaxllm.errors import CheckpointError, ConfigError, JaxllmError, TokenError
from jaxllm.evaluate.verify import transformers_directory
from jaxllm.files import copy_files
from jaxllm.generation.heads import to_scores
from jaxllm.models.invariance import has_invariant_rows
from jaxllm.text.embedding_settings import EmbeddingSettings, read_embedding_settings
from jaxllm.text.formats import tokenizer_files
from jaxllm.train.objective import next_token_loss
from jaxllm.weights.formats import weight_format
from tests.conftest import Run, assert_refused, succeed
from tests.tiny_models import KINDS, assert_close, each_family, random_torch_model, theirs, tokens

PAD = 3
# Of several lengths; one begins with padding, and one is nothing but padding.
TEXTS = [tokens(1, n, seed=n)[0].tolist() for n in (5, 1, 13, 8)]
TEXTS += [[PAD, 9, 17, PAD, 20, PAD, PAD], [PAD, PAD]]
# transformers has no class for these.
HEADLESS = (
    "granite",
    "granitemoehybrid",
    "granitemoehybrid_moe",
    "ernie4_5",
    "cohere2",
    "glm4_moe",
    "lfm2",
    "lfm2_moe",
    "qwen3_5_moe_text",
    "glm4_moe_lite",
    "gemma4_text",
)
FAMILIES = [name for name in KINDS if name not in HEADLESS]


def save_classifier(directory: Path, family: str, **changes: Any) -> Any:
    """Write a random classifier of transformers, and return it."""
    config = theirs(family, **{"pad_token_id": PAD, "num_labels": 3, **changes})
    model = random_torch_model(config, make=transformers.AutoModelForSequenceClassification)
    model.save_pretrained(directory)
    return model


def pad(texts: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    """Return a padded batch; positions are those of each text alone."""
    width = max(map(len, texts))
    gaps = [width - len(text) for text in texts]
    before = [gap if side == "left" else 0 for gap in gaps]
    ids = [
        [PAD] * b + text + [PAD] * (g - b) for b, text, g in zip(before, texts, gaps, strict=True)
    ]
    real = [
        [0] * b + [1] * len(text) + [0] * (g - b)
        for b, text, g in zip(before, texts, gaps, strict=True)
    ]
    mask = torch.tensor(real)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": torch.tensor(ids), "attention_mask": mask, "position_ids": places}


@pytest.mark.parametrize("family", each_family(FAMILIES))
def test_classifier_equals_transformers_padded_anywhere(family: str, tmp_path: Path) -> None:
    """Logits equal transformers' for a text alone, and for batches padded left and right, also
    where a text ends in padding tokens of its own.
    """
    torch_model = save_classifier(tmp_path, family)
    lm = jaxllm.load(tmp_path, dtype="float32")
    found = lm.classify(TEXTS)
    assert found.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    batches = [{"input_ids": torch.tensor([text])} for text in TEXTS]
    with torch.no_grad():
        alone = torch.cat([torch_model(**one).logits for one in batches]).numpy()
        padded = [torch_model(**pad(TEXTS, side)).logits.numpy() for side in ("left", "right")]
    assert_close(found.logits, alone)
    # A row of padding alone is pooled at column 0, which is padding itself if padded on the left.
    assert_close(found.logits[:-1], padded[0][:-1])
    assert_close(found.logits, padded[1])


def test_every_family_of_transformers_classifies() -> None:
    """A table names the class of sequence classification wherever transformers has one."""
    for name, table in TABLES.items():
        own = getattr(transformers, f"{KINDS[name][0]}ForSequenceClassification", None)
        assert (table.classifier is not None) == (own is not None), name
        assert table.classifier is None or hasattr(transformers, table.classifier)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_classifier_is_written_as_it_was_read(family: str, tmp_path: Path) -> None:
    """In the native format and in Hugging Face's, with labels, type and padding token."""
    names = {0: "sad", 1: "glad"}
    torch_model = save_classifier(
        tmp_path / "a", family, id2label=names, num_labels=2, label2id={},
        problem_type="multi_label_classification",
    )  # fmt: skip
    lm = jaxllm.load(tmp_path / "a", dtype="float32")
    head = ScoreHead(
        labels=("sad", "glad"), problem_type="multi_label_classification", pad_token_id=PAD
    )
    assert lm.config.score == head
    lm.save(tmp_path / "native")
    again = jaxllm.load(tmp_path / "native")
    assert again.config == lm.config
    np.testing.assert_array_equal(again.classify(TEXTS).logits, lm.classify(TEXTS).logits)
    write_hf(tmp_path / "b", open_hf(tmp_path / "a"))
    assert open_hf(tmp_path / "b").config == lm.config
    read, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "b", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert read.config.id2label == names
    for ours, wanted in zip(read.parameters(), torch_model.parameters(), strict=True):
        assert torch.equal(ours, wanted)


def test_quantized_classifier_keeps_a_dense_head(tmp_path: Path) -> None:
    """An int8 body gives transformers' logits on the dequantized weights."""
    save_classifier(tmp_path, "llama")
    lm = jaxllm.load(tmp_path, dtype="float32", quantize="int8")
    assert weight_format(lm.params["score"]["weight"]) == "float32"
    assert weight_format(lm.params["layers.0"]["self_attn"]["q_proj"]["weight"]) == "int8"
    with transformers_directory(tmp_path, lm, "float32") as directory:
        torch_model = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=torch.float32
        )
    with torch.no_grad():
        expected = torch_model(**pad(TEXTS, "right")).logits.numpy()
    assert_close(lm.classify(TEXTS).logits, expected)


def test_classes_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """With `invariant`, a text's logits do not depend on the texts beside it."""
    save_classifier(tmp_path, "llama", num_hidden_layers=2)
    lm = jaxllm.load(tmp_path, dtype="float32", invariant=True)
    if not has_invariant_rows(lm.model, lm.params):
        pytest.skip("needs the native kernels")
    found = lm.classify(TEXTS).logits
    np.testing.assert_array_equal(found, lm.classify(TEXTS, batch=2).logits)
    alone = [lm.classify([text]).logits[0] for text in TEXTS]
    np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("kind", [None, "regression", "multi_label_classification"])
@pytest.mark.parametrize("count", [1, 3])
def test_scores_equal_the_pipeline_of_transformers(kind: Any, count: int) -> None:
    """Scores are those of the text-classification pipeline, for every type of problem."""
    logits_NL = 9 * np.random.default_rng(0).standard_normal((4, count)).astype(np.float32)
    labels = tuple(f"L{i}" for i in range(count))
    found = to_scores(ScoreHead(labels=labels, problem_type=kind), logits_NL)
    config = SimpleNamespace(problem_type=kind, num_labels=count, id2label=dict(enumerate(labels)))
    pipeline: Any = SimpleNamespace(model=SimpleNamespace(config=config))
    for logit_L, score_L in zip(logits_NL, found, strict=True):
        rows = transformers.TextClassificationPipeline.postprocess(
            pipeline, {"logits": torch.tensor(logit_L[None])}, top_k=None, _legacy=False
        )
        expected = {row["label"]: row["score"] for row in rows}
        np.testing.assert_allclose(score_L, [expected[label] for label in labels], rtol=1e-6)


def test_score_head_predicts_no_tokens(tmp_path: Path) -> None:
    """Everything that needs a distribution of tokens refuses a classifier, before it runs."""
    save_classifier(tmp_path / "a", "llama", num_hidden_layers=1)
    lm = jaxllm.load(tmp_path / "a", dtype="float32")
    forward = jaxllm.forward(lm.model, lm.params, None, [TEXTS[0]])
    assert forward.logits.shape == (1, 5, 3)
    model, params = lm.model, lm.params
    for use in (
        lambda: lm.generate([5], max_new_tokens=1),
        lambda: next(lm.stream([5])),
        lambda: next(lm.serve([{"prompt": [5]}]))[1],
        lambda: lm.log_probs([5, 6]),
        lambda: jaxllm.generate(model, params, [[5]], max_new_tokens=1),
        lambda: jaxllm.beam_search(model, params, [[5]], max_new_tokens=1, num_beams=2),
        lambda: next_token_loss(model, params, forward, np.zeros((1, 5), np.int32)),
    ):
        with pytest.raises(ConfigError, match="predicts no tokens"):
            use()
    plain = jaxllm.load("demo:llama")
    with pytest.raises(ConfigError, match="has no score head, which classify requires"):
        plain.classify(["One day"])


def qwen_config(**changes: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(theirs("qwen3", **changes).to_dict()))
    return {**config, "architectures": ["Qwen3ForSequenceClassification"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must have distinct labels"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label must have distinct labels"),
        ({"id2label": {"0": "a"}, "num_labels": 2}, r"num_labels \(2\)"),
        ({"id2label": [1]}, "id2label must be"),
        ({"problem_type": "ranking"}, "problem_type"),
        ({"pad_token_id": "x"}, "pad_token_id"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "or Qwen3ForSequenceClassification"),
    ],
)
def test_invalid_heads_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_config({**qwen_config(), **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("marked", ["by its class", "by modules.json"])
def test_embedding_model_needs_no_output_matrix(marked: str, tmp_path: Path) -> None:
    """A checkpoint without lm_head loads if its class has no head, as e5-mistral's, or if
    sentence-transformers' files are there. It embeds as transformers does, also saved again.
    """
    config = theirs("mistral")
    torch_model = random_torch_model(config, make=transformers.AutoModel)
    torch_model.save_pretrained(tmp_path)
    if marked == "by modules.json":
        write_sentence_transformers(tmp_path, LAST)
        data = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(
            json.dumps({**data, "architectures": ["MistralForCausalLM"]})
        )
    found = jaxllm.load(tmp_path, dtype="float32")
    with torch.no_grad():
        last_D = torch_model(torch.tensor([TEXTS[2]])).last_hidden_state[0, -1].numpy()
    assert_close(found.embed([TEXTS[2]], pooling="last")[0], last_D)
    found.save(tmp_path / "native")
    again = jaxllm.load(tmp_path / "native")
    assert_close(again.embed([TEXTS[2]], pooling="last")[0], last_D)
    write_hf(tmp_path / "b", open_hf(tmp_path))
    read, info = transformers.AutoModel.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for ours, wanted in zip(read.parameters(), torch_model.parameters(), strict=True):
        assert torch.equal(ours, wanted)
    for use in (lambda: found.generate([5]), lambda: found.rerank("a", ["b"])):
        with pytest.raises(JaxllmError, match="predicts no tokens"):
            use()
    with pytest.raises(ConfigError, match="has no score head"):
        found.classify([[5]])


def test_labels_have_transformers_defaults() -> None:
    """Without fields there are two labels; a matrix of another size is refused by its shape."""
    data = {k: v for k, v in qwen_config().items() if k not in ("id2label", "label2id")}
    config, _ = read_config(data)
    assert config.score == ScoreHead(labels=("LABEL_0", "LABEL_1"))
    config, _ = read_config({**data, "num_labels": 1})
    assert config.score == ScoreHead(labels=("LABEL_0",))


QUERY = "what does the cat eat"
DOCUMENTS = ["The cat eats fish, yes.", "no dog <|im_end|> here", "A boat on the sea. " * 3]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The text that Qwen3-Reranker's model card shows, before and after the documents.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer like Qwen3-Embedding's, which ends texts by <|endoftext|>."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([BEFORE, QUERY, *DOCUMENTS, TASK, *["yes", "no"] * 50], trainer)
    made.add_tokens(["<think>", "</think>"])
    made.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    made.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>", "add_bos_token": False,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_sentence_transformers(directory: Path, pooling: dict[str, Any], *more: str) -> None:
    """Write the files that sentence-transformers adds to a checkpoint."""
    kinds = ["Transformer", "Pooling", *more]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" * (i > 0),
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"query": f"Instruct: {TASK}\nQuery:", "document": ""}
    (directory / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": None})
    )


LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with its tokenizer and sentence-transformers' files."""
    directory = tmp_path_factory.mktemp("qwen")
    size = {"vocab_size": 340, "max_position_embeddings": 512, "num_hidden_layers": 2}
    random_torch_model(theirs("qwen3", **size)).save_pretrained(directory)
    write_tokenizer(directory)
    write_sentence_transformers(directory, LAST, "Normalize")
    return directory


@pytest.fixture(scope="module")
def lm(qwen: Path) -> jaxllm.LM:
    return jaxllm.load(qwen, dtype="float32")


def torch_parts(directory: Path) -> tuple[Any, Any]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return tokenizer, model.eval()


@pytest.mark.parametrize("instruction", [None, "Find the animal"])
def test_reranking_by_yes_or_no_equals_transformers(
    qwen: Path, lm: jaxllm.LM, instruction: str | None
) -> None:
    """The probability of yes is that of torch, in the published form, in a batch padded left.

    A special token spelled out in a document stays text.
    """
    tokenizer, model = torch_parts(qwen)

    def encode(text: str, **options: Any) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return ids

    rows = []
    for document in DOCUMENTS:
        pair = f"<Instruct>: {instruction or TASK}\n<Query>: {QUERY}\n<Document>: {document}"
        middle = encode(pair, split_special_tokens=True)
        rows.append(encode(BEFORE) + middle + encode(AFTER))
    batch = pad(rows, "left")
    with torch.no_grad():
        last_BV = model(**batch).logits[:, -1]
    yes, no = tokenizer.convert_tokens_to_ids("yes"), tokenizer.convert_tokens_to_ids("no")
    pair_B2 = torch.stack([last_BV[:, no], last_BV[:, yes]], dim=1)
    expected = torch.log_softmax(pair_B2, dim=1)[:, 1].exp().numpy()
    found = lm.rerank(QUERY, DOCUMENTS, instruction=instruction)
    assert_close(found, expected)
    assert len({*np.round(found, 4)}) == 3
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [row.count(end) for row in rows] == [2, 2, 2]


def test_reranking_with_other_words(lm: jaxllm.LM) -> None:
    """Template and answers of another model: the probability of its second answer."""
    assert lm.tokenizer is not None
    text = f"{QUERY} / {DOCUMENTS[0]}<|im_end|>"
    ids = lm.tokenizer.encode(text, parse_special=True)
    logits_V = np.asarray(jaxllm.forward(lm.model, lm.params, None, [ids]).logits)[0, -1]
    pair = logits_V[[lm.tokenizer.id("a"), lm.tokenizer.id("b")]].astype(np.float64)
    expected = np.exp(pair[1]) / np.exp(pair).sum()
    options: Any = {"template": "{query} / {document}<|im_end|>", "answers": ("a", "b")}
    assert lm.rerank(QUERY, DOCUMENTS[:1], **options)[0] == pytest.approx(expected, rel=1e-4)


def test_score_head_ranks_the_same_text(qwen: Path, tmp_path: Path) -> None:
    """A head with one label ranks by its sigmoid, at the end of the same template."""
    size = {"vocab_size": 340, "max_position_embeddings": 512, "num_hidden_layers": 2}
    torch_model = save_classifier(tmp_path, "qwen3", num_labels=1, pad_token_id=0, **size)
    write_tokenizer(tmp_path)
    ranker = jaxllm.load(tmp_path, dtype="float32")
    tokenizer, _ = torch_parts(qwen)
    pair = f"<Instruct>: {TASK}\n<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}"
    ids = tokenizer(BEFORE + pair + AFTER, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logit = torch_model(torch.tensor([ids])).logits
    assert_close(ranker.rerank(QUERY, DOCUMENTS[:1]), torch.sigmoid(logit)[0].numpy())
    # A text gets the tokenizer's last token, which is padding here: it is not pooled.
    with torch.no_grad():
        logit = torch_model(torch.tensor([tokenizer(QUERY)["input_ids"]])).logits
    assert_close(ranker.classify([QUERY]).logits, logit.numpy())
    with pytest.raises(ConfigError, match="predicts no tokens"):
        ranker.rerank(QUERY, DOCUMENTS, method="yes-no")


@pytest.mark.parametrize("instruction", [None, "Find the animal"])
def test_instructed_embeddings_equal_transformers(
    qwen: Path, lm: jaxllm.LM, instruction: str | None, tmp_path: Path
) -> None:
    """Last-token vectors of norm 1, of texts that the tokenizer ends, as torch has them: queries
    with an instruction and documents without; a saved model keeps the settings.
    """
    tokenizer, model = torch_parts(qwen)
    queries = [QUERY, "where is the boat"]

    def vectors(texts: list[str]) -> np.ndarray:
        batch = pad([tokenizer(text)["input_ids"] for text in texts], "left")
        with torch.no_grad():
            last_BD = model.model(**batch).last_hidden_state[:, -1]
        return torch.nn.functional.normalize(last_BD, dim=1).numpy()  # type: ignore[no-any-return]

    asked = vectors([f"Instruct: {instruction or TASK}\nQuery:{query}" for query in queries])
    options: Any = {"instruction": instruction} if instruction else {"prompt_name": "query"}
    assert_close(lm.embed(queries, **options), asked)
    documents = vectors(["The cat eats fish, yes.", "A boat"])
    plain = ["The cat eats fish, yes.", "A boat"]
    assert_close(lm.embed(plain), documents)
    found = lm.rerank(QUERY, plain, method="cosine", instruction=instruction)
    assert_close(found, documents @ asked[0])
    lm.save(tmp_path / "native")
    again = jaxllm.load(tmp_path / "native")
    np.testing.assert_array_equal(again.embed(queries, **options), lm.embed(queries, **options))


def test_pooling_options_replace_the_checkpoint_s(lm: jaxllm.LM) -> None:
    assert lm.tokenizer is not None
    ids = [*lm.tokenizer.encode(QUERY), 0]  # <|endoftext|>
    out = jaxllm.forward(lm.model, lm.params, None, [ids], hidden_states=True)
    assert out.hidden_states is not None
    mean_D = np.asarray(out.hidden_states[-1])[0].mean(axis=0)
    assert_close(lm.embed([QUERY], pooling="mean", normalize=False)[0], mean_D)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda lm: lm.rerank("", ["a"]), TokenError, "texts, none empty"),
        (lambda lm: lm.rerank("a", "b"), TokenError, "texts, none empty"),
        (lambda lm: lm.rerank("a", None), TokenError, "texts, none empty"),
        (lambda lm: lm.rerank("a", ["b"], method="best"), ConfigError, "yes-no, score or cosine"),
        (lambda lm: lm.rerank("a", ["b"], method="score"), ConfigError, "one label, there are 0"),
        (lambda lm: lm.rerank("a", ["b"], template="{query}"), ConfigError, "{document}"),
        (lambda lm: lm.rerank("a", ["b"], template="{document}{x}"), ConfigError, "none but"),
        (lambda lm: lm.rerank("a", ["b"], template="<|x|>{document}"), ConfigError, "no special"),
        (lambda lm: lm.rerank("a", ["b"], answers="no"), ConfigError, "two tokens"),
        (lambda lm: lm.rerank("a", ["b"], answers=("no", "maybe so")), ConfigError, "no token"),
        (lambda lm: lm.rerank("a", ["b" * 3000]), JaxllmError, "context is 512"),
        (lambda lm: lm.embed(["a"], prompt_name="passage"), ConfigError, "query, document"),
        (lambda lm: lm.embed(["a"], prompt_name="query", instruction="x"), ConfigError, "either"),
    ],
)
def test_invalid_uses_are_refused(
    lm: jaxllm.LM, use: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        use(lm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling must be one of"),
        ({**LAST, "pooling_mode_cls_token": True}, (), "pooling must be one of"),
        ({**LAST, "include_prompt": False}, (), "include the prompt"),
        (LAST, ("Dense",), "Dense is not supported"),
    ],
)
def test_unsupported_embedding_settings_are_refused(
    pooling: dict[str, Any], more: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """The checkpoint loads, since it may do other things; only embedding raises."""
    random_torch_model(theirs("llama", num_hidden_layers=1)).save_pretrained(tmp_path)
    write_sentence_transformers(tmp_path, pooling, *more)
    found = jaxllm.load(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        found.embed([[5, 6]])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_pooling_settings_are_read(pooling: Any, expected: str, tmp_path: Path) -> None:
    assert read_embedding_settings(tmp_path) == EmbeddingSettings()
    write_sentence_transformers(tmp_path, pooling)
    assert read_embedding_settings(tmp_path).pooling == expected
    assert not read_embedding_settings(tmp_path).normalize


def test_pooling_settings_from_the_hub_cache(tmp_path: Path) -> None:
    """A snapshot's files are links into blobs; links elsewhere are neither read nor copied."""
    write_sentence_transformers(tmp_path, LAST)
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "x"
    (snapshot / "1_Pooling").mkdir(parents=True)
    for name in ("modules.json", "1_Pooling/config.json"):
        blob = tmp_path / "blobs" / name.replace("/", "_")
        (tmp_path / name).rename(blob)
        (snapshot / name).symlink_to(blob)
    assert read_embedding_settings(snapshot).pooling == "last"
    (tmp_path / "1_Pooling").rmdir()
    copy_files(tokenizer_files(snapshot), tmp_path)
    assert read_embedding_settings(tmp_path).pooling == "last"
    (snapshot / "1_Pooling" / "all").symlink_to("/")
    (tmp_path / "new").mkdir()
    copy_files(tokenizer_files(snapshot), tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").rglob("*")) == [
        "1_Pooling", "config.json", "modules.json",
    ]  # fmt: skip
    (snapshot / "1_Pooling" / "config.json").unlink()
    (snapshot / "1_Pooling" / "config.json").symlink_to(tmp_path / "1_Pooling" / "config.json")
    with pytest.raises(CheckpointError, match="leaves the directory"):
        read_embedding_settings(snapshot)
    (tmp_path / "new" / "modules.json").write_text(
        json.dumps([{"type": "x.Pooling", "path": "../1_Pooling"}])
    )
    with pytest.raises(CheckpointError, match="not a plain folder name"):
        read_embedding_settings(tmp_path / "new")


def test_classify_command_and_batch(run: Run, tmp_path: Path) -> None:
    """The command prints the best label, or JSON; `batch --task classify` answers each row."""
    size = {"vocab_size": 340, "num_hidden_layers": 1}
    save_classifier(tmp_path / "a", "qwen3", pad_token_id=0, **size)
    write_tokenizer(tmp_path / "a")
    texts = ["The cat", "A boat on the sea"]
    found = jaxllm.load(tmp_path / "a").classify(texts)
    asked = ("classify", tmp_path / "a", "--text", texts[0], "--text", texts[1])
    out, _ = succeed(run, *asked)
    best = [f"LABEL_{row.argmax()} {row.max():.6g}" for row in found.scores]
    assert out.splitlines() == best
    out, _ = succeed(run, *asked, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    np.testing.assert_array_equal(np.float32([row["logits"] for row in rows]), found.logits)
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in [*texts, [999]])
    status, out, _ = run("batch", tmp_path / "a", "-", "--task", "classify", stdin=lines)
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 1 and "error" in answers[2]
    np.testing.assert_array_equal(np.float32([a["scores"] for a in answers[:2]]), found.scores)
    assert_refused(run, "has no score head", "classify", "demo:llama", "--text", "x")
    assert_refused(run, "predicts no tokens", "generate", tmp_path / "a", "x")
