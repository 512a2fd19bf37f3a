"""The GPU's stopwatch on the smallest shape, on whatever device there is."""

import json

import bench_gpu
import pytest


@pytest.mark.parametrize("fmt", ["bfloat16", "int4-g64-f16"])
def test_every_test_has_its_line(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench_gpu.measure("tiny", fmt, [1, 2], prompt=8, decode=2)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["test"] for row in rows] == ["tg2", "tg2 x 2", "pp8"]
    assert all(row["rate"] > 0 and row["bus"] > 0 for row in rows)
    assert all(row["share"] > 0 for row in rows[:2])
    assert rows[2]["tflops"] > 0
