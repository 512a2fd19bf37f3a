"""What a teacher said, on disk: whole, resumed, refused; and what it writes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.train.data.rows import IGNORED, Rows, blank_rows
from jaxllm.train.distill import cached_logits
from jaxllm.train.distill.cached_logits import RecordedData, TeacherRecord, record_teacher
from tests.train.distill.small import B, T, ask, pairs, rows_of
from tests.twins import VOCAB

MODEL, PARAMS = pairs(0, 0.7)


class Texts:
    """Three batches an epoch; the next epoch has their rows in another order."""

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


def made(folder: Path, data: Any, **changes: Any) -> TeacherRecord:
    asked = {"k": 5, "temperature": 2.0, "size": VOCAB, **changes}
    return record_teacher(folder, MODEL, PARAMS, data, **asked)


def test_a_record_has_what_the_teacher_says_of_each_row(tmp_path: Path) -> None:
    """In both orders; against torch's own top k of the model's logits."""
    data = RecordedData(Texts(), made(tmp_path / "said", Texts()))
    for number in (0, 2, 4):
        rows = data.batch(number)
        p = torch.log_softmax(torch.tensor(np.asarray(ask(MODEL, PARAMS, rows))) / 2, -1)
        top, token = p.topk(5, -1)
        for row in range(B):
            if (rows.label_BT[row] == IGNORED).all():
                assert not rows.teacher.token_BTk[row].any()
                continue
            np.testing.assert_array_equal(rows.teacher.token_BTk[row], token[row].numpy())
            said = rows.teacher.logprob_BTL[row].astype(np.float32)
            np.testing.assert_allclose(said[:, :5], top[row].numpy(), rtol=2e-3)
    assert data.digest != RecordedData(data.data, made(tmp_path / "k3", Texts(), k=3)).digest
    with pytest.raises(CheckpointError, match="has no teacher outputs for a row"):
        data.record.look_up(rows_of(9))
    assert data.record.look_up(blank_rows(B, T)).teacher.token_BTk.shape == (B, T, 5)


def test_a_record_goes_on_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_logits, "SHARD_BYTES", 1)  # a shard each batch
    whole = made(tmp_path / "whole", Texts())
    assert whole.shards == 3
    data = Texts()
    ask_again, calls = cached_logits._record_batch, 0

    def killed(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return ask_again(*args)

    monkeypatch.setattr(cached_logits, "_record_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "killed", data)
    monkeypatch.setattr(cached_logits, "_record_batch", ask_again)
    data = Texts()
    made(tmp_path / "killed", data)
    assert set(data.asked) == {0, 2}  # 0 for the shape
    for file in sorted((tmp_path / "whole").glob("*.part")):
        assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"k": 3}, r"k \(5, not 3\)"), ({"temperature": 1.0}, r"temperature \(2.0, not 1.0\)")],
)
def test_another_question_is_refused(tmp_path: Path, changes: Any, name: str) -> None:
    made(tmp_path, Texts())
    with pytest.raises(ConfigError, match=f"recorded with another {name}"):
        made(tmp_path, Texts(), **changes)


def test_another_teacher_other_data_and_damage_are_refused(tmp_path: Path) -> None:
    made(tmp_path, Texts())
    other = pairs(5, 0.7)[1]
    with pytest.raises(ConfigError, match="recorded with another teacher: name another"):
        record_teacher(tmp_path, MODEL, other, Texts(), k=5, temperature=2.0, size=VOCAB)
    data = Texts()
    data.digest = "other"
    with pytest.raises(ConfigError, match="recorded with another data"):
        made(tmp_path, data)
    with pytest.raises(ConfigError, match="top_k must be 1 to 131, the vocabulary size: got 132"):
        made(tmp_path, Texts(), k=132)
    (file,) = tmp_path.glob("*.part")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: remove it"):
        made(tmp_path, Texts()).look_up(Texts().batch(0))
    file.write_bytes(json.dumps({}).encode())
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        made(tmp_path, Texts())
