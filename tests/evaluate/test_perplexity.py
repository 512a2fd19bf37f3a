"""Perplexity and its standard error for each protocol, journals, and the command."""

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from jaxllm.cli.eval_data import make_loader
from jaxllm.errors import CapacityError, CheckpointError, NonFiniteError, TokenError
from jaxllm.evaluate.likelihood.data import loader
from jaxllm.evaluate.likelihood.perplexity import Perplexity, perplexity, token_logprobs
from jaxllm.evaluate.likelihood.score import score
from jaxllm.files import lock_file
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.paths import map_leaves
from tests.conftest import Run, assert_refused
from tests.tiny_models import Twin, load_twin

Find = Callable[[str], Path]
WINDOW = 64


@pytest.fixture(scope="module", params=["stories260K", "gpt2_slm4096"])
def trained(request: pytest.FixtureRequest, data: Find) -> tuple[Twin, list[int]]:
    """Return a trained model in jaxllm and transformers, and Shakespeare's text as ids."""
    directory = data(request.param)
    text = (data("corpora") / "tinyshakespeare.txt").read_text(encoding="utf-8")[:700]
    if request.param == "stories260K":
        ids = Tokenizer.from_directory(directory).encode(text, bos=True)
    else:
        characters = json.loads((directory / "char_vocab.json").read_text(encoding="utf-8"))
        ids = [characters[c] for c in text if c in characters]
    assert len(ids) % WINDOW not in (0, 1)
    return load_twin(directory), ids


def sliding_window_loss(
    twin: Twin, ids: list[int], window: int, stride: int, bos: int | None = None
) -> tuple[float, int]:
    """Return the mean loss and token count as Hugging Face's perplexity guide computes them.

    Tokens that are not new get label -100. The guide weights a window by its label count minus 1;
    here the weight is the number of labels left after the shift. bos: replaces the first token of
    each window.
    """
    total, count, seen = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + window, len(ids))
        tokens = torch.tensor([ids[start:end]])
        tokens[0, 0] = ids[start] if bos is None else bos
        labels = tokens.clone()
        labels[:, : seen - end] = -100
        scored = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            loss = twin.torch_model(tokens, labels=labels).loss
        total, count, seen = total + float(loss) * scored, count + scored, end
        if end == len(ids):
            break
    return total / count, count


def losses(twin: Twin, ids: list[int]) -> np.ndarray:
    """Return the negative log-likelihood of each token but the first, float64."""
    logits = torch.tensor(twin.logits(np.array([ids]))[0]).double()
    return torch.nn.functional.cross_entropy(
        logits[:-1], torch.tensor(ids[1:]), reduction="none"
    ).numpy()


@pytest.mark.parametrize("stride", [WINDOW, 20, 1])
def test_strided_perplexity_equals_transformers(
    trained: tuple[Twin, list[int]], stride: int
) -> None:
    """Strided perplexity equals Hugging Face's sliding-window guide, run with transformers."""
    twin, ids = trained
    ids = ids if stride > 1 else ids[: WINDOW + 9]
    found = perplexity(
        twin.model, twin.params, loader([ids], window=WINDOW, stride=stride, batch=3)
    )
    nll, count = sliding_window_loss(twin, ids, WINDOW, stride)
    assert found.tokens == count
    assert found.nll.mean == pytest.approx(nll, rel=1e-5)
    assert found.perplexity.mean == pytest.approx(np.exp(nll), rel=1e-4)


