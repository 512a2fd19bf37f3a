"""lm-evaluation-harness adapter: its three request types equal transformers.

The reference follows the rules of the harness's own `hf` model.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from jaxllm.errors import CapacityError, ConfigError, SamplingError, TokenError
from jaxllm.evaluate.lm_eval import JaxLM, register
from tests.conftest import ROOT
from tests.tiny_models import save_random

LENGTH = 40  # tokens of input, so that some requests exceed it
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    " One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
)
PAIRS = [
    ("Once upon a time, there was a", " little girl"),
    ("Once upon a time, there was a   ", "little girl"),
    ("Once upon a time,", " there was a big stone and"),
    ("", "Once upon a time"),
    ("", "<s>Once upon"),
    ("<s>Once upon", " a time"),
    ("Lily", " was"),
    (STORY, "Her mom said, she could not"),
    (STORY[:20], STORY[20:110]),
    ("Lily", " was"),
]


class Request(NamedTuple):
    args: tuple[Any, ...]


def make_requests(rows: list[Any]) -> list[Request]:
    return [Request(row if isinstance(row, tuple) else (row,)) for row in rows]


class Reference:
    """transformers, one request at a time, by the rules of lm-evaluation-harness's `hf` model."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        # Not AutoTokenizer, which keeps the file's vocabulary but not its normalizer.
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        self.bos = self.tokenizer.bos_token_id

    def encode(self, text: str) -> list[int]:
        plain = text.startswith(self.tokenizer.bos_token)
        return self.tokenizer.encode(text, add_special_tokens=not plain)

    def score(self, ids: list[int], count: int) -> tuple[float, bool]:
        """Score the last `count` tokens after at most LENGTH input tokens."""
        ids = ids[-(LENGTH + 1) :]
        with torch.no_grad():
            logits = self.model(torch.tensor([ids[:-1]])).logits[0].double()
        chosen, target = logits.log_softmax(-1)[-count:], torch.tensor(ids[-count:])
        greedy = bool((chosen.argmax(-1) == target).all())
        return float(chosen.gather(1, target[:, None]).sum()), greedy

    def likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        if context == "":
            ids = self.tokenizer.encode(continuation, add_special_tokens=False)
            ids = ids if ids[0] == self.bos else [self.bos, *ids]
            return self.score(ids, len(ids) - 1)
        # The context keeps its separate encoding, even if a token would span the boundary.
        before, whole = self.encode(context.rstrip()), self.encode(context + continuation)
        rest = whole[len(before) :]
        return self.score([*before, *rest], len(rest))

    def rolling(self, text: str) -> float:
        ids, total = [self.bos, *self.encode(text)], 0.0
        for first in range(1, len(ids), LENGTH):
            end = min(first + LENGTH, len(ids))
            total += self.score(ids[:end], end - first)[0]
        return total

    def generate(self, context: str, new: int, stops: list[str]) -> str:
        ids = self.encode(context)[-(LENGTH - new) :]
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        text = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text


@pytest.fixture(scope="module")
def directory(data: Callable[[str], Path]) -> Path:
    return data("stories260K")


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.fixture(scope="module")
def answers(directory: Path) -> JaxLM:
    return JaxLM(str(directory), max_length=LENGTH, batch_size=4)


def test_loglikelihood_equals_transformers(answers: JaxLM, reference: Reference) -> None:
    found = answers.loglikelihood(make_requests(PAIRS))
    expected = [reference.likelihood(*pair) for pair in PAIRS]
    np.testing.assert_allclose(
        [f[0] for f in found], [e[0] for e in expected], atol=1e-5, rtol=1e-5
    )
    assert [f[1] for f in found] == [e[1] for e in expected]
    assert {greedy for _, greedy in found} == {True, False}
    assert answers.loglikelihood([]) == []


def test_loglikelihood_moves_trailing_spaces_to_continuation() -> None:
    """A trailing space of the context is scored as part of the continuation, because a byte-level
    vocabulary has ' time' as one token.
    """
    plain = JaxLM("demo:gpt2", batch_size=2)
    found = plain.loglikelihood(make_requests([("Once upon a ", "time"), ("Once upon a", " time")]))
    assert found[0] == found[1]
    assert found[0][1]
    # "Once" is one token, so the continuation is encoded alone.
    assert plain._encode_pair("Onc", "e") == (plain.encode("Onc"), plain.encode("e", bos=False))


def test_loglikelihood_rolling_equals_transformers(answers: JaxLM, reference: Reference) -> None:
    texts = ["One day", STORY, STORY + STORY[:60], ""]
    found = answers.loglikelihood_rolling(make_requests(texts))
    np.testing.assert_allclose(found, [reference.rolling(text) for text in texts], rtol=1e-5)


def test_generate_until_equals_transformers(answers: JaxLM, reference: Reference) -> None:
    """Prompts of unequal length and stops share one batch; long ones are cut on the left."""
    contexts = ["Once upon a time", STORY, "One day, Lily", "Tom had a dog."]
    stops = [["."], ["\n\n", " the"], [], [",", "He"]]
    limits = [16, 12, 9, 20]
    found = answers.generate_until(
        make_requests(
            [
                (context, {"until": stop, "max_gen_toks": new, "do_sample": False, "top_p": 0.5})
                for context, stop, new in zip(contexts, stops, limits, strict=True)
            ]
        )
    )
    cases = zip(contexts, limits, stops, strict=True)
    assert found == [reference.generate(*case) for case in cases]


