"""The table of formats' divergences: its figures are those of `jaxllm.divergence`."""

import sys

import format_divergence
import numpy as np
import pytest

import jaxllm


@pytest.mark.full
def test_the_table_holds_what_the_logits_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(format_divergence, "FORMATS", ("int8",))
    monkeypatch.setattr(sys, "argv", ["format_divergence", "--rows", "2", "--tokens", "24"])
    format_divergence.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["exact", "int8"]

    exact = jaxllm.load("demo:llama", dtype="float32")
    text = format_divergence.own_text(exact, 2, 24)
    other = jaxllm.load("demo:llama", dtype="float32", quantize="int8")
    (batch,) = (batch for batch, _ in text.batches())
    p, q = (
        np.asarray(jaxllm.forward(lm.model, lm.params, None, batch.token_BT).logits, np.float64)
        for lm in (exact, other)
    )
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    kl = (np.exp(p) * (p - q)).sum(-1)[:, :-1]  # the last token's prediction is of no token
    assert float(rows[0][2].split(" ")[0]) == pytest.approx(kl.mean(), rel=0.02)
