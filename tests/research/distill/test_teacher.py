"""Teacher logits recorded on disk: complete, resumed and refused records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.research.distill import teacher
from jaxllm.research.distill.teacher import RecordedTeacher, record_teacher
from jaxllm.train.data.rows import IGNORED, Rows, blank_rows
from tests.research.distill.bigram_model import B, T, compute_logits, pairs, rows_of
from tests.tiny_models import VOCAB

MODEL, PARAMS = pairs(0, 0.7)


class Texts:
    """Three batches per epoch; the next epoch has their rows in another order."""

    digest, tokens = "texts", 100

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 3

    def batch(self, number: int) -> Rows:
        self.asked.append(number)
        rows = rows_of(number % 3)
        if number % 3 == 2:
            for array, empty in zip(
                (rows.token_BT, rows.label_BT, rows.position_BT, rows.document_BT),
                (0, IGNORED, -1, -1),
                strict=True,
            ):
                array[1] = empty
        if number < 3:
            return rows
        return Rows(*(x[::-1] for x in (rows.token_BT, rows.label_BT, rows.position_BT,
                                        rows.document_BT)))  # fmt: skip


def make_record(folder: Path, data: Any, **changes: Any) -> RecordedTeacher:
    options = {"k": 5, "temperature": 2.0, "size": VOCAB, **changes}
    return record_teacher(folder, MODEL, PARAMS, data, **options)


def test_record_holds_teacher_topk_per_row(tmp_path: Path) -> None:
    """In both row orders, the record equals the top k of torch's log-softmax; a row without record
    is refused.
    """
    data = make_record(tmp_path / "record", Texts())
    for number in (0, 2, 4):
        rows = data.batch(number)
        p = torch.log_softmax(torch.tensor(np.asarray(compute_logits(MODEL, PARAMS, rows))) / 2, -1)
        top, token = p.topk(5, -1)
        for row in range(B):
            if (rows.label_BT[row] == IGNORED).all():
                assert not rows.teacher.token_BTk[row].any()
                continue
            np.testing.assert_array_equal(rows.teacher.token_BTk[row], token[row].numpy())
            logprob = rows.teacher.logprob_BTL[row].astype(np.float32)
            np.testing.assert_allclose(logprob[:, :5], top[row].numpy(), rtol=2e-3)
    assert data.digest != make_record(tmp_path / "k3", Texts(), k=3).digest
    with pytest.raises(CheckpointError, match="has no teacher outputs for a row"):
        data.look_up(rows_of(9))
    assert data.look_up(blank_rows(B, T)).teacher.token_BTk.shape == (B, T, 5)


def test_record_resumes_after_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed record recomputes only the missing batch, and its shards are byte-identical to an
    uninterrupted one.
    """
    monkeypatch.setattr(teacher, "SHARD_BYTES", 1)  # one shard per batch
    whole = make_record(tmp_path / "whole", Texts())
    assert whole.shards == 3
    data = Texts()
    record_batch, calls = teacher._record_batch, 0

    def interrupt(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return record_batch(*args)

    monkeypatch.setattr(teacher, "_record_batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_record(tmp_path / "interrupt", data)
    monkeypatch.setattr(teacher, "_record_batch", record_batch)
    data = Texts()
    make_record(tmp_path / "interrupt", data)
    assert set(data.asked) == {0, 2}  # batch 0 only for its shape
    for file in sorted((tmp_path / "whole").glob("*.part")):
        assert file.read_bytes() == (tmp_path / "interrupt" / file.name).read_bytes()


def test_record_refuses_other_settings_and_damage(tmp_path: Path) -> None:
    """Another teacher, data, k or temperature and a damaged file raise errors."""
    make_record(tmp_path, Texts())
    other = pairs(5, 0.7)[1]
    with pytest.raises(ConfigError, match="recorded with another teacher: name another"):
        record_teacher(tmp_path, MODEL, other, Texts(), k=5, temperature=2.0, size=VOCAB)
    data = Texts()
    data.digest = "other"
    with pytest.raises(ConfigError, match="recorded with another data"):
        make_record(tmp_path, data)
    for changes, name in (({"k": 3}, r"k \(5, not 3"), ({"temperature": 1.0}, r"temperature \(2")):
        with pytest.raises(ConfigError, match=f"recorded with another {name}"):
            make_record(tmp_path, Texts(), **changes)
    with pytest.raises(ConfigError, match="top_k must be 1 to 131, the vocabulary size: got 132"):
        make_record(tmp_path, Texts(), k=132)
    (file,) = tmp_path.glob("*.part")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: remove it"):
        make_record(tmp_path, Texts()).look_up(Texts().batch(0))
    file.write_bytes(json.dumps({}).encode())
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        make_record(tmp_path, Texts())
