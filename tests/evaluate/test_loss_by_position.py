"""Loss by position: transformers' losses grouped by position, with unchanged totals."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxllm.errors import ConfigError
from jaxllm.evaluate.likelihood.data import loader
from jaxllm.evaluate.likelihood.perplexity import bucket_edges, bucket_losses, token_positions
from jaxllm.text.tokenizer import Tokenizer
from tests.conftest import Run, assert_refused
from tests.tiny_models import load_twin

Find = Callable[[str], Path]
WINDOW, STRIDE = 48, 30


def test_bucket_edges_double_or_are_equal() -> None:
    """Edges double by default, or give buckets of equal size if their number is set."""
    assert bucket_edges(48) == [1, 2, 4, 8, 16, 32, 48]
    assert bucket_edges(33) == [1, 2, 4, 8, 16, 32, 33]
    assert bucket_edges(2) == [1, 2]
    assert bucket_edges(13, 3) == [1, 5, 9, 13]
    assert bucket_edges(13, 12) == list(range(1, 14))
    for wrong in (0, 13):
        with pytest.raises(ConfigError, match="buckets must be from 1 to 12"):
            bucket_edges(13, wrong)


@pytest.mark.parametrize("protocol", ["strided", "second-half", "rolling"])
def test_token_positions_count_from_span_start(protocol: str) -> None:
    """A scored token's position is its distance from its span's start, for every protocol."""
    documents = [list(range(50)), [1], list(range(7))]
    made = loader(documents, window=16, stride=5, protocol=protocol, batch=3)
    expected = [i - s.start for s in made.spans for i in range(s.score_start, s.end)]
    np.testing.assert_array_equal(token_positions(made), expected)


def test_bucket_losses_sum_to_total() -> None:
    """Counts and losses of the buckets add up to the totals; an empty bucket has no mean."""
    rng = np.random.default_rng(0)
    logprob_N = -rng.gamma(2.0, 1.0, 200).astype(np.float32)
    position_N = rng.integers(1, 9, 200)
    found = bucket_losses(logprob_N, position_N, bucket_edges(20))
    assert sum(b.tokens for b in found) == 200
    total = -logprob_N.astype(np.float64).sum()
    assert sum(b.total for b in found) == pytest.approx(total, rel=1e-13)
    assert (found[-1].tokens, found[-1].nll) == (0, None)
    third = -logprob_N[
        (position_N == 4) | (position_N == 5) | (position_N == 6) | (position_N == 7)
    ]
    assert found[2].nll is not None
    assert found[2].nll.mean == pytest.approx(third.astype(np.float64).mean(), rel=1e-13)


def test_by_position_losses_equal_transformers(run: Run, data: Find, tmp_path: Path) -> None:
    """`perplexity --by-position` equals transformers' losses grouped by position, and its totals
    equal the plain perplexity.
    """
    directory, picture = data("stories260K"), tmp_path / "losses.png"
    text = (directory / "greedy_200.txt").read_text(encoding="utf-8")
    common = ("perplexity", directory, "--text", "-", "--window", WINDOW, "--stride", STRIDE)
    command = (*common, "--by-position", "--picture", picture)
    status, out, _ = run(*command, "--json", stdin=text)
    assert status == 0
    report = json.loads(out)

    twin = load_twin(directory)
    ids = Tokenizer.from_directory(directory).encode(text, bos=True)
    losses: dict[int, list[float]] = {}
    seen = 1
    for start in range(0, len(ids), STRIDE):
        end = min(start + WINDOW, len(ids))
        window = [ids[0], *ids[start + 1 : end]]  # each begins with the begin-of-text token
        with torch.no_grad():
            logits = twin.torch_model(torch.tensor([window])).logits[0]
        for i in range(max(seen, start + 1), end):
            loss = -float(logits[i - start - 1].log_softmax(-1)[ids[i]])
            losses.setdefault(i - start, []).append(loss)
        seen = end
        if end == len(ids):
            break
    for bucket in report["by_position"]:
        each = [x for p in range(bucket["start"], bucket["stop"]) for x in losses.get(p, [])]
        assert bucket["tokens"] == len(each)
        assert bucket["nll_total"] == pytest.approx(sum(each), rel=1e-4)
    assert [b["start"] for b in report["by_position"]] == [1, 2, 4, 8, 16, 32]

    # The totals equal the plain perplexity, whose value is identical.
    plain = json.loads(run(*common, "--json", stdin=text)[1])
    assert report["perplexity"] == plain["perplexity"]
    totals = [b["nll_total"] for b in report["by_position"]]
    assert sum(totals) / plain["tokens"] == pytest.approx(plain["nll"], rel=1e-13)
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = run(*common, "--by-position", "--buckets", 2, stdin=text)[1]
    assert "  1-23 " in shown and "  24-47 " in shown


def test_by_position_refuses_conflicting_options_first(run: Run, tmp_path: Path) -> None:
    """Conflicting options are refused before the model is loaded."""
    for given, message in {
        ("--picture", tmp_path / "x.png"): "--picture require --by-position",
        ("--buckets", 3): "require --by-position",
        ("--by-position", "--other-quantize", "int4"): "--by-position measures one model",
        ("--by-position", "--picture", tmp_path / "away" / "x.png"): "is not a directory",
    }.items():
        assert_refused(run, message, "perplexity", tmp_path, "--text", "-", *given)
