"""A few random requests in all ways; the script is for a thousand, or an hour."""

import dataclasses
from typing import Any

import pytest
import typer

from jaxllm.ops import native
from scripts.tools import same_bits


@pytest.mark.more
@pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")
def test_all_ways_agree_and_a_difference_is_found(
    demo_names: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ways give the same bits; an answer with another log-probability is reported."""
    monkeypatch.setattr(same_bits, "OPTIONS", same_bits.OPTIONS[2:3])
    same_bits.same_bits(requests=4, seed=1)
    out = capsys.readouterr().out
    assert "4 requests" in out and out.count("| 0 |\n") == 7
    streamed = same_bits.run_stream

    def run_stream(lm: Any, requests: Any) -> Any:
        (number, first), *others = streamed(lm, requests)
        scores = [x + 1e-7 for x in first.logprobs]
        return [(number, dataclasses.replace(first, logprobs=scores)), *others]

    monkeypatch.setattr(same_bits, "run_stream", run_stream)
    with pytest.raises(typer.Exit):
        same_bits.same_bits(requests=4, seed=1)
    assert "| streamed | 4 | 0 | 1 |" in capsys.readouterr().out