def test_second_half_perplexity_and_error_equal_transformers(
    trained: tuple[Twin, list[int]],
) -> None:
    """As in llama-perplexity: sqrt((mean of squares - square of mean) / (n - 1)) x perplexity."""
    twin, ids = trained
    bos = 1
    found = perplexity(
        twin.model,
        twin.params,
        loader([ids], window=WINDOW, batch=3, protocol="second-half", bos=bos),
    )
    whole = range(0, len(ids) - WINDOW + 1, WINDOW)
    each = [losses(twin, [bos, *ids[s + 1 : s + WINDOW]])[WINDOW // 2 :] for s in whole]
    nll = np.concatenate(each)
    assert found.tokens == nll.size == len(whole) * (WINDOW - 1 - WINDOW // 2)
    ppl = np.exp(nll.mean())
    error = np.sqrt(((nll**2).mean() - nll.mean() ** 2) / (nll.size - 1)) * ppl
    assert found.perplexity.mean == pytest.approx(ppl, rel=1e-4)
    assert found.perplexity.error == pytest.approx(error, rel=1e-4)


def test_batched_documents_equal_separate_documents(trained: tuple[Twin, list[int]]) -> None:
    """Padding adds to no count or sum: batched documents have the scores of separate runs."""
    twin, ids = trained
    cuts = [0, 5, 7, 60, 61, 100, 130]
    documents = [ids[a:b] for a, b in pairwise(cuts)]
    for by_length in (False, True):
        batched = token_logprobs(
            twin.model,
            twin.params,
            loader(documents, window=WINDOW, batch=3, by_length=by_length),
        )
        ordered = sorted(documents, key=len, reverse=True) if by_length else documents
        expected = np.concatenate([losses(twin, d) for d in ordered if len(d) > 1])
        np.testing.assert_allclose(-batched, expected, atol=1e-4, rtol=1e-4)


def test_standard_error_equals_scipy() -> None:
    """The NLL's standard error equals scipy's, and the perplexity's is its first-order error."""
    logprob_N = -np.random.default_rng(0).gamma(2.0, 1.5, 500).astype(np.float32)
    found = Perplexity.from_logprobs(logprob_N)
    nll = -logprob_N.astype(np.float64)
    assert found.nll.mean == pytest.approx(nll.mean(), rel=1e-12)
    assert found.nll.error == pytest.approx(scipy.stats.sem(nll), rel=1e-12)
    assert found.perplexity.mean == pytest.approx(np.exp(nll.mean()), rel=1e-12)
    # First order: the change of the perplexity if the mean moves by its error.
    small = Perplexity.from_logprobs(np.tile(logprob_N, 2000))
    moved = np.exp(nll.mean() + small.nll.error) - np.exp(nll.mean())
    assert small.perplexity.error == pytest.approx(moved, rel=1e-2)


def test_perplexity_handles_single_token_and_overflow() -> None:
    """One token has a NaN error; log-probabilities of -1,000 and less an infinite perplexity."""
    one = Perplexity.from_logprobs(np.array([-2.0]))
    assert one.perplexity.mean == pytest.approx(np.exp(2.0))
    assert np.isnan(one.perplexity.error)
    assert Perplexity.from_logprobs(np.array([-2000.0, -1000.0])).perplexity.mean == np.inf


def test_interrupted_evaluation_resumes_from_journal(
    trained: tuple[Twin, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt in batch 3 and a torn journal line, only missing batches run; journals of
    other data or models are refused.
    """
    twin, ids = trained
    made = loader([ids], window=WINDOW, stride=20, batch=3)
    assert len(made) > 4
    whole = token_logprobs(twin.model, twin.params, made)
    calls = []

    def counting(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr("jaxllm.evaluate.likelihood.perplexity.score", counting)
    journal = tmp_path / "journal"
    with pytest.raises(KeyboardInterrupt):
        token_logprobs(twin.model, twin.params, made, journal=journal)
    with open(journal, "a") as file:
        file.write('{"state": {"epo')
    again = token_logprobs(twin.model, twin.params, made, journal=journal)
    assert len(calls) == 3 + len(made) - 2
    np.testing.assert_array_equal(again, whole)
    assert again.dtype == whole.dtype
    assert token_logprobs(twin.model, twin.params, made, journal=journal).tolist() == whole.tolist()
    assert len(calls) == 3 + len(made) - 2

    other = loader([ids], window=WINDOW, stride=21, batch=3)
    with pytest.raises(CheckpointError, match="belongs to another run: data was"):
        token_logprobs(twin.model, twin.params, other, journal=journal)
    changed = map_leaves(lambda _, leaf: leaf * 1.01, twin.params)
    with pytest.raises(CheckpointError, match="belongs to another run: model was"):
        token_logprobs(twin.model, changed, made, journal=journal)
    for content in ("[1]\n", "{}\n", "text\n", "text", '{"owner": {}}\n'):
        journal.write_text(content)
        with pytest.raises(CheckpointError, match="journal"):
            token_logprobs(twin.model, twin.params, made, journal=journal)
        assert journal.read_text() == content


@pytest.fixture(scope="module")
def journaled(
    trained: tuple[Twin, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Callable[[Path], np.ndarray], str, np.ndarray]:
    """Return a short evaluation with a journal, the journal's text and the results."""
    twin, ids = trained
    made = loader([ids[:150]], window=WINDOW, stride=20, batch=3)

    def run(path: Path) -> np.ndarray:
        return token_logprobs(twin.model, twin.params, made, journal=path)

    path = tmp_path_factory.mktemp("journal") / "journal"
    whole = run(path)
    return run, path.read_text(), whole


def test_truncated_journal_is_completed_exactly(journaled: Any, tmp_path: Path) -> None:
    """A journal cut at any of seven points is completed to the same bytes and log-probabilities."""
    run, text, whole = journaled
    ends = [i + 1 for i, c in enumerate(text) if c == "\n"]
    for cut in (0, 1, ends[0] // 2, ends[0] - 1, ends[0], ends[0] + 9, ends[1]):
        journal = tmp_path / f"cut {cut}"
        journal.write_text(text[:cut])
        np.testing.assert_array_equal(run(journal), whole)
        assert journal.read_text() == text


def test_altered_journal_is_refused_with_line_number(journaled: Any, tmp_path: Path) -> None:
    """An altered, missing or repeated line is refused by its number, and the file is unchanged."""
    run, text, _ = journaled
    first, second, third, *rest = text.splitlines(keepends=True)
    journal = tmp_path / "journal"
    digit = second.index("-") + 1
    for altered, line in (
        (first + second[:digit] + "9" + second[digit + 1 :] + third, "line 2"),
        (first + third, "line 2"),
        (first + second + second, "line 3"),
        (first + second + third + "".join(rest) + second, "line"),
        (text.replace("data", "date", 1), "line 1"),
    ):
        journal.write_text(altered)
        with pytest.raises(CheckpointError, match=line):
            run(journal)
        assert journal.read_text() == altered


def test_locked_journal_is_refused(journaled: Any, tmp_path: Path) -> None:
    """A journal locked by another process is refused, and runs as usual once it is unlocked."""
    run, text, whole = journaled
    journal = tmp_path / "journal"
    with lock_file(journal), pytest.raises(CheckpointError, match="in use by another process"):
        run(journal)
    np.testing.assert_array_equal(run(journal), whole)
    assert journal.read_text() == text


def test_perplexity_refuses_invalid_inputs(trained: tuple[Twin, list[int]]) -> None:
    """A window beyond the context, an unknown token id and NaN logits raise errors."""
    twin, ids = trained
    context, vocab = twin.config.context_length, twin.config.vocab_size
    with pytest.raises(CapacityError, match=f"window is too long.* context is {context}"):
        perplexity(twin.model, twin.params, loader([ids], window=context + 2))
    with pytest.raises(TokenError, match=f"token id {vocab} is outside the vocabulary"):
        perplexity(twin.model, twin.params, loader([[1, vocab]], window=WINDOW))
    broken = map_leaves(lambda _, leaf: leaf.at[..., 0].set(np.nan), twin.params)
    with pytest.raises(NonFiniteError, match="window 0, token 1"):
        perplexity(twin.model, broken, loader([ids], window=WINDOW, batch=3))


@pytest.mark.parametrize("adds_bos", [True, False])
def test_windows_begin_as_tokenizer_begins_texts(data: Find, adds_bos: bool) -> None:
    """Every window begins with the begin-of-text token if the tokenizer adds it, as in
    llama-perplexity; rolling windows, as in lm-evaluation-harness, have it before the text only.
    """
    tokenizer = Tokenizer.from_directory(data("stories260K"))
    config = SimpleNamespace(vocab_size=512, context_length=16)
    lm: Any = SimpleNamespace(
        tokenizer=dataclasses.replace(tokenizer, adds_bos=adds_bos), config=config, path="tiny"
    )
    corpus = ["Once upon a time there was a quiet girl who lived in a small cottage. " * 2]
    ids, bos = tokenizer.encode(corpus[0]), tokenizer.bos_id
    for protocol, each in (("strided", True), ("second-half", True), ("rolling", False)):
        made, facts = make_loader(lm, corpus, window=None, protocol=protocol)
        begins = [int(row[0]) for batch in made.batches() for row in batch.token_BT if row.any()]
        assert len(begins) > 2
        assert begins[0] == (bos if adds_bos else ids[0])
        assert all((one == bos) == (adds_bos and each) for one in begins[1:])
        assert facts["bos"] == ("none" if not adds_bos else "each" if each else "first")
    again, _ = make_loader(lm, [[bos, *ids]], window=None)  # ids that begin with it already
    assert again.documents[0].tolist() == [bos, *ids]


def test_perplexity_command_equals_transformers(run: Run, data: Find, tmp_path: Path) -> None:
    """`perplexity` equals transformers for --text and --documents; with --separate the NLL is
    averaged over all documents' tokens.
    """
    directory = data("stories260K")
    text = (directory / "greedy_200.txt").read_text(encoding="utf-8")
    common = ("perplexity", directory, "--window", 48, "--stride", 30, "--batch", 3)
    status, out, _ = run(*common, "--text", "-", "--json", stdin=text)
    assert status == 0
    report = json.loads(out)
    twin = load_twin(directory)
    ids = Tokenizer.from_directory(directory).encode(text, bos=True)
    nll, count = sliding_window_loss(twin, ids, 48, 30, bos=ids[0])
    assert report["perplexity"] == pytest.approx(np.exp(nll), rel=1e-4)
    assert report["tokens"] == count
    assert (report["window"], report["stride"], report["bos"]) == (48, 30, "each")
    _, shown, _ = run(*common, "--text", "-", stdin=text)
    assert f"{report['perplexity']:.5f} +/- {report['perplexity_error']:.5f}" in shown
    assert "windows of 48, stride 30, strided; begin of text: each" in shown

    first, second = text[:300], text[300:]
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in (first, second)))
    joined = run(*common, "--text", "-", "--json", stdin=f"{first}\n\n{second}")[1]
    status, out, _ = run(*common, "--documents", file, "--json")
    assert json.loads(out) == json.loads(joined)
    short = json.loads(run(*common, "--text", "-", "--json", stdin="a")[1])
    assert (short["tokens"], short["perplexity_error"]) == (1, None)
    separate = json.loads(run(*common, "--documents", file, "--separate", "--json")[1])
    each = [json.loads(run(*common, "--text", "-", "--json", stdin=t)[1]) for t in (first, second)]
    total = sum(r["nll"] * r["tokens"] for r in each)
    assert separate["tokens"] == sum(r["tokens"] for r in each)
    assert separate["nll"] == pytest.approx(total / separate["tokens"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give either --text (TEXT, @FILE or -) or"),
        (("--text", "-", "--documents", "x"), "give either --text (TEXT, @FILE or -) or"),
        (("--text", "@missing.txt"), "cannot read missing.txt: No such file or directory"),
        (("--text", "-", "--bos", "twice"), "--bos must be one of auto, first, each, none"),
        (("--text", "-", "--window", 100000), "window is too long"),
        (("--text", "-", "--quantize", "int5"), "int5"),
    ],
)
def test_perplexity_command_refuses_in_one_line(run: Run, options: Any, message: str) -> None:
    """Each bad option gives status 1 and one line on stderr."""
    text = "One day there was a dog."
    assert_refused(run, message, "perplexity", "demo:llama", *options, stdin=text)
