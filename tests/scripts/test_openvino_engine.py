"""Llama in OpenVINO, where that is installed, against transformers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.twins import save_random

pytest.importorskip("openvino", reason="OpenVINO is not installed")


@pytest.mark.filterwarnings("ignore")
def test_logits_in_pieces_and_for_several_rows_are_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    sys.modules.pop("openvino_engine", None)
    from openvino_engine import compiled

    save_random(tmp_path, "llama")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    step, reset = compiled(str(tmp_path), "float32")
    for pieces in ((5, 1, 1, 2), (9,)):
        reset()
        past = 0
        for length in pieces:
            logits = step(ids[:, past : past + length], past)
            past += length
            np.testing.assert_allclose(logits[:, 0], expected[:, past - 1], atol=2e-5)