def test_generate_until_sampling_is_varied_and_reproducible(answers: JaxLM) -> None:
    """Equal requests of one call get different samples; another call gets the same ones."""
    options = {"until": [], "max_gen_toks": 15, "temperature": 1.0}
    requests = make_requests([("Once upon a time", options)] * 4)
    found = answers.generate_until(requests)
    assert len(set(found)) > 1
    assert answers.generate_until(requests) == found


def test_lm_eval_refuses_invalid_models_and_requests(answers: JaxLM, tmp_path: Path) -> None:
    """Missing models or tokenizers, bad sizes, empty or long requests, unknown options raise."""
    with pytest.raises(ConfigError, match="path="):
        JaxLM()
    with pytest.raises(CapacityError, match=r"max_length must be from 1 to \d+, got 10000"):
        JaxLM("demo:llama", max_length=10_000)
    with pytest.raises(ConfigError, match="batch_size"):
        JaxLM("demo:llama", batch_size=0)
    save_random(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(TokenError, match="has no tokenizer"):
        JaxLM(str(tmp_path))
    with pytest.raises(TokenError, match="request 1: the continuation must not be empty"):
        answers.loglikelihood(make_requests([("One", " day"), ("One day", "")]))
    with pytest.raises(CapacityError, match="expected at most 40"):
        answers.loglikelihood(make_requests([("One", STORY)]))
    with pytest.raises(CapacityError, match="leave no room for a prompt"):
        answers.generate_until(make_requests([("One", {"max_gen_toks": LENGTH})]))
    with pytest.raises(SamplingError, match="no option best_of"):
        answers.generate_until(make_requests([("One", {"max_gen_toks": 4, "best_of": 3})]))


TEMPLATE = (
    "{% for m in messages %}{{ bos_token if loop.first }}[{{ m.role }}] {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_template_equals_transformers(
    directory: Path, reference: Reference, tmp_path: Path
) -> None:
    """A rendered conversation equals transformers, with and without a continued last message, and
    encodes to one begin token.
    """
    for file in directory.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    chat_model = JaxLM(str(tmp_path), max_length=LENGTH)
    history = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Once "}]
    for continues in (False, True):
        expected = reference.tokenizer.apply_chat_template(
            history,
            chat_template=TEMPLATE,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        text = chat_model.apply_chat_template(history, add_generation_prompt=not continues)
        assert text == expected
        assert chat_model.encode(text).count(1) == 1  # one begin-of-text token, the template's own
    assert chat_model.chat_template(True) == TEMPLATE
    assert chat_model.tokenizer_name == tmp_path.name


TASKS = {
    "toy_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "toy_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "toy_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}
ROWS = [
    {
        "question": "Once upon a time, there was a little",
        "choices": ["girl", "stone of the", "boy"],
        "answer": 0,
        "text": STORY,
    },
    {
        "question": "Lily liked to play with her",
        "choices": ["taxes", "toys", "very big dog"],
        "answer": 2,
        "text": "One day, Tom saw a dog.",
    },
]


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed (pip install 'jaxllm[eval]')",
)
def test_lm_eval_results_equal_transformers(
    directory: Path, reference: Reference, tmp_path: Path
) -> None:
    """The lm_eval command runs three toy tasks and reports the accuracy, perplexity and match rate
    computed with transformers.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, task in TASKS.items():
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}}
        whole = {"task": name, "test_split": "test", "metadata": {"version": 1}, **files, **task}
        # JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")
    command = [
        sys.executable, "-m", "jaxllm.evaluate.lm_eval", "--model", "jaxllm",
        "--model_args", f"path={directory},max_length={LENGTH}", "--batch_size", "3",
        "--tasks", ",".join(TASKS), "--include_path", str(tmp_path),
        "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **offline}
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"]

    right, right_by_length, correct = [], [], []
    for row in ROWS:
        choices: Any = row["choices"]
        each = [reference.likelihood(str(row["question"]), f" {c}")[0] for c in choices]
        lengths = [len(c) for c in choices]
        right.append(np.argmax(each) == row["answer"])
        right_by_length.append(np.argmax(np.divide(each, lengths)) == row["answer"])
        correct.append(reference.generate(str(row["question"]), 12, ["."]) == row["text"])
    assert results["toy_choice"]["acc,none"] == np.mean(right)
    assert results["toy_choice"]["acc_norm,none"] == np.mean(right_by_length)
    total = sum(reference.rolling(str(row["text"])) for row in ROWS)
    size = sum(len(str(row["text"]).encode()) for row in ROWS)
    byte_perplexity = np.exp(-total / size)
    assert results["toy_rolling"]["byte_perplexity,none"] == pytest.approx(
        byte_perplexity, rel=1e-5
    )
    assert results["toy_generate"]["exact_match,none"] == np.mean(correct)
    (file,) = (tmp_path / "out").rglob("samples_toy_generate*.jsonl")
    samples = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert [sample["resps"] for sample in samples] == [
        [[reference.generate(str(row["question"]), 12, ["."])]] for row in ROWS
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed here"
)
def test_register_without_lm_eval_names_install_command() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[eval\]'"):
        register()
