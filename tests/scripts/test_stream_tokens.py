"""A stream through a model with a memory: what is measured, and what is written of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stream_tokens

from jaxllm.train.infini import with_memory
from tests.train.test_routing import lm_of
from tests.twins import random_model, tokens


def test_each_segment_is_measured_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm: Any = with_memory(lm_of(*random_model("llama", num_hidden_layers=1)), 8)
    read, found = stream_tokens.measured(lm, tokens(1, 60)[0])
    assert read.tolist() == [8, 16, 24, 32, 40, 48, 56, 60]
    assert all(len(x) == len(read) for x in found.values())
    assert min(found["resident"]) > 1e7
    plot, report = tmp_path / "s.png", tmp_path / "s.json"
    stream_tokens.write_out(read, found, 3, plot, report, lm)
    assert "linear memory, segments of 8, 60 tokens" in capsys.readouterr().out
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert json.loads(report.read_text())["tokens"] == read.tolist()
    assert stream_tokens._ids(lm, 5, None, 0).dtype == np.int32
